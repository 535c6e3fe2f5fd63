"""Tables that Spark's own SQL writes: what breaks between their statements, and whoever rewrites files meanwhile."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

import lake_jars
import pyarrow as pa
import pytest
from driving import run
from lake import Begin, CatalogLake, is_same, rows_of, set_aside
from psycopg2.extensions import connection as Session
from pyspark.errors import AnalysisException, PySparkException, UnsupportedOperationException
from pyspark.sql import DataFrame, SparkSession
from sessions import SparkSessions
from threads import at_work
from watch import wait_until

from pg_cdc_source import mirror
from pg_cdc_source.errors import DefiniteError, OptionError, TransientError
from pg_cdc_source.lake import bring, directories, files
from pg_cdc_source.lake.ledger import MODES, TEMPLATE
from pg_cdc_source.mirrors import iceberg_files
from pg_cdc_source.mirrors.delta import DeltaTable
from pg_cdc_source.mirrors.fetching import in_a_task
from pg_cdc_source.mirrors.iceberg import IcebergTable
from pg_cdc_source.mirrors.iceberg_of_jvm import IcebergTableOfJvm
from pg_cdc_source.mirrors.spark_ledger import SparkLedger
from pg_cdc_source.postgres.backoff import Backoff

T = ("CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'a'), (2, 'b')")
U = ("CREATE TABLE u (id int PRIMARY KEY, v text)", "INSERT INTO u VALUES (1, 'x')")


# The newest Spark has neither format.
pytestmark = pytest.mark.corner


@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=pytest.mark.skipif(why is not None, reason=why or ""))
    for name in ("delta", "iceberg") for why in [lake_jars.lacking(name)]
])  # fmt: skip
def format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses between attempts are a hundredth of what they are; tests/lake/test_patience.py has how long that is.

    There are as many attempts.
    """

    def shorter(first_seconds: float, **bounds: Any) -> Backoff:
        return Backoff(first_seconds / 100, **bounds)

    monkeypatch.setattr(bring, "Backoff", shorter)


class _Killed(BaseException):
    """Ends a batch as a killed process does."""


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        (("DROP b", "RENAME a TO b", "ADD a int DEFAULT 5"), ["DROP", "SET", "RENAME", "SET", "ADD", "UPDATE", "SET"]),
        (("RENAME a TO b", "ADD a int DEFAULT 5", "ADD n int"), ["RENAME", "SET", "ADD", "UPDATE", "SET"]),
        (("DROP a", "ALTER d TYPE numeric(12, 2)", "RENAME d TO a"), ["DROP", "SET", "RENAME", "SET", "ALTER", "SET"]),
        (("DROP a", "DROP b"), ["DROP", "SET"]),
    ],
    ids=["all", "without a drop", "a type", "drops"],
)
def test_columns_go_on_changing_where_a_crash_has_ended_it(
    changes: Sequence[str], kinds: Sequence[str], pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = begin("CREATE TABLE t (id int PRIMARY KEY, a int, d numeric(10, 2))",
                 *(["ALTER TABLE t ADD b bigint"] if "DROP b" in changes else []),
                 "INSERT INTO t VALUES (1, 10, 1.5), (2, 20, 2.5)")  # fmt: skip
    done: list[str] = []
    whole = SparkSession.sql

    def breaking(self: SparkSession, statement: str, *args: Any, **named: Any) -> Any:
        found = whole(self, statement, *args, **named)
        if re.match(r"ALTER TABLE|UPDATE ", statement):
            is_again = done[-1:] == [statement]
            done.append(statement)
            if not is_again:
                raise _Killed
        return found

    monkeypatch.setattr(SparkSession, "sql", breaking)
    # One that is added is of another type than one that is dropped: otherwise all rows come again.
    run(pg, *(f"ALTER TABLE t {change}" for change in changes), "INSERT INTO t (id) VALUES (3)")

    def step() -> bool:
        try:
            lake.step()
        except _Killed:
            # Not yet at its end, which Spark need not be asked.
            lake.restart()
            return False
        return lake.rows("t") == rows_of(pg, "t")

    # Each crash is a start, of up to ten.
    wait_until(step, 300)
    last = lake.ledger.last()
    assert last is not None
    assert last.set_aside == {}
    found = [re.sub(r"ALTER TABLE \S+ ", "", statement).split()[0] for statement in done]
    # What changes nothing where it is done twice may be done so.
    assert [kind for i, kind in enumerate(found) if kind not in ("ALTER", "UPDATE") or kind != found[i - 1]] == kinds


def test_whoever_rewrites_files_while_a_batch_is_merged_does_not_end_it(
    pg: Session, begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = begin(*T)
    assert isinstance(lake, CatalogLake)
    run(pg, "INSERT INTO t VALUES (3, 'c')")
    wait_until(is_same(lake, pg, "t"))
    is_running, is_rewritten = tmp_path / "running", tmp_path / "rewritten"
    attempts = 0
    whole = lake.kind._run

    def held(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        is_running.touch()
        while not is_rewritten.exists():
            time.sleep(0.01)
        yield from batches

    def merge(self: Any, step: Any, rows: DataFrame, how: str) -> None:
        nonlocal attempts
        attempts += 1
        whole(self, step, rows.mapInArrow(held, rows.schema), how)

    def rewrite(stop: threading.Event) -> None:
        try:
            while not is_running.exists():
                if stop.wait(0.01):
                    return
            lake.rewrite_files("t")
        finally:
            is_rewritten.touch()

    monkeypatch.setattr(lake.kind, "_run", merge)
    run(pg, "UPDATE t SET v = 'd' WHERE id = 1")
    with at_work(rewrite):
        wait_until(is_same(lake, pg, "t"))
    assert attempts == 2
    last = lake.ledger.last()
    assert last is not None
    assert last.set_aside == {}


@pytest.mark.usefixtures("_short_pauses")
def test_a_table_that_fails_again_and_again_is_set_aside_and_all_of_them_end_the_query(
    pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = begin(*T, *U)
    attempts = []
    whole = lake.kind.apply

    def failing(self: Any, *args: Any) -> None:
        attempts.append(self._table)
        if self._table == "public.t" or "all" in attempts:
            # An error that PySpark has no class for.
            self._spark._jvm.java.util.Optional.empty().get()
        whole(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(lake.kind, "apply", failing)
        run(pg, "BEGIN; INSERT INTO t VALUES (3, 'c'); INSERT INTO u VALUES (2, 'y'); COMMIT")
        wait_until(is_same(lake, pg, "u"))
        last = lake.ledger.last()
        assert last is not None
        assert last.set_aside["public.t"].startswith("[TRANSIENT] public.t could not be written: java.util.NoSuch")
        assert (attempts.count("public.t"), attempts.count("public.u")) == (7, 1)
        attempts.append("all")
        run(pg, "INSERT INTO u VALUES (3, 'z')")
        with pytest.raises(DefiniteError, match="no table of batch"):
            wait_until(is_same(lake, pg, "u"))
    wait_until(is_same(lake, pg, "u"))


@pytest.mark.usefixtures("_short_pauses")
@pytest.mark.parametrize("how", ["refused for half a minute", "unsupported"])
def test_what_a_catalog_takes_at_last_is_not_set_aside_and_what_it_never_will_is_at_once(
    how: str, pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = begin(*T, *U)
    attempts = []
    whole = lake.kind.apply

    def failing(self: Any, *args: Any) -> None:
        attempts.append(self._table)
        if self._table == "public.t" and how == "unsupported":
            raise UnsupportedOperationException("Cannot")
        if self._table == "public.t" and attempts.count("public.t") <= 6:
            self._spark._jvm.java.util.Optional.empty().get()
        whole(self, *args)

    monkeypatch.setattr(lake.kind, "apply", failing)
    run(pg, "BEGIN; INSERT INTO t VALUES (3, 'c'); INSERT INTO u VALUES (2, 'y'); COMMIT")
    wait_until(is_same(lake, pg, "u"))
    last = lake.ledger.last()
    assert last is not None
    if how == "unsupported":
        assert last.set_aside["public.t"].startswith("[DEFINITE] public.t could not be written: UnsupportedOperation")
        assert attempts.count("public.t") == 1
    else:
        assert last.set_aside == {}
        assert lake.rows("t") == rows_of(pg, "t")


@pytest.mark.usefixtures("_short_pauses")
def test_what_another_driver_removes_sets_no_table_aside(
    pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was thought to be dead goes on, and begins or ends a batch."""
    lake = begin(*T, *U)
    assert isinstance(lake, CatalogLake)
    whole = lake.kind.apply

    def robbed(self: Any, *args: Any) -> None:
        directories.remove_directory(lake._lake._staging)
        whole(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(lake.kind, "apply", robbed)
        run(pg, "INSERT INTO t VALUES (3, 'c')")
        with pytest.raises(DefiniteError, match="another driver of this mirror applies batch"):
            wait_until(is_same(lake, pg, "t", "u"))
    last = lake.ledger.last()
    assert last is not None
    assert last.set_aside == {}
    wait_until(is_same(lake, pg, "t", "u"))


@pytest.mark.usefixtures("_short_pauses")
def test_a_table_that_fails_alone_in_its_batch_does_not_end_the_query(
    pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = begin(*T, *U)
    whole = lake.kind.apply

    def failing(self: Any, *args: Any) -> None:
        if self._table == "public.t":
            self._spark._jvm.java.util.Optional.empty().get()
        whole(self, *args)

    monkeypatch.setattr(lake.kind, "apply", failing)
    run(pg, "INSERT INTO t VALUES (3, 'c')")

    def is_set_aside() -> bool:
        row = lake.step()
        return row is not None and row.set_aside.keys() == {"public.t"}

    wait_until(is_set_aside)
    run(pg, "INSERT INTO u VALUES (2, 'y')")
    wait_until(is_same(lake, pg, "u"))


def test_keys_are_deleted_again_where_other_rows_come_behind_a_crash(pg: Session, begin: Begin) -> None:
    lake = begin(*T)
    assert isinstance(lake, CatalogLake)
    for key in (1, 2):
        lake.delete_keys("t", key)
    assert lake.rows("t") == {}


def test_a_table_that_a_crash_has_left_without_its_entry_in_the_catalog_is_created(
    format: str, pg: Session, begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if format != "delta":
        pytest.skip("its catalog has the table, or nothing is there")
    lake = begin(*T, "CREATE PUBLICATION s FOR ALL TABLES")
    assert isinstance(lake, CatalogLake)
    whole = DeltaTable._write_empty

    def killed(self: Any, *args: Any, **named: Any) -> None:
        monkeypatch.undo()
        whole(self, *args, **named)
        lake.lose_entry("u", tmp_path / "kept")
        raise _Killed

    monkeypatch.setattr(DeltaTable, "_write_empty", killed)
    run(pg, *U)

    def step() -> bool:
        try:
            lake.step()
        except _Killed:
            lake.restart()
        last = lake.ledger.last()
        assert last is not None
        assert last.set_aside == {}
        return "public.u" in last.tables

    wait_until(step)
    assert (tmp_path / "kept").exists()
    assert lake.rows("u") == rows_of(pg, "u")
    run(pg, "INSERT INTO u VALUES (2, 'y')")
    wait_until(is_same(lake, pg, "u"))


def test_a_ledger_that_a_crash_has_left_without_its_entry_in_the_catalog_is_created(
    format: str, begin: Begin, tmp_path: Path
) -> None:
    if format != "delta":
        pytest.skip("its catalog has the table, or nothing is there")
    lake = begin(*T)
    assert isinstance(lake, CatalogLake)
    other = SparkLedger(lake._spark, f"{lake._namespace}.other", "delta", {}, DeltaTable.create)
    other.create({TEMPLATE: "one"})
    lake.lose_entry("other", tmp_path / "kept")
    other.create({TEMPLATE: "two"})
    assert (other.said[TEMPLATE], other.last()) == ("two", None)
    # One that has batches is nothing that has only begun.
    lake.lose_entry("_pgcdc", tmp_path / "ledger")
    with pytest.raises(AnalysisException, match="NON_EMPTY"):
        lake.ledger.create({TEMPLATE: "two"})


def test_a_ledger_notes_what_is_true_of_its_tables_from_now_on(begin: Begin) -> None:
    lake = begin(*T)
    # Spark does not show what looks like a secret.
    said = {TEMPLATE: "token.'two'.{table}", MODES: '{"*": "merge", "public.\'password\'": "append"}'}
    lake.ledger.note(said)
    assert said.items() <= lake.ledger.said.items()


def test_values_that_were_fetched_in_vain_are_fetched_again(
    pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = "SELECT 1, 0, string_agg(md5(i::text), '') FROM generate_series(1, 400) AS i"
    lake = begin("CREATE TABLE t (id int PRIMARY KEY, n int, v text)", f"INSERT INTO t {large}")
    attempts = 0

    def failing(*args: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise PySparkException("the task is lost")
        return in_a_task(*args)

    monkeypatch.setattr("pg_cdc_source.mirrors.spark_table.in_a_task", failing)
    run(pg, "UPDATE t SET id = 2")
    wait_until(is_same(lake, pg, "t"))
    assert attempts == 2
    last = lake.ledger.last()
    assert last is not None
    assert last.set_aside == {}


def test_first_rows_whose_files_have_been_moved_are_taken_over_by_the_next_attempt(
    format: str, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    if format != "iceberg":
        pytest.skip("files are not taken over")
    attempts = 0
    whole = iceberg_files._data_file

    def failing(*args: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise OSError("the store has a bad moment")
        return whole(*args)

    monkeypatch.setattr(iceberg_files, "_data_file", failing)
    lake = begin(*T)
    assert isinstance(lake, CatalogLake)
    assert attempts == 2
    assert lake.are_taken_over("t")


def test_first_rows_are_found_by_values_beside_long_ones(
    format: str, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row group with a text of more than 4 kB says no bounds, and those of the others are not the file's."""
    if format != "iceberg":
        pytest.skip("files are not taken over")
    monkeypatch.setattr(files, "ROW_GROUP_BYTES", 0)
    lake = begin(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT n, repeat('b', 3000) FROM generate_series(1, 3000) AS n",
        "INSERT INTO t VALUES (5000, 'c'), (5001, repeat('z', 5000))",
    )
    assert isinstance(lake, CatalogLake)
    assert lake.are_taken_over("t")
    rows = lake._spark.table(lake.targets["public.t"])
    found = [rows.where(where).count() for where in ("v = 'c'", "v > 'y'", "v < 'c'", "id > 4000")]
    assert found == [1, 1, 3000, 2]


def test_names_may_leave_out_the_catalog_that_is_the_default_one(
    format: str,
    pg: Session,
    begin: Begin,
    spark_sessions: SparkSessions,
    lake_conf: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if format != "iceberg":
        pytest.skip("catalogs of Delta keep no tables")
    spark = spark_sessions.get(**lake_conf)
    monkeypatch.setitem(CatalogLake._KINDS, "iceberg", (IcebergTableOfJvm, ""))
    spark.conf.set("spark.sql.defaultCatalog", "lake")
    whole, seen = IcebergTable.require_ours, []

    def looking(self: Any, expected: int | None, *, again: bool) -> None:
        # Found by the first look, or not at all.
        seen.append(self._version == expected)
        whole(self, expected, again=again)

    monkeypatch.setattr(IcebergTable, "require_ours", looking)
    try:
        lake = begin(*T, *U)
        # The table is written in one session after the other.
        for number in range(3, 8):
            run(pg, f"INSERT INTO t VALUES ({number}, 'c')")
            wait_until(is_same(lake, pg, "t"))
            last = lake.ledger.last()
            assert last is not None
            assert last.set_aside == {}
        assert len(seen) > 5
        assert all(seen)
        name = lake.targets["public.t"]
        assert "lake" not in name
        for found in (name, f"lake.{name}"):
            IcebergTable.write_together(spark, found, "")
    finally:
        spark.conf.unset("spark.sql.defaultCatalog")


def test_names_that_spark_takes_for_secrets_are_names(pg: Session, begin: Begin) -> None:
    lake = begin("CREATE TABLE tokens (id int PRIMARY KEY, url text)", "INSERT INTO tokens VALUES (1, 'a')")
    assert isinstance(lake, CatalogLake)
    run(pg, "INSERT INTO tokens VALUES (2, 'b')")
    wait_until(is_same(lake, pg, "tokens"))
    run(pg, "ALTER TABLE tokens ADD password text", "INSERT INTO tokens VALUES (3, 'c', 'd')")
    wait_until(is_same(lake, pg, "tokens"))
    other = SparkLedger(lake._spark, f"{lake._namespace}.other", lake._lake._kind.provider, {}, lake._lake._kind.create)
    other.create({TEMPLATE: "lake.secrets.{table}"})
    assert other.said[TEMPLATE] == "lake.secrets.{table}"
    assert lake.ledger.queries() == {"q"}
    assert not other.queries()


def test_a_table_that_does_not_say_its_columns_any_more_is_set_aside(pg: Session, begin: Begin) -> None:
    lake = begin(*T, *U)
    assert isinstance(lake, CatalogLake)
    lake._spark.sql(f"ALTER TABLE {lake.targets['public.t']} SET TBLPROPERTIES ('pgcdc.columns' = '?')").collect()
    run(pg, "BEGIN; INSERT INTO t VALUES (3, 'c'); INSERT INTO u VALUES (2, 'y'); COMMIT")
    wait_until(is_same(lake, pg, "u"))
    last = lake.ledger.last()
    assert last is not None
    assert "does not say any more which columns" in last.set_aside["public.t"]


SETTINGS = {
    "spark.sql.parquet.datetimeRebaseModeInRead": "LEGACY",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "LEGACY",
    "spark.sql.parquet.inferTimestampNTZ.enabled": "false",
    "spark.sql.parquet.binaryAsString": "true",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MILLIS",
    "spark.sql.timestampType": "TIMESTAMP_NTZ",
    "spark.sql.session.timeZone": "America/New_York",
    "spark.sql.sources.partitionOverwriteMode": "dynamic",
    "spark.sql.parser.quotedRegexColumnNames": "true",
}


@contextmanager
def users_settings(spark: SparkSession) -> Iterator[None]:
    before = {key: spark.conf.get(key, None) for key in SETTINGS}
    for key, value in SETTINGS.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key, was in before.items():
            if was is None:
                spark.conf.unset(key)
            else:
                spark.conf.set(key, was)


def test_settings_of_the_users_session_change_no_value(
    pg: Session, begin: Begin, spark_sessions: SparkSessions, lake_conf: dict[str, str]
) -> None:
    spark = spark_sessions.get(**lake_conf)
    row = r"'0001-01-01', '0001-01-01', '2026-07-01 12:00:00.123456+00', '2026-07-01 12:00:00.123456', '\x00ff'"
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, d date, old timestamp, z timestamptz, n timestamp, b bytea)",
        'CREATE TABLE x (id int PRIMARY KEY, "a+b" text, aab text)', "INSERT INTO x VALUES (1, 'p', 'q')",
        f"INSERT INTO t VALUES (1, {row})", *U)  # fmt: skip
    with users_settings(spark):
        lake = begin(mode={"public.x": "append"})

    def is_there() -> bool:
        with users_settings(spark):
            lake.step()
        last = lake.ledger.last()
        return last is not None and len(last.tables) == 3 and lake.rows("u") == rows_of(pg, "u")

    wait_until(is_there)
    run(pg, f"BEGIN; INSERT INTO t VALUES (2, {row}); INSERT INTO x VALUES (2, 'r', 's');"
            " INSERT INTO u VALUES (2, 'y'); COMMIT")  # fmt: skip
    wait_until(is_there)
    # The one name is a pattern that means the other.
    assert sorted((r["id"], r["a+b"], r["aab"]) for r in lake.found("x")) == [(1, "p", "q"), (2, "r", "s")]
    at = datetime(2026, 7, 1, 12, 0, 0, 123456)
    values = date(1, 1, 1), datetime.min, at.replace(tzinfo=timezone.utc), at, b"\x00\xff"
    assert sorted(tuple(row.values()) for row in lake.found("t")) == [(1, *values), (2, *values)]
    run(pg, "BEGIN; TRUNCATE t; INSERT INTO u VALUES (3, 'z'); COMMIT")
    wait_until(is_there)
    assert lake.found("t") == []
    last = lake.ledger.last()
    assert last is not None
    assert last.set_aside == {}


@pytest.mark.parametrize("key", ["spark.databricks.delta.write.txnAppId", "spark.wap.id"])
def test_a_session_in_which_the_ledgers_rows_would_be_lost_is_refused(key: str, pg: Session, begin: Begin) -> None:
    lake = begin(*T)
    assert isinstance(lake, CatalogLake)
    run(pg, "INSERT INTO t VALUES (3, 'c')")
    lake._spark.conf.set(key, "nightly")
    try:
        with pytest.raises(OptionError, match=f"the session sets {key}"):
            wait_until(lake.step)
    finally:
        lake._spark.conf.unset(key)
    wait_until(is_same(lake, pg, "t"))


def test_a_table_whose_old_snapshots_have_expired_goes_on(format: str, pg: Session, begin: Begin) -> None:
    if format != "iceberg":
        pytest.skip("files are rewritten in a commit of the table's, and its history is not cut by hand")
    lake = begin(*T)
    assert isinstance(lake, CatalogLake)
    run(pg, "INSERT INTO t VALUES (3, 'c')")
    wait_until(is_same(lake, pg, "t"))
    lake.rewrite_files("t")
    latest = "older_than => TIMESTAMP '2999-01-01 00:00:00', retain_last => 1"
    lake._spark.sql(f"CALL lake.system.expire_snapshots(table => '{lake.targets['public.t']}', {latest})").collect()
    run(pg, "INSERT INTO t VALUES (4, 'd')")
    wait_until(is_same(lake, pg, "t"))
    last = lake.ledger.last()
    assert last is not None
    assert last.set_aside == {}


# Iceberg makes no snapshot of either.
DROPPED = ("DROP COLUMN v", "ADD COLUMN v string")
SWAPPED = ("RENAME COLUMN v TO x", "RENAME COLUMN w TO v", "RENAME COLUMN x TO w")
BeginIceberg = Callable[[type[IcebergTable]], CatalogLake]


@pytest.fixture
def begin_iceberg(format: str, begin: Begin, monkeypatch: pytest.MonkeyPatch) -> BeginIceberg:
    """A lake of Iceberg whose tables are of a kind: with Spark Connect, they are written by SQL alone."""
    if format != "iceberg":
        pytest.skip("altering columns is a commit of Delta's")

    def begin_iceberg(kind: type[IcebergTable]) -> CatalogLake:
        monkeypatch.setitem(CatalogLake._KINDS, "iceberg", (kind, "lake."))
        lake = begin("CREATE TABLE t (id int PRIMARY KEY, w text, v text)", "INSERT INTO t VALUES (1, 'w', 'v')")
        assert isinstance(lake, CatalogLake)
        return lake

    return begin_iceberg


IDS_AS_TEXTS = "SELECT CAST(id AS string) AS id, v"


def alter(lake: CatalogLake, *clauses: str) -> None:
    for clause in clauses:
        lake._spark.sql(f"ALTER TABLE {lake.targets['public.t']} {clause}")


@pytest.mark.parametrize(
    ("kind", "clauses", "behind"),
    [
        (IcebergTableOfJvm, DROPPED, "a row"),
        (IcebergTableOfJvm, SWAPPED, "ALTER TABLE t ADD n int"),
        (IcebergTableOfJvm, DROPPED, "files are rewritten"),
        (IcebergTable, DROPPED, "a row"),
        (IcebergTable, SWAPPED, "ALTER TABLE t ADD n int"),
    ],
    ids=["dropped", "swapped", "rewritten", "dropped-sql", "swapped-sql"],
)
def test_a_column_that_somebody_else_put_in_the_place_of_another_is_noticed(
    kind: type[IcebergTable], clauses: Sequence[str], behind: str, pg: Session, begin_iceberg: BeginIceberg
) -> None:
    lake = begin_iceberg(kind)
    alter(lake, *clauses)
    if behind == "files are rewritten":
        lake.rewrite_files("t")
    elif behind.startswith("ALTER"):
        run(pg, behind)
    run(pg, "INSERT INTO t VALUES (3, 'x', 'y')")
    wait_until(lambda: "changed by somebody else" in set_aside(lake).get("public.t", ""))
    if pg.server_version < 140000:
        return
    run(pg, """SELECT pg_logical_emit_message(true, 'pgcdc', '{"snapshot": ["public.t"]}')""")
    wait_until(is_same(lake, pg, "t"))
    run(pg, "INSERT INTO t VALUES (4, 'x', 'y')")
    wait_until(is_same(lake, pg, "t"))
    assert set_aside(lake) == {}


@pytest.mark.usefixtures("_short_pauses")
@pytest.mark.parametrize(
    ("clause", "evolution"),
    [
        ("DROP COLUMN v", "evolve"),
        ("DROP COLUMN v", "additive"),
        ("RENAME COLUMN v TO x", "evolve"),
        ("ADD COLUMN x int", "evolve"),
        # The property that says which columns it has stays.
        pytest.param(IDS_AS_TEXTS, "evolve", id="another type-evolve"),
        pytest.param(IDS_AS_TEXTS, "additive", id="another type-additive"),
    ],
)
def test_a_table_whose_columns_somebody_else_has_altered_is_made_anew_for_rows_that_come_again(
    format: str, clause: str, evolution: str, pg: Session, begin: Begin
) -> None:
    if format == "iceberg" and clause.startswith("ADD"):
        pytest.skip("it is no commit, and does not stop any")
    if pg.server_version < 140000:
        pytest.skip("PostgreSQL 14 has messages")
    lake = begin(*T, changes=evolution)
    assert isinstance(lake, CatalogLake)
    if clause != IDS_AS_TEXTS:
        alter(lake, clause)
    elif format == "iceberg":
        name = lake.targets["public.t"]
        lake._spark.sql(f"CREATE OR REPLACE TABLE {name} USING iceberg AS {IDS_AS_TEXTS} FROM {name}")
    else:
        rows = lake._spark.sql(f"{IDS_AS_TEXTS} FROM {lake.targets['public.t']}").localCheckpoint()
        writer = rows.write.format("delta").mode("overwrite").option("overwriteSchema", "true")
        writer.saveAsTable(lake.targets["public.t"])
    run(pg, "INSERT INTO t VALUES (3, 'c')")
    wait_until(lambda: "changed by somebody else" in set_aside(lake).get("public.t", ""))
    run(pg, """SELECT pg_logical_emit_message(true, 'pgcdc', '{"snapshot": ["public.t"]}')""")
    wait_until(is_same(lake, pg, "t"))
    run(pg, "INSERT INTO t VALUES (4, 'd')")
    wait_until(is_same(lake, pg, "t"))
    assert set_aside(lake) == {}
    assert dict(lake._spark.table(lake.targets["public.t"]).dtypes)["id"] == "int"


def test_what_somebody_else_says_of_a_delta_table_changes_no_row(format: str, pg: Session, begin: Begin) -> None:
    if format != "delta":
        pytest.skip("Iceberg's tables have no commit for it")
    lake = begin(*T)
    assert isinstance(lake, CatalogLake)
    alter(lake, "ALTER COLUMN v COMMENT 'text'", "SET TBLPROPERTIES (seen = '1')", "UNSET TBLPROPERTIES (seen)")
    run(pg, "INSERT INTO t VALUES (3, 'c')")
    wait_until(is_same(lake, pg, "t"))
    assert set_aside(lake) == {}
    alter(lake, "ALTER COLUMN id TYPE bigint")
    run(pg, "INSERT INTO t VALUES (4, 'd')")
    wait_until(lambda: lake.step() is not None and "CHANGE COLUMN" in set_aside(lake).get("public.t", ""))


@pytest.mark.parametrize("kind", [IcebergTableOfJvm, IcebergTable])
def test_what_somebody_else_says_of_columns_or_adds_behind_them_changes_no_row(
    kind: type[IcebergTable], pg: Session, begin_iceberg: BeginIceberg
) -> None:
    lake = begin_iceberg(kind)
    for number, clause in enumerate(("ALTER COLUMN v COMMENT 'text'", "ADD COLUMN n int"), 2):
        alter(lake, clause, f"SET TBLPROPERTIES (seen = '{number}')")
        run(pg, f"INSERT INTO t VALUES ({number}, 'x', 'y')")
        wait_until(lambda: set_aside(lake) or lake.rows("t", names=["id", "v", "w"]) == rows_of(pg, "t"))
        assert set_aside(lake) == {}


def test_a_catalog_that_is_away_at_the_start_is_a_short_error(
    format: str, db: str, tmp_path: Path, spark_sessions: SparkSessions, lake_conf: dict[str, str]
) -> None:
    if format != "iceberg":
        pytest.skip("Delta has no catalog that is a server")
    # Nobody listens there.
    away = {"": "org.apache.iceberg.spark.SparkCatalog", ".type": "rest", ".uri": "http://127.0.0.1:1"}
    # Of a session of its own: others would have the catalog as well.
    spark = spark_sessions.get(**lake_conf).newSession()
    for key, value in away.items():
        spark.conf.set(f"spark.sql.catalog.away{key}", value)
    with pytest.raises(TransientError, match=r"cannot be read: .*RESTException.*, caused by .*refused") as found:
        mirror(
            spark,
            url=db,
            tables="public.*",
            target="away.shop.{table}",
            slot="s",
            checkpoint=f"{tmp_path}/checkpoint",
            format="iceberg",
        )
    assert "\tat " not in str(found.value)
