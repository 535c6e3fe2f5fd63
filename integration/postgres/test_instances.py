"""Endpoints that lead to several servers: a snapshot is never looked for on another one than that which has it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from balancer import balanced
from databases import connect
from driving import Driver, drop_slots, run
from frames import load
from psycopg2.extensions import make_dsn, parse_dsn
from pyspark.sql import SparkSession
from refusals import refusal
from servers import second_server
from standby import Standby, standby_of
from watch import slots

from pg_cdc_source import open_snapshot
from pg_cdc_source.cli.preflight import check
from pg_cdc_source.errors import ServerSetupError, SnapshotLostError, TransientError
from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.options.declared import ConsistentPoint
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.options.stream_options import parse_stream_options
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.catalog import is_in_recovery
from pg_cdc_source.postgres.connection import connect as connect_source
from pg_cdc_source.postgres.instances import read_instance, require_instance
from pg_cdc_source.postgres.snapshots import SnapshotSpec, make_snapshot
from pg_cdc_source.spark import pgcdc
from pg_cdc_source.stream.tables import source_session
from pg_cdc_source.stream.tables.slot_history import SlotHistory
from pg_cdc_source.stream.tables.source_session import SourceSession

Spread = Callable[[Callable[[str], bool]], str]
SAYS = ("leads to another server than the one before: a standby at 127.0.0.1:", "; it was a primary at 127.0.0.1:")


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[str, Standby]]:
    with second_server({}) as url, standby_of(url, {"hot_standby_feedback": "on"}) as standby:
        with connect(url) as session:
            run(session, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
        standby.catch_up(url)
        yield url, standby


@pytest.fixture
def spread(pair: tuple[str, Standby]) -> Iterator[Spread]:
    """``spread(leads_away)`` gives a URL of the primary; connections of whose name that is true go to the standby."""
    primary, standby = pair
    with contextlib.ExitStack() as stack:

        def spread(leads_away: Callable[[str], bool]) -> str:
            return stack.enter_context(
                balanced(primary, lambda name: str(standby.url) if leads_away(name) else primary)
            )

        yield spread


def test_tasks_that_come_to_another_server_say_so(spark: SparkSession, spread: Spread) -> None:
    url = spread(lambda name: "?" in name)
    text = refusal(lambda: load(spark, url, dbtable="t").collect(), "ServerSetupError", "looking for keeper", *SAYS)
    assert "connect to one server" in text


def test_a_keeper_that_comes_to_another_server_says_so(spark: SparkSession, spread: Spread) -> None:
    # A database in which none runs yet.
    url = make_dsn(**{**parse_dsn(spread(lambda name: name == "pgsnapshot:starting")), "dbname": "template1"})
    refusal(
        lambda: load(spark, url, query="SELECT 1 AS one").collect(), "ServerSetupError", "starting the keeper", *SAYS
    )


@pytest.mark.parametrize("point", ["require", "off"])
def test_a_snapshot_is_not_made_on_one_server_and_held_on_another(
    pair: tuple[str, Standby], spread: Spread, point: ConsistentPoint
) -> None:
    names: list[str] = []

    def leads_away(name: str) -> bool:
        if ":making:" in name:
            names.append(name)
        return len(names) > 1 and ":making:" in name

    def name_for(snapshot_id: str) -> str:
        return f"test:making:{snapshot_id}"

    connection = parse_connection_options({"url": spread(leads_away)})
    with (
        pytest.raises(ServerSetupError) as caught,
        contextlib.closing(make_snapshot(connection, SnapshotSpec(point, None, 10.0), name_for)) as held,
    ):
        held.add_holder(connection, name_for, held.first.snapshot_id)
    doing = "creating slot pgsnapshot_" if point == "require" else "holding a snapshot"
    assert caught.value.what.startswith(doing)
    assert all(part in str(caught.value) for part in SAYS)
    with connect(pair[0]) as session:
        assert slots(session) == []


def test_a_snapshot_that_is_given_is_read_on_its_server_alone(
    spark: SparkSession, pair: tuple[str, Standby], spread: Spread
) -> None:
    url = spread(lambda name: name == "pgsnapshot:reading")
    with open_snapshot(pair[0], tables=["t"]) as held:
        given = {name: value for name, value in held.options.items() if name != "url"}
        refusal(lambda: load(spark, url, dbtable="t", **given).collect(), "ServerSetupError", "reading public.t", *SAYS)
        assert load(spark, pair[0], dbtable="t", **given).collect() == [(1,)]


def test_the_initial_snapshot_of_a_stream_is_read_on_its_server_alone(
    pair: tuple[str, Standby], spread: Spread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pgcdc, "execution", lambda: "test")
    driver = Driver(spread(lambda name: name == "pgsnapshot:reading"), dbtable="t")
    with connect(pair[0]) as session:
        try:
            driver.start().refusal(*SAYS, kind=ServerSetupError)
            driver.restart(url=pair[0])
            assert [row["id"] for row in driver.take(1)] == [1]
        finally:
            driver.stop()
            drop_slots(session)


def test_a_slot_that_is_missing_on_a_standby_is_not_said_to_be_lost(
    pair: tuple[str, Standby], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pgcdc, "execution", lambda: "test")
    driver = Driver(pair[0], dbtable="t")
    with connect(pair[0]) as session:
        if session.server_version < 160000:
            pytest.skip("a stream from a standby is refused before")
        try:
            driver.start().take(1)
            driver.restart(url=pair[1].url)
            says = "slot s is not on this server, which is a standby"
            driver.refusal(says, "Remedy: connect to the primary", kind=ServerSetupError)
            driver.restart(url=pair[0])
            run(session, "INSERT INTO t VALUES (2)")
            assert [row["id"] for row in driver.take(1)] == [2]
        finally:
            driver.stop()
            drop_slots(session)
            run(session, "DELETE FROM t WHERE id = 2")


def test_check_finds_an_endpoint_of_several_servers(pair: tuple[str, Standby], spread: Spread) -> None:
    turns: list[str] = []

    def leads_away(name: str) -> bool:
        turns.append(name)
        return len(turns) % 2 == 0

    def endpoint(url: str) -> tuple[str, str]:
        (finding,) = [f for f in check("pgsnapshot", {"url": url, "dbtable": "t"}) if f.check == "endpoint"]
        return finding.status, finding.text

    status, text = endpoint(spread(leads_away))
    assert status == "wrong"
    assert text.startswith("connections lead to 2 servers: ")
    assert endpoint(pair[0])[0] == "ok"


def test_a_server_that_was_restarted_is_told_from_another(pair: tuple[str, Standby]) -> None:
    standby = pair[1]
    options = parse_connection_options({"url": standby.url})
    with contextlib.closing(connect_source(options, "test")) as session:
        before = read_instance(session)
        require_instance(session, before, "reading t")
    standby.stop("fast")
    standby.start()
    restarted = pytest.raises(SnapshotLostError, match="reading t: the server that had the snapshot was restarted")
    with contextlib.closing(connect_source(options, "test", retry_seconds=30)) as session, restarted:
        require_instance(session, before, "reading t")


def test_a_stream_of_a_primary_waits_where_its_address_leads_to_a_standby(
    spread: Spread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an address that follows the primary does while none is promoted yet."""
    away = False
    options = parse_stream_options({"url": spread(lambda name: away), "tables": "public.t", "slot": "s"})
    source = SourceSession(options)
    history = SlotHistory(options, source)
    identity = history.identify()
    assert source.ask(is_in_recovery) is False
    away = True
    source.close()
    with pytest.raises(TransientError, match="leads to a standby, and the stream was on a primary"):
        history.connect_stream(Position.before(Lsn(8)), streaming=False)
    monkeypatch.setattr(source_session, "PROMOTING", Backoff(0.01, within_seconds=0.2))
    with pytest.raises(TransientError, match="leads to a standby, and the stream was on a primary"):
        source.ask(is_in_recovery)
    away = False
    assert source.ask(is_in_recovery) is False
    assert history.identify() == identity
    source.close()
