"""Write to a table at a steady rate: ``python -m pg_cdc_source.bench.writer TABLE RATE SECONDS``, URL on stdin.

Each transaction inserts one row of the wide table. Prints how many there were.
"""

from __future__ import annotations

import json
import sys
import time

import psycopg2

from pg_cdc_source.bench.datasets import WIDE


def write(url: str, table: str, per_second: float, seconds: float) -> int:
    session = psycopg2.connect(url)
    session.autocommit = True
    with session.cursor() as cursor:
        cursor.execute(f"PREPARE one (int) AS INSERT INTO {table} {WIDE.rows_between('$1', '$1')}")
        start = time.monotonic()
        for done in range(int(per_second * seconds)):
            # Behind its time it hurries, so that the rate is kept on the average.
            time.sleep(max(0.0, start + done / per_second - time.monotonic()))
            cursor.execute(f"EXECUTE one ({done + 1})")
    session.close()
    return int(per_second * seconds)


if __name__ == "__main__":
    rows = write(sys.stdin.read(), sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
    print(json.dumps({"rows": rows}))
