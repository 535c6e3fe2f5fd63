"""Sessions that write to tables at random, while another one creates, drops, renames, alters and publishes those."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial

import psycopg2
from databases import connect
from psycopg2.extensions import cursor as Cursor
from second_opinion import Gap
from threads import at_work

NAMES = tuple("abcde")
KEYS = 40
# What one transaction runs, and whether the table is taken out with it.
Transaction = tuple[list[str], bool]
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
    """Tables of ``NAMES`` that come and go, all with ``(id int PRIMARY KEY, v text)`` and, with ``columns``, others.

    ``renamed`` are those that have a name which the stream may know as another table's: their rows come anew only
    where somebody asks for them. Whoever holds ``altering`` keeps the tables as they are; rows go on to change.
    """

    def __init__(self, url: str, seed: int, *, listed: bool, columns: bool, server_version: int) -> None:
        self.renamed: set[str] = set()
        self.done: list[str] = []  # what was run of DDL, in order
        self.gaps: list[Gap] = []
        self.altering = threading.Lock()
        self._url = url
        self._seed = seed
        self._listed = listed
        self._columns = columns
        self._server_version = server_version
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
            cursor.execute(self._publication(NAMES[:2]))

    def _publication(self, names: Iterable[str]) -> str:
        listed = ", ".join(("kept", *names))
        return f"CREATE PUBLICATION s FOR {f'TABLE {listed}' if self._listed else 'ALL TABLES'}"

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

    def _alter(self, cursor: Cursor, rng: random.Random, stop: threading.Event) -> None:
        with self.altering:
            name, other = rng.sample(NAMES, 2)
            what = rng.choice(self._kinds())
            if what == "publication":
                self._replace_publication(cursor, rng, stop)
            elif what == "without deletes":
                self._leave_out_deletes(cursor, rng, stop)
            else:
                for transaction in self._transactions(what, name, other, rng, cursor):
                    self._run(cursor, transaction, name)
            if what in ("rename", "replace"):
                self.renamed.add(other)
            self.done.append(f"{what} {name} {other}")

    def _kinds(self) -> list[str]:
        kinds = ["create", "create", "drop", "recreate", "recreate in one", "recreate twice", "truncate"]
        kinds += ["truncate both", "publication"]
        if self._server_version >= 140000:
            # Who wants the rows of a table under another's name asks for them, which takes messages.
            kinds += ["ask", "ask", "ask for all", "rename", "replace"]
        if self._server_version >= 150000:
            # Before, it leaves no trace.
            kinds += ["without deletes"]
        if self._listed:
            kinds += ["publish", "publish", "take out", "take out and put in", "in one"]
        if self._columns:
            kinds += ["add", "add", "add", "drop column", "rename column", "retype", "column again", "identity"] * 2
        return kinds

    def _run(self, cursor: Cursor, transaction: Transaction, name: str) -> None:
        statements, has_gap = transaction
        cursor.execute("BEGIN")
        for statement in statements:
            cursor.execute(statement)
        if not has_gap:
            cursor.execute("COMMIT")
            return
        begin = self._where(cursor)
        cursor.execute(f"SELECT '{name}'::regclass::oid::bigint")
        (oid,) = cursor.fetchone() or (None,)
        cursor.execute("COMMIT")
        self.gaps.append(Gap(begin, self._where(cursor), oid))

    def _where(self, cursor: Cursor) -> int:
        cursor.execute("SELECT pg_current_wal_insert_lsn() - '0/0'")
        (lsn,) = cursor.fetchone() or (0,)
        return int(lsn)

    def _transactions(self, what: str, name: str, other: str, rng: random.Random, cursor: Cursor) -> list[Transaction]:
        create = self._creation(name, rng)
        take_out, put_in = (f"ALTER PUBLICATION s {verb} TABLE {name}" for verb in ("DROP", "ADD"))
        drop = f"DROP TABLE {name}"
        separate: dict[str, list[str]] = {
            "create": create,
            "drop": [drop],
            "recreate": [drop, *create],
            "recreate twice": [drop, *create, drop, *create],
            "truncate": [f"TRUNCATE {name}"],
            "truncate both": [f"TRUNCATE {name}, {other}"],
            "rename": [f"ALTER TABLE {name} RENAME TO {other}"],
            "ask": [_ASK % f"public.{name}"],
            "ask for all": [_ASK % "*"],
            "publish": [put_in],
        }
        together: dict[str, Transaction] = {
            "recreate in one": ([drop, *create], False),
            "replace": ([f"DROP TABLE IF EXISTS {other}", f"ALTER TABLE {name} RENAME TO {other}"], False),
            "take out": ([take_out], True),
            "in one": ([take_out, put_in], True),
        }
        if what in separate:
            return [([statement], False) for statement in separate[what]]
        if what == "take out and put in":
            return [([take_out], True), ([put_in], False)]
        return [together[what]] if what in together else [(self._column(what, name, rng, cursor), False)]

    def _creation(self, name: str, rng: random.Random) -> list[str]:
        full = rng.choice(("", f"; ALTER TABLE {name} REPLICA IDENTITY FULL"))
        statements = [
            f"CREATE TABLE {name} (id int PRIMARY KEY, v text){full}",
            f"INSERT INTO {name} SELECT i, '{next(self._numbers)}' FROM generate_series(1, {rng.randint(0, 9)}) AS i",
        ]
        if self._listed and rng.random() < 0.7:
            statements.insert(rng.randint(1, len(statements)), f"ALTER PUBLICATION s ADD TABLE {name}")
        return statements

    def _column(self, what: str, name: str, rng: random.Random, cursor: Cursor) -> list[str]:
        """Statements that change the columns besides ``id`` and ``v``."""
        cursor.execute(
            "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 2 AND NOT attisdropped",
            (name,),
        )
        columns = [column for (column,) in cursor]
        new, alter = f"c{next(self._numbers)}", f"ALTER TABLE {name}"
        if what == "identity":
            return [f"{alter} REPLICA IDENTITY {rng.choice(('FULL', 'DEFAULT'))}"]
        if what == "add" or not columns:
            kind, default = rng.choice(("text", "varchar(20)", "int")), rng.choice(("", " DEFAULT '7'"))
            write = f"UPDATE {name} SET {new} = '{rng.randrange(100)}', v = '{next(self._numbers)}' WHERE id % 3 = 0"
            return [f"{alter} ADD {new} {kind}{default}", *([write] if rng.random() < 0.5 else [])]
        column = rng.choice(columns)
        return {
            "drop column": [f"{alter} DROP {column}"],
            "rename column": [f"{alter} RENAME {column} TO {new}"],
            "retype": [f"{alter} ALTER {column} DROP DEFAULT, ALTER {column} TYPE text"],
            "column again": [f"{alter} DROP {column}", f"{alter} ADD {column} text"],
        }[what]

    # --- the publication ----------------------------------------------------------------------------------------------

    def _replace_publication(self, cursor: Cursor, rng: random.Random, stop: threading.Event) -> None:
        """Drop the publication, and create it again after a while."""
        begin = self._where(cursor)
        cursor.execute("DROP PUBLICATION s")
        stop.wait(rng.choice((0.0, 0.2, 1.0)))
        cursor.execute("SELECT relname FROM pg_class WHERE relkind = 'r' AND relname = ANY (%s)", (list(NAMES),))
        self._end_gap(cursor, begin, self._publication([name for (name,) in cursor]))

    def _leave_out_deletes(self, cursor: Cursor, rng: random.Random, stop: threading.Event) -> None:
        begin = self._where(cursor)
        cursor.execute("ALTER PUBLICATION s SET (publish = 'insert, update, truncate')")
        stop.wait(rng.uniform(0, 1))
        self._end_gap(cursor, begin, "ALTER PUBLICATION s SET (publish = 'insert, update, delete, truncate')")

    def _end_gap(self, cursor: Cursor, begin: int, statement: str) -> None:
        """Run what has to be run before this session ends."""
        while True:
            try:
                cursor.execute(statement)
            except _CONFLICTS:
                continue
            self.gaps.append(Gap(begin, self._where(cursor), None))
            return


_ASK = """SELECT pg_logical_emit_message(true, 'pgcdc', '{"snapshot": ["%s"]}')"""
