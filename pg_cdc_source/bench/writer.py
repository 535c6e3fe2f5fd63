"""Run prepared statements at a steady rate, one in each transaction, and print how many there were.

Runs as ``python -m pg_cdc_source.bench.writer STATEMENTS RATE SECONDS`` with the server's URL on stdin. STATEMENTS is
a JSON list; they take turns, and ``$1`` is the transaction's number.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

import psycopg2


def write(url: str, statements: Sequence[str], per_second: float, seconds: float) -> int:
    session = psycopg2.connect(url)
    session.autocommit = True
    with session.cursor() as cursor:
        for i, statement in enumerate(statements):
            cursor.execute(f"PREPARE s{i} (int) AS {statement}")
        start = time.monotonic()
        for done in range(int(per_second * seconds)):
            # Late transactions follow at once, so that the rate is kept on average.
            time.sleep(max(0.0, start + done / per_second - time.monotonic()))
            cursor.execute(f"EXECUTE s{done % len(statements)} ({done + 1})")
    session.close()
    return int(per_second * seconds)


if __name__ == "__main__":
    rows = write(sys.stdin.read(), json.loads(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
    print(json.dumps({"rows": rows}))
