"""Sessions that write to a shop's tables at random, while another one alters them.

Whoever alters a table says in the table's comment what the stream can know of it: it learns of other columns with the
next change of a row.

- ``said``: the same transaction has changed a row.
- ``silent``: it has not. There may be columns that the lake does not know, and names that it knows otherwise.
- ``rewritten``: as well, and rows may have other values.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import psycopg2
from databases import connect
from psycopg2 import errors
from psycopg2.extensions import cursor as Cursor
from shop_alterations import OF_NO_COLUMN, Alterations, extras_of, names_of
from shop_tables import KEYS, OTHERS, TYPES, Table
from threads import at_work

# What others may have done first: the transaction is rolled back, which is one more kind of transaction.
_CONFLICTS = (
    psycopg2.IntegrityError,
    psycopg2.DataError,
    errors.DeadlockDetected,
    errors.LockNotAvailable,
    errors.UndefinedColumn,
    errors.UndefinedTable,
    errors.DuplicateTable,
    errors.DuplicateColumn,
    errors.DependentObjectsStillExist,
    errors.InvalidTableDefinition,
    errors.ObjectInUse,
    errors.UnsafeNewEnumValueUsage,
    errors.InternalError_,
)

_PAUSE_SECONDS = 0.05
# How far sessions may be ahead of the lake: with more alterations, tables stand aside most of the time.
_AHEAD_BYTES = 1 << 20
_AHEAD_ALTERATIONS = 3
_CHANGES = (
    *("insert", "insert", "update", "update", "several", "twice", "rekey", "rekey", "flip", "extra"),
    *("delete", "again", "brief"),
)


class Load:
    """``done`` counts what was done, by kind. Tables are altered from when ``may_alter`` is set."""

    def __init__(self, url: str, seed: int, tables: Sequence[Table], mode: str, applied: Callable[[], int]) -> None:
        """``mode`` is what the lake's tables keep.

        ``applied`` says up to which LSN the lake is: nothing is written that is too far ahead of it.
        """
        self.done: Counter[str] = Counter()
        self.alterations = Alterations(tables, mode)
        self.may_alter = threading.Event()
        self._tables = tables
        self._url = url
        self._seed = seed
        self._applied = applied
        self._created = self._written = 0
        self._altered: list[int] = []

    def create(self) -> None:
        """Create all tables, with rows."""
        rng = random.Random(self._seed)
        with connect(self._url) as session, session.cursor() as cursor:
            for statement in (*TYPES, *(one for table in self._tables for one in table.statements()), *OTHERS):
                cursor.execute(statement)
            for table in self._tables:
                for k in range(0, KEYS, 2) if table.name not in ("empty", "addresses") else ():
                    self._insert(cursor, table, k, rng)
            self._created = _present_lsn(cursor)

    def at_work(self) -> AbstractContextManager[list[BaseException]]:
        """All sessions are at work, as ``threads.at_work`` has it."""
        works = [(self._write, 1), (self._write, 1), (self._hold, 6), (self._alter, 40)]
        return at_work(
            *(
                partial(self._repeat, work, times * _PAUSE_SECONDS, random.Random(f"{self._seed} {i}"))
                for i, (work, times) in enumerate(works)
            )
        )

    def end(self) -> None:
        """Change a row of each table, so that the lake gets all columns."""
        rng = random.Random(self._seed)
        with connect(self._url) as session, session.cursor() as cursor:
            for table in self._tables:
                self._until_said(cursor, table, rng)

    def _until_said(self, cursor: Cursor, table: Table, rng: random.Random) -> None:
        # Few rows may be there for it to refer to, but one is: that table came first.
        for k in rng.sample(range(KEYS), KEYS):
            cursor.execute("BEGIN")
            try:
                self._say(cursor, table, k, rng)
            except psycopg2.IntegrityError:
                cursor.execute("ROLLBACK")
            else:
                cursor.execute("COMMIT")
                return
        raise AssertionError(f"no row of {table.name} could be written")

    def _repeat(
        self,
        work: Callable[[Cursor, random.Random, threading.Event], None],
        pause: float,
        rng: random.Random,
        stop: threading.Event,
    ) -> None:
        while not stop.is_set():
            try:
                with connect(self._url) as session, session.cursor() as cursor:
                    cursor.execute("SET lock_timeout = '2s'")
                    while not stop.wait(rng.uniform(0, 2 * pause)):
                        is_ahead = self._written > max(self._applied(), self._created) + _AHEAD_BYTES
                        if is_ahead and work != self._alter:
                            continue
                        try:
                            work(cursor, rng, stop)
                        except _CONFLICTS as error:
                            self.done[type(error).__name__] += 1
                            cursor.execute("ROLLBACK")
            except (psycopg2.OperationalError, psycopg2.InterfaceError):
                # The server was killed.
                self.done["lost session"] += 1
                stop.wait(0.3)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _write(self, cursor: Cursor, rng: random.Random, __: threading.Event) -> None:
        cursor.execute("BEGIN")
        for _ in range(rng.choice((1, 1, 2, 3, 6))):
            self._change_or_not(cursor, rng)
        cursor.execute("ROLLBACK" if rng.random() < 0.05 else "COMMIT")
        self.done["transaction"] += 1
        self._written = _present_lsn(cursor)

    def _hold(self, cursor: Cursor, rng: random.Random, stop: threading.Event) -> None:
        """A transaction that lasts, and may be larger than a batch."""
        cursor.execute("BEGIN")
        for _ in range(rng.choice((3, 3, 3, 60))):
            self._change_or_not(cursor, rng)
            stop.wait(rng.uniform(0, 0.05))
        cursor.execute("ROLLBACK" if rng.random() < 0.1 else "COMMIT")
        self.done["long transaction"] += 1

    def _change_or_not(self, cursor: Cursor, rng: random.Random) -> None:
        """Change something within a savepoint, which may be rolled back."""
        cursor.execute("SAVEPOINT one")
        try:
            self._change(cursor, rng.choice(self._tables), rng)
        except psycopg2.IntegrityError:
            cursor.execute("ROLLBACK TO one")
            return
        cursor.execute("ROLLBACK TO one" if rng.random() < 0.05 else "RELEASE one")

    def _change(self, cursor: Cursor, table: Table, rng: random.Random) -> None:
        what = rng.choice(_CHANGES)
        names, k, other = names_of(cursor, table), rng.randrange(KEYS), rng.randrange(KEYS)
        here, there = _where(table, names, k), _where(table, names, other)
        if what == "insert":
            for key in (k, other):
                self._insert(cursor, table, key, rng)
        elif what == "rekey":
            self._rekey(cursor, table, names, (here, there), other, rng)
        elif what == "flip" and table.flips:
            cursor.execute(
                f"UPDATE {table.name} SET {names[0]} = -{names[0]} WHERE {names[0]} % 3 = {rng.randrange(3)}"
            )
        elif what == "extra":
            _update_extra(cursor, table, here, rng)
        elif what == "several":
            self._update(cursor, table, names, f"abs(hashtext({table.name}::text)) % 4 = 1", rng)
        elif what in ("delete", "again", "brief"):
            cursor.execute(f"DELETE FROM {table.name} WHERE {here}")
            if what != "delete":
                self._insert(cursor, table, k, rng)
            if what == "brief":
                cursor.execute(f"DELETE FROM {table.name} WHERE {here}")
        else:
            for _ in range(1 + (what == "twice")):
                self._update(cursor, table, names, here, rng)

    def _insert(self, cursor: Cursor, table: Table, k: int, rng: random.Random) -> None:
        names, n = names_of(cursor, table), rng.randrange(1, 100_000)
        columns = [
            (name, _value(value, k, n))
            for name, (_, value) in zip(names, table.columns, strict=True)
            if name is not None and value is not None
        ]
        cursor.execute(
            f"INSERT INTO {table.name} ({', '.join(name for name, _ in columns)})"
            f" VALUES ({', '.join(value for _, value in columns)}) ON CONFLICT DO NOTHING"
        )

    def _rekey(
        self,
        cursor: Cursor,
        table: Table,
        names: Sequence[str | None],
        places: tuple[str, str],
        other: int,
        rng: random.Random,
    ) -> None:
        """Give a row another key; before and behind it may get other values."""
        here, there = places
        if rng.random() < 0.5:
            self._update(cursor, table, names, here, rng)
        keys = zip(names[: table.key], table.columns, strict=False)
        settings = _settings(((name, value) for name, (_, value) in keys), other, rng.randrange(1, 100_000))
        cursor.execute(f"UPDATE {table.name} SET {settings} WHERE {here}")
        if rng.random() < 0.5:
            self._update(cursor, table, names, there, rng)

    def _update(
        self, cursor: Cursor, table: Table, names: Sequence[str | None], where: str, rng: random.Random
    ) -> None:
        """Set one or two of the columns that are not of the key."""
        given = [
            (name, value)
            for name, (_, value) in list(zip(names, table.columns, strict=True))[table.key :]
            if name is not None and value is not None
        ]
        if given:
            chosen = rng.sample(given, min(rng.randint(1, 2), len(given)))
            settings = _settings(chosen, rng.randrange(KEYS), rng.randrange(1, 100_000))
            cursor.execute(f"UPDATE {table.name} SET {settings} WHERE {where}")

    # --- tables -------------------------------------------------------------------------------------------------------

    def _alter(self, cursor: Cursor, rng: random.Random, __: threading.Event) -> None:
        applied = self._applied()
        self._altered = [lsn for lsn in self._altered if lsn > applied]
        if not self.may_alter.is_set() or len(self._altered) >= _AHEAD_ALTERATIONS:
            return
        table, kind, is_said = rng.choice(self._tables), rng.choice(self.alterations.kinds), rng.random() < 0.7
        cursor.execute("BEGIN")
        if rng.random() < 0.5:
            self._change(cursor, rng.choice((table, rng.choice(self._tables))), rng)
        comment, is_altered = "silent", False
        for _ in range(rng.choice((1, 1, 2))):
            for statement, is_rewriting in self.alterations.of(kind, cursor, table, rng):
                cursor.execute(statement)
                comment = "rewritten" if is_rewriting else comment
                is_altered = True
        if is_altered and kind not in OF_NO_COLUMN:
            if is_said:
                self._say(cursor, table, rng.randrange(KEYS), rng)
            else:
                _comment(cursor, table, comment)
        cursor.execute("ROLLBACK" if rng.random() < 0.1 else "COMMIT")
        if is_altered:
            self.done[kind] += 1
            self._altered.append(_present_lsn(cursor))

    def _say(self, cursor: Cursor, table: Table, k: int, rng: random.Random) -> None:
        """Change a row, so that the stream says the columns."""
        cursor.execute(f"DELETE FROM {table.name} WHERE {_where(table, names_of(cursor, table), k)}")
        self._insert(cursor, table, k, rng)
        cursor.execute(f"COMMENT ON TABLE {table.name} IS 'said'")


def _present_lsn(cursor: Cursor) -> int:
    cursor.execute("SELECT pg_current_wal_insert_lsn() - '0/0'")
    ((lsn,),) = cursor.fetchall()
    return int(lsn)


def _comment(cursor: Cursor, table: Table, comment: str) -> None:
    cursor.execute("SELECT obj_description(%s::regclass)", (table.name,))
    if cursor.fetchone() != ("rewritten",):
        cursor.execute(f"COMMENT ON TABLE {table.name} IS '{comment}'")


def _update_extra(cursor: Cursor, table: Table, where: str, rng: random.Random) -> None:
    """Set a column that was added."""
    extras = extras_of(cursor, table)
    if extras:
        name, kind = rng.choice(extras)
        n = rng.randrange(1, 100_000)
        values = {"text": f"repeat('{n}', 900)", "integer": str(n), "double precision": f"{n} / 7.0"}
        cursor.execute(f"UPDATE {table.name} SET {name} = {values.get(kind, 'DEFAULT')} WHERE {where}")


def _where(table: Table, names: Sequence[str | None], k: int) -> str:
    keys = zip(names[: table.key], table.columns, strict=False)
    return " AND ".join(f"{name} = {_value(value or '', k, 1)}" for name, (_, value) in keys)


def _settings(columns: Iterable[tuple[str | None, str | None]], k: int, n: int) -> str:
    return ", ".join(f"{name} = {_value(value or '', k, n)}" for name, value in columns)


def _value(value: str, k: int, n: int) -> str:
    return "(" + value.replace("$k", str(k)).replace("$n", str(n)) + ")"
