"""Mirror the shop into Delta tables while it takes orders, then compare the lake with the shop."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from queue import Empty, SimpleQueue

# Missing, it is to be missed before anything starts.
import deltalake  # noqa: F401
import psycopg2
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from pg_cdc_source import mirror, mirror_at
from pg_cdc_source.cli.mirror_progress import Progress
from pg_cdc_source.demo.comparison import broken_rules, contents_of_copy, read_sources
from pg_cdc_source.demo.shop import TABLES, Opened, Orders, orders_coming_in
from pg_cdc_source.errors import DefiniteError
from pg_cdc_source.lake.sink import Applied
from pg_cdc_source.offsets import Lsn

_LOOK_SECONDS = 0.5
_DRAIN_SECONDS = 300.0

# Both PostgreSQL and Spark are asked this.
_TAKINGS = """
SELECT sum(items.price * items.quantity)
FROM orders JOIN items ON items.order_id = orders.id
WHERE NOT orders.gift
"""


@dataclass(frozen=True, slots=True)
class MirroredTable:
    """One table of the lake after the last batch. ``changes`` is how many came after its first rows."""

    table: str
    rows: int
    changes: int
    equals_source: bool


@dataclass(frozen=True, slots=True)
class AtTheEnd:
    """The lake at the LSN of the last order, and PostgreSQL. The takings are a sum over two tables."""

    lsn: str
    tables: tuple[MirroredTable, ...]
    takings: str
    takings_in_lake: str


@dataclass(frozen=True, slots=True)
class Meanwhile:
    """The lake at an older LSN, from when orders came in: the rules of the shop that its tables break."""

    lsn: str
    broken_rules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MirrorResult:
    """What the mirror has shown.

    Seconds behind are the age of the newest commit in the lake, sampled while orders came in. ``drain_seconds`` passed
    from the last order until the lake had it.
    """

    orders_placed_meanwhile: int
    first_rows: int
    first_seconds: float
    changes: int
    changes_per_second: float
    batches: int
    median_seconds_behind: float
    most_seconds_behind: float
    drain_seconds: float
    at_the_end: AtTheEnd
    meanwhile: Meanwhile

    @property
    def consistent(self) -> bool:
        end = self.at_the_end
        same = all(t.equals_source for t in end.tables) and end.takings == end.takings_in_lake
        return same and not self.meanwhile.broken_rules


class _Watch:
    """Counts the batches of the mirror, and shows on a terminal how it gets on."""

    def __init__(self, live: Live) -> None:
        self.batches: SimpleQueue[Applied] = SimpleQueue()
        self.progress = Progress(datetime.now(timezone.utc))
        self.changes: Counter[str] = Counter()
        self.first_done_at: float | None = None
        self.changed_lsn, self.changed_at = 0, 0.0
        self.count = 0
        self.seconds_behind: list[float] = []
        self._live = live

    def look(self, query: StreamingQuery, orders: Orders) -> None:
        """Wait a moment, and take what has come. Raises the error that ended the query."""
        if not query.isActive:
            query.awaitTermination(1)
            raise DefiniteError("the mirror ended while the shop still took orders")
        with contextlib.suppress(Empty):
            self._take(self.batches.get(timeout=_LOOK_SECONDS))
            while True:
                self._take(self.batches.get_nowait())
        now = datetime.now(timezone.utc)
        if self.changed_lsn and (behind := self.progress.seconds_behind(now)) is not None:
            self.seconds_behind.append(behind)
        if self._live.console.is_terminal:
            title = Text(f"Mirroring the shop into Delta tables: {orders.placed:,} orders meanwhile")
            self._live.update(Group(title, self.progress.screen(now)), refresh=True)

    def _take(self, batch: Applied) -> None:
        if batch.row.set_aside:
            table, why = min(batch.row.set_aside.items())
            raise DefiniteError(f"the mirror has set {table} aside: {why}")
        self.progress.add(batch)
        self.count += 1
        # Only changes have a time at which they were committed.
        if batch.row.commit_ts is not None and any(batch.rows.values()):
            self.changes.update(batch.rows)
            self.changed_lsn, self.changed_at = batch.row.lsn, time.monotonic()
        if self.first_done_at is None and len(batch.row.tables) == len(TABLES):
            self.first_done_at = time.monotonic()

    def has_followed(self, seconds: float) -> bool:
        """Whether changes were applied, and the first rows at least ``seconds`` ago."""
        done_at = self.first_done_at
        return done_at is not None and self.changed_lsn > 0 and time.monotonic() > done_at + seconds


def mirror_shop(
    spark: SparkSession, url: str, home: Path, lake: Path, opened: Opened, seconds: float, console: Console
) -> MirrorResult:
    """Mirror the shop into ``lake`` until the last order has arrived.

    The shop takes orders until ``seconds`` after all tables had their first rows.
    """
    with Live(console=console, auto_refresh=False, transient=True) as live:
        watch, start, ledger = _Watch(live), time.monotonic(), f"{lake}/_pgcdc"
        with orders_coming_in(url) as orders:
            query = mirror(
                spark,
                url=url,
                tables="shop.*",
                slot="demo",
                target=f"{lake}/{{table}}",
                checkpoint=f"{home}/checkpoint",
                on_batch=watch.batches.put,
            )
            while not watch.has_followed(seconds):
                watch.look(query, orders)
            lsn = watch.changed_lsn
        closed = time.monotonic()
        while watch.changed_lsn <= orders.last_lsn:
            if time.monotonic() > closed + _DRAIN_SECONDS:
                raise DefiniteError(f"the mirror did not reach the last order within {_DRAIN_SECONDS:.0f} s")
            watch.look(query, orders)
    query.stop()
    assert watch.first_done_at is not None
    changes = watch.changes.total()
    return MirrorResult(
        orders_placed_meanwhile=orders.placed,
        first_rows=watch.progress.rows.total() - changes,
        first_seconds=watch.first_done_at - start,
        changes=changes,
        changes_per_second=changes / (watch.changed_at - watch.first_done_at),
        batches=watch.count,
        median_seconds_behind=statistics.median(watch.seconds_behind),
        most_seconds_behind=max(watch.seconds_behind),
        drain_seconds=max(watch.changed_at - closed, 0.0),
        at_the_end=_compare(spark, url, ledger, watch),
        meanwhile=Meanwhile(str(Lsn(lsn)), broken_rules(spark, _tables(spark, ledger, lsn), opened)),
    )


def _tables(spark: SparkSession, ledger: str, lsn: int | None = None) -> dict[str, DataFrame]:
    return {name.removeprefix("shop."): rows for name, rows in mirror_at(spark, ledger, lsn).items()}


def _compare(spark: SparkSession, url: str, ledger: str, watch: _Watch) -> AtTheEnd:
    """Compare the lake with PostgreSQL, where nothing has changed since the last order."""
    copies, tables = _tables(spark, ledger), []
    for table, source in read_sources(url).items():
        contents = contents_of_copy(copies[table], source)
        changes = watch.changes[f"shop.{table}"]
        tables.append(MirroredTable(table, contents.rows, changes, contents == source.contents))
        copies[table].createOrReplaceTempView(table)
    session = psycopg2.connect(url, options="-c search_path=shop")
    with contextlib.closing(session), session.cursor() as cursor:
        cursor.execute(_TAKINGS)
        ((takings,),) = cursor.fetchall()
    ((in_lake,),) = spark.sql(_TAKINGS).collect()
    return AtTheEnd(str(Lsn(watch.changed_lsn)), tuple(tables), str(takings), str(in_lake))
