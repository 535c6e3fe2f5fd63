"""Follow the shop from a snapshot into Delta tables while it takes orders, then compare the tables with the shop's."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg2
from deltalake import DeltaTable
from psycopg2.extensions import connection as Session
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from pg_cdc_source.demo.comparison import broken_rules, contents_of_copy, read_sources
from pg_cdc_source.demo.delta_copy import DeltaCopy, Progress
from pg_cdc_source.demo.shop import TABLES, Opened, Orders, orders_coming_in
from pg_cdc_source.errors import DefiniteError
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.slot_creation import drop_slot

_SLOT = "demo"
_LOOK_SECONDS = 1
# The rate on the screen is that of the last few seconds.
_RATE_SECONDS = 5.0
_DROP_SECONDS = 20.0
_DRAIN_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class FollowedTable:
    """One Delta table after the last batch. ``changes`` is how many came after the snapshot."""

    table: str
    rows: int
    changes: int
    equals_source: bool


@dataclass(frozen=True, slots=True)
class StreamResult:
    """What following the shop has shown.

    Seconds behind are the age of the newest commit in the copy, sampled every second while orders came in.
    ``drain_seconds`` passed from the last order until the copy had it.
    """

    orders_placed_meanwhile: int
    snapshot_rows: int
    snapshot_seconds: float
    changes: int
    changes_per_second: float
    batches: int
    median_seconds_behind: float
    most_seconds_behind: float
    drain_seconds: float
    tables: tuple[FollowedTable, ...]
    broken_rules: tuple[str, ...]

    @property
    def consistent(self) -> bool:
        return not self.broken_rules and all(t.equals_source for t in self.tables)


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    rows: int
    seconds_behind: float | None
    bytes_behind: int


def follow(spark: SparkSession, url: str, home: Path, opened: Opened, seconds: float, console: Console) -> StreamResult:
    """Stream the shop into Delta tables in ``home`` until the last order has arrived; leave no slot behind.

    The shop takes orders until ``seconds`` after the snapshot was applied.
    """
    copy = DeltaCopy(home / "delta", url)
    progress = copy.progress
    with contextlib.closing(psycopg2.connect(url)) as session:
        session.autocommit = True
        with _screen(copy, console) as show:
            samples = []
            start = time.monotonic()
            with orders_coming_in(url) as orders:
                query = _start(spark, url, home / "checkpoint", copy)
                while not progress.has_followed(seconds):
                    samples.append(_look(session, query, progress))
                    show(samples, orders)
            closed = time.monotonic()
            while progress.applied_lsn <= orders.last_lsn:
                if time.monotonic() > closed + _DRAIN_SECONDS:
                    raise DefiniteError(f"the stream did not reach the last order within {_DRAIN_SECONDS:.0f} s")
                show([*samples, _look(session, query, progress)], orders)
        query.stop()
        _drop_slot(session)
    assert progress.snapshot_done_at is not None
    behind = [sample.seconds_behind for sample in samples if sample.seconds_behind is not None]
    tables, broken = _compare(spark, url, copy, opened)
    changes = sum(progress.changes.values())
    return StreamResult(
        orders_placed_meanwhile=orders.placed,
        snapshot_rows=sum(progress.snapshot_rows.values()),
        snapshot_seconds=progress.snapshot_done_at - start,
        changes=changes,
        changes_per_second=changes / (progress.applied_at - progress.snapshot_done_at),
        batches=progress.batches,
        median_seconds_behind=statistics.median(behind) if behind else 0.0,
        most_seconds_behind=max(behind, default=0.0),
        drain_seconds=max(progress.applied_at - closed, 0.0),
        tables=tables,
        broken_rules=broken,
    )


def _start(spark: SparkSession, url: str, checkpoint: Path, copy: DeltaCopy) -> StreamingQuery:
    options = {"url": url, "tables": "shop.*", "slot": _SLOT}
    changes = spark.readStream.format("pgcdc").options(**options).load()
    return changes.writeStream.foreachBatch(copy.apply).option("checkpointLocation", str(checkpoint)).start()


def _look(session: Session, query: StreamingQuery, progress: Progress) -> _Sample:
    """Wait a moment, then measure how far the copy is behind the server. Raises the error that ended the query."""
    if query.awaitTermination(_LOOK_SECONDS):
        raise DefiniteError("the query ended while the shop still took orders")
    with session.cursor() as cursor:
        cursor.execute(
            """
            SELECT clock_timestamp(), (pg_current_wal_insert_lsn() - '0/0')::bigint
            """
        )
        ((now, lsn),) = cursor.fetchall()
    newest = progress.newest_commit
    behind = None if newest is None else max((now - newest.astimezone(now.tzinfo)).total_seconds(), 0.0)
    rows = sum(progress.snapshot_rows.values()) + sum(progress.changes.values())
    return _Sample(time.monotonic(), rows, behind, max(lsn - max(progress.applied_lsn, 0), 0))


def _drop_slot(session: Session) -> None:
    """Drop slot and publication, which a query keeps for its next run: there is none."""
    # For a moment the server has not noticed yet that the query is gone.
    Backoff(0.1, longest_seconds=1, within_seconds=_DROP_SECONDS).retrying(lambda: drop_slot(session, _SLOT))
    with session.cursor() as cursor:
        cursor.execute(f"DROP PUBLICATION {_SLOT}")


def _compare(
    spark: SparkSession, url: str, copy: DeltaCopy, opened: Opened
) -> tuple[tuple[FollowedTable, ...], tuple[str, ...]]:
    # Spark reads the files of the table's newest version, since Delta's own reader is not installed.
    copies = {table: spark.read.parquet(*DeltaTable(copy.path(table)).file_uris()) for table in TABLES}
    tables = []
    for table, source in read_sources(url).items():
        contents = contents_of_copy(copies[table], source)
        changes = copy.progress.changes[table]
        tables.append(FollowedTable(table, contents.rows, changes, contents == source.contents))
    return tuple(tables), broken_rules(spark, copies, opened)


# --- the screen ------------------------------------------------------------------------------------------------------


@contextmanager
def _screen(copy: DeltaCopy, console: Console) -> Iterator[Callable[[Sequence[_Sample], Orders], None]]:
    """Show on a terminal how the copy grows; yields the function that redraws it."""
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show(samples: Sequence[_Sample], orders: Orders) -> None:
            if console.is_terminal:
                live.update(_drawn(copy.progress, samples, orders), refresh=True)

        yield show


def _drawn(progress: Progress, samples: Sequence[_Sample], orders: Orders) -> Table:
    now = samples[-1]
    before = next(sample for sample in samples if sample.at >= now.at - _RATE_SECONDS)
    rate = (now.rows - before.rows) / (now.at - before.at) if now.at > before.at else 0.0
    behind = "" if now.seconds_behind is None else f"{now.seconds_behind:.1f} s, {now.bytes_behind / 1e6:.1f} MB behind"
    title = f"Following the shop into Delta tables: {orders.placed:,} orders meanwhile"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", caption_justify="left")
    table.caption = f"{rate:,.0f} rows/s  {behind}"
    table.add_column("table")
    for heading in ("from the snapshot", "changes"):
        table.add_column(heading, justify="right")
    for name in TABLES:
        table.add_row(f"shop.{name}", f"{progress.snapshot_rows[name]:,}", f"{progress.changes[name]:,}")
    return table
