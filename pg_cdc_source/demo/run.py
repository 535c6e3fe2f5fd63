"""Snapshot a shop that keeps writing, then follow it as a stream, and prove both copies right.

Two things are proved of each copy. Every table equals what PostgreSQL itself shows, under the same snapshot or after
the last change: row count and a checksum over every value, computed on both sides. And the copy agrees with itself:
every transaction of the shop keeps balances, order totals, stock and events in step, so a copy that held half of one
would show it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from rich import box
from rich.console import Console
from rich.table import Table

from pg_cdc_source import open_snapshot, register
from pg_cdc_source.demo.embedded import embedded_postgres
from pg_cdc_source.demo.local_spark import end_jvm, start_session, stop_session
from pg_cdc_source.demo.shop import (
    TABLES,
    Opened,
    Source,
    broken_rules,
    contents_of_copy,
    open_shop,
    orders_coming_in,
    read_sources,
)
from pg_cdc_source.demo.stream import StreamResult, follow
from pg_cdc_source.errors import DefiniteError
from pg_cdc_source.offsets import Lsn

# Small, so that tables of some MB are cut as the default of 64 MB cuts large ones.
_PARTITION_BYTES = "2MB"


@dataclass(frozen=True, slots=True)
class Copied:
    """What is known when the copy is done."""

    lsn: Lsn | None
    seconds: float
    orders_placed_meanwhile: int
    sources: Mapping[str, Source]


@dataclass(frozen=True, slots=True)
class TableResult:
    """One table of the copy: ``ranges`` counts the tasks that brought rows, ``lsns`` the snapshots its rows name."""

    table: str
    rows: int
    source_bytes: int
    ranges: int
    lsns: tuple[str, ...]
    equals_source: bool


@dataclass(frozen=True, slots=True)
class SnapshotResult:
    """What the snapshot has shown. ``broken_rules`` are the rules of the shop that the copy breaks."""

    lsn: str
    seconds: float
    orders_placed_meanwhile: int
    tables: tuple[TableResult, ...]
    broken_rules: tuple[str, ...]

    @property
    def consistent(self) -> bool:
        return not self.broken_rules and all(t.equals_source and t.lsns == (self.lsn,) for t in self.tables)


@dataclass(frozen=True, slots=True)
class Result:
    """What the demo found."""

    snapshot: SnapshotResult
    stream: StreamResult

    @property
    def consistent(self) -> bool:
        return self.snapshot.consistent and self.stream.consistent


def run(orders: int, seconds: float) -> Result:
    """Run the demo with a shop of ``orders`` orders, followed for ``seconds``; progress goes to stderr."""
    console = Console(stderr=True, highlight=False)
    with contextlib.ExitStack() as stack:
        home = Path(tempfile.mkdtemp(prefix="pg_cdc_source-demo-"))
        stack.callback(shutil.rmtree, home)
        with console.status("Starting PostgreSQL"):
            url = stack.enter_context(embedded_postgres())
        with console.status("Filling a shop"):
            opened = open_shop(url, orders)
        with console.status("Starting Spark"):
            spark = stack.enter_context(_spark(home))
        with console.status("Copying the shop to Parquet while it takes orders"):
            copied = _copy(spark, url, home / "copy")
        with console.status("Comparing the copy with the source"):
            snapshot = _compare(spark, home / "copy", copied, opened)
        return Result(snapshot, follow(spark, url, home, opened, seconds, console))


def print_json(result: Result) -> None:
    print(json.dumps({**asdict(result), "consistent": result.consistent}))


def print_table(result: Result) -> None:
    console = Console(highlight=False)
    _print_snapshot(console, result.snapshot)
    _print_stream(console, result.stream)


def _print_snapshot(console: Console, result: SnapshotResult) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("snapshot")
    for title in ("rows", "MB", "ranges"):
        table.add_column(title, justify="right")
    table.add_column("LSN")
    table.add_column("copy and source")
    for t in result.tables:
        table.add_row(
            f"shop.{t.table}",
            f"{t.rows:,}",
            f"{t.source_bytes / 1e6:,.1f}",
            str(t.ranges),
            ", ".join(t.lsns),
            _verdict(t.equals_source),
        )
    console.print(table)
    console.print(
        f"One Spark action copied {sum(t.rows for t in result.tables):,} rows in {result.seconds:.1f} s;\n"
        f"meanwhile the shop took {result.orders_placed_meanwhile:,} orders."
    )
    _print_broken_rules(console, result.broken_rules)
    if result.consistent:
        console.print(f"[green]Every row is as it was at {result.lsn}, and the shop's books balance.[/]")


def _print_stream(console: Console, result: StreamResult) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("stream")
    for title in ("rows", "changes"):
        table.add_column(title, justify="right")
    table.add_column("Delta table and source")
    for t in result.tables:
        table.add_row(f"shop.{t.table}", f"{t.rows:,}", f"{t.changes:,}", _verdict(t.equals_source))
    console.print(table)
    console.print(
        f"A stream took {result.snapshot_rows:,} rows of its own snapshot in {result.snapshot_seconds:.1f} s,\n"
        f"then {result.changes:,} changes ({result.changes_per_second:,.0f} a second) in {result.batches} batches;\n"
        f"meanwhile the shop took {result.orders_placed_meanwhile:,} orders. Changes had waited for the snapshot,\n"
        f"so the Delta tables were {result.median_seconds_behind:.1f} s behind"
        f" (median; at most {result.most_seconds_behind:.1f} s),\n"
        f"and complete {result.drain_seconds:.1f} s after the last order."
    )
    _print_broken_rules(console, result.broken_rules)
    if result.consistent:
        console.print("[green]Every row is as it is in PostgreSQL, and the shop's books balance.[/]")


def _verdict(equal: bool) -> str:
    return "[green]equal[/]" if equal else "[bold red]differ[/]"


def _print_broken_rules(console: Console, rules: tuple[str, ...]) -> None:
    for rule in rules:
        console.print(f"[bold red]The copy breaks a rule of the shop: {rule}.[/]")


@contextmanager
def _spark(home: Path) -> Iterator[SparkSession]:
    """Run Spark in ``home``. Its log is a file there, whose end goes into the error when Spark fails."""
    log = home / "spark.log"
    # One open file per table and task; without it Spark sorts each task's rows by the table's name first.
    conf = {"spark.sql.maxConcurrentOutputFileWriters": str(len(TABLES))}
    try:
        spark = start_session("local[*]", conf, home, log=log)
        register(spark)
        yield spark
        # Not after an error or Ctrl-C: a call into a JVM that was interrupted may wait for ever.
        stop_session(spark)
    except PySparkException as error:
        tail = log.read_text(errors="replace")[-3000:].strip()
        raise DefiniteError(f"Spark failed: {error}\nThe end of its log:\n{tail}") from error
    finally:
        end_jvm()


def _copy(spark: SparkSession, url: str, target: Path) -> Copied:
    with orders_coming_in(url) as orders, open_snapshot(url, tables=[f"shop.{t}" for t in TABLES]) as snapshot:

        def load(table: str) -> DataFrame:
            reader = spark.read.format("pgsnapshot").options(**snapshot.options)
            rows = reader.options(dbtable=f"shop.{table}", lsnColumn="_lsn", partitionBytes=_PARTITION_BYTES).load()
            # A struct of the table's name keeps each table's columns and types apart in the union.
            return rows.select(f.lit(table).alias("_table"), f.struct("*").alias(table))

        union = functools.reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), map(load, TABLES))
        already_placed, start = orders.placed, time.monotonic()
        union.write.partitionBy("_table").parquet(str(target))
        seconds, meanwhile = time.monotonic() - start, orders.placed - already_placed
        return Copied(snapshot.lsn, seconds, meanwhile, read_sources(url, snapshot.options["snapshot"]))


def _compare(spark: SparkSession, target: Path, copied: Copied, opened: Opened) -> SnapshotResult:
    copy = spark.read.parquet(str(target))
    copies = {table: copy.where(f.col("_table") == table).select(f"{table}.*") for table in TABLES}
    tables = []
    for table, source in copied.sources.items():
        contents = contents_of_copy(copies[table], source)
        found = copies[table].select("_lsn").distinct().collect()
        lsns = tuple(sorted(str(Lsn(row["_lsn"])) for row in found))
        # A task writes one file for each table that it has rows of.
        ranges = sum(1 for _ in (target / f"_table={table}").glob("*.parquet"))
        tables.append(TableResult(table, contents.rows, source.heap_bytes, ranges, lsns, contents == source.contents))
    broken = broken_rules(spark, copies, opened)
    lsn = "none" if copied.lsn is None else str(copied.lsn)
    return SnapshotResult(lsn, copied.seconds, copied.orders_placed_meanwhile, tuple(tables), broken)
