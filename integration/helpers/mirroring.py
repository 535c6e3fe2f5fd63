"""A Spark driver that mirrors tables until it is killed: python mirroring.py DIRECTORY URL."""

from __future__ import annotations

import sys
from pathlib import Path

from pg_cdc_source import mirror
from pg_cdc_source.demo.local_spark import start_session

if __name__ == "__main__":
    directory, url = Path(sys.argv[1]), sys.argv[2]
    spark = start_session("local[2]", {}, directory)
    query = mirror(
        spark,
        url=url,
        tables="public.*",
        slot="s",
        target=f"{directory}/lake/{{table}}",
        checkpoint=f"{directory}/checkpoint",
        maxRowsPerBatch=2000,
    )
    query.awaitTermination()
