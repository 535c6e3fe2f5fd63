"""What cannot be read completely and correctly is refused, with one short error that says what to do."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest
from balancer import balanced
from databases import connect
from driving import refusal_of
from frames import load
from pgbouncer import pgbouncer
from psycopg2.extensions import connection as Session
from psycopg2.extensions import parse_dsn
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from refusals import refusal
from roles import SETTINGS_OF_ROLES, TELLING_COLUMNS, conninfo, role
from scans import planned, rows_of
from servers import second_server
from typer.testing import CliRunner

from pg_cdc_source import open_snapshot
from pg_cdc_source.cli.app import app
from pg_cdc_source.errors import AccessError, ConnectError, PgCdcError, SchemaChangedError, TransientError
from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.snapshot.scan import make_plan
from pg_cdc_source.snapshot.source import plan_ranges


def run(pg: Session, statements: str) -> list[tuple[Any, ...]]:
    with pg.cursor() as cursor:
        cursor.execute(statements)
        return cursor.fetchall() if cursor.description else []


def right_or_refused(df: DataFrame, rows: list[tuple[Any, ...]], *expected: str, count: bool = False) -> None:
    """Check that ``df`` gives these rows or is refused: which of the two, is up to when Spark plans partitions."""
    try:
        got = [(df.count(),)] if count else sorted(tuple(row) for row in df.collect())
    except PySparkException:
        refusal(df.collect, *expected)
    else:
        assert got == rows


def refused_at_load(kind: type[PgCdcError], *expected: str, url: str, **options: str) -> str:
    """Plan what ``load()`` plans; the text of the error."""
    return refusal_of(lambda: make_plan(parse_snapshot_options({"url": url, **options})), *expected, kind=kind)


@pytest.fixture
def reader(pg: Session, db: str) -> Iterator[dict[str, str]]:
    """A role without any rights on tables."""
    with role(pg, db) as login:
        yield login


# --- rows and columns that the role may not see ---------------------------------------------------------------------

PARTITIONED = (
    "CREATE TABLE sales (id int, region int) PARTITION BY LIST (region);"
    " CREATE TABLE sales_1 PARTITION OF sales FOR VALUES IN (1);"
    " CREATE TABLE sales_2 PARTITION OF sales FOR VALUES IN (2);"
    " INSERT INTO sales SELECT i, 1 + i % 2 FROM generate_series(1, 1000) AS i"
)


@pytest.mark.parametrize("table", ["sales", "sales_1"])
def test_row_level_security_that_would_hide_rows_is_refused(table: str, pg: Session, reader: dict[str, str]) -> None:
    run(pg, f"{PARTITIONED}; GRANT SELECT ON sales, sales_1, sales_2 TO {reader['user']}")
    run(pg, f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY; CREATE POLICY few ON {table} USING (id < 10)")
    refused_at_load(AccessError, table, "row-level", "BYPASSRLS", url=conninfo(reader), dbtable=table)


def test_a_policy_made_after_loading_is_refused(pg: Session, spark: SparkSession, reader: dict[str, str]) -> None:
    run(pg, f"{PARTITIONED}; GRANT SELECT ON sales, sales_1, sales_2 TO {reader['user']}")
    df = load(spark, conninfo(reader), dbtable="sales_1")
    run(pg, "ALTER TABLE sales_1 ENABLE ROW LEVEL SECURITY; CREATE POLICY few ON sales_1 USING (id < 10)")
    refusal(df.count, "AccessError", "sales_1", "row-level security")


def test_a_policy_of_a_leaf_hides_nothing_from_who_reads_the_root(
    pg: Session, spark: SparkSession, reader: dict[str, str]
) -> None:
    run(pg, f"{PARTITIONED}; GRANT SELECT ON sales, sales_1, sales_2 TO {reader['user']}")
    df = load(spark, conninfo(reader), dbtable="sales")
    assert df.count() == 1000
    run(pg, "ALTER TABLE sales_2 ENABLE ROW LEVEL SECURITY; CREATE POLICY few ON sales_2 USING (id < 10)")
    assert load(spark, conninfo(reader), dbtable="sales").count() == 1000
    # Planned before the policy, a task would read the leaf itself.
    right_or_refused(df, [(1000,)], "AccessError", "row-level security", count=True)


def test_the_right_to_the_root_is_enough_for_partitions(
    pg: Session, spark: SparkSession, reader: dict[str, str]
) -> None:
    run(pg, f"{PARTITIONED}; GRANT SELECT ON sales, sales_1 TO {reader['user']}")
    assert load(spark, conninfo(reader), dbtable="sales").count() == 1000
    refusal(lambda: load(spark, conninfo(reader), dbtable="sales_2").count(), "AccessError", "sales_2", "GRANT SELECT")


def test_a_role_whose_sessions_are_anothers_finds_its_snapshots(
    pg: Session, db: str, spark: SparkSession, reader: dict[str, str]
) -> None:
    run(pg, "CREATE TABLE t (id int); INSERT INTO t SELECT generate_series(1, 1000)")
    with role(pg, db) as owner:
        run(pg, f"GRANT SELECT ON t TO {owner['user']}; GRANT {owner['user']} TO {reader['user']}")
        # From then on its sessions may not see in pg_stat_activity what they themselves do.
        run(pg, f"ALTER ROLE {reader['user']} SET role = {owner['user']}")
        df = load(spark, conninfo(reader), dbtable="t", numPartitions=2)
        assert df.count() == 1000
        # An RDD's stages are told apart by when their snapshots began.
        assert df.rdd.count() == 1000
        run(pg, "INSERT INTO t VALUES (1001)")
        assert df.rdd.count() == 1001


def test_a_table_without_select_is_refused(pg: Session, reader: dict[str, str]) -> None:
    run(pg, "CREATE TABLE secret (id int); CREATE SCHEMA hidden; CREATE TABLE hidden.t (id int)")
    url = conninfo(reader)
    refused_at_load(AccessError, "secret", "GRANT SELECT", url=url, dbtable="secret")
    refused_at_load(AccessError, "hidden", "USAGE", url=url, dbtable="hidden.t")


def test_the_right_to_some_columns_is_enough_for_these(
    pg: Session, spark: SparkSession, reader: dict[str, str]
) -> None:
    run(pg, f"CREATE TABLE staff AS SELECT 1 AS id, 'x' AS salary; GRANT SELECT (id) ON staff TO {reader['user']}")
    refusal(lambda: load(spark, conninfo(reader), dbtable="staff"), "AccessError", "staff", "GRANT SELECT")
    assert [tuple(row) for row in load(spark, conninfo(reader), dbtable="staff", columns="id").collect()] == [(1,)]


# --- what the server does not keep -----------------------------------------------------------------------------------


@pytest.mark.corner
def test_a_server_that_removes_rows_a_snapshot_sees_is_refused(pg: Session, spark: SparkSession) -> None:
    """Sessions that import a snapshot would find fewer rows, without an error."""
    if pg.server_version >= 170000:
        pytest.skip("old_snapshot_threshold is gone in PostgreSQL 17")
    with second_server({"old_snapshot_threshold": "1h"}) as url:
        with connect(url) as session:
            run(session, "CREATE TABLE t (id int PRIMARY KEY)")
        expected = ("ServerSetupError", "old_snapshot_threshold is 1h", "old_snapshot_threshold = -1")
        refusal(lambda: load(spark, url, dbtable="t").count(), *expected)
        refusal(lambda: load(spark, url, query="SELECT 1 AS one").count(), *expected)
        for format, *options in (("pgsnapshot",), ("pgcdc", "-o", "slot=s")):
            checked = CliRunner().invoke(app, ["check", format, "-o", f"url={url}", "-o", "dbtable=t", *options])
            assert checked.exit_code == 1
            assert "old_snapshot_threshold is 1h" in checked.output


# --- what is not there ----------------------------------------------------------------------------------------------


def test_a_missing_table_is_refused_with_the_nearest_name(db: str, pg: Session) -> None:
    run(pg, "CREATE SCHEMA sales; CREATE TABLE sales.orders (id int)")
    refused_at_load(AccessError, "sales.order", "did you mean sales.orders?", url=db, dbtable="sales.order")
    refused_at_load(AccessError, "orders", "did you mean sales.orders?", url=db, dbtable="orders")
    # PostgreSQL's own are not what is meant.
    refused_at_load(AccessError, "stats", "check the schema and the spelling", url=db, dbtable="stats")
    refused_at_load(AccessError, "pg_stat", "did you mean pg_catalog.pg_stats", url=db, dbtable="pg_stat")


def test_who_is_not_let_in_is_told_why(pg: Session, spark: SparkSession, reader: dict[str, str]) -> None:
    # Spark adds frames to what it shows, and none may have the password.
    wrong = conninfo(reader, password="Falsch-4711")
    text = refusal(lambda: load(spark, wrong, dbtable="t"), "ConnectError", "password", "pg_hba.conf", reader["user"])
    assert "Falsch-4711" not in text
    there_is_none = conninfo(reader, dbname="no_such_db")
    text = refused_at_load(ConnectError, '"no_such_db"', url=there_is_none, dbtable="t")
    assert reader["password"] not in text
    misspelt = conninfo(reader, options="-c serch_path=x")
    refused_at_load(ConnectError, "serch_path", "option options", url=misspelt, dbtable="t")
    run(pg, f"REVOKE CONNECT ON DATABASE {reader['dbname']} FROM PUBLIC")
    refused_at_load(ConnectError, "GRANT CONNECT ON DATABASE", url=conninfo(reader), dbtable="t")


def test_a_server_that_does_not_answer_is_named_within_seconds(pg: Session, reader: dict[str, str]) -> None:
    start = time.monotonic()
    nowhere = conninfo(reader, port="1")
    text = refused_at_load(TransientError, f"{reader['host']}:1", "refused", url=nowhere, dbtable="t")
    assert time.monotonic() - start < 10
    assert reader["password"] not in text


def test_a_misspelt_option_is_refused_before_anything_connects(spark: SparkSession) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        here = f"127.0.0.1:{server.getsockname()[1]}"
        url = f"postgresql://nobody:geheim@{here}/db?connect_timeout=5"
        text = refusal(
            lambda: load(spark, url, dbtable="t", numPartition="4"), "OptionError", "numPartitions?", "numpartition"
        )
        with pytest.raises(BlockingIOError):
            server.accept()
    assert here not in text
    assert "geheim" not in text


# --- poolers --------------------------------------------------------------------------------------------------------


@pytest.mark.debian
def test_a_transaction_pooling_pgbouncer_is_refused(db: str, pg: Session, spark: SparkSession, tmp_path: Path) -> None:
    run(pg, "CREATE TABLE t AS SELECT generate_series(1, 1000) AS id")
    with pgbouncer(db, "transaction") as url:
        before = settings_of_clients(url)
        refusal(
            lambda: load(spark, url, dbtable="t").count(), "ServerSetupError", "pooler", "transaction mode", "session"
        )
        assert "a connection pooler in transaction mode" in CliRunner().invoke(app, ["slots", url]).output
        # Other clients get the same server sessions, with whatever was set in them.
        assert settings_of_clients(url) == before


def settings_of_clients(url: str) -> list[set[tuple[str, str]]]:
    """The settings of the sessions that three clients at a time of a pooler get."""
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(connect(url)) for _ in range(3)]
        for session in sessions:
            run(session, "BEGIN")
        ask = "SELECT name, setting FROM pg_settings WHERE name <> 'application_name'"
        return [set(run(session, ask)) for session in sessions]


def test_a_pooler_that_drops_the_parameter_replication_is_named(db: str, pg: Session, spark: SparkSession) -> None:
    run(pg, "CREATE TABLE t AS SELECT generate_series(1, 1000) AS id")
    with balanced(db, lambda name: db, drops=b"replication") as url:
        says = ("ServerSetupError", "opens a plain session", "a pooler does not pass replication on")
        refusal(lambda: load(spark, url, dbtable="t", consistentPoint="require").count(), *says)
        # Whoever does not insist reads without an LSN.
        assert load(spark, url, dbtable="t", lsnColumn="lsn").select("lsn").distinct().collect() == [(None,)]


@pytest.mark.debian
@pytest.mark.parametrize("add_host", [False, True])
def test_a_session_pooling_pgbouncer_works(db: str, pg: Session, spark: SparkSession, add_host: bool) -> None:
    run(pg, "CREATE TABLE t AS SELECT generate_series(1, 100000) AS id")
    with pgbouncer(db, "session", add_host=add_host) as url:
        df = load(spark, url, dbtable="t", numPartitions=4)
        assert df.selectExpr("count(*)", "count(distinct id)").collect() == [(100000, 100000)]
        refusal(
            lambda: load(spark, url, dbtable="t", consistentPoint="require").count(),
            "a pooler does not pass replication on",
            "consistentPoint=off",
        )


# --- the consistent point -------------------------------------------------------------------------------------------


def lsns(df: DataFrame) -> list[int | None]:
    return [row[0] for row in df.select("lsn").distinct().collect()]


def test_a_server_without_logical_decoding_gives_a_snapshot_without_lsn(spark: SparkSession) -> None:
    with second_server({"wal_level": "replica"}) as url, connect(url) as session:
        run(session, "CREATE TABLE t AS SELECT generate_series(1, 1000) AS id")
        options = {"dbtable": "t", "lsnColumn": "lsn"}
        refusal(
            lambda: load(spark, url, consistentPoint="require", **options).count(),
            "ServerSetupError",
            "wal_level=logical, but it is replica",
            "consistentPoint=off",
        )
        for choice in ("auto", "off"):
            df = load(spark, url, consistentPoint=choice, **options)
            assert df.count() == 1000
            assert lsns(df) == [None]


def test_a_role_without_replication_gets_a_snapshot_without_lsn(
    pg: Session, spark: SparkSession, reader: dict[str, str]
) -> None:
    run(pg, f"CREATE TABLE t AS SELECT 1 AS id; GRANT SELECT ON t TO {reader['user']}")
    refusal(
        lambda: load(spark, conninfo(reader), dbtable="t", consistentPoint="require"),
        "ServerSetupError",
        f"ALTER ROLE {reader['user']} REPLICATION",
    )
    assert lsns(load(spark, conninfo(reader), dbtable="t", lsnColumn="lsn")) == [None]


@contextlib.contextmanager
def all_slots_taken(pg: Session) -> Iterator[None]:
    name = f"taken_{secrets.token_hex(4)}"
    run(
        pg,
        f"SELECT pg_create_physical_replication_slot('{name}_' || i) FROM generate_series(1,"
        " current_setting('max_replication_slots')::int - (SELECT count(*)::int FROM pg_replication_slots)) AS i",
    )
    try:
        yield
    finally:
        run(pg, f"SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name ~ '^{name}_'")


def test_a_server_without_a_free_slot_is_refused_only_where_one_is_required(
    db: str, pg: Session, spark: SparkSession
) -> None:
    run(pg, "CREATE TABLE t AS SELECT 1 AS id")
    with all_slots_taken(pg):
        df = load(spark, db, dbtable="t", consistentPoint="require")
        refusal(
            df.count, "[SERVER_SETUP] ", "replication slots are in use", "max_replication_slots", "pg_replication_slots"
        )
        assert lsns(load(spark, db, dbtable="t", lsnColumn="lsn")) == [None]
    assert lsns(load(spark, db, dbtable="t", lsnColumn="lsn", consistentPoint="require")) != [None]


def test_a_slot_that_waits_for_a_long_transaction_is_given_up_in_time(
    db: str, pg: Session, spark: SparkSession
) -> None:
    run(pg, "CREATE TABLE t AS SELECT 1 AS id")
    with connect(db) as writer:
        run(writer, "BEGIN; INSERT INTO t VALUES (2)")
        pid = writer.info.backend_pid
        df = load(spark, db, dbtable="t", consistentPoint="require", slotTimeout="500ms")
        refusal(df.count, "[TRANSIENT] ", "within 0.5 s", f"pid {pid} for ", "slotTimeout")
        start = time.monotonic()
        assert lsns(load(spark, db, dbtable="t", lsnColumn="lsn", slotTimeout="500ms")) == [None]
        # A slot of its own patience would wait for the writer, and that is this test.
        assert time.monotonic() - start < 30
        run(writer, "ROLLBACK")


# --- sessions -------------------------------------------------------------------------------------------------------


def test_a_query_that_writes_is_refused(db: str, pg: Session, spark: SparkSession) -> None:
    run(
        pg,
        "CREATE TABLE log (id int); CREATE FUNCTION note() RETURNS int LANGUAGE sql"
        " AS 'INSERT INTO log VALUES (1) RETURNING id'",
    )
    refusal(lambda: load(spark, db, query="SELECT note() AS id").collect(), "QueryError", "read-only")
    assert run(pg, "SELECT count(*) FROM log") == [(0,)]


@pytest.mark.matrix("settings of role and database, encodings")
@pytest.mark.parametrize("level", ["ROLE", "DATABASE"])
def test_settings_of_role_and_database_change_no_value(
    level: str, db: str, pg: Session, spark: SparkSession, reader: dict[str, str]
) -> None:
    run(
        pg,
        f"CREATE SCHEMA decoy; CREATE TABLE decoy.t AS SELECT 0 AS id; SET standard_conforming_strings = on;"
        f" CREATE TABLE public.t AS {TELLING_COLUMNS} FROM generate_series(1, 50) AS i;"
        f" GRANT USAGE ON SCHEMA decoy TO {reader['user']}; GRANT SELECT ON decoy.t, public.t TO {reader['user']}",
    )
    options: dict[str, str | int] = {"dbtable": "public.t", "where": "id > 1 OR pg_sleep(0.4) IS NOT NULL"}
    every_column_as_text = {"asString": "d,ts,tz,iv,b,f8,f4,m,r,tza,dr,tmz", **options}

    def rows() -> list[list[tuple[Any, ...]]]:
        frames = [load(spark, conninfo(reader), **chosen) for chosen in (options, every_column_as_text)]
        return [[tuple(row) for row in frame.orderBy("id").collect()] for frame in frames]

    before = rows()
    target = reader["user"] if level == "ROLE" else parse_dsn(db)["dbname"]
    for name, value in SETTINGS_OF_ROLES.items():
        # Some are lists.
        quoted = ", ".join(f"'{part}'" for part in value.split(", "))
        run(pg, f"ALTER {level} {target} SET {name} = {quoted}")
    assert rows() == before
    text = before[1][0]
    assert text[1:6] == ("2024-02-04", "2024-02-03 04:05:06.5", "2024-02-03 04:05:06+00", "P1Y-2DT3H4M5S", "\\x00ff41")


def test_sessions_say_who_they_are_and_are_bounded(db: str, spark: SparkSession) -> None:
    names = [
        "application_name",
        "transaction_read_only",
        "transaction_isolation",
        "statement_timeout",
        "idle_in_transaction_session_timeout",
        "lock_timeout",
        "row_security",
        "TimeZone",
    ]
    query = "SELECT " + ", ".join(f"current_setting('{name}') AS \"{name}\"" for name in names)
    row = load(spark, db, query=query).first()
    assert row is not None
    name, *others = row
    assert re.fullmatch(r"pgsnapshot:[a-z2-7]{16}:\d+\?0", name)
    assert others == ["on", "repeatable read", "0", "0", "1min", "off", "UTC"]


# --- the password ---------------------------------------------------------------------------------------------------

DRIVER = """
import json, sys
from pathlib import Path
from pg_cdc_source.demo.local_spark import start_session
from pg_cdc_source import register

settings = json.loads(sys.stdin.readline())
conf = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": settings["events"]}
conf["spark.eventLog.compress"] = "false"
spark = start_session("local[2]", conf, Path(settings["directory"]))
register(spark)

def load(options, **more):
    return spark.read.format("pgsnapshot").options(**{**options, **more}).load()

forms = settings["forms"]
for options in forms:
    df = load(options, dbtable="t")
    df.explain(True)
    print(df.collect(), df._jdf.queryExecution().toString(), repr(df))
    refused = [{"dbtabel": "t"}]
    # Once it is read, a form is a password or a command.
    if options in (forms[0], forms[-1]):
        refused += [{"dbtable": "tt"}, {"dbtable": "t", "where": "1 / (id - 1) = 1"}]
    for wrong in refused:
        try:
            load(options, **wrong).collect()
        except Exception as error:
            print(error)
spark.sql("SELECT 1").collect()
print("holding", flush=True)
sys.stdin.readline()
spark.stop()
"""


def test_the_password_is_nowhere_to_be_seen(pg: Session, reader: dict[str, str], tmp_path: Path) -> None:
    run(pg, f"CREATE TABLE t AS SELECT 1 AS id; GRANT SELECT ON t TO {reader['user']}")
    password, token = reader["password"], tmp_path / "token"
    token.write_text(password)
    host, port, dbname, user = (reader[k] for k in ("host", "port", "dbname", "user"))
    forms = [
        {"host": host, "port": port, "database": dbname, "user": user, "password": password},
        {"url": f"postgresql://{user}:{quote(password)}@{host}:{port}/{dbname}"},
        {"url": f"jdbc:postgresql://{host}:{port}/{dbname}?user={user}&password={quote(password)}"},
        {"url": conninfo(reader)},
        {"url": f"postgresql://{user}@{host}:{port}/{dbname}", "passwordCommand": f"cat {token}"},
    ]
    events = tmp_path / "events"
    events.mkdir()
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    settings = json.dumps({"forms": forms, "events": str(events), "directory": str(tmp_path)})
    with (
        (tmp_path / "stderr").open("w") as errors,
        subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=tmp_path,
        ) as driver,
    ):
        assert driver.stdin is not None
        assert driver.stdout is not None
        driver.stdin.write(settings + "\n")
        driver.stdin.flush()
        shown = []
        for line in driver.stdout:
            shown.append(line)
            if line == "holding\n":
                break
        processes = visible_processes()
        driver.stdin.write("\n")
        driver.stdin.close()
        shown.extend(driver.stdout)
    assert driver.returncode == 0, (tmp_path / "stderr").read_text()[-3000:]
    output = "".join(shown)
    assert output.count("[Row(id=1)]") == len(forms)
    assert output.count("did you mean") == len(forms) + 2
    assert any("pg_cdc_source.snapshot.keeper" in process for process in processes)
    log, event_log = (tmp_path / "stderr").read_text(), "".join(p.read_text() for p in events.rglob("*") if p.is_file())
    assert "pgsnapshot" in event_log
    assert "ERROR TaskSetManager" in log
    for place, text in {"output": output, "log": log, "events": event_log, "processes": "\n".join(processes)}.items():
        assert password not in text, place


def visible_processes() -> list[str]:
    """Return arguments and environment of every process that can be looked at."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found.append(f"{process.cmdline()} {process.environ()}")
    return found


# --- tables that change between snapshot and read -------------------------------------------------------------------

TABLE = (
    "CREATE TABLE t (id int NOT NULL, a text, b text);"
    " INSERT INTO t SELECT i, 'a' || i, 'b' || i FROM generate_series(1, 500) AS i"
)
SWAP = "ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME x TO b"
CREATE_AGAIN = "DROP TABLE t; " + TABLE

REWRITTEN = "t was truncated or rewritten after the snapshot was taken"
ANOTHER_COLUMN = "column a was dropped, renamed or replaced after the DataFrame was loaded"
# What a task says where the load has planned already what it reads.
NO_COLUMN = "column t.a does not exist (SQLSTATE 42703); PostgreSQL accepted this SQL when the DataFrame was loaded"
REPLACED = "public.t was dropped, renamed or replaced after the DataFrame was loaded"

CHANGES_UNDER_A_SNAPSHOT = {
    "truncated": ("TRUNCATE t", REWRITTEN),
    "truncated and filled": ("TRUNCATE t; INSERT INTO t SELECT 1, 'a', 'b'", REWRITTEN),
    "rewritten": ("ALTER TABLE t ALTER id TYPE int USING id + 1", REWRITTEN),
    "vacuumed in full": ("VACUUM FULL t", REWRITTEN),
    "column retyped with a rewrite": ("ALTER TABLE t ALTER id TYPE bigint", REWRITTEN),
    "column retyped without": ("ALTER TABLE t ALTER a TYPE varchar", "column a (text) is not the column it was"),
    "created again": (CREATE_AGAIN, REPLACED),
    "dropped": ("DROP TABLE t", REPLACED),
    "renamed": ("ALTER TABLE t RENAME TO u", REPLACED),
    "columns swapped": (SWAP, ANOTHER_COLUMN),
    "column renamed": ("ALTER TABLE t RENAME a TO c", NO_COLUMN),
    "column dropped": ("ALTER TABLE t DROP a", NO_COLUMN),
}


@pytest.mark.parametrize("change", CHANGES_UNDER_A_SNAPSHOT)
def test_a_table_changed_under_its_snapshot_is_refused(change: str, db: str, pg: Session) -> None:
    statements, expected = CHANGES_UNDER_A_SNAPSHOT[change]
    run(pg, TABLE)
    with open_snapshot(db, consistentPoint="off") as snapshot:
        given = planned(snapshot, dbtable="t")
        for statement in statements.split("; "):
            run(pg, statement)
        refusal_of(lambda: rows_of(given), expected, kind=SchemaChangedError)


@pytest.mark.parametrize("change", ["columns swapped", "dropped"])
def test_a_table_changed_under_its_snapshot_is_refused_in_spark(
    change: str, db: str, pg: Session, spark: SparkSession
) -> None:
    statements, expected = CHANGES_UNDER_A_SNAPSHOT[change]
    run(pg, TABLE)
    with open_snapshot(db, consistentPoint="off") as snapshot:
        df = load(spark, None, dbtable="t", numPartitions=2, **snapshot.options)
        for statement in statements.split("; "):
            run(pg, statement)
        refusal(df.collect, "SchemaChangedError", expected)


@pytest.mark.parametrize("change", [SWAP, "ALTER TABLE t RENAME a TO c", "ALTER TABLE t DROP a"])
def test_a_column_that_is_another_one_is_noticed_when_ranges_are_planned(change: str, db: str, pg: Session) -> None:
    run(pg, TABLE)
    plan = make_plan(options := parse_snapshot_options({"url": db, "dbtable": "t"}))
    for statement in change.split("; "):
        run(pg, statement)
    with pytest.raises(SchemaChangedError, match=f"planning public.t: {ANOTHER_COLUMN}"):
        plan_ranges(plan, options)


CHANGES_AFTER_LOADING = {
    "created again": CREATE_AGAIN,
    "created again with partitions": "DROP TABLE t; CREATE TABLE t (id int NOT NULL, a text, b text) PARTITION BY LIST"
    " (id); CREATE TABLE t1 PARTITION OF t DEFAULT; INSERT INTO t VALUES (1, 'x', 'y')",
    "columns swapped": SWAP,
    "column renamed": "ALTER TABLE t RENAME a TO c",
    "column dropped": "ALTER TABLE t DROP a",
    "column retyped": "ALTER TABLE t ALTER id TYPE bigint",
    "column added": "ALTER TABLE t ADD c text",
    "truncated": "TRUNCATE t; INSERT INTO t VALUES (1, 'x', 'y')",
    "vacuumed in full": "VACUUM FULL t",
    "partition attached": "CREATE TABLE child () INHERITS (t); INSERT INTO child VALUES (1, 'x', 'y')",
}
# The columns of the DataFrame are what they were, and its rows are those of the action's own snapshot.
READ_AS_THEY_ARE = ("column added", "truncated", "vacuumed in full")


@pytest.mark.parametrize("change", CHANGES_AFTER_LOADING)
def test_a_table_changed_between_two_actions_is_refused_or_read_as_it_is(
    change: str, db: str, pg: Session, spark: SparkSession
) -> None:
    run(pg, TABLE)
    df = load(spark, db, dbtable="t", numPartitions=2)
    assert df.count() == 500
    for statement in CHANGES_AFTER_LOADING[change].split("; "):
        run(pg, statement)
    if change in READ_AS_THEY_ARE:
        assert sorted(tuple(row) for row in df.collect()) == run(pg, "SELECT id, a, b FROM t ORDER BY id")
    elif change == "partition attached":
        # Spark 4.0 plans partitions for each action, and sees it; later versions plan once.
        right_or_refused(df, run(pg, "SELECT id, a, b FROM t ORDER BY id, a"), "SchemaChangedError", "other partitions")
    else:
        refusal(df.collect, "SchemaChangedError", "t", "Remedy: load the DataFrame again")


def test_a_view_whose_columns_changed_places_is_not_read_swapped(db: str, pg: Session, spark: SparkSession) -> None:
    run(pg, f"{TABLE}; CREATE VIEW v AS SELECT id, a, b FROM t")
    df = load(spark, db, dbtable="v")
    assert df.count() == 500
    run(pg, "DROP VIEW v; CREATE VIEW v AS SELECT id, b, a FROM t")
    refusal(df.collect, "SchemaChangedError", "v", "Remedy: load the DataFrame again")
