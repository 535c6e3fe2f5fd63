"""Several sessions that write to all kinds of tables at random: what a stream has to tell, it meets here."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import psycopg2
from databases import connect
from history import Table
from psycopg2.extensions import connection as Session
from psycopg2.extensions import cursor as Cursor
from threads import at_work

ITEMS = Table(
    "public.items",
    ("id", "n", "amount", "note", "flag", "at", "day", "raw", "numbers", "ratio"),
    ("id",),
    identity_columns=("id",),
)
JOURNAL = Table("public.journal", ("a", "b", "c"), identity="f")
PAIRS = Table("public.pairs", ("a", "b", "v", "big"), ("a", "b"), identity="f")
EVENTS = Table("public.events", ("id", "what", "payload"), ("id",), identity_columns=("id",))
ODD = Table('public."Odd, näme"', ("k", 'a"b', "t"), identity="i", identity_columns=("k",))
TABLES = (ITEMS, JOURNAL, PAIRS, EVENTS, ODD)
# What a session does, transaction by transaction, as long as somebody asks for more.
Steps = Generator[None, None, None]

# Between two transactions of a session.
PACE_SECONDS = 0.05

LEAVES = {f"public.events_{i}": EVENTS.name for i in (1, 2, 3)}

_CREATE = """
    CREATE SEQUENCE ids START 5000;
    CREATE TABLE items (
        id bigint PRIMARY KEY DEFAULT nextval('ids'), n int, amount numeric(12, 2), note text, flag boolean,
        at timestamptz, day date, raw bytea, numbers int[], ratio float8);
    ALTER TABLE items ALTER note SET STORAGE EXTERNAL, ALTER raw SET STORAGE EXTERNAL;

    CREATE TABLE journal (a int, b text, c text);
    ALTER TABLE journal ALTER c SET STORAGE EXTERNAL, REPLICA IDENTITY FULL;

    CREATE TABLE pairs (a int, b text, v numeric, big text, PRIMARY KEY (b, a));
    ALTER TABLE pairs ALTER big SET STORAGE EXTERNAL, REPLICA IDENTITY FULL;

    CREATE TABLE events (id int PRIMARY KEY, what text, payload jsonb) PARTITION BY RANGE (id);
    CREATE TABLE events_1 PARTITION OF events FOR VALUES FROM (0) TO (400);
    CREATE TABLE events_2 PARTITION OF events FOR VALUES FROM (400) TO (800);

    CREATE TABLE "Odd, näme" (k smallint NOT NULL, "a""b" int, t text);
    CREATE UNIQUE INDEX odd_k ON "Odd, näme" (k);
    ALTER TABLE "Odd, näme" REPLICA IDENTITY USING INDEX odd_k;

    CREATE TABLE unread (id bigint PRIMARY KEY DEFAULT nextval('ids'), x text);
    CREATE MATERIALIZED VIEW seen AS SELECT count(*) AS n FROM items;
"""
# Of another layout than its root; before PostgreSQL 15, such a partition cannot come under it.
_OTHER_LAYOUT = """
    CREATE TABLE events_3 (payload jsonb, gone int, id int NOT NULL PRIMARY KEY, what text);
    ALTER TABLE events_3 DROP gone;
    ALTER TABLE events ATTACH PARTITION events_3 FOR VALUES FROM (800) TO (1200);
"""
_SAME_LAYOUT = "CREATE TABLE events_3 PARTITION OF events FOR VALUES FROM (800) TO (1200);"

# What others may have done first; the transaction is rolled back, and that is one more kind of transaction.
_CONFLICTS = (
    psycopg2.errors.DeadlockDetected,
    psycopg2.errors.LockNotAvailable,
    psycopg2.errors.SerializationFailure,
    psycopg2.errors.UniqueViolation,
    # The server checks a row that another one's CREATE or ALTER has just changed.
    psycopg2.errors.InternalError_,
)


def create_tables(pg: Session) -> None:
    with pg.cursor() as cursor:
        cursor.execute(_CREATE)
        cursor.execute(_OTHER_LAYOUT if pg.server_version >= 150000 else _SAME_LAYOUT)


@dataclass
class Progress:
    """What the writers have done so far. Large transactions come first."""

    transactions: int = 0
    large_ones_done: bool = False


@contextmanager
def writers(db: str, *, seed: int, big: int, ddl: bool = True) -> Iterator[Progress]:
    """Three sessions that write at random, one that first writes ``big`` rows at once, one that alters tables.

    They go on until the block ends, at a pace that a stream can follow.
    """
    progress = Progress()

    def run(number: int, body: Callable[[Cursor, random.Random], Steps], stop: threading.Event) -> None:
        with connect(db) as session, session.cursor() as cursor:
            cursor.execute("SET deadlock_timeout = '50ms'; SET lock_timeout = '3s'; SET TimeZone = 'UTC'")
            with contextlib.closing(body(cursor, random.Random(f"{seed} {number}"))) as steps:
                for _ in steps:
                    progress.transactions += 1
                    if stop.wait(PACE_SECONDS):
                        break

    def write_big(cursor: Cursor, chance: random.Random) -> Steps:
        write_large(cursor, big)
        progress.large_ones_done = True
        return _write_as_replicated(cursor, chance)

    bodies = [_write, _write, _write, write_big, *([_alter] if ddl else [])]
    with at_work(*(partial(run, i, body) for i, body in enumerate(bodies))):
        yield progress


def mark(pg: Session) -> None:
    """Write the row that shows that everything before has come."""
    with pg.cursor() as cursor:
        cursor.execute("INSERT INTO items (id, note) VALUES (-1, 'the end')")


def _write(cursor: Cursor, chance: random.Random) -> Steps:
    while True:
        _transaction(cursor, chance)
        yield


def _transaction(cursor: Cursor, chance: random.Random) -> None:
    """One random transaction of one to some dozens of statements."""
    kind = chance.random()
    prepared = f"p{chance.getrandbits(60):x}"
    try:
        if kind < 0.3:
            _statement(cursor, chance)  # by itself
            return
        cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ" if kind > 0.9 else "BEGIN")
        for _ in range(min(int(chance.expovariate(0.2)), 40)):
            _step(cursor, chance, depth=0)
        if kind < 0.75:
            cursor.execute("COMMIT")
        elif kind < 0.8:
            cursor.execute(f"PREPARE TRANSACTION '{prepared}'")
            cursor.execute(f"{chance.choice(('COMMIT', 'COMMIT', 'ROLLBACK'))} PREPARED '{prepared}'")
        elif kind < 0.9:
            cursor.execute("ROLLBACK")
        else:
            cursor.execute("COMMIT")
    except _CONFLICTS:
        cursor.execute("ROLLBACK")


def _step(cursor: Cursor, chance: random.Random, depth: int) -> None:
    """A statement, or several between savepoints that are released or rolled back to."""
    if depth == 3 or chance.random() < 0.7:
        _statement(cursor, chance)
        return
    cursor.execute(f"SAVEPOINT s{depth}")
    try:
        for _ in range(chance.randint(0, 4)):
            _step(cursor, chance, depth + 1)
    except psycopg2.errors.UniqueViolation:
        cursor.execute(f"ROLLBACK TO s{depth}")
        return
    cursor.execute(f"{chance.choice(('RELEASE', 'RELEASE', 'ROLLBACK TO'))} s{depth}")


def _text(chance: random.Random) -> str | None:
    """A text, often one that is stored out of line."""
    kind = chance.random()
    if kind < 0.1:
        return None
    if kind < 0.4:
        return chance.choice("xyzä") * chance.randint(2100, 6000)
    return chance.choice(("", "plain", "it's", "null", 'quo"te', "ümlaut", "back\\slash", "two\nlines", "[x]:'1' y"))


def _statement(cursor: Cursor, chance: random.Random) -> None:
    statement, *values = chance.choice(_STATEMENTS)(chance)
    cursor.execute(statement, values)


_ROW = "(SELECT id FROM items WHERE id >= %s ORDER BY id LIMIT 1)"


def _low(chance: random.Random) -> int:
    """An id that the sequence does not give."""
    return chance.randint(0, 1000)


def _any_item(chance: random.Random) -> int:
    return chance.choice((_low(chance), chance.randint(5000, 8000)))


# Each gives a statement and its values.
_STATEMENTS: tuple[Callable[[random.Random], tuple[object, ...]], ...] = (
    # A primary key, default identity.
    lambda c: (
        "INSERT INTO items (n, amount, note, flag, at, day, raw, numbers, ratio)"
        " SELECT i, i / 7.0, %s, i %% 2 = 0, timestamptz '2024-02-29 12:00:00.25+00' + i * interval '1 hour 1 us',"
        " date '1999-12-31' + i, decode(%s, 'escape'), ARRAY[i, NULL, -i], i / 3.0::float8"
        " FROM generate_series(1, %s) AS i",
        _text(c),
        "b" * c.choice((0, 3, 3000)),
        c.choice((1, 1, 1, 5, 40)),
    ),
    lambda c: (f"UPDATE items SET n = n + 1, amount = -amount WHERE id = {_ROW}", _any_item(c)),
    lambda c: (f"UPDATE items SET note = %s, flag = NOT flag WHERE id = {_ROW}", _text(c), _any_item(c)),
    lambda c: (f"UPDATE items SET id = nextval('ids') WHERE id = {_ROW}", _any_item(c)),
    lambda c: ("UPDATE items SET n = -n WHERE id BETWEEN %s AND %s", (id := _any_item(c)), id + c.randint(0, 99)),
    lambda c: (f"DELETE FROM items WHERE id = {_ROW}", _any_item(c)),
    lambda c: (
        "INSERT INTO items (id, n, note) VALUES (%s, 0, %s) ON CONFLICT (id) DO UPDATE SET n = excluded.n, at = now()",
        _low(c),
        _text(c),
    ),
    # Keys that change places.
    lambda c: (
        "UPDATE items SET id = -10 - id WHERE id BETWEEN %(a)s AND %(a)s + 3;"
        " UPDATE items SET id = %(a)s * 2 + 3 + (id + 10) WHERE id <= -10".replace("%(a)s", str(_low(c))),
    ),
    # No key, identity FULL: rows that are equal, and values that are NULL.
    lambda c: (
        "INSERT INTO journal SELECT %s, %s, %s FROM generate_series(1, %s)",
        c.choice((None, 1, 2, 3)),
        c.choice((None, "b", "")),
        _text(c),
        c.choice((1, 2, 10)),
    ),
    lambda c: ("UPDATE journal SET b = b || '.' WHERE a = %s AND length(b) < 4", c.randint(1, 3)),
    lambda c: ("UPDATE journal SET c = %s WHERE a IS NULL", _text(c)),
    lambda c: (
        "DELETE FROM journal WHERE ctid IN (SELECT ctid FROM journal WHERE a = %s LIMIT %s)",
        c.randint(1, 3),
        c.randint(1, 20),
    ),
    # A primary key, identity FULL.
    lambda c: (
        "INSERT INTO pairs VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING",
        c.randint(1, 20),
        c.choice("abc"),
        c.choice((None, 0, 1.5)),
        _text(c),
    ),
    lambda c: ("UPDATE pairs SET v = coalesce(v, 0) + 1 WHERE a = %s", c.randint(1, 20)),
    lambda c: ("UPDATE pairs SET a = %s WHERE a = %s AND b = %s", c.randint(1, 20), c.randint(1, 20), c.choice("abc")),
    lambda c: ("DELETE FROM pairs WHERE a = %s", c.randint(1, 20)),
    # Partitions: rows go from one to another, and some come to a partition by its own name.
    lambda c: (
        "INSERT INTO events VALUES (%s, %s, jsonb_build_object('n', %s))"
        " ON CONFLICT (id) DO UPDATE SET what = excluded.what",
        c.randint(0, 1199),
        _text(c),
        c.randint(1, 9),
    ),
    lambda c: ("INSERT INTO events_3 (id, what) VALUES (%s, %s)", c.randint(800, 1199), _text(c)),
    lambda c: ("UPDATE events SET payload = NULL WHERE id BETWEEN %s AND %s", c.randint(0, 600), c.randint(600, 1199)),
    lambda c: (
        "UPDATE events SET id = %s WHERE id = (SELECT min(id) FROM events WHERE id >= %s)",
        c.randint(0, 1199),
        c.randint(0, 1199),
    ),
    lambda c: ("DELETE FROM events WHERE id BETWEEN %s AND %s", c.randint(0, 600), c.randint(600, 700)),
    # Names that need quotes, identity of an index.
    lambda c: (
        'INSERT INTO "Odd, näme" VALUES (%s, %s, %s) ON CONFLICT (k) DO UPDATE SET "a""b" = excluded."a""b"',
        c.randint(1, 50),
        c.choice((None, 7)),
        _text(c),
    ),
    lambda c: ('UPDATE "Odd, näme" SET k = %s WHERE k = %s', c.randint(1, 50), c.randint(1, 50)),
    lambda c: ('DELETE FROM "Odd, näme" WHERE k = %s', c.randint(1, 50)),
    # What no stream reads.
    lambda c: ("INSERT INTO unread (x) VALUES (%s)", _text(c)),
    lambda c: ("UPDATE unread SET x = %s", _text(c)),
    lambda c: ("SELECT pg_logical_emit_message(%s, 'prefix', 'content')", c.random() < 0.5),
    lambda c: ("SELECT txid_current()",),  # an empty transaction with an xid, where it stands alone
    lambda c: ("SELECT FROM items WHERE n = 1 FOR UPDATE",),
)


def write_large(cursor: Cursor, rows: int) -> None:
    """One transaction with ``rows`` rows, part of which are rolled back and written again; one of subtransactions."""
    insert = "INSERT INTO items (n, note) SELECT i, %s FROM generate_series(1, %s) AS i"
    # However long DDL holds it up: nobody writes it again.
    cursor.execute("BEGIN; SET LOCAL lock_timeout = 0")
    cursor.execute(insert, ("first", rows // 2))
    cursor.execute("SAVEPOINT middle")
    cursor.execute(insert, ("never", rows // 10))
    cursor.execute("ROLLBACK TO middle")
    cursor.execute("INSERT INTO journal SELECT i, 'big' FROM generate_series(1, %s) AS i", (rows // 10,))
    cursor.execute(insert, ("second", rows - rows // 2 - rows // 10))
    cursor.execute("COMMIT")
    # More than what a backend caches of its subtransactions, 64.
    cursor.execute("BEGIN; SET LOCAL lock_timeout = 0")
    for i in range(150):
        cursor.execute(f"SAVEPOINT s; INSERT INTO journal (a, b) VALUES ({i}, 'nested')")
        cursor.execute("ROLLBACK TO s" if i % 3 == 0 else "RELEASE s")
    cursor.execute("COMMIT")
    with contextlib.suppress(*_CONFLICTS):
        cursor.execute("DELETE FROM items WHERE note = 'first' AND id % 7 = 0")


def _write_as_replicated(cursor: Cursor, chance: random.Random) -> Steps:
    """Write what another server's replication would bring: it is announced by a message more."""
    cursor.execute("SELECT pg_replication_origin_create('of_' || current_database())")
    cursor.execute("SELECT pg_replication_origin_session_setup('of_' || current_database())")
    try:
        yield from _write(cursor, chance)
    finally:
        cursor.execute("SELECT pg_replication_origin_session_reset()")
        cursor.execute("SELECT pg_replication_origin_drop('of_' || current_database())")


def _alter(cursor: Cursor, chance: random.Random) -> Steps:
    """DDL of all kinds that leaves the columns of streamed tables as they are, between changes and among them."""
    for i in itertools.count():
        for statement in _DDL:
            try:
                cursor.execute(statement.format(i=i, before=max(0, i - 1)))
            except _CONFLICTS:
                cursor.execute("ROLLBACK")
            yield


_DDL = (
    "CREATE TABLE extra_{i} (id int PRIMARY KEY, t text); INSERT INTO extra_{i} VALUES (1, 'x')",
    "ALTER TABLE unread ADD COLUMN added_{i} int DEFAULT {i}",
    "BEGIN; INSERT INTO items (n) VALUES ({i}); ALTER TABLE extra_{i} ADD COLUMN u int;"
    " INSERT INTO items (n) VALUES (-{i}); INSERT INTO extra_{i} VALUES (2, 'y', 3); COMMIT",
    "ALTER TABLE items ALTER n SET STATISTICS {i}",
    "ALTER TABLE items ALTER note SET STORAGE EXTENDED; ALTER TABLE items ALTER note SET STORAGE EXTERNAL",
    "BEGIN; UPDATE pairs SET v = {i} WHERE a = 1; ALTER TABLE pairs ADD CONSTRAINT c{i} CHECK (a > 0) NOT VALID;"
    " UPDATE pairs SET v = -{i} WHERE a = 1; ALTER TABLE pairs DROP CONSTRAINT c{i}; COMMIT",
    "BEGIN; CREATE INDEX journal_{i} ON journal (a); INSERT INTO journal VALUES ({i}, 'indexed'); ROLLBACK",
    "BEGIN; TRUNCATE journal, unread; INSERT INTO journal VALUES ({i}, 'after'); COMMIT",
    'TRUNCATE pairs, extra_{i}, "Odd, näme" RESTART IDENTITY CASCADE',
    "BEGIN; TRUNCATE events; ROLLBACK",
    "BEGIN; INSERT INTO events VALUES (5, 'before') ON CONFLICT DO NOTHING; TRUNCATE events; COMMIT",
    "REFRESH MATERIALIZED VIEW seen",
    "VACUUM FULL journal",
    "CLUSTER items USING items_pkey",
    "ANALYZE",
    "ALTER TABLE unread DROP COLUMN IF EXISTS added_{i}; DROP TABLE IF EXISTS extra_{before} CASCADE",
)
