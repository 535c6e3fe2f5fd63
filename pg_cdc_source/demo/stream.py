"""Follow the shop from a snapshot into Delta tables while it takes orders, then compare the tables with the shop's."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import psycopg2
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Transaction
from psycopg2.extensions import connection as Session
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from pg_cdc_source.demo.shop import (
    TABLES,
    Opened,
    Orders,
    broken_rules,
    contents_of_copy,
    orders_coming_in,
    read_sources,
)
from pg_cdc_source.errors import DefiniteError
from pg_cdc_source.spark.collapse import collapse
from pg_cdc_source.spark.project import project

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

    ``seconds_behind`` are the age of the newest commit in the copy, looked at every second while the shop was open.
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


def _zeros() -> dict[str, int]:
    return dict.fromkeys(TABLES, 0)


@dataclass(slots=True)
class _Progress:
    """How far the copy is. The query's thread writes it, the screen reads it: no key ever comes or goes."""

    snapshot_rows: dict[str, int] = field(default_factory=_zeros)
    changes: dict[str, int] = field(default_factory=_zeros)
    snapshot_done_at: float | None = None
    applied_at: float = 0.0
    applied_lsn: int = 0
    newest_commit: datetime | None = None
    batches: int = 0

    def has_followed(self, seconds: float) -> bool:
        """Whether changes have been applied, and the snapshot for ``seconds``."""
        done_at = self.snapshot_done_at
        return done_at is not None and self.newest_commit is not None and time.monotonic() > done_at + seconds


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    rows: int
    seconds_behind: float | None
    bytes_behind: int


class _DeltaCopy:
    """A Delta table for each table of the shop, brought to the end of each batch."""

    def __init__(self, directory: Path, url: str) -> None:
        self._directory = directory
        self._url = url
        self.progress = _Progress()

    def path(self, table: str) -> str:
        return str(self._directory / table)

    def apply(self, batch: DataFrame, batch_id: int) -> None:
        batch = batch.persist()
        try:
            snapshot = f.col("_change_type") == "snapshot"
            found = batch.groupBy("_table", snapshot.alias("snapshot")).agg(
                f.count("*").alias("rows"), f.max("_commit_lsn").alias("lsn"), f.max("_commit_ts").alias("at")
            )
            facts = found.collect()
            for name in sorted({fact["_table"] for fact in facts}):
                self._apply_to(name.removeprefix("shop."), project(batch, name, url=self._url), batch_id)
        finally:
            batch.unpersist()
        progress, now = self.progress, time.monotonic()
        for fact in facts:
            counter = progress.snapshot_rows if fact["snapshot"] else progress.changes
            counter[fact["_table"].removeprefix("shop.")] += fact["rows"]
            progress.applied_lsn = max(progress.applied_lsn, fact["lsn"])
            if fact["at"] is not None:
                progress.newest_commit = max(progress.newest_commit or fact["at"], fact["at"])
        if progress.snapshot_done_at is None and all(progress.snapshot_rows.values()):
            progress.snapshot_done_at = now
        progress.batches += 1
        progress.applied_at = now

    def _apply_to(self, table: str, rows: DataFrame, batch_id: int) -> None:
        """Merge a table's rows. The commit names the batch, so that a replayed one is known."""
        path = self.path(table)
        if DeltaTable.is_deltatable(path) and _version(DeltaTable(path)) >= batch_id:
            return
        states = collapse(rows, TABLES[table]).toArrow()
        names = states.column_names[: states.column_names.index("_change_type")]
        target = DeltaTable.create(path, states.select(names).schema, mode="ignore")
        (
            target.merge(
                # Built anew: deltalake cannot read empty lists as Spark 4.0 writes them.
                states.filter(pc.is_valid(states["_change_type"])),
                " AND ".join(f"t.{key} = s.{key}" for key in TABLES[table]),
                source_alias="s",
                target_alias="t",
                commit_properties=CommitProperties(app_transactions=[Transaction(_SLOT, batch_id)]),
            )
            .when_matched_delete("s._change_type = 'delete'")
            .when_matched_update({name: _KEPT.format(name) for name in names})
            .when_not_matched_insert({name: f"s.{name}" for name in names}, "s._change_type <> 'delete'")
            .execute()
        )


_KEPT = "CASE WHEN array_contains(s._unchanged, '{0}') THEN t.{0} ELSE s.{0} END"


def _version(table: DeltaTable) -> int:
    version = table.transaction_version(_SLOT)
    return -1 if version is None else version


def follow(spark: SparkSession, url: str, home: Path, opened: Opened, seconds: float, console: Console) -> StreamResult:
    """Stream the shop into Delta tables in ``home`` until it is drained; leaves no slot behind.

    The shop takes orders until ``seconds`` after the snapshot was applied.
    """
    copy = _DeltaCopy(home / "delta", url)
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
                    raise DefiniteError(f"the stream had not come to the last order within {_DRAIN_SECONDS:.0f} s")
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


def _start(spark: SparkSession, url: str, checkpoint: Path, copy: _DeltaCopy) -> StreamingQuery:
    options = {"url": url, "tables": "shop.*", "slot": _SLOT}
    changes = spark.readStream.format("pgcdc").options(**options).load()
    return changes.writeStream.foreachBatch(copy.apply).option("checkpointLocation", str(checkpoint)).start()


def _look(session: Session, query: StreamingQuery, progress: _Progress) -> _Sample:
    """Wait a moment, then see how far the copy is behind the server. Raises what the query ended with."""
    if query.awaitTermination(_LOOK_SECONDS):
        raise DefiniteError("the query ended before the shop was closed")
    with session.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp(), (pg_current_wal_insert_lsn() - '0/0')::bigint")
        ((now, lsn),) = cursor.fetchall()
    newest = progress.newest_commit
    behind = None if newest is None else max((now - newest.astimezone(now.tzinfo)).total_seconds(), 0.0)
    rows = sum(progress.snapshot_rows.values()) + sum(progress.changes.values())
    return _Sample(time.monotonic(), rows, behind, max(lsn - max(progress.applied_lsn, 0), 0))


def _drop_slot(session: Session) -> None:
    """Drop slot and publication: a query leaves them for its next run, and this one has none."""
    deadline = time.monotonic() + _DROP_SECONDS
    with session.cursor() as cursor:
        while True:
            try:
                cursor.execute("SELECT pg_drop_replication_slot(%s)", (_SLOT,))
                break
            except psycopg2.errors.ObjectInUse:
                # The server has not noticed yet that the query has left.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        cursor.execute(f"DROP PUBLICATION {_SLOT}")


def _compare(
    spark: SparkSession, url: str, copy: _DeltaCopy, opened: Opened
) -> tuple[tuple[FollowedTable, ...], tuple[str, ...]]:
    # Spark reads the files that the table's newest version consists of: Delta's own reader is not there.
    copies = {table: spark.read.parquet(*DeltaTable(copy.path(table)).file_uris()) for table in TABLES}
    tables = []
    for table, source in read_sources(url).items():
        contents = contents_of_copy(copies[table], source)
        changes = copy.progress.changes[table]
        tables.append(FollowedTable(table, contents.rows, changes, contents == source.contents))
    return tuple(tables), broken_rules(spark, copies, opened)


# --- the screen ------------------------------------------------------------------------------------------------------


@contextmanager
def _screen(copy: _DeltaCopy, console: Console) -> Iterator[Callable[[Sequence[_Sample], Orders], None]]:
    """Show how the copy grows, on a terminal; yields what renews the picture."""
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show(samples: Sequence[_Sample], orders: Orders) -> None:
            if console.is_terminal:
                live.update(_picture(copy.progress, samples, orders), refresh=True)

        yield show


def _picture(progress: _Progress, samples: Sequence[_Sample], orders: Orders) -> Table:
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
