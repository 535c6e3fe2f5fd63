"""Two tables of accounts between which money moves all the time, so that only a consistent read finds all of it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from databases import connect
from psycopg2.extensions import connection as Session
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

ACCOUNTS = 8000  # in each table
TOTAL = 2 * ACCOUNTS * 1000
TABLES = ("checking", "savings")


@dataclass
class Transfers:
    """How many transfers have been committed so far."""

    committed: int = 0


def open_bank(pg: Session) -> None:
    """Create the tables ``checking`` and ``savings``, with 1,000 in each account."""
    with pg.cursor() as cursor:
        for table in TABLES:
            cursor.execute(
                f"CREATE TABLE {table} (id int PRIMARY KEY, balance int NOT NULL, filler text NOT NULL);"
                f" INSERT INTO {table} SELECT i, 1000, repeat('x', 100) FROM generate_series(1, {ACCOUNTS}) AS i"
            )


@contextmanager
def transfers(db: str, pause_seconds: float = 0.0) -> Iterator[Transfers]:
    """Move money between the tables and within one until the block ends.

    One session does it as fast as it can, which takes most of a core, or with a pause after each transfer.
    """
    done = Transfers()
    stop = threading.Event()
    failures: list[BaseException] = []

    def move() -> None:
        chance = random.Random(17)
        try:
            with connect(db) as session, session.cursor() as cursor:
                while not stop.is_set():
                    from_table, to_table = chance.choice(TABLES), chance.choice(TABLES)
                    from_id, to_id = chance.sample(range(1, ACCOUNTS + 1), 2)
                    amount = chance.randint(1, 500)
                    cursor.execute(
                        "BEGIN;"
                        f" UPDATE {from_table} SET balance = balance - {amount} WHERE id = {from_id};"
                        f" UPDATE {to_table} SET balance = balance + {amount} WHERE id = {to_id};"
                        " COMMIT"
                    )
                    done.committed += 1
                    stop.wait(pause_seconds)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=move, name="transfers")
    thread.start()
    try:
        yield done
    finally:
        stop.set()
        thread.join()
    assert not failures, failures


def join(checking: DataFrame, savings: DataFrame) -> DataFrame:
    return (
        checking.alias("c")
        .join(savings.alias("s").hint("merge"), "id")
        .agg(
            F.sum(F.col("c.balance") + F.col("s.balance")),
            F.count("*"),
            F.array_union(F.collect_set("c.lsn"), F.collect_set("s.lsn")),
        )
    )


def self_join(checking: DataFrame, savings: DataFrame) -> DataFrame:
    """Four scans: a balance that differs between two of one table makes the total wrong."""

    def twice(table: DataFrame) -> DataFrame:
        lsns = F.array(F.col("a.lsn"), F.col("b.lsn")).alias("lsns")
        balance = F.when(F.col("a.balance") == F.col("b.balance"), F.col("a.balance")).alias("balance")
        return table.alias("a").join(table.alias("b"), "id").select("id", balance, lsns)

    both = twice(checking).union(twice(savings))
    lsns = F.array_distinct(F.flatten(F.collect_set("lsns")))
    return both.agg(F.sum("balance"), F.count("balance") / 2, lsns)
