"""Lock the tables that a snapshot reads, and find out whether DDL came before the lock.

TRUNCATE and rewrites of tables do not follow snapshots: a reader that comes later sees an empty table. Partitions,
children and views are expanded by the catalog as it is now, whatever the snapshot sees of it. A lock (ACCESS SHARE, as
pg_dump takes it) keeps such DDL away from then on, and the checks here, made under the lock, find what came before it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import psycopg2
from psycopg2 import sql
from psycopg2.extensions import connection as Session
from psycopg2.extensions import cursor as Cursor

from pg_cdc_source.errors import SchemaChangedError, TransientError
from pg_cdc_source.postgres import search_path
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.catalog import Relation
from pg_cdc_source.postgres.lock_waits import describe_lockers, waiting_for_nobody
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.trees import TREE

# What Spark has broadcast, shuffled or read for a subquery of a DataFrame, it does not run again.
RUN_AGAIN = (
    "run the action again: it takes a new snapshot. Call it on df.select('*') or on a DataFrame loaded anew, because "
    "Spark keeps parts of one that has run"
)
# A new action does not help where the snapshot outlives actions.
_RETAKE = (
    f"{RUN_AGAIN}. A snapshot that open_snapshot() or a stream's query holds is "
    "replaced by opening or starting that again"
)


def begin_locking(session: Session) -> None:
    """Remember which locks the transaction has now; ``release_locks`` releases those that come after."""
    with translated("preparing locks"), session.cursor() as cursor:
        cursor.execute("SAVEPOINT unlocked")


def release_locks(session: Session) -> None:
    """Release the locks since ``begin_locking``; the transaction and its snapshot stay."""
    with translated("releasing locks"), session.cursor() as cursor:
        cursor.execute("ROLLBACK TO unlocked")


# pg_class as a query sees it belongs to the snapshot; the names of regclass are those of the catalog as it is now, and
# an oid where there is none. They have no schema where this package's own search_path finds them.
_READ_NAMES = """
SELECT format('%%I.%%I', n.nspname, c.relname),
    CASE n.nspname WHEN 'pg_catalog' THEN 'pg_catalog.' ELSE '' END || nullif(%s::regclass::text, c.oid::text),
    c.relkind = 'p' AND has_table_privilege(c.oid, 'SELECT')
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.oid = %s
"""


# pg_blocking_pids() stops all who ask for locks for a moment, so it is asked only of sessions that wait for one.
_IS_WAITED_FOR = """
SELECT EXISTS (
    SELECT FROM pg_catalog.pg_locks
    WHERE NOT granted AND pg_catalog.pg_backend_pid() = ANY (pg_catalog.pg_blocking_pids(pid))
)
"""


def lock_relations(sessions: Sequence[Session], oids: Collection[int], *, within_seconds: float) -> None:
    """Lock relations and all they consist of (ACCESS SHARE) in each session, for as long as its transaction runs.

    It is tried for ``within_seconds``. None is waited for while others are held: DDL that locks several would meet
    these sessions in a deadlock, and PostgreSQL may end the DDL. Where somebody waits for a session while one cannot be
    had, all locks since ``begin_locking`` are let go, and tried again.

    Nothing is done for a relation that the snapshot does not have. Raises SchemaChangedError for one that was dropped
    after it.
    """
    wanted = [(session, oid) for session in sessions for oid in oids]
    missing, locked = wanted, ""
    for _ in Backoff(0.005, longest_seconds=0.25, within_seconds=within_seconds).polls():
        try:
            while missing:
                _try_to_lock(*missing[0])
                missing = missing[1:]
            return
        except _LockedError as error:
            locked = error.what
        except _NoRoomError:
            # Nobody else can lock anything either.
            for session in sessions:
                release_locks(session)
            raise
        if any(map(_is_waited_for, sessions)):
            for session in sessions:
                release_locks(session)
            missing = wanted
    lockers = describe_lockers(sessions[0])
    raise TransientError(f"{locked} within {within_seconds:g} s" + (f"; locked are {lockers}" if lockers else ""))


class _NoRoomError(TransientError):
    """The server has no memory for a lock, which all sessions share."""


class _LockedError(TransientError):
    """Somebody has a lock that keeps readers away, or waits for one."""


def _try_to_lock(session: Session, oid: int) -> None:
    """Lock a relation and all it consists of, or nothing of it.

    A SELECT also locks partitions, children and the tables under a view; it needs only column privileges, and works for
    kinds that LOCK TABLE refuses. For 2,000 partitions it takes 0.2 s of the server's CPU, LOCK TABLE 10 ms.
    """
    with translated(f"locking the relation with oid {oid}"), session.cursor() as cursor:
        try:
            _lock(cursor, oid)
        except psycopg2.errors.OutOfMemory as error:
            raise _NoRoomError(
                f"the server has no room for further locks: {error.diag.message_primary}",
                remedy="if that does not pass, raise max_locks_per_transaction, or read fewer tables at a time",
            ) from None


def _lock(cursor: Cursor, oid: int) -> None:
    cursor.execute(_READ_NAMES, (oid, oid))
    row = cursor.fetchone()
    if row is None:
        return
    name, name_now, lockable = row
    if name_now is None:
        raise _dropped(name)
    cursor.execute("SAVEPOINT locks")
    try:
        if lockable:
            lock = "LOCK TABLE {} IN ACCESS SHARE MODE NOWAIT"
            search_path.execute_by_role(cursor, sql.SQL(lock).format(sql.SQL(name_now)))
        else:
            with waiting_for_nobody(cursor, within="1ms"):
                search_path.execute_by_role(cursor, sql.SQL("SELECT FROM {} LIMIT 0").format(sql.SQL(name_now)))
    except psycopg2.errors.UndefinedTable:
        cursor.execute("ROLLBACK TO locks")
        raise _dropped(name) from None
    except psycopg2.errors.LockNotAvailable:
        cursor.execute("ROLLBACK TO locks")
        raise _LockedError(f"{name} could not be locked for its readers") from None
    except psycopg2.Error:
        # The snapshot has to survive a lock that was not granted.
        cursor.execute("ROLLBACK TO locks")
        raise
    finally:
        cursor.execute("RELEASE locks")


def _is_waited_for(session: Session) -> bool:
    """Whether somebody waits for a lock of this session."""
    with translated("looking who waits for locks"), session.cursor() as cursor:
        cursor.execute(_IS_WAITED_FOR)
        [found] = cursor.fetchone()
        return bool(found)


# As long as a session waits for one lock (lock_timeout).
_LOCKED = Backoff(0.005, longest_seconds=0.25, within_seconds=60)


def lock_together(session: Session, tables: Sequence[Relation], doing: str) -> None:
    """Lock several tables (ACCESS SHARE), each by itself. Call it after ``begin_locking`` or ``release_locks``.

    None is waited for while others are held, because DDL that locks several, as TRUNCATE of a partitioned table does,
    must not meet a session that does as well. So all are let go while one cannot be had.
    """
    statement = sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE NOWAIT").format(
        sql.SQL(", ").join(sql.SQL("ONLY {}").format(table.identifier) for table in tables)
    )
    locked_by_others = ""
    for _ in _LOCKED.polls():
        with translated(doing), session.cursor() as cursor:
            try:
                cursor.execute(statement)
                return
            except psycopg2.errors.LockNotAvailable as error:
                locked_by_others = str(error.diag.message_primary)
                cursor.execute("ROLLBACK TO unlocked")
    raise TransientError(f"{doing}: {locked_by_others}")


# pg_class as a query sees it belongs to the snapshot; pg_relation_filenode() looks at the catalog as it is now, and so
# do pg_get_indexdef() and pg_describe_object(). A query locks all indexes of its tables, also those that are being made
# concurrently.
_OTHER_FILE = "c.relfilenode <> 0 AND c.relfilenode IS DISTINCT FROM pg_catalog.pg_relation_filenode(c.oid)"

# A virtual generated column is computed by its present expression, and a new one is another row of the catalog. Not
# EXISTS, for which PostgreSQL would read the columns of all tables.
_OTHER_EXPRESSION = """%(virtual)s AND (
    SELECT bool_or(pg_catalog.pg_describe_object('pg_catalog.pg_attrdef'::regclass, d.oid, 0) IS NULL)
    FROM pg_catalog.pg_attribute AS a
    JOIN pg_catalog.pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    WHERE a.attrelid = c.oid AND a.attgenerated = 'v'
)"""
_VIRTUAL_VERSION = 180000

_FIND_CHANGED = f"""
SELECT l.relation::regclass::text, c.oid IS NULL, {_OTHER_FILE}
FROM pg_catalog.pg_locks AS l
LEFT JOIN pg_catalog.pg_class AS c ON c.oid = l.relation
WHERE l.pid = pg_catalog.pg_backend_pid()
    AND l.locktype = 'relation'
    AND (
        c.oid IS NULL AND pg_catalog.pg_get_indexdef(l.relation) IS NULL
        OR c.relkind IN ('r', 'm', 't') AND {_OTHER_FILE}
        OR {_OTHER_EXPRESSION}
    )
LIMIT 1
"""


def check_files(session: Session, doing: str) -> None:
    """Raise SchemaChangedError when a relation locked by this session was rewritten or made after its snapshot.

    Under a lock, the same file in the snapshot and now means that the heap still holds what the snapshot should see.
    Its virtual generated columns have to have the same expressions as well.
    """
    _check_files(session, _FIND_CHANGED, {"virtual": session.server_version >= _VIRTUAL_VERSION}, doing)


# All that a backend holds is found in pg_locks only among the locks of all backends, some thousands where a snapshot of
# a table with as many partitions is held.
_FIND_CHANGED_OF = f"""
SELECT t.oid::regclass::text, c.oid IS NULL, {_OTHER_FILE}
FROM unnest(%(oids)s::oid[]) AS t (oid)
LEFT JOIN pg_catalog.pg_class AS c ON c.oid = t.oid
WHERE c.oid IS NULL OR {_OTHER_FILE} OR {_OTHER_EXPRESSION}
LIMIT 1
"""


def check_files_of(session: Session, tables: Sequence[Relation], doing: str, *, virtual: bool) -> None:
    """As ``check_files``, of these tables only, which are locked; ``virtual`` says whether they have such columns."""
    _check_files(session, _FIND_CHANGED_OF, {"oids": [table.oid for table in tables], "virtual": virtual}, doing)


# All that tables consist of in the snapshot, by the names there, and whether these mean the same tables now. What only
# inherits from one is a table of its own, and of a schema that this role may not use, names mean nothing to it.
_READ_TREES = f"""
WITH RECURSIVE {TREE}
SELECT c.oid::bigint, names.name,
    CASE WHEN has_schema_privilege(n.oid, 'USAGE') THEN to_regclass(names.name) IS NOT DISTINCT FROM c.oid ELSE true END
FROM tree
JOIN pg_catalog.pg_class AS c ON c.oid = tree.oid AND (c.relispartition OR tree.oid = tree.root)
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
CROSS JOIN LATERAL (SELECT format('%%I.%%I', n.nspname, c.relname)) AS names (name)
"""


def check_files_under(session: Session, oids: Collection[int], doing: str) -> None:
    """As ``check_files``, of tables that nobody has locked: it tells what was, and not what is still to come.

    Raises SchemaChangedError also where one of them has another name now.
    """
    with translated(doing), session.cursor() as cursor:
        cursor.execute(_READ_TREES, {"roots": list(oids)})
        tree = cursor.fetchall()
    if renamed := [name for _, name, is_same in tree if not is_same]:
        raise SchemaChangedError(
            f"{doing}: {renamed[0]} was renamed or dropped after the snapshot was taken", remedy=_RETAKE
        )
    parameters = {"oids": [oid for oid, *_ in tree], "virtual": session.server_version >= _VIRTUAL_VERSION}
    _check_files(session, _FIND_CHANGED_OF, parameters, doing)


def _check_files(session: Session, query: str, parameters: dict[str, object], doing: str) -> None:
    with translated(doing), session.cursor() as cursor:
        cursor.execute(query, parameters)
        row = cursor.fetchone()
    if row is not None:
        name, is_new, is_rewritten = row
        if is_new or is_rewritten:
            what, so = "was created" if is_new else "was truncated or rewritten", "does not see its rows"
        else:
            what, so = "got another expression for a virtual generated column", "had other values"
        raise SchemaChangedError(
            f"{doing}: {name} {what} after the snapshot was taken, so the snapshot {so}", remedy=_RETAKE
        )


# Oids from 16384 on are given out once a cluster is made (transam.h, FirstNormalObjectId).
_READ_LOCKED = """
SELECT c.oid::bigint
FROM pg_catalog.pg_locks AS l
JOIN pg_catalog.pg_class AS c ON c.oid = l.relation
WHERE l.pid = pg_catalog.pg_backend_pid()
    AND l.locktype = 'relation'
    AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
    AND c.oid >= 16384
"""


def read_locked(session: Session, doing: str) -> set[int]:
    """The oids of all that this session has locked and rows come from; the system's own catalogs are not among them."""
    with translated(doing), session.cursor() as cursor:
        cursor.execute(_READ_LOCKED)
        return {oid for (oid,) in cursor}


def check_expansion(session: Session, present: Session, oids: Collection[int], doing: str) -> None:
    """Raise SchemaChangedError when relations consist of other parts now than in this session's snapshot.

    The session has them locked. The rows of the catalog by which PostgreSQL expands them are compared with those that
    ``present`` sees, a session without a snapshot.
    """
    query = " UNION ALL ".join(_part_queries(present, doing))
    then, now = (_read_parts(of, query, list(oids), doing) for of in (session, present))
    if then != now:
        with translated(doing), present.cursor() as cursor:
            cursor.execute("SELECT %s::oid::regclass::text", (min(then ^ now)[0],))
            [name] = cursor.fetchone()
        raise SchemaChangedError(
            f"{doing}: {name} got or lost a partition or child, or was defined anew, after the snapshot was taken, so "
            "other rows would be read than the snapshot's",
            remedy=_RETAKE,
        )


# xmin shows a row that came and went in between.
_READ_PARTS = (
    """
    SELECT inhparent::text, inhrelid::text, xmin::text
    FROM pg_catalog.pg_inherits
    WHERE inhparent = ANY(%(oids)s::oid[]) OR inhrelid = ANY(%(oids)s::oid[])
    """,
    """
    SELECT ev_class::text, oid::text, xmin::text
    FROM pg_catalog.pg_rewrite
    WHERE ev_class = ANY(%(oids)s::oid[])
    """,
)
# TimescaleDB's own, by where it says which chunks are compressed; before and from its 2.29 on. A chunk that was
# decompressed is empty to a snapshot from before (timescale/timescaledb#6841).
_READ_CHUNKS = {
    ("chunk", "compressed_chunk_id"): """
    SELECT c.oid::text, coalesce(chunk.compressed_chunk_id::text, ''), ''
    FROM _timescaledb_catalog.chunk AS chunk
    JOIN pg_catalog.pg_namespace AS n ON n.nspname = chunk.schema_name
    JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid AND c.relname = chunk.table_name
    WHERE c.oid = ANY(%(oids)s::oid[])
    """,
    ("compression_settings", "compress_relid"): """
    SELECT relid::oid::text, coalesce(compress_relid::oid::text, ''), ''
    FROM _timescaledb_catalog.compression_settings
    WHERE relid = ANY(%(oids)s::oid[])
    """,
}
_FIND_CHUNKS = """
SELECT c.relname, a.attname
FROM pg_catalog.pg_namespace AS n
JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid
JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND NOT a.attisdropped
WHERE n.nspname = '_timescaledb_catalog'
    AND has_schema_privilege(n.oid, 'USAGE')
    AND has_table_privilege(c.oid, 'SELECT')
"""


def _part_queries(session: Session, doing: str) -> list[str]:
    with translated(doing), session.cursor() as cursor:
        cursor.execute(_FIND_CHUNKS)
        columns = set(cursor)
    return [*_READ_PARTS, *[query for place, query in _READ_CHUNKS.items() if place in columns][:1]]


def _read_parts(session: Session, query: str, oids: list[int], doing: str) -> set[tuple[str, ...]]:
    """The rows by which PostgreSQL, or an extension, expands these relations, the relation's oid first."""
    with translated(doing), session.cursor() as cursor:
        cursor.execute(query, {"oids": oids})
        return set(cursor)


# A statement finds tables and columns by their present names. pg_identify_object() has these; pg_class and pg_attribute
# have those of the snapshot, as queries see them.
_NAME_NOW = "(pg_catalog.pg_identify_object('pg_catalog.pg_class'::regclass, c.oid, {})).identity"
_FIND_RENAMED = f"""
SELECT names.was, names.now
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
CROSS JOIN LATERAL (
    SELECT format('%%I.%%I', n.nspname, c.relname) AS was, {_NAME_NOW.format(0)} AS now
    UNION ALL
    SELECT format('%%I.%%I.%%I', n.nspname, c.relname, a.attname), {_NAME_NOW.format("a.attnum")}
    FROM pg_catalog.pg_attribute AS a
    WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
    UNION ALL
    SELECT NULL, {_NAME_NOW.format("c.relnatts + 1")}
    WHERE c.oid = ANY(%(whole)s::oid[])
) AS names
WHERE c.oid = ANY(%(oids)s::oid[]) AND names.was IS DISTINCT FROM names.now
LIMIT 1
"""
# Before, what is not there is an error instead of NULL.
_NULL_NAMES_VERSION = 140000


def check_names(session: Session, oids: Collection[int], doing: str, *, whole: Collection[int] = ()) -> None:
    """Raise SchemaChangedError where locked relations, or their columns, have other names than in the snapshot.

    SQL that names them would read others. ``whole``: also where these have more columns, which NATURAL JOIN or
    ``to_jsonb(t)`` would take in; not on PostgreSQL 13.
    """
    parameters = {"oids": list(oids), "whole": list(whole) if session.server_version >= _NULL_NAMES_VERSION else []}
    with translated(doing), session.cursor() as cursor:
        cursor.execute(_FIND_RENAMED, parameters)
        row = cursor.fetchone()
    if row is not None:
        was, now = row
        if was is None:
            what = f"{now} was added"
        else:
            # attname of a column that is gone
            what = f"{was} was dropped" if "........pg.dropped." in now else f"{was} is {now} now"
        raise SchemaChangedError(
            f"{doing}: names that its SQL may use have changed after the snapshot was taken: {what}",
            remedy=_RETAKE,
        )


def _dropped(name: str) -> SchemaChangedError:
    return SchemaChangedError(f"{name} was dropped after the snapshot was taken", remedy=_RETAKE)
