"""A client of a Connect server elsewhere that mirrors, in two runs with changes between them, and one that is refused.

Arguments: server, conninfo, directory, format, target. It prints a line of JSON: each table's rows as texts, as
``mirror_at`` gives them.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from unittest.mock import patch

import psycopg2
from deltalake import DeltaTable
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from pg_cdc_source import mirror, mirror_at
from pg_cdc_source.errors import OptionError
from pg_cdc_source.mirrors.query import Format

CHANGES = """
    UPDATE customers SET name = 'changed' WHERE id % 10 = 0;
    UPDATE customers SET id = id + 10000 WHERE id = 7;
    DELETE FROM items WHERE line = 2;
    ALTER TABLE items ADD COLUMN level int DEFAULT 7;
    INSERT INTO items VALUES (5000, 1, 3.50, 'new', 8);
    UPDATE items SET price = 1 WHERE order_id = 1
"""


def main(server: str, url: str, directory: Path, format: Format, target: str) -> None:
    spark = SparkSession.builder.remote(server).getOrCreate()

    def run(mode: str = "merge") -> None:
        query = mirror(
            spark,
            url=url,
            tables="public.*",
            slot="remote",
            target=target,
            format=format,
            checkpoint=f"{directory}/checkpoint",
            once=True,
            mode=mode,
            # The server's process has its own copy of what this is bound to.
            on_batch=lambda batch: print(batch.row.batch_id, file=(directory / "batches").open("a")),
            maxRowsPerBatch=1000,
        )
        assert query.awaitTermination(300)

    run()
    with contextlib.closing(psycopg2.connect(url)) as session, session, session.cursor() as cursor:
        cursor.execute(CHANGES)
    # A lake on the server's disk is one that the client does not see: it is the server who says what it keeps.
    refused = ""
    try:
        with patch.object(DeltaTable, "is_deltatable", staticmethod(lambda *_: False)):
            run("append")
    except (StreamingQueryException, OptionError) as error:
        refused = str(error)
    assert "was written with the mode merge, and cannot go on with append" in refused, refused
    run()
    found = mirror_at(spark, target.format(table="_pgcdc"), format=format)
    rows = {
        name: sorted([None if value is None else str(value) for value in row] for row in table.collect())
        for name, table in found.items()
    }
    print(json.dumps(rows), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4], sys.argv[5])  # type: ignore[arg-type]
