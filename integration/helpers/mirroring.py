"""A Spark driver that mirrors tables until it is killed: python mirroring.py DIRECTORY URL [FORMAT]."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lake_jars

from pg_cdc_source import mirror
from pg_cdc_source.demo.local_spark import start_session


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


if __name__ == "__main__":
    directory, url, format = Path(sys.argv[1]), sys.argv[2], (sys.argv[3:] or ["deltalake"])[0]
    conf = {} if format == "deltalake" else lake_jars.conf(directory / "warehouse")
    spark = start_session("local[2]", conf, directory)
    mirror(spark, **arguments(directory, url, format)).awaitTermination()
