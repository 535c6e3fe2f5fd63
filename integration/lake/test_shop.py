"""A whole shop under load and DDL, while drivers, executors and the server are killed: every point is PostgreSQL's.

At points of the ledger the lake has what a server has that replays the WAL up to that LSN. ``make shop FORMAT=iceberg``
runs it: SHOP_FORMAT, SHOP_MODE, SHOP_POINTS and SHOP_SEED say what. Where tables have a past, the last ones
say what every point was, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import lake_jars
import pyarrow as pa
import pytest
from databases import connect
from deltalake import DeltaTable
from driving import drop_slots, run
from losses import RestartableServer
from mirroring import arguments
from past import past_of
from pyspark.sql import DataFrame, SparkSession
from servers import second_server
from sessions import SparkSessions
from shop_drivers import HOWS, Drivers
from shop_graves import Graves
from shop_judge import Judge, Seen, seen_by
from shop_load import Load
from shop_modes import Merged, mode_of
from shop_tables import FEW, TABLES

from pg_cdc_source import mirror_at
from pg_cdc_source.lake.ledger import LedgerRow
from pg_cdc_source.lake.standing import caught_up_at
from pg_cdc_source.mirrors.query import Format, ledger_at

FORMATS = os.environ.get("SHOP_FORMAT", "deltalake").split()
POINTS = int(os.environ.get("SHOP_POINTS", "6"))
SEED = int(os.environ.get("SHOP_SEED", "1"))
MODE = os.environ.get("SHOP_MODE", "merge")
IS_WHOLE = POINTS >= 20
POINTS_OF_A_JVM = 15

SERVER = {"wal_keep_size": "8GB", "checkpoint_timeout": "30s"}
# Why a table may stand aside for a while; the operator has its rows come again where this does not come by itself.
REASONS = (
    "was rewritten, and",
    "its first rows were read again after a crash",
    # Such a row was deleted before they were read again.
    "lacks a row that was changed, and PostgreSQL did not send all of its values",
    "got another key under REPLICA IDENTITY FULL",
    "public.pairs has no key, or got another one under FULL",
    "public.empty has no key, or got another one under FULL",
    "was called",
    "rows changed their keys while the table or its key changed",
    "the type of column",
    "was changed right behind the rows that came anew",
    "was dropped right behind the rows that came anew",
    "it was dropped, or left the publication, before its first rows were read",
    # Of a partition all of whose columns were altered, and that was rewritten, nobody knows that it was created as one.
    "was attached to public.readings, and had rows",
)


@pytest.fixture
def server() -> Iterator[RestartableServer]:
    with second_server(SERVER) as url, contextlib.closing(RestartableServer(url)) as server:
        yield server


@pytest.mark.skipif("SHOP_FORMAT" not in os.environ, reason="make shop runs it: what its load does is random")
@pytest.mark.parametrize("format", FORMATS)
def test_every_point_of_the_ledger_is_one_of_postgresql(
    format: Format, server: RestartableServer, tmp_path: Path, spark_sessions: SparkSessions
) -> None:
    if format != "deltalake" and (why := lake_jars.lacking(format)):
        pytest.skip(why)
    with connect(server.url) as pg:
        if pg.server_version < 140000:
            pytest.skip("PostgreSQL 14 has messages, by which an operator asks for rows")
    tables = TABLES if IS_WHOLE else FEW
    mode = mode_of(MODE, format)
    master = "local-cluster[2,1,1024]" if IS_WHOLE else "local[2]"
    drivers = Drivers(tmp_path, server, format, master, SEED, mode.given)
    load = Load(server.url, SEED, tables, MODE, lambda: drivers.lsn)
    load.create()
    rng = random.Random(f"{SEED} how")
    with past_of(server) as past, contextlib.closing(drivers):
        graves = Graves(server.url, tables) if MODE == "soft" else None
        operator = Operator(server.url, drivers, mode.aside)
        with load.at_work() as failures:
            drivers.live_and_die("driver")
            # A table that is truncated or altered before it was read ends the query.
            drivers.live_until(lambda: failures or len(drivers.tables) > len(tables), 900)
            load.may_alter.set()
            enough = len(drivers.batches) + POINTS
            for how in _hows(rng):
                if failures or len(drivers.batches) > enough:
                    break
                drivers.live_and_die(how)
                operator.act()
            drivers.live_until(lambda: failures or len(drivers.batches) > enough, 900)
        print(f"load {load.done}")
        load.end()
        end = operator.until_all_are_there()
        drivers.close()
        # So that the WAL has something behind the last point.
        if graves is not None:
            graves.read()
        with connect(server.url) as pg:
            run(pg, "SELECT pg_switch_wal()")
            drop_slots(pg)
        conf = {} if format == "deltalake" else lake_jars.conf(tmp_path / "warehouse")

        def fresh() -> SparkSession:
            """A session in a JVM of its own: Delta remembers much of each version of each table that is read."""
            spark_sessions.end_jvm()
            return spark_sessions.get(**conf, **{"spark.driver.memory": "6g"})

        ledger = arguments(tmp_path, server.url, format)["target"].format(table="_pgcdc")
        shop = Shop(fresh(), format, ledger, load.alterations.gone, mode, graves)
        try:
            strange = shop.expect_ledger()
            with connect(server.url) as session:
                last = seen_by(session)
            for number, row in enumerate(shop.points(POINTS, end), start=1):
                if number % POINTS_OF_A_JVM == 0:
                    print(f"at point {number}, batch {row.batch_id}")
                    shop.spark = fresh()
                with past.at(row.lsn) as session:
                    shop.compare(session, row, last)
            shop.compare_last(server.url)
        finally:
            shop.judge.say()
            # A warehouse of its own is of no use to other tests.
            spark_sessions.end_jvm()
    print(f"{format}, {MODE}: {len(shop.rows)} batches, killed {drivers.kills}, ended {len(drivers.ends)}")
    if graves is not None:
        print(f"{graves.known} deleted rows are as they were, {graves.unknown} were deleted as rows came again")
    print("\n---\n".join(Counter(end[-700:] for end in drivers.ends)))
    # The first one of each table: a table that differs once often does so for long.
    first = {text.partition(", ")[2].partition(":")[0]: text for text in reversed(shop.judge.differences)}
    found = [f"{table} stands aside: {why}" for table, why in strange]
    found += [f"{len(shop.judge.differences)} differences; the first ones:", *first.values()] if first else []
    assert not found, "\n".join(found)


def _hows(rng: random.Random) -> list[str]:
    return [*HOWS, *(rng.choice(HOWS) for _ in range(POINTS))] if IS_WHOLE else ["worker", "server"]


def _seen_from(row: LedgerRow, name: str) -> int:
    """From which LSN on the lake sees all of a table that stands aside at a row of the ledger, at the earliest."""
    why = row.set_aside.get(name, "")
    at = caught_up_at(why)
    return row.lsn if at is None else at


class Operator:
    """Does what the ledger says of tables that are set aside."""

    def __init__(self, url: str, drivers: Drivers, aside: Set[str]) -> None:
        """``aside``: tables that stay so."""
        self._url = url
        self._drivers = drivers
        self._aside = aside
        self._asked: dict[str, str] = {}

    def act(self) -> None:
        """Do what the last row says."""
        with connect(self._url) as pg:
            self._ask(pg)

    def until_all_are_there(self) -> int:
        """Wait until the lake has all that was committed; the LSN of that."""
        with connect(self._url) as pg:
            ((lsn,),) = run(pg, "SELECT pg_current_wal_insert_lsn() - '0/0'")
            run(pg, "INSERT INTO marks VALUES (1)")

            def are_there() -> bool:
                said = self._drivers.batches[-1:]
                if not said or said[0]["lsn"] < lsn:
                    return False
                self._ask(pg)
                guests = run(pg, "SELECT 'public.' || relname FROM pg_class WHERE relkind = 'r' AND relname ~ '^guest'")
                lacking = {name for (name,) in guests} - self._drivers.tables
                return set(said[0]["set_aside"]) <= self._aside and not lacking

            self._drivers.live_until(are_there, 600)
        return int(lsn)

    def _ask(self, pg: Any) -> None:
        for row in self._drivers.batches[-1:]:
            aside = row["set_aside"]
            self._asked = {table: why for table, why in self._asked.items() if aside.get(table) == why}
            for table, why in aside.items():
                if table not in self._aside and "pg-cdc resnapshot" in why and table not in self._asked:
                    self._asked[table] = why
                    run(pg, f"""SELECT pg_logical_emit_message(true, 'pgcdc', '{json.dumps({"snapshot": [table]})}')""")


class Shop:
    """The shop in the lake."""

    def __init__(
        self,
        spark: SparkSession,
        format: Format,
        ledger: str,
        gone: set[str],
        mode: Merged,
        graves: Graves | None,
    ) -> None:
        self.judge = Judge(mode)
        self._graves = graves
        self._mode = mode
        self.spark = spark
        self._format = format
        self._ledger = ledger
        self._gone = gone
        self._known: dict[tuple[str, int], pa.Table] = {}
        if format == "deltalake":
            found = DeltaTable(ledger).to_pyarrow_table()
        else:
            found = spark.table(f"delta.`{ledger}`" if format == "delta" else ledger).toArrow()
        self.rows = [LedgerRow.of(row) for row in found.sort_by("batch_id").to_pylist()]

    def expect_ledger(self) -> list[tuple[str, str]]:
        """Each batch is there once. The tables that stand aside where they do not have to, with the reasons."""
        assert len({row.query for row in self.rows}) == 1
        assert [row.batch_id for row in self.rows] == list(range(len(self.rows)))
        assert [row.lsn for row in self.rows] == sorted(row.lsn for row in self.rows)
        reasons = {(table, why) for row in self.rows for table, why in row.set_aside.items()}
        for table, why in sorted(reasons):
            print(f"{table}: {why}")
        return [
            one for one in reasons if one[0] not in self._mode.aside and not any(reason in one[1] for reason in REASONS)
        ]

    def points(self, count: int, end: int) -> list[LedgerRow]:
        """Rows of the ledger, in order: some, and the last one; the newest of each LSN, which mirror_at() knows."""
        whole = [row for row in self.rows if row.is_whole]
        newest = list({row.lsn: row for row in whole}.values())
        assert newest[-1].lsn >= end
        print(f"{len(whole)} rows are whole, of {len(newest)} LSNs")
        step = max(1, len(newest) // count)
        return [*newest[:-1][::step][: count - 1], newest[-1]]

    def compare(self, session: Any, row: LedgerRow, last: Mapping[str, Seen]) -> None:
        assert ledger_at(self.spark, self._ledger, self._format).last(row.lsn) == row
        tables = mirror_at(self.spark, self._ledger, row.lsn, format=self._format)
        # Those that stand aside are not in the lake; new ones may still be to come.
        absent = set(row.set_aside) | {name for name in _names(session) if name not in row.tables}
        reads = {name: self._reading(name, row.tables[name], found) for name, found in tables.items()}
        where = f"batch {row.batch_id} at {row.lsn}"
        self.judge.compare(session, where, row.lsn, reads, self._gone, absent)
        if self._graves is not None:
            self._expect_graves(self._graves, session, where, row, reads)
        if self._mode.has_past:
            # Of what was changed while a table stood aside, its past has nothing.
            finals = {name: read for name, read in self._last_reads().items() if name in tables}
            self.judge.compare_past(session, where, row.lsn, finals, last)

    def _expect_graves(
        self, graves: Graves, session: Any, where: str, row: LedgerRow, reads: Mapping[str, Callable[[], pa.Table]]
    ) -> None:
        for name, seen in seen_by(session).items():
            if name in reads and seen.comment == "said":
                # What came and went while a table stood aside was nowhere to be seen.
                before = (
                    _seen_from(other, name)
                    for other in self.rows[: row.batch_id]
                    if name not in other.tables.keys() - other.set_aside
                )
                found, since = reads[name](), max(before, default=self.rows[0].lsn)
                faults = graves.faults(name, seen, found, self._mode.deleted, row.lsn, since)
                self.judge.differences += [f"{where}, {name}: {fault}" for fault in faults]

    def compare_last(self, url: str) -> None:
        """Where nothing was committed since: the server itself, and every table is there."""
        with connect(url) as session:
            lsn = self.rows[-1].lsn
            self.judge.compare(session, "at the end", lsn, self._last_reads(), self._gone, set(self._mode.aside))

    def _last_reads(self) -> dict[str, Callable[[], pa.Table]]:
        tables = mirror_at(self.spark, self._ledger, format=self._format)
        return {name: self._reading(name, self.rows[-1].tables[name], found) for name, found in tables.items()}

    def _reading(self, name: str, version: int, found: DataFrame) -> Callable[[], pa.Table]:
        def read() -> pa.Table:
            if (name, version) not in self._known:
                self._known[name, version] = found.toArrow()
            return self._known[name, version]

        return read


def _names(session: Any) -> list[str]:
    return [name for (name,) in run(session, "SELECT 'public.' || quote_ident(relname) FROM pg_class")]
