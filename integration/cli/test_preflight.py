"""``pg-cdc check`` says what a read would run into and changes nothing; ``pg-cdc slots`` lists and drops slots."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg2
import psycopg2.extras
import pytest
from commands import COMMAND, pg_cdc, pg_cdc_installed
from databases import connect
from driving import run
from psycopg2.extensions import connection as Session
from psycopg2.extensions import make_dsn, parse_dsn
from roles import conninfo, role
from servers import second_server
from typer.testing import CliRunner
from watch import slots, wait_until

from pg_cdc_source.cli.app import app
from pg_cdc_source.cli.preflight import stream as preflight_stream
from pg_cdc_source.postgres.minor_versions import STALE_PUBLICATION
from pg_cdc_source.spark.open_snapshot import open_snapshot

pytestmark = pytest.mark.corner

Findings = dict[str, list[dict[str, str]]]


def check(format_name: str, url: str, **options: str) -> tuple[Findings, bool]:
    """What the check finds, by its name, and whether it takes everything for right."""
    given = [part for name, value in {"url": url, **options}.items() for part in ("-o", f"{name}={value}")]
    # In this process, because there are many and each would import everything again.
    result = CliRunner().invoke(app, ["check", format_name, *given, "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert parse_dsn(url)["password"] not in result.output
    printed = json.loads(result.stdout)
    assert result.exit_code == (0 if printed["ok"] else 1), result.output
    found: Findings = {}
    for finding in printed["findings"]:
        found.setdefault(finding.pop("check"), []).append(finding)
    return found, printed["ok"]


def statuses(found: Findings, *names: str) -> list[str]:
    return [finding["status"] for name in names for finding in found[name]]


def made(pg: Session) -> list[tuple[Any, ...]]:
    """What a check might make: publications and slots."""
    return run(pg, "SELECT (SELECT count(*) FROM pg_publication), (SELECT count(*) FROM pg_replication_slots)")


def next_xid(pg: Session) -> list[tuple[Any, ...]]:
    """Whatever writes takes a transaction id, in any database, autovacuum too."""
    return run(pg, "SELECT pg_snapshot_xmax(pg_current_snapshot())")


@pytest.fixture
def table(pg: Session) -> None:
    run(pg, "CREATE TABLE orders (id int PRIMARY KEY, note text)", "INSERT INTO orders VALUES (1, 'a')")


@pytest.fixture
def slot(pg: Session) -> Iterator[str]:
    """A slot of a publication of its name, dropped afterwards where it is still there."""
    name = f"s_{secrets.token_hex(4)}"
    run(pg, f"CREATE PUBLICATION {name} FOR TABLE orders")
    run(pg, f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")
    yield name
    here = f"FROM pg_replication_slots WHERE slot_name = '{name}'"
    wait_until(lambda: run(pg, f"SELECT count(*) {here} AND active") == [(0,)])
    run(pg, f"SELECT pg_drop_replication_slot(slot_name) {here}")


@contextlib.contextmanager
def reading(db: str, slot: str) -> Iterator[int]:
    """Read a slot as its stream does; yields the walsender's pid."""
    session = psycopg2.connect(
        db,
        application_name=f"pgcdc:{slot}:changes",
        connection_factory=psycopg2.extras.LogicalReplicationConnection,
    )
    with contextlib.closing(session), session.cursor() as cursor:
        cursor.start_replication(slot, options={"proto_version": "1", "publication_names": slot})
        yield session.info.backend_pid


# --- check -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("table")
def test_a_read_that_works_has_nothing_wrong(pg: Session, db: str) -> None:
    # Before PostgreSQL 15, everybody has this right.
    run(pg, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    found, right = check("pgsnapshot", db, dbtable="public.orders")
    assert right, found
    assert {finding["status"] for findings in found.values() for finding in findings} == {"ok"}
    assert found["table"][0]["text"] == "public.orders: 2 columns, 1 part"
    found, right = check("pgsnapshot", db, query="SELECT 1 AS a, 2 AS b", consistentPoint="off")
    assert right, found
    assert found["table"][0]["text"] == "the query: 2 columns, 1 part"
    assert found["replication"][0]["text"].startswith("not used: consistentPoint=off")


@pytest.mark.usefixtures("table")
def test_a_search_path_with_functions_of_everybody_is_a_warning_for_sql_that_runs_with_it(pg: Session, db: str) -> None:
    run(pg, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    filtered = {"dbtable": "orders", "where": "id > 0"}
    found, _ = check("pgsnapshot", db, **filtered)
    assert "search path" not in found
    run(pg, "GRANT CREATE ON SCHEMA public TO PUBLIC", "CREATE VIEW public.v AS SELECT * FROM public.orders")
    found, ok = check("pgsnapshot", db, **filtered)
    [finding] = found["search path"]
    assert (finding["status"], ok) == ("warning", True)
    assert "REVOKE CREATE ON SCHEMA public FROM PUBLIC" in finding["remedy"]
    assert "search path" in check("pgsnapshot", db, dbtable="v")[0]
    assert "search path" not in check("pgsnapshot", db, dbtable="orders")[0]
    safe = make_dsn(db, options="-csearch_path=pg_catalog")
    found, ok = check("pgsnapshot", safe, **{**filtered, "dbtable": "public.orders"})
    assert ("search path" in found, ok) == (False, True)


@pytest.mark.usefixtures("table")
def test_options_of_sparks_jdbc_source_are_a_warning(db: str) -> None:
    found, right = check("pgsnapshot", db, dbtable="public.orders", driver="org.postgresql.Driver", fetchsize="10")
    assert right, found
    (warning,) = found["options of jdbc"]
    assert (warning["status"], warning["text"].partition(";")[0]) == ("warning", "driver: no JDBC driver is used")


@pytest.mark.usefixtures("table")
def test_a_stream_is_checked_and_nothing_of_it_is_made(pg: Session, db: str) -> None:
    before = made(pg)

    def checked_without_writing() -> Findings | None:
        xid = next_xid(pg)
        found, right = check("pgcdc", db, dbtable="public.orders", slot="orders")
        assert right, found
        assert made(pg) == before
        return found if next_xid(pg) == xid else None

    found = wait_until(checked_without_writing)
    assert found is not None
    assert found["slot"][0]["text"].startswith("orders does not exist yet: startFrom=snapshot makes it")
    assert found["publication"][0]["text"].startswith("orders does not exist yet: CREATE PUBLICATION")
    assert found["tables"][0]["text"] == "by replica identity: public.orders (id)"
    assert statuses(found, "rights", "slots", "walsenders", "replication") == ["ok"] * 4
    # The server's default: worth knowing, and not wrong.
    assert statuses(found, "WAL") == ["warning"]


@pytest.mark.usefixtures("table")
def test_what_the_servers_minor_version_lacks_is_told(db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = check("pgcdc", db, dbtable="public.orders", slot="s")
    assert "minor version" not in found
    monkeypatch.setattr(preflight_stream, "defects_of", lambda _: [STALE_PUBLICATION])
    monkeypatch.setattr(preflight_stream, "newest_known", lambda _: "17.6")
    found, ok = check("pgcdc", db, dbtable="public.orders", slot="s")
    assert ok
    (finding,) = found["minor version"]
    assert finding["status"] == "warning"
    assert "changes may not be sent" in finding["text"]
    assert finding["remedy"] == "update the server to 17.6 or later"


@pytest.mark.usefixtures("table")
def test_the_command_prints_a_line_for_each_check_and_the_remedies(db: str) -> None:
    given = ("check", "pgcdc", "-o", f"url={db}", "-o", "slot=orders", "-o")
    result = pg_cdc_installed(*given, "dbtable=public.orders")
    assert result.returncode == 0, result.stdout
    assert result.stdout.endswith("\nNothing is wrong.\n")
    assert "\nwarning  WAL         max_slot_wal_keep_size is -1" in result.stdout
    result = pg_cdc(*given, "dbtable=public.ordesr")
    assert result.returncode == 1
    assert "Remedy: did you mean public.orders?" in result.stdout
    assert result.stdout.endswith("\nWrong: 1.\n")


@pytest.mark.usefixtures("table")
def test_all_that_a_role_lacks_is_found_at_once(pg: Session, db: str) -> None:
    with role(pg, db) as login:
        found, right = check("pgcdc", conninfo(login), dbtable="public.orders", slot="orders")
    assert not right
    assert statuses(found, "connection", "server", "slot", "publication") == ["ok"] * 4
    assert statuses(found, "rights", "tables", "replication") == ["wrong"] * 3
    assert "permission denied for database" in found["rights"][0]["text"]
    assert "must be owner of table public.orders" in found["rights"][0]["text"]
    assert "CREATE PUBLICATION" in found["rights"][0]["remedy"]
    assert "GRANT SELECT" in found["tables"][0]["remedy"]
    assert found["replication"][0]["remedy"] == f"ALTER ROLE {login['user']} REPLICATION"


@pytest.mark.usefixtures("table")
def test_postgresql_agrees_on_who_may_create_the_publication(pg: Session, db: str) -> None:
    with role(pg, db) as login:
        user, database = login["user"], login["dbname"]
        for grant, lacks in (
            (f"GRANT CREATE ON DATABASE {database} TO {user}", "must be owner"),
            (f"ALTER TABLE orders OWNER TO {user}", ""),
            (f"REVOKE CREATE ON DATABASE {database} FROM {user}", "permission denied for database"),
        ):
            run(pg, grant)
            found, _ = check("pgcdc", conninfo(login), dbtable="public.orders", slot="orders")
            assert (found["rights"][0]["status"] == "ok") == (not lacks), found["rights"]
            assert lacks in found["rights"][0]["text"]
            refused = psycopg2.errors.InsufficientPrivilege
            refusal = pytest.raises(refused, match=lacks) if lacks else contextlib.nullcontext()
            with connect(conninfo(login)) as session, refusal:
                run(session, "CREATE PUBLICATION orders FOR TABLE orders", "DROP PUBLICATION orders")


def test_without_a_server_the_rest_is_not_done(pg: Session, db: str) -> None:
    nowhere = make_dsn(**{**parse_dsn(db), "password": "Geheim-123", "port": "1", "host": "127.0.0.1"})
    found, right = check("pgcdc", nowhere, tables="public.*", slot="s", unknown="1")
    assert not right
    assert statuses(found, "options", "connection") == ["wrong", "wrong"]
    assert "unknown" in found["options"][0]["text"]
    assert statuses(found, "pooler", "encryption", "server", "slot", "publication", "tables", "WAL") == ["not done"] * 7
    # Options that are wrong do not keep the server from being looked at.
    found, right = check("pgsnapshot", db, dbtable="t", numericAs="foo")
    assert not right
    assert statuses(found, "options", "connection", "server", "table") == ["wrong", "ok", "ok", "not done"]


@pytest.mark.usefixtures("table")
def test_a_slot_that_exists_is_judged_with_its_publication(pg: Session, db: str, slot: str) -> None:
    run(pg, "CREATE TABLE keyless (a int)", f"ALTER PUBLICATION {slot} ADD TABLE keyless")
    found, right = check("pgcdc", db, tables="public.*", slot=slot)
    assert right, found
    assert f"{slot} stands at " in found["slot"][0]["text"]
    assert "B of WAL" in found["slot"][0]["text"]
    assert found["publication"][0]["text"] == f"{slot} has 2 tables"
    assert statuses(found, "tables", "identities") == ["ok", "warning"]
    assert "refuses UPDATE and DELETE on public.keyless" in found["identities"][0]["text"]
    run(pg, f"ALTER PUBLICATION {slot} SET (publish = 'insert')")
    found, _ = check("pgcdc", db, tables="public.*", slot=slot)
    assert found["publication"][0]["text"].endswith("and does not send updates, deletes, truncates")
    assert statuses(found, "identities") == ["ok"]
    with reading(db, slot) as pid:
        found, right = check("pgcdc", db, dbtable="public.orders", slot=slot)
        assert not right
        assert f"in use by pid {pid} (application_name 'pgcdc:{slot}:changes'" in found["slot"][0]["text"]
    wait_until(lambda: run(pg, "SELECT count(*) FROM pg_replication_slots WHERE active") == [(0,)])
    # Both have come since the slot was made: the setting, and a table.
    found, right = check("pgcdc", db, dbtable="public.orders", slot=slot, startFrom="slot")
    assert right, found
    assert found["publication"][1]["text"].startswith(f"public.keyless, publication {slot} may be younger than slot")
    # A stream that still reads its tables has the slot, too.
    with contextlib.closing(psycopg2.connect(db, application_name=f"pgcdc:{slot}:snapshot")) as holder:
        found, right = check("pgcdc", db, dbtable="public.orders", slot=slot)
        assert not right
        assert f"in use by pid {holder.info.backend_pid} " in found["slot"][0]["text"]
    run(pg, f"DROP PUBLICATION {slot}")
    found, right = check("pgcdc", db, dbtable="public.orders", slot=slot)
    assert not right
    # A stream does not make one that is younger than its slot.
    assert statuses(found, "slot", "publication", "tables") == ["ok", "wrong", "not done"]
    assert "A query without a checkpoint needs a slot that is younger" in found["publication"][0]["remedy"]
    found, right = check("pgcdc", db, dbtable="public.orders", slot="no_such_slot", startFrom="slot")
    assert not right
    assert "startFrom=slot starts from one that does" in found["slot"][0]["text"]
    found, right = check("pgsnapshot", db, dbtable="public.orders", slot=slot)
    assert not right
    assert "exists already" in found["slot"][0]["text"]


def test_a_snapshot_that_was_exported_has_to_be_there(pg: Session, db: str) -> None:
    with open_snapshot(db, consistentPoint="off") as snapshot:
        exported = snapshot.options["snapshot"]
        found, right = check("pgsnapshot", db, query="SELECT 1 AS a", snapshot=exported)
        assert right, found
    found, right = check("pgsnapshot", db, query="SELECT 1 AS a", snapshot=exported)
    assert not right
    assert statuses(found, "snapshot") == ["wrong"]


def test_settings_of_a_server_that_do_harm_later() -> None:
    settings = {"synchronous_standby_names": "ANY 1 (*)", "synchronous_commit": "local"}
    with second_server(settings) as url, connect(url) as session:
        run(session, "CREATE TABLE t (id int PRIMARY KEY)")
        found, right = check("pgcdc", url, dbtable="public.t", slot="s")
        assert right, found
        assert statuses(found, "commits") == ["warning"]
        assert "synchronous_standby_names is 'ANY 1 (*)'" in found["commits"][0]["text"]
        if session.server_version >= 180000:
            run(session, "ALTER SYSTEM SET idle_replication_slot_timeout = '1h'", "SELECT pg_reload_conf()")
            wait_until(lambda: run(session, "SHOW idle_replication_slot_timeout") == [("1h",)])
            found, _ = check("pgcdc", url, dbtable="public.t", slot="s")
            assert found["WAL"][0]["text"].startswith("idle_replication_slot_timeout is 1h")


def test_a_server_without_logical_decoding_or_room() -> None:
    settings = {
        "wal_level": "replica",
        "max_replication_slots": "1",
        "max_wal_senders": "0",
        "max_slot_wal_keep_size": "1GB",
    }
    with second_server(settings) as url, connect(url) as session:
        run(session, "CREATE TABLE t (id int PRIMARY KEY)", "CREATE ROLE poor LOGIN PASSWORD 'Geheim'")
        run(session, "ALTER TABLE t OWNER TO poor")
        poor = make_dsn(**{**parse_dsn(url), "user": "poor", "password": "Geheim"})
        found, right = check("pgcdc", poor, dbtable="public.t", slot="s")
        assert not right
        lacks = [finding["text"] for finding in found["replication"]]
        assert lacks[0] == "a stream needs wal_level=logical, but it is replica"
        assert "which role poor lacks" in lacks[1]
        assert found["slots"][0]["text"] == "1 of 1 free; needed: 1, and 1 for a moment"
        assert found["walsenders"][0]["text"] == "0 of 0 free; needed: 1, and 1 for a moment"
        assert statuses(found, "replication", "slots", "walsenders") == ["wrong", "wrong", "warning", "wrong"]
        assert (statuses(found, "WAL"), found["WAL"][0]["text"]) == (["ok"], "slots keep 1GB at most")
        assert statuses(found, "commits") == ["ok"]
        run(session, "SELECT pg_create_physical_replication_slot('taken')")
        found, right = check("pgsnapshot", poor, dbtable="public.t")
        assert right, found  # auto does without
        assert statuses(found, "replication", "slots", "walsenders") == ["warning"] * 4
        found, right = check("pgsnapshot", poor, dbtable="public.t", consistentPoint="require")
        assert not right
        assert statuses(found, "replication", "slots", "walsenders") == ["wrong"] * 4


def test_a_slot_that_the_server_gives_up_is_told_before_and_after() -> None:
    with second_server({"max_slot_wal_keep_size": "1MB", "max_wal_size": "1GB"}) as url, connect(url) as session:
        run(session, "CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION s FOR TABLE t")
        run(session, "SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        for _ in range(4):
            run(session, "SELECT pg_logical_emit_message(false, '', ''), pg_switch_wal()")
        found, right = check("pgcdc", url, dbtable="public.t", slot="s")
        assert right, found
        assert statuses(found, "slot") == ["ok", "warning"]
        assert "holds more than max_slot_wal_keep_size" in found["slot"][1]["text"]
        run(session, "CHECKPOINT")
        found, right = check("pgcdc", url, dbtable="public.t", slot="s")
        assert not right
        assert "slot s was given up by the server: wal_removed" in found["slot"][0]["text"]
        found, right = check("pgcdc", url, dbtable="public.t", slot="s", onSlotLost="resnapshot")
        assert right, found
        assert "makes a new slot" in found["slot"][0]["remedy"]
        assert (listed(url)["s"]["invalidation"], listed(url)["s"]["held_bytes"]) == ("wal_removed", None)
        assert "lost: wal_removed" in pg_cdc("slots", url).stdout


# --- slots -----------------------------------------------------------------------------------------------------------


def listed(db: str, *arguments: str) -> dict[str, dict[str, Any]]:
    result = pg_cdc("slots", db, "--json", *arguments)
    assert result.returncode == 0, result.stderr
    return {found["name"]: found for found in json.loads(result.stdout)["slots"]}


@pytest.mark.usefixtures("table")
def test_slots_are_listed_with_who_reads_them_and_what_they_hold(pg: Session, db: str, slot: str) -> None:
    run(pg, "INSERT INTO orders SELECT g, 'x' FROM generate_series(2, 2000) AS g")
    found = listed(db)[slot]
    ((confirmed,),) = run(pg, f"SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{slot}'")
    assert (found["database"], found["plugin"]) == (parse_dsn(db)["dbname"], "pgoutput")
    assert (found["active_pid"], found["running"], found["invalidation"]) == (None, None, None)
    assert (found["confirmed_flush_lsn"], found["wal_status"]) == (confirmed, "reserved")
    assert 100_000 < found["lag_bytes"] <= found["held_bytes"]
    with reading(db, slot) as pid:
        found = listed(db)[slot]
        assert (found["active_pid"], found["application"]) == (pid, f"pgcdc:{slot}:changes")
        assert found["running"] == "pgcdc"
        table = pg_cdc("slots", db).stdout
    assert f"pid {pid} (pgcdc:{slot}:changes)" in table


@pytest.mark.usefixtures("table")
def test_slots_are_dropped_all_or_none(pg: Session, db: str, server: str, slot: str) -> None:
    with reading(db, slot) as pid:
        refused = pg_cdc("slots", server, "--drop", slot, "--drop", "no_such_slot")
        assert refused.returncode == 1
        assert f"slot {slot} is in use by pid {pid}" in refused.stderr
        assert "there is no logical slot no_such_slot" in refused.stderr
    wait_until(lambda: run(pg, "SELECT count(*) FROM pg_replication_slots WHERE active") == [(0,)])
    assert pg_cdc("slots", server, "--drop", slot, "--drop", "no_such_slot").returncode == 1
    # One whose stream runs is in use, also while its tables are read.
    with contextlib.closing(psycopg2.connect(db, application_name=f"pgcdc:{slot}:snapshot")):
        assert listed(db)[slot]["running"] == "pgcdc"
        refused = pg_cdc("slots", server, "--drop", slot)
        assert (refused.returncode, "a pgcdc stream that runs now" in refused.stderr) == (1, True), refused.stderr
    with role(pg, db) as login:
        refused = pg_cdc("slots", conninfo(login), "--drop", slot)
        assert (refused.returncode, "ALTER ROLE" in refused.stderr) == (1, True), refused.stderr
    assert slots(pg) == [slot]
    # From another database, as an administrator does.
    wait_until(lambda: listed(db)[slot]["running"] is None)
    assert slot not in listed(server, "--drop", slot)
    assert slots(pg) == []


@pytest.mark.usefixtures("table")
def test_on_a_terminal_the_user_is_asked(pg: Session, db: str, slot: str) -> None:
    for answer, given, left in (("n", [], [slot]), ("n", ["--yes"], [])):
        ours, terminal = pty.openpty()
        try:
            os.write(ours, f"{answer}\n".encode())
            command = [COMMAND, "slots", db, "--drop", slot, *given]
            result = subprocess.run(command, stdin=terminal, capture_output=True, text=True, timeout=60, check=False)
        finally:
            os.close(ours)
            os.close(terminal)
        assert slots(pg) == left
        assert (result.returncode == 0) == (left == [])
        assert (f"Drop {slot}?" in result.stderr) == (left == [slot])


def test_a_server_that_is_not_there_is_an_error_without_its_password(db: str) -> None:
    result = pg_cdc("slots", "postgresql://somebody:Geheim-123@127.0.0.1:1/x")
    assert result.returncode == 1
    assert "cannot connect to PostgreSQL at 127.0.0.1:1/x as somebody" in result.stderr
    assert "Geheim-123" not in result.stdout + result.stderr


def test_the_list_of_slots_takes_options_of_the_connection(db: str, tmp_path: Path) -> None:
    login = parse_dsn(db)
    (tmp_path / "token").write_text(login.pop("password"))
    listed = pg_cdc("slots", make_dsn(**login), "-o", f"passwordCommand=cat {tmp_path}/token", "--json")
    assert json.loads(listed.stdout)["dropped"] == []
    twice = pg_cdc("slots", make_dsn(**login), "-o", "url=x")
    assert twice.returncode == 2
    assert "url is given twice" in twice.stderr


@pytest.fixture(scope="module")
def plain_server() -> Iterator[str]:
    """A server that does not decode."""
    with second_server({"wal_level": "replica"}) as url:
        with connect(url) as session:
            run(session, "CREATE TABLE t (id int PRIMARY KEY)")
        yield url


@pytest.mark.parametrize(
    ("roles", "says", "decoding", "replicating"),
    [
        (["rds_superuser", "rds_replication"], "Amazon RDS, rds.logical_replication=off: ", "DB parameter group", ""),
        (
            ["cloudsqlsuperuser"],
            "Google Cloud SQL, cloudsql.logical_decoding=not shown: ",
            "decoding=on",
            "REPLICATION",
        ),
        (
            ["alloydbsuperuser"],
            "Google AlloyDB, alloydb.logical_decoding=not shown: ",
            "decoding=on",
            "alloydbsuperuser: ALTER",
        ),
        (
            ["azure_pg_admin"],
            "Azure Database for PostgreSQL: ",
            "parameter wal_level to logical",
            "azure_pg_admin: ALTER",
        ),
        (["neon_superuser"], "Neon: connect to the host without -pooler", "the project's settings", "console"),
        (["supabase_admin"], "Supabase: connect to the database itself", "restart the project", "as postgres: ALTER"),
    ],
)
def test_managed_services_are_recognised_and_have_remedies_of_their_own(
    plain_server: str, roles: list[str], says: str, decoding: str, replicating: str
) -> None:
    with connect(plain_server) as session:
        for name in roles:
            run(session, f"CREATE ROLE {name} NOLOGIN")
        run(session, "CREATE ROLE poor LOGIN PASSWORD 'Geheim'", "GRANT SELECT ON t TO poor")
        run(session, "ALTER ROLE poor SET rds.logical_replication = 'off'")
        if "rds_replication" in roles:
            run(session, "GRANT rds_replication TO poor")
        try:
            poor = make_dsn(**{**parse_dsn(plain_server), "user": "poor", "password": "Geheim"})
            found, _ = check("pgcdc", poor, dbtable="public.t", slot="s", startFrom="now")
        finally:
            run(session, "DROP OWNED BY poor", *(f"DROP ROLE {name}" for name in ("poor", *roles)))
    assert found["service"][0]["text"].startswith(says)
    remedies = [finding["remedy"] for finding in found["replication"]]
    assert decoding in remedies[0]
    assert [replicating in remedy for remedy in remedies[1:]] == ([True] if replicating else [])
