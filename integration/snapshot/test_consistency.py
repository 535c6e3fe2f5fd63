"""Every Spark action sees PostgreSQL at one point, however many scans it has and whatever is written meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg2
import pytest
from bank import ACCOUNTS, TABLES, TOTAL, join, open_bank, self_join, transfers
from databases import connect
from frames import load
from jdbc import jdbc
from psycopg2.extensions import connection as Session
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from threads import at_work
from watch import wait_until

from pg_cdc_source import open_snapshot

JDBC_ROUNDS = 10
LEAST_TRANSFERS = 300
ROUNDS = 2
# Without it, transfers take most of a core from what they are there to disturb.
PAUSE_SECONDS = 0.002


# --- the rows of one point -------------------------------------------------------------------------------------------


def churn(db: str, stop: threading.Event) -> None:
    """Insert, update and delete rows; some updates are HOT, some move an indexed value, some a TOASTed one."""
    chance = random.Random(23)
    with connect(db) as session, session.cursor() as cursor:
        while not stop.is_set():
            k = chance.randrange(4000)
            cursor.execute(f"UPDATE busy SET version = version + 1 WHERE id BETWEEN {k} AND {k + 20}")
            cursor.execute(f"UPDATE busy SET class = class + 1 WHERE id BETWEEN {k} AND {k + 5}")
            cursor.execute(f"UPDATE busy SET long = repeat(md5(version::text), {chance.randrange(200)}) WHERE id = {k}")
            cursor.execute(f"DELETE FROM busy WHERE id BETWEEN {k + 100} AND {k + 130}")
            cursor.execute(
                "INSERT INTO busy SELECT i, 0, i % 7, md5(i::text), NULL"
                f" FROM generate_series({k + 110}, {k + 135}) AS i ON CONFLICT DO NOTHING"
            )


def vacuum(db: str, stop: threading.Event) -> None:
    with connect(db) as session, session.cursor() as cursor:
        while not stop.is_set():
            cursor.execute("VACUUM busy")
            stop.wait(0.2)


def select_at(db: str, snapshot: str, query: str) -> list[tuple[Any, ...]]:
    """What ``query`` gives under an exported snapshot."""
    with contextlib.closing(psycopg2.connect(db)) as session, session.cursor() as cursor:
        session.set_session(isolation_level="REPEATABLE READ", readonly=True)
        cursor.execute("SET TRANSACTION SNAPSHOT %s", (snapshot,))
        cursor.execute(query)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows


@pytest.mark.matrix("one snapshot for all scans of an action")
def test_rows_under_load_are_those_of_a_select_under_the_same_snapshot(
    db: str, pg: Session, spark: SparkSession
) -> None:
    with pg.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE busy (id int PRIMARY KEY, version int, class int, note text, long text)"
            " WITH (fillfactor = 60, autovacuum_enabled = off);"
            " CREATE INDEX ON busy (class);"
            " INSERT INTO busy SELECT i, 0, i % 7, md5(i::text), NULL FROM generate_series(1, 4000) AS i;"
            # Bloat: half of the table is empty, and its rows are in the back.
            " UPDATE busy SET version = 1; UPDATE busy SET version = 2"
        )
    with at_work(partial(churn, db), partial(vacuum, db)):
        wait_until(lambda: select_all(pg, "SELECT count(*) FROM busy WHERE version > 2")[0][0] > 500)
        seen = []
        for cut in ({"numPartitions": 1}, {"partitionBytes": "400kB"}):
            with open_snapshot(db, tables=["busy"]) as snapshot:
                frame = load(spark, None, dbtable="busy", **cut, **snapshot.options)
                got = sorted(tuple(row) for row in frame.collect())
                assert got == select_at(db, snapshot.options["snapshot"], "SELECT * FROM busy ORDER BY id")
                # Once more, after the load has gone on.
                assert sorted(tuple(row) for row in frame.collect()) == got
                seen.append(got)
        assert all(one != other for one, other in itertools.pairwise(seen)), "nothing was written meanwhile"
    # Before PostgreSQL 15, statistics come in a little later.
    hot = "SELECT 1 FROM pg_stat_user_tables WHERE relname = 'busy' AND n_tup_hot_upd > 0"
    wait_until(lambda: select_all(pg, hot))


def select_all(pg: Session, query: str) -> list[tuple[Any, ...]]:
    with pg.cursor() as cursor:
        cursor.execute(query)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows


# --- one point for all scans -----------------------------------------------------------------------------------------


# Each takes both tables, and gives the total of all accounts, the number of rows and the LSNs of all scans.
Action = Callable[[DataFrame, DataFrame], DataFrame]


def union(checking: DataFrame, savings: DataFrame) -> DataFrame:
    return checking.union(savings).agg(F.sum("balance"), F.count("*") / 2, F.collect_set("lsn"))


def broadcast_join(checking: DataFrame, savings: DataFrame) -> DataFrame:
    return join(checking, F.broadcast(savings))


def scalar_subquery(checking: DataFrame, savings: DataFrame) -> DataFrame:
    checking.createOrReplaceTempView("checking")
    savings.createOrReplaceTempView("savings")
    return checking.sparkSession.sql(
        "SELECT sum(balance) + (SELECT sum(balance) FROM savings), count(*),"
        " array_union(collect_set(lsn), (SELECT collect_set(lsn) FROM savings)) FROM checking"
    )


ACTIONS: tuple[Action, ...] = (union, join, broadcast_join, self_join, scalar_subquery)


@pytest.mark.parametrize("action", [join, broadcast_join, scalar_subquery])
def test_an_action_on_what_another_one_has_run_is_at_a_later_point(
    action: Action, db: str, pg: Session, spark: SparkSession
) -> None:
    """With ``select("*")``, as the documentation says: a DataFrame keeps what it has broadcast or shuffled."""
    open_bank(pg)
    frame = action(*(load(spark, db, dbtable=table, numPartitions=2, lsnColumn="lsn") for table in TABLES))
    ((_, _, before),) = frame.collect()
    with pg.cursor() as cursor:
        cursor.execute(
            f"WITH paid AS (UPDATE {TABLES[0]} SET balance = balance - 5 WHERE id = 1)"
            f" UPDATE {TABLES[1]} SET balance = balance + 5 WHERE id = 1"
        )
    ((total, rows, lsns),) = frame.select("*").collect()
    assert (total, rows) == (TOTAL, ACCOUNTS)
    assert len(before) == len(lsns) == 1
    assert lsns > before


@pytest.mark.debian
@pytest.mark.usefixtures("jdbc_driver")
def test_an_action_sees_one_point_where_jdbc_does_not(db: str, pg: Session, spark: SparkSession) -> None:
    open_bank(pg)
    # A snapshot that is held keeps PostgreSQL from reusing the space of what the transfers leave behind.
    ours = [load(spark, db, dbtable=table, numPartitions=3, lsnColumn="lsn", snapshotIdle="20s") for table in TABLES]
    assert union(*ours).collect()[0][0] == TOTAL
    points = []
    with transfers(db, PAUSE_SECONDS) as done:
        before = done.committed
        for _ in range(ROUNDS):
            for action in ACTIONS:
                ((total, rows, lsns),) = action(*ours).collect()
                assert (total, rows) == (TOTAL, ACCOUNTS), action.__name__
                assert len(lsns) == 1, action.__name__
                points += lsns
        assert done.committed - before > LEAST_TRANSFERS

        theirs = [jdbc(spark, db, table) for table in TABLES]
        totals = (action(*theirs).collect()[0][0] for _ in range(JDBC_ROUNDS) for action in ACTIONS)
        assert any(total != TOTAL for total in totals), "these actions cannot tell a consistent reader from another"
    # Money moved between any two actions: each has a point of its own, later than the last one's.
    assert points == sorted(set(points))
    assert None not in points
