"""A question about the first result: a new JVM, and ``load().count()`` of one table in it.

    python -m pg_cdc_source.bench.first_result READER TABLE|FILE [BATCHES]     < the server's URL

This module is also the process that is measured: its Spark starts anew each time.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from psycopg2.extensions import parse_dsn

from pg_cdc_source import register
from pg_cdc_source.bench import datasets, peers, to_arrow
from pg_cdc_source.bench.lab import CORES, Lab
from pg_cdc_source.bench.meter import CpuOf, adopt_orphans
from pg_cdc_source.bench.question import Contender, Question, Sample, Target
from pg_cdc_source.bench.ready_batches import ReadySource, write_batch
from pg_cdc_source.bench.small_tables import READY
from pg_cdc_source.bench.snapshot import JDBC, OURS
from pg_cdc_source.demo.jdbc import JDBC_DRIVER, jdbc_options
from pg_cdc_source.demo.local_spark import end_jvm, start_session, stop_session


def first_result(lab: Lab) -> Question:
    table, rows = lab.table(datasets.WIDE, 0.25)
    batch = next(to_arrow.ours(lab.url, table))
    ready = str(lab.home / "first.arrow")
    write_batch(batch, Path(ready))

    def run(*arguments: str) -> Sample:
        return lab.in_own_process("first_result", *arguments)

    return Question(
        "first",
        f"From the start of a JVM to load().count() of {rows:,} rows (wide)",
        [
            Contender(OURS, partial(run, OURS, table)),
            Contender(READY, partial(run, ReadySource.name(), ready, str(max(1, rows // batch.num_rows)))),
            peers.missing_jdbc() or Contender(JDBC, partial(run, "jdbc", table)),
        ],
        ("wall_s", "client_cpu_s", "server_cpu_s"),
        [Target("wall_s", OURS, "at most", 1.1, to=JDBC)],
        notes="Default options: JDBC reads in one query. Each run is a new process. Ready rows are those of a Python"
        " source that has as many already: what Spark takes to start its Python.",
    )


def measured(url: str, reader: str, what: str, batches: str = "") -> dict[str, float]:
    """Start Spark, count, and end it, which is not measured. ``what`` is a table, or the file of ready rows."""
    import psutil

    adopt_orphans()
    me = psutil.Process()
    with tempfile.TemporaryDirectory() as home:
        start = time.perf_counter()
        conf = {"spark.log.level": "ERROR"}
        if JDBC_DRIVER.exists():
            conf["spark.driver.extraClassPath"] = str(JDBC_DRIVER)
        spark = start_session(f"local[{CORES}]", conf, Path(home), log=Path(home, "spark.log"))
        if reader == "jdbc":
            options = {**jdbc_options(parse_dsn(url)), "dbtable": what}
        elif reader == ReadySource.name():
            spark.dataSource.register(ReadySource)
            options = {"path": what, "batches": batches, "partitions": str(CORES)}
        else:
            register(spark)
            options = {"url": url, "dbtable": what}
        rows = spark.read.format(reader).options(**options).load().count()
        wall_s = time.perf_counter() - start
        cpu_s = CpuOf(lambda: {me, *me.children(recursive=True)}).read()
        stop_session(spark)
        end_jvm()
    return {"rows": rows, "wall_s": wall_s, "client_cpu_s": cpu_s}


if __name__ == "__main__":
    print(json.dumps(measured(sys.stdin.read(), *sys.argv[1:])))
