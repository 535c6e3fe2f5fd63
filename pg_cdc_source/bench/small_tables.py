"""Questions about small tables: what reading one takes beside what Spark takes by itself, and many of them at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from pyspark.sql import SparkSession

from pg_cdc_source.bench import datasets, peers, to_arrow
from pg_cdc_source.bench.lab import FULL, Lab
from pg_cdc_source.bench.question import Contender, Question, Sample, Target
from pg_cdc_source.bench.ready_batches import ReadySource, write_batch
from pg_cdc_source.bench.snapshot import JDBC, MEASURES, OURS
from pg_cdc_source.demo.jdbc import jdbc_options

READY = "ready rows"
_TIMES = 10
_THREADS = 8


def one(lab: Lab) -> Question:
    """A table of five rows, loaded and written, some times one after another."""
    _create(lab, "small", 5)
    ready = _ready(lab, "small")

    def times(format: str, options: dict[str, str]) -> float:
        def work() -> int:
            for _ in range(_TIMES):
                _load_and_write(lab.spark, format, options)
            return _TIMES

        return lab.meter.measure(work).measures["wall_s"] / _TIMES

    def ours() -> Sample:
        each, without = times(OURS, {"url": lab.url, "dbtable": "small"}), times("bench_ready", ready)
        return Sample({"wall_s": each, "over_ready_rows_s": each - without})

    def other(format: str, options: dict[str, str]) -> Sample:
        return Sample({"wall_s": times(format, options)})

    return Question(
        "small",
        "A table of five rows, loaded and written to a no-op sink",
        [
            Contender(OURS, ours),
            Contender(READY, partial(other, "bench_ready", ready)),
            peers.missing_jdbc() or Contender(JDBC, partial(other, "jdbc", _jdbc(lab, "small"))),
        ],
        ("wall_s", "over_ready_rows_s"),
        [Target("over_ready_rows_s", OURS, "at most", 0.04)],
        notes=f"Seconds of one of {_TIMES} in a row. Ready rows are those of a Python source that has them already.",
    )


def many(lab: Lab) -> Question:
    """A schema's tables, each loaded and written by one of some threads. Their number follows the run's scale."""
    count = max(2, 500 * lab.scale.rows // FULL.rows)
    tables = [f"small_{i}" for i in range(count)]
    for table in tables:
        _create(lab, table, 100)
    ready = _ready(lab, tables[0])

    def read(format: str, options: Callable[[str], dict[str, str]]) -> Sample:
        spark = lab.spark  # is started from the main thread

        def work() -> int:
            with ThreadPoolExecutor(_THREADS) as threads:
                for read in [threads.submit(_load_and_write, spark, format, options(table)) for table in tables]:
                    read.result()
            return count

        return lab.meter.measure(work)

    return Question(
        "small-many",
        f"{count:,} tables of 100 rows, each loaded and written to a no-op sink, in {_THREADS} threads",
        [
            Contender(OURS, partial(read, OURS, lambda table: {"url": lab.url, "dbtable": table})),
            Contender(READY, partial(read, "bench_ready", lambda _: ready)),
            peers.missing_jdbc() or Contender(JDBC, partial(read, "jdbc", partial(_jdbc, lab))),
        ],
        MEASURES,
        [Target("wall_s", OURS, "at most", 1.5, to=JDBC)],
        notes="Ready rows are those of a Python source that has them already: what Spark's Python takes by itself.",
        most_rounds=3,
    )


def _create(lab: Lab, table: str, rows: int) -> None:
    datasets.create(lab.admin, datasets.WIDE, table, rows)


def _ready(lab: Lab, table: str) -> dict[str, str]:
    """Options of the source that has a table's rows already."""
    path = lab.home / f"{table}.arrow"
    write_batch(next(to_arrow.ours(lab.url, table)), path)
    lab.spark.dataSource.register(ReadySource)
    return {"path": str(path), "batches": "1", "partitions": "1"}


def _jdbc(lab: Lab, table: str) -> dict[str, str]:
    return {**jdbc_options(lab.server), "dbtable": table}


def _load_and_write(spark: SparkSession, format: str, options: dict[str, str]) -> None:
    spark.read.format(format).options(**options).load().write.format("noop").mode("overwrite").save()
