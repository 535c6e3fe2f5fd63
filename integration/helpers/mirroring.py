"""A Spark driver that mirrors tables until it is killed: python mirroring.py DIRECTORY URL [FORMAT [MASTER [GIVEN]]].

GIVEN are other arguments of mirror(), as JSON. The file ``batches`` in the directory gets a line of JSON for each
batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lake_jars

from pg_cdc_source import mirror
from pg_cdc_source.demo.local_spark import start_session
from pg_cdc_source.lake.ledger import LedgerRow


def arguments(directory: Path, url: str, format: str) -> dict[str, Any]:
    """What mirror() is given, whoever calls it."""
    target = "lake.bank.{table}" if format == "iceberg" else f"{directory}/lake/{{table}}"
    return {
        "url": url,
        "tables": "public.*",
        "slot": "s",
        "target": target,
        "format": format,
        "checkpoint": f"{directory}/checkpoint",
        "maxRowsPerBatch": 2000,
    }


def note(directory: Path, row: LedgerRow) -> None:
    """Write a line for a batch."""
    said = {
        "batch": row.batch_id,
        "lsn": row.lsn,
        "tables": [*row.tables],
        "set_aside": dict(row.set_aside),
    }
    with (directory / "batches").open("a") as file:
        file.write(json.dumps(said) + "\n")


def main(directory: Path, url: str, format: str = "deltalake", master: str = "local[2]", given: str = "{}") -> None:
    conf = {} if format == "deltalake" else lake_jars.conf(directory / "warehouse")
    spark = start_session(master, conf, directory)
    wanted = {**arguments(directory, url, format), **json.loads(given)}
    mirror(spark, **wanted, on_batch=lambda batch: note(directory, batch.row)).awaitTermination()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
