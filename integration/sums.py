"""Count how often a sum over two tables is true while money moves between them, as each reader sees it.

    PYTHONPATH=integration/helpers .venv/bin/python integration/sums.py [ROUNDS]

A round is each of test_consistency's five actions (union, join, broadcast join, self-join, scalar subquery), once with
``pgsnapshot`` and once with Spark's JDBC source. The total of all accounts never changes, so a sum that differs from it
was never true. README shows the result.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from bank import TABLES, TOTAL, open_bank, transfers
from databases import connect
from frames import load
from jdbc import jdbc
from servers import postgres_server
from sessions import SparkSessions
from snapshot.test_consistency import ACTIONS


def main(rounds: int) -> None:
    true: Counter[str] = Counter()
    with postgres_server() as url, tempfile.TemporaryDirectory() as scratch:
        with connect(url) as session:
            open_bank(session)
        sessions = SparkSessions(Path(scratch))
        spark = sessions.get()
        readers = {
            "pgsnapshot": [load(spark, url, dbtable=table, numPartitions=3, lsnColumn="lsn") for table in TABLES],
            "jdbc": [jdbc(spark, url, table) for table in TABLES],
        }
        with transfers(url) as done:
            before = done.committed
            for _ in range(rounds):
                for action in ACTIONS:
                    for name, tables in readers.items():
                        true[name] += action(*tables).collect()[0][0] == TOTAL
            print(f"{done.committed - before:,} transfers were committed meanwhile.")
        sessions.end_jvm()
    for name in readers:
        print(f"{name}: {true[name]} of {rounds * len(ACTIONS)} sums were true")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 20)
