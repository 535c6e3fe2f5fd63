"""``pg-cdc slots``: what slots cost, for people, for scripts and for Prometheus, once and again and again."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import psycopg2
import psycopg2.extras
import pytest
from commands import COMMAND, pg_cdc, pg_cdc_installed
from databases import connect
from driving import run
from psycopg2.extensions import connection as Session
from psycopg2.extensions import parse_dsn
from roles import conninfo, role
from servers import second_server
from watch import wait_until

from pg_cdc_source.cli.prometheus import METRICS
from pg_cdc_source.postgres import slot_metrics

Samples = dict[str, dict[str, float]]


@pytest.fixture
def slot(pg: Session) -> Iterator[str]:
    """A slot of a publication of its name, dropped afterwards."""
    name = f"s_{secrets.token_hex(4)}"
    run(pg, "CREATE TABLE orders (id int PRIMARY KEY, note text)", f"CREATE PUBLICATION {name} FOR TABLE orders")
    run(pg, f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")
    yield name
    here = f"FROM pg_replication_slots WHERE slot_name = '{name}'"
    wait_until(lambda: run(pg, f"SELECT count(*) {here} AND active") == [(0,)])
    run(pg, f"SELECT pg_drop_replication_slot(slot_name) {here}")


@contextlib.contextmanager
def reading(db: str, slot: str) -> Iterator[Any]:
    """Read a slot and confirm nothing."""
    factory = psycopg2.extras.LogicalReplicationConnection
    session = psycopg2.connect(db, application_name="reader", connection_factory=factory)
    with contextlib.closing(session), session.cursor() as cursor:
        cursor.start_replication(slot, options={"proto_version": "1", "publication_names": slot})
        yield cursor


# --- Prometheus' text format -----------------------------------------------------------------------------------------

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*"'
SAMPLE = re.compile(rf"({NAME})\{{({LABEL}(?:,{LABEL})*)\}} (-?[0-9.]+(?:e[-+]?[0-9]+)?)")


def parsed(text: str) -> Samples:
    """The samples, by metric and slot. Fails on what the format forbids (prometheus.io, "Exposition formats")."""
    assert text.endswith("\n")
    found: Samples = {}
    helped: list[str] = []
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            _, _, name, words = line.split(" ", 3)
            assert re.fullmatch(NAME, name)
            assert words
            assert name not in helped
            helped.append(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds
            assert name == helped[-1]
            kinds[name] = kind
            assert (kind == "counter") == name.endswith("_total"), line
            assert kind in ("gauge", "counter")
            found[name] = {}
        else:
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            name, labels, value = match.groups()
            # The samples of a metric stand together, behind its type.
            assert name == list(kinds)[-1], line
            pairs = dict(pair.split("=", 1) for pair in re.findall(LABEL, labels))
            assert list(pairs) == ["slot", "database", "plugin"]
            assert pairs["slot"] not in found[name]
            found[name][pairs["slot"].strip('"')] = float(value)
    assert list(kinds) == helped == [metric.name for metric in METRICS]
    return found


def scraped(url: str) -> Samples:
    result = pg_cdc("slots", url, "--prometheus")
    assert (result.returncode, result.stderr) == (0, "")
    return parsed(result.stdout)


@pytest.mark.corner
def test_prometheus_can_read_what_a_slot_costs(pg: Session, db: str, slot: str) -> None:
    result = pg_cdc_installed("slots", db, "--prometheus")
    assert (result.returncode, result.stderr) == (0, "")
    before = parsed(result.stdout)
    assert before["pg_cdc_slot_active"][slot] == before["pg_cdc_slot_lost"][slot] == 0
    run(pg, "INSERT INTO orders SELECT g, repeat('x', 100) FROM generate_series(1, 5000) AS g")
    found = scraped(db)
    assert 500_000 < found["pg_cdc_slot_lag_bytes"][slot] <= found["pg_cdc_slot_retained_bytes"][slot]
    assert found["pg_cdc_slot_lag_bytes"][slot] > before["pg_cdc_slot_lag_bytes"][slot]
    assert found["pg_cdc_slot_lag_seconds"][slot] >= 0
    assert found["pg_cdc_slot_catalog_age"][slot] > before["pg_cdc_slot_catalog_age"][slot] >= 0
    # max_slot_wal_keep_size is -1.
    assert slot not in found["pg_cdc_slot_safe_bytes"]
    with reading(db, slot):
        wait_until(lambda: scraped(db)["pg_cdc_slot_active"][slot] == 1)
    wait_until(lambda: scraped(db)["pg_cdc_slot_active"][slot] == 0)

    def has_nothing_more() -> bool:
        # The server writes WAL of its own, as for autovacuum.
        run(pg, f"SELECT pg_replication_slot_advance('{slot}', pg_current_wal_lsn())")
        return scraped(db)["pg_cdc_slot_lag_bytes"][slot] < 10_000

    wait_until(has_nothing_more)


@pytest.mark.corner
def test_what_was_spilled_is_counted(pg: Session, db: str, slot: str) -> None:
    """A reader that has not asked for streaming lets large transactions spill."""
    if pg.server_version < 140000:
        pytest.skip("pg_stat_replication_slots came with PostgreSQL 14")
    run(pg, "INSERT INTO orders SELECT g, repeat('x', 100) FROM generate_series(1, 5000) AS g")
    alter = f"ALTER DATABASE {parse_dsn(db)['dbname']} SET logical_decoding_work_mem = '64kB'"
    run(pg, alter)
    with connect(db) as fresh:
        run(fresh, f"SELECT count(*) FROM pg_logical_slot_peek_binary_changes('{slot}', NULL, NULL, "
            f"'proto_version', '1', 'publication_names', '{slot}')")  # fmt: skip
    wait_until(lambda: scraped(db)["pg_cdc_slot_spilled_bytes_total"].get(slot, 0) > 500_000)
    found = scraped(db)
    assert found["pg_cdc_slot_spilled_transactions_total"][slot] == 1
    assert found["pg_cdc_slot_spills_total"][slot] >= 1
    assert found["pg_cdc_slot_decoded_bytes_total"][slot] > 500_000
    assert re.search(r"spilled\s*\n", pg_cdc("slots", db).stdout)


@pytest.mark.corner
def test_a_slot_that_stands_still_gets_older(pg: Session, db: str, slot: str) -> None:
    run(pg, f"SELECT pg_replication_slot_advance('{slot}', pg_current_wal_lsn())")
    with reading(db, slot) as cursor:
        run(pg, "INSERT INTO orders VALUES (1, 'x')")
        # What is received and not confirmed.
        wait_until(lambda: cursor.read_message() is not None)
        ages = []

        def is_older() -> bool:
            # A reader has to answer now and then.
            cursor.send_feedback(reply=True)
            ages.append(scraped(db)["pg_cdc_slot_lag_seconds"][slot])
            return ages[-1] > ages[0] + 2

        wait_until(is_older)


def test_a_service_that_does_not_list_its_wal_has_the_other_metrics(
    pg: Session, db: str, slot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Amazon Aurora lets roles call the function, which refuses."""
    monkeypatch.setattr(slot_metrics, "_READ_AGES", "DO $$BEGIN RAISE feature_not_supported; END$$")
    run(pg, "INSERT INTO orders VALUES (1, 'x')")
    found = scraped(db)
    assert found["pg_cdc_slot_lag_bytes"][slot] > 0
    assert slot not in found["pg_cdc_slot_lag_seconds"]


@pytest.mark.corner
def test_a_role_that_may_see_little_is_told_what_it_may(pg: Session, db: str, slot: str) -> None:
    run(pg, "INSERT INTO orders VALUES (1, 'x')")
    with role(pg, db) as login:
        found = scraped(conninfo(login))
    assert found["pg_cdc_slot_lag_bytes"][slot] > 0
    # Only pg_monitor may list WAL files.
    assert slot not in found["pg_cdc_slot_lag_seconds"]


@pytest.mark.corner
def test_what_is_left_before_a_slot_is_lost_is_told() -> None:
    with second_server({"max_slot_wal_keep_size": "64MB", "max_wal_size": "32MB"}) as url, connect(url) as pg:
        assert scraped(url) == {metric.name: {} for metric in METRICS}
        run(pg, "SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        first = scraped(url)["pg_cdc_slot_safe_bytes"]["s"]
        assert 0 < first <= 100 << 20
        run(pg, "SELECT pg_logical_emit_message(false, '', ''), pg_switch_wal()")
        assert scraped(url)["pg_cdc_slot_safe_bytes"]["s"] < first
        assert re.search(r"held\s+safe\s*\n", pg_cdc("slots", url).stdout)
        (listed,) = json.loads(pg_cdc("slots", url, "--json").stdout)["slots"]
        assert 0 < listed["safe_bytes"] < first
        run(pg, "SELECT pg_drop_replication_slot('s')")


def test_a_server_that_is_away_gives_prometheus_nothing() -> None:
    result = pg_cdc("slots", "postgresql://somebody@127.0.0.1:1/x", "--prometheus")
    assert (result.returncode, result.stdout) == (1, "")
    assert "cannot connect" in result.stderr


@pytest.mark.parametrize(
    "together", [("--watch", "--prometheus"), ("--drop=s", "--watch"), ("--drop=s", "--prometheus")]
)
def test_what_does_not_go_together_is_refused(together: tuple[str, ...]) -> None:
    result = pg_cdc("slots", "postgresql://somebody@127.0.0.1:1/x", *together)
    assert result.returncode == 2
    assert "do not go together" in result.stderr


# --- again and again -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def watching(*arguments: str, **streams: Any) -> Iterator[subprocess.Popen[str]]:
    command = [COMMAND, "slots", *arguments, "--watch", "--every", "0.2"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **streams) as process:
        try:
            yield process
        finally:
            process.kill()


def interrupted(process: subprocess.Popen[str]) -> str:
    """End it as Ctrl-C does; what it says of that."""
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, time.monotonic() - began < 10) == (0, True), errors
    return str(errors)


def test_a_watch_shows_what_happens_until_it_is_interrupted(pg: Session, db: str, slot: str) -> None:
    with watching(db, "--json", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None

        def lag() -> int:
            assert process.stdout is not None
            listed = {found["name"]: found for found in json.loads(process.stdout.readline())["slots"]}
            return int(listed[slot]["lag_bytes"])

        first = lag()
        assert lag() < first + 100_000
        run(pg, "INSERT INTO orders SELECT g, repeat('x', 100) FROM generate_series(1, 2000) AS g")
        wait_until(lambda: lag() > first + 200_000)
        assert interrupted(process) == ""
    wait_until(lambda: run(pg, "SELECT 1 FROM pg_stat_activity WHERE application_name = 'pg-cdc:slots'") == [])


def test_a_watch_goes_on_when_its_session_was_lost(pg: Session, db: str, slot: str) -> None:
    with watching(db, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None

        def shows() -> bool:
            assert process.stdout is not None
            return slot in process.stdout.readline()

        wait_until(shows)
        end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'pg-cdc:slots'"
        wait_until(lambda: run(pg, end) == [(True,)])
        assert process.stderr is not None
        assert "[TRANSIENT]" in process.stderr.readline()
        wait_until(shows)
        assert "Traceback" not in interrupted(process)


def test_a_watch_of_a_server_that_is_not_there_ends() -> None:
    with watching("postgresql://somebody@127.0.0.1:1/x", stdout=subprocess.PIPE) as process:
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (1, "")
    assert "cannot connect" in errors


def test_on_a_terminal_the_table_stays_in_place(db: str, slot: str) -> None:
    ours, terminal = pty.openpty()
    try:
        with watching(db, stdout=terminal) as process:
            os.close(terminal)
            seen = b""
            deadline = time.monotonic() + 60
            # The cursor goes up to where the table began.
            while seen.count(slot[:6].encode()) < 3 or b"\x1b[1A" not in seen:
                assert time.monotonic() < deadline, seen
                seen += os.read(ours, 65536)
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # Linux says so when the other side was closed
                while os.read(ours, 65536):
                    pass
            assert process.wait(timeout=30) == 0
            assert process.stderr is not None
            assert process.stderr.read() == ""
    finally:
        os.close(ours)
    assert b"Ctrl-C ends" in seen
