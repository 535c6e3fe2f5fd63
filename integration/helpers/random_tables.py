"""Sessions that write to tables at random, while another one creates, drops, renames and publishes those tables."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import psycopg2
from databases import connect
from psycopg2.extensions import cursor as Cursor
from threads import at_work

NAMES = tuple("abcde")
KEYS = 40
WRITERS = 2

# What others may have done first: the transaction is rolled back, which is one more kind of transaction.
_CONFLICTS = (
    psycopg2.errors.DeadlockDetected,
    psycopg2.errors.LockNotAvailable,
    psycopg2.errors.UniqueViolation,
    psycopg2.errors.UndefinedTable,
    psycopg2.errors.DuplicateTable,
    psycopg2.errors.DuplicateObject,
    psycopg2.errors.UndefinedObject,
    # The server checks a row that another one's CREATE or ALTER has just changed.
    psycopg2.errors.InternalError_,
)


class RandomTables:
    """Tables of ``NAMES`` that come and go, all of ``(id int PRIMARY KEY, v text)``.

    ``renamed`` are those that have a name which the stream may know as another table's: their rows come anew only
    where somebody asks for them.
    """

    def __init__(self, url: str, seed: int, *, listed: bool) -> None:
        self.renamed: set[str] = set()
        self.done: list[str] = []  # what was run of DDL, in order
        self._url = url
        self._seed = seed
        self._listed = listed
        self._numbers = itertools.count()

    def create(self) -> None:
        """Create the first tables, with rows, and the publication."""
        with connect(self._url) as session, session.cursor() as cursor:
            for name in NAMES[:3]:
                cursor.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)")
                cursor.execute(f"INSERT INTO {name} SELECT i, 'first' FROM generate_series(1, 5) AS i")
            cursor.execute(f"ALTER TABLE {NAMES[0]} REPLICA IDENTITY FULL")
            # A publication without any table is an error until it has one.
            cursor.execute("CREATE TABLE kept (id int PRIMARY KEY, v text)")
            tables = f"TABLE kept, {', '.join(NAMES[:2])}" if self._listed else "ALL TABLES"
            cursor.execute(f"CREATE PUBLICATION s FOR {tables}")

    def changing(self) -> AbstractContextManager[list[BaseException]]:
        """All sessions are at work, as ``at_work`` has it."""
        works = [(self._write, 0.02), (self._write, 0.02), (self._hold, 0.5), (self._alter, 0.25)]
        return at_work(
            *(
                partial(self._repeat, work, pause, random.Random(f"{self._seed} {i}"))
                for i, (work, pause) in enumerate(works)
            )
        )

    def _repeat(
        self,
        work: Callable[[Cursor, random.Random, threading.Event], None],
        pause: float,
        rng: random.Random,
        stop: threading.Event,
    ) -> None:
        with connect(self._url) as session, session.cursor() as cursor:
            cursor.execute("SET lock_timeout = '2s'")
            while not stop.wait(rng.uniform(0, 2 * pause)):
                try:
                    work(cursor, rng, stop)
                except _CONFLICTS:
                    cursor.execute("ROLLBACK")

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _write(self, cursor: Cursor, rng: random.Random, __: threading.Event) -> None:
        cursor.execute("BEGIN")
        for _ in range(rng.choice((1, 1, 2, 5, 12))):
            self._change(cursor, rng)
        cursor.execute("ROLLBACK" if rng.random() < 0.1 else "COMMIT")

    def _hold(self, cursor: Cursor, rng: random.Random, stop: threading.Event) -> None:
        """A transaction that lasts."""
        cursor.execute("BEGIN")
        for _ in range(rng.randint(1, 4)):
            self._change(cursor, rng)
            stop.wait(rng.uniform(0, 0.7))
        cursor.execute("ROLLBACK" if rng.random() < 0.2 else "COMMIT")

    def _change(self, cursor: Cursor, rng: random.Random) -> None:
        name, key, value = rng.choice(NAMES), rng.randrange(KEYS), f"'{next(self._numbers)}'"
        statement = rng.choice(
            (
                f"INSERT INTO {name} VALUES ({key}, {value}) ON CONFLICT (id) DO UPDATE SET v = excluded.v",
                f"INSERT INTO {name} VALUES ({key}, {value}) ON CONFLICT (id) DO UPDATE SET v = excluded.v",
                f"UPDATE {name} SET v = {value} WHERE id = {key}",
                f"UPDATE {name} SET v = {value} WHERE id < {key}",
                f"UPDATE {name} SET id = {rng.randrange(KEYS)}, v = {value} WHERE id = {key}",
                f"DELETE FROM {name} WHERE id = {key}",
            )
        )
        cursor.execute(statement)

    # --- tables -------------------------------------------------------------------------------------------------------

    def _alter(self, cursor: Cursor, rng: random.Random, _: threading.Event) -> None:
        name, other = rng.sample(NAMES, 2)
        create = self._creation(name, rng)
        ask = """SELECT pg_logical_emit_message(true, 'pgcdc', '{"snapshot": ["%s"]}')"""
        options: list[tuple[str, list[str]]] = [
            ("create", create),
            ("create", create),
            ("drop", [f"DROP TABLE {name}"]),
            ("recreate", [f"DROP TABLE {name}", *create]),
            ("recreate in one", ["BEGIN", f"DROP TABLE {name}", *create, "COMMIT"]),
            ("recreate twice", [f"DROP TABLE {name}", *create, f"DROP TABLE {name}", *create]),
            ("truncate", [f"TRUNCATE {name}"]),
            ("truncate both", [f"TRUNCATE {name}, {other}"]),
            ("rename", [f"ALTER TABLE {name} RENAME TO {other}"]),
            (
                "replace",
                ["BEGIN", f"DROP TABLE IF EXISTS {other}", f"ALTER TABLE {name} RENAME TO {other}", "COMMIT"],
            ),
            ("ask", [ask % f"public.{name}"]),
            ("ask", [ask % f"public.{name}"]),
            ("ask for all", [ask % "*"]),
        ]
        if self._listed:
            take_out, put_in = (f"ALTER PUBLICATION s {verb} TABLE {name}" for verb in ("DROP", "ADD"))
            options += [
                ("publish", [put_in]),
                ("publish", [put_in]),
                ("take out", [take_out]),
                ("take out and put in", [take_out, put_in]),
                ("in one", ["BEGIN", take_out, put_in, "COMMIT"]),
            ]
        what, statements = rng.choice(options)
        for statement in statements:
            cursor.execute(statement)
        if what in ("rename", "replace"):
            self.renamed.add(other)
        self.done.append(f"{what} {name} {other}")

    def _creation(self, name: str, rng: random.Random) -> list[str]:
        # To change the identity later is a change of the columns, which a repeated batch may see otherwise.
        full = rng.choice(("", f"; ALTER TABLE {name} REPLICA IDENTITY FULL"))
        statements = [
            f"CREATE TABLE {name} (id int PRIMARY KEY, v text){full}",
            f"INSERT INTO {name} SELECT i, '{next(self._numbers)}' FROM generate_series(1, {rng.randint(0, 9)}) AS i",
        ]
        if self._listed and rng.random() < 0.7:
            statements.insert(rng.randint(1, len(statements)), f"ALTER PUBLICATION s ADD TABLE {name}")
        return statements
