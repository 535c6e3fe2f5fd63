"""Insert rows of the wide table at a steady rate, one in each transaction, and print how many there were.

Runs as ``python -m pg_cdc_source.bench.writer TABLE RATE SECONDS`` with the server's URL on stdin.
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
            # Late transactions follow at once, so that the rate is kept on average.
            time.sleep(max(0.0, start + done / per_second - time.monotonic()))
            cursor.execute(f"EXECUTE one ({done + 1})")
    session.close()
    return int(per_second * seconds)


if __name__ == "__main__":
    rows = write(sys.stdin.read(), sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
    print(json.dumps({"rows": rows}))
