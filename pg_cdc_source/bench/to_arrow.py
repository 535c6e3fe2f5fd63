"""Read a table into Arrow batches in one process, in one of several ways, and print what that cost.

Each run is a process of its own, ``python -m pg_cdc_source.bench.to_arrow WAY TABLE`` with the server's URL on stdin,
so its CPU and memory are those of the read. Imports are done before the clock starts.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from pg_cdc_source.bench.meter import peak_rss_bytes


def ours(url: str, table: str) -> Iterator[pa.RecordBatch]:
    """The connector's reader as Spark's tasks use it, one partition after the other."""
    from pg_cdc_source import open_snapshot
    from pg_cdc_source.options.snapshot_options import parse_snapshot_options
    from pg_cdc_source.snapshot.reader import read_range
    from pg_cdc_source.snapshot.scan import make_plan
    from pg_cdc_source.snapshot.source import plan_ranges

    def batches() -> Iterator[pa.RecordBatch]:
        with open_snapshot(url, tables=[table]) as snapshot:
            options = parse_snapshot_options({**snapshot.options, "dbtable": table})
            plan = make_plan(options)
            source, ranges = plan_ranges(plan, options)
            for scan_range in ranges:
                yield from read_range(plan, source, scan_range, "bench")

    return batches()


def ours_numpy_alone(url: str, table: str) -> Iterator[pa.RecordBatch]:
    """The same without the accelerator, for the whole process."""
    from pg_cdc_source.values import native

    native.LIBRARY = None
    return ours(url, table)


def adbc(url: str, table: str) -> Iterator[pa.RecordBatch]:
    import adbc_driver_postgresql.dbapi as dbapi

    def batches() -> Iterator[pa.RecordBatch]:
        with dbapi.connect(url) as session, session.cursor() as cursor:
            cursor.execute(f"SELECT * FROM {table}")
            yield from cursor.fetch_record_batch()

    return batches()


def connectorx(url: str, table: str) -> Iterator[pa.RecordBatch]:
    import connectorx as cx

    def batches() -> Iterator[pa.RecordBatch]:
        # Its fastest protocol, and its default batch size.
        yield from cx.read_sql(url, f"SELECT * FROM {table}", protocol="binary", return_type="arrow_stream")

    return batches()


def duckdb(url: str, table: str) -> Iterator[pa.RecordBatch]:
    import duckdb as ddb
    import duckdb_extension_postgres_scanner as extension

    def batches() -> Iterator[pa.RecordBatch]:
        (path,) = Path(extension.__file__).parent.glob("extensions/*/postgres_scanner.duckdb_extension")
        session = ddb.connect()
        session.execute(f"LOAD '{path}'")
        session.execute(f"ATTACH '{url}' AS pg (TYPE postgres, READ_ONLY)")
        yield from session.execute(f"SELECT * FROM pg.public.{table}").fetch_record_batch(65_536)

    return batches()


WAYS: dict[str, Callable[[str, str], Iterator[pa.RecordBatch]]] = {
    "pgsnapshot": ours,
    "pgsnapshot, NumPy alone": ours_numpy_alone,
    "ADBC": adbc,
    "ConnectorX": connectorx,
    "DuckDB": duckdb,
}


def measured(batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    """Read all batches and discard them."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    rows = sum(batch.num_rows for batch in batches)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "rows": rows,
        "wall_s": wall,
        "client_cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        # Not from getrusage, which starts with the parent's peak.
        "peak_rss_mb": peak_rss_bytes(os.getpid()) / 1e6,
    }


if __name__ == "__main__":
    print(json.dumps(measured(WAYS[sys.argv[1]](sys.stdin.read(), sys.argv[2]))))
