"""Copy the shop to Parquet in one Spark action while it takes orders, then compare the copy with the shop."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from pg_cdc_source import open_snapshot
from pg_cdc_source.demo.comparison import Source, broken_rules, contents_of_copy, read_sources
from pg_cdc_source.demo.shop import TABLES, Opened, orders_coming_in
from pg_cdc_source.offsets import Lsn

# Small, so that tables of a few MB have several ranges, as large tables have with the default of 64 MB.
_PARTITION_BYTES = "2MB"


@dataclass(frozen=True, slots=True)
class Copied:
    """What is known when the copy is complete."""

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


def copy_shop(spark: SparkSession, url: str, target: Path) -> Copied:
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


def compare_copy(spark: SparkSession, target: Path, copied: Copied, opened: Opened) -> SnapshotResult:
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
