"""Make, hold and import snapshots.

The consistent point is where a logical slot starts: the snapshot that a new slot exports holds every commit before it,
and the slot's stream gives every commit at or after it. So a slot, even one that lives for a moment, turns "a snapshot"
into "the snapshot at this LSN".

- A temporary slot is dropped inside the exporting transaction as soon as its LSN is known. The snapshot stays valid and
  no WAL is held back while tables are copied.
- Any transaction that imported a snapshot can export it again, and the new id outlives the first exporter. So the
  session with the slot leaves as soon as plain sessions hold the snapshot: no walsender is kept.
- Every id dies with the session that exported it, so each holder exports an id of its own and announces it in its
  ``application_name``; its LSN it announces as a shared advisory lock with that key. Both are visible to every session
  of the role, on primaries and standbys, without a table, a port or a file.

TRUNCATE and rewrites of tables do not follow snapshots: a reader that comes later sees an empty table. ``check_files``
finds that out under the reader's own lock; the holder's locks only make it rare.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg2
from psycopg2 import sql
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import (
    DefiniteError,
    SchemaChangedError,
    ServerSetupError,
    SnapshotLostError,
    TransientError,
)
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.options.declared import ConsistentPoint
from pg_cdc_source.options.names import QualifiedName, quoted
from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.postgres import catalog
from pg_cdc_source.postgres.catalog import Relation, Server
from pg_cdc_source.postgres.connection import connect
from pg_cdc_source.postgres.server_errors import translate, translated

_BEGIN = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"

# The end of remedies where a snapshot is what is wanted: a stream cannot do without a slot.
_DO_WITHOUT = ", or use consistentPoint=off (a snapshot without LSN)"


@dataclass(frozen=True, slots=True)
class SnapshotSpec:
    """How a snapshot is to be made; the part of the options that its maker needs. ``failover`` is the slot's."""

    consistent_point: ConsistentPoint
    slot: str | None
    slot_timeout_seconds: float
    failover: bool = False


@dataclass(slots=True)
class Held:
    """A snapshot and the sessions that keep it open. Each session's own id is beside it."""

    lsn: Lsn | None
    holders: list[tuple[Session, str]] = field(default_factory=list)

    def add_holder(self, options: ConnectionOptions, name_for: Callable[[str], str], source_id: str) -> None:
        """Import ``source_id`` into one more session, export it there, and announce it under ``name_for(id)``."""
        session = connect(options, name_for(""))
        try:
            import_snapshot(session, source_id)
            own_id = export_snapshot(session)
            with translated("announcing a snapshot"), session.cursor() as cursor:
                if self.lsn is not None:
                    cursor.execute("SELECT pg_advisory_xact_lock_shared(%s)", (int(self.lsn),))
                cursor.execute("SELECT set_config('application_name', %s, false)", (name_for(own_id),))
            begin_locking(session)
        except BaseException:
            session.close()
            raise
        self.holders.append((session, own_id))

    def lock(self, oids: Sequence[int], *, timeout: str) -> None:
        """Lock relations (ACCESS SHARE, with all they consist of) on every holder, as pg_dump does."""
        for session, _ in self.holders:
            for oid in oids:
                lock_relation(session, oid, timeout=timeout)

    def unlock(self) -> None:
        """Let go of all locks; the snapshot stays."""
        for session, _ in self.holders:
            release_locks(session)

    def close(self) -> None:
        for session, _ in self.holders:
            session.close()
        self.holders.clear()


def make_snapshot(
    options: ConnectionOptions,
    spec: SnapshotSpec,
    name_for: Callable[[str], str],
    *,
    holders: int,
    stream: bool = False,
) -> Held:
    """Make a snapshot as ``spec`` says, and hold it on ``holders`` plain sessions.

    ``name_for`` gives the application_name for a snapshot id ("" before there is one). With a consistent point the LSN
    is that point minus one, the greatest position the snapshot contains. Raises what keeps a wanted consistent point
    from being had; under ``auto`` a plain snapshot without an LSN is made instead. ``stream`` words errors for the slot
    of a stream, which cannot do without.
    """
    session = connect(options, name_for(""))
    try:
        server = catalog.read_server(session)
        # On a standby a slot waits for what the primary writes at its leisure, or not at all: too long for a maybe.
        if spec.consistent_point == "require" or (spec.consistent_point == "auto" and not server.in_recovery):
            try:
                require_consistent_point(server, stream=stream, failover=spec.failover)
                return _at_consistent_point(options, spec, name_for, holders, session, server, stream=stream)
            except (ServerSetupError, TransientError):
                if spec.consistent_point == "require":
                    raise
        with translated("opening a snapshot"), session.cursor() as cursor:
            cursor.execute(_BEGIN)
        return _hold(options, Held(lsn=None), name_for, holders, export_snapshot(session))
    finally:
        session.close()


def require_consistent_point(server: Server, *, stream: bool = False, failover: bool = False) -> None:
    """Raise ServerSetupError when this server or role cannot make a logical slot (see ``lacks_for_slot``)."""
    for error in lacks_for_slot(server, stream=stream, failover=failover):
        raise error


def lacks_for_slot(server: Server, *, stream: bool, failover: bool) -> Iterator[ServerSetupError]:
    """All that keeps this server or role from making a logical slot, worded for what it is made for.

    ``failover`` asks for a slot that standbys keep a copy of.
    """
    what, otherwise = ("a stream", "") if stream else ("a consistent point", _DO_WITHOUT)
    if server.wal_level != "logical":
        yield ServerSetupError(
            f"{what} needs wal_level=logical, but it is {server.wal_level}",
            remedy=f"set wal_level=logical and restart PostgreSQL{otherwise}",
        )
    if not server.may_replicate:
        yield ServerSetupError(
            f"{what} needs the right to use replication slots, which role {server.role} lacks",
            remedy=f"ALTER ROLE {quoted(server.role)} REPLICATION{otherwise}",
        )
    if server.in_recovery and server.version_num < 160000:
        yield ServerSetupError(
            f"{what} on a standby needs PostgreSQL 16 or later", remedy=f"connect to the primary{otherwise}"
        )
    if failover and server.version_num < 170000:
        yield ServerSetupError(
            "standbys keep copies of slots from PostgreSQL 17 on", remedy="leave out the option failover"
        )
    elif failover and server.in_recovery:
        yield ServerSetupError(
            "a standby makes no slots that other standbys keep copies of",
            remedy="connect to the primary, or leave out the option failover",
        )


def _hold(options: ConnectionOptions, held: Held, name_for: Callable[[str], str], holders: int, source_id: str) -> Held:
    try:
        for _ in range(holders):
            held.add_holder(options, name_for, source_id)
    except BaseException:
        held.close()
        raise
    return held


def _at_consistent_point(
    options: ConnectionOptions,
    spec: SnapshotSpec,
    name_for: Callable[[str], str],
    holders: int,
    watcher: Session,
    server: Server,
    *,
    stream: bool,
) -> Held:
    slot = spec.slot or f"pgsnapshot_{secrets.token_hex(8)}"
    if spec.slot:
        refuse_existing_slot(watcher, spec.slot, stream=stream)
    session = connect(options, name_for(""), replication=True)
    created = False
    try:
        with session.cursor() as cursor:
            with translated("opening a snapshot"):
                cursor.execute(_BEGIN)
            kind = "" if spec.slot else "TEMPORARY "
            # The bare word works on every supported version. The command has to come first in its transaction.
            how = "(SNAPSHOT 'use', FAILOVER true)" if spec.failover else "USE_SNAPSHOT"
            create = f'CREATE_REPLICATION_SLOT "{slot}" {kind}LOGICAL pgoutput {how}'
            consistent_point = _create_slot(cursor, create, slot, spec, watcher, server, stream=stream)
            created = True
            snapshot_id = export_snapshot(session)
            if not spec.slot:
                with translated(f"dropping the temporary slot {slot}"):
                    cursor.execute(f'DROP_REPLICATION_SLOT "{slot}"')
        return _hold(options, Held(lsn=Lsn(consistent_point - 1)), name_for, holders, snapshot_id)
    except BaseException:
        session.close()
        if created and spec.slot:
            drop_slot(watcher, spec.slot)
        raise
    finally:
        session.close()


def refuse_existing_slot(session: Session, slot: str, *, stream: bool) -> None:
    with translated(f"looking for slot {slot}"), session.cursor() as cursor:
        cursor.execute(
            "SELECT plugin, database, active_pid FROM pg_catalog.pg_replication_slots WHERE slot_name = %s", (slot,)
        )
        row = cursor.fetchone()
    if row is not None:
        state = f"used by pid {row[2]}" if row[2] else "not in use"
        hint = (
            "A DataFrame with the option slot makes its slot in its first action; for several actions at that point "
            "use open_snapshot()"
        )
        if stream:
            hint = "To read on from where it stands, without a snapshot: startFrom=slot"
        raise DefiniteError(
            f"slot {slot} exists already (plugin {row[0]}, database {row[1]}, {state}); a snapshot can only be taken "
            "where a new slot starts",
            remedy=f"choose another name, or drop it: SELECT pg_drop_replication_slot('{slot}'). {hint}",
        )


def drop_slot(session: Session, slot: str) -> None:
    with translated(f"dropping slot {slot}"), session.cursor() as cursor:
        cursor.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_catalog.pg_replication_slots WHERE slot_name = %s",
            (slot,),
        )


def _create_slot(
    cursor: Any, create: str, slot: str, spec: SnapshotSpec, watcher: Session, server: Server, *, stream: bool
) -> Lsn:
    """Create the slot within slotTimeout; statement_timeout does not end this command, a cancel does."""
    timeout_seconds = spec.slot_timeout_seconds
    timer = threading.Timer(timeout_seconds, cursor.connection.cancel)
    timer.start()
    try:
        cursor.execute(create)
        return Lsn.parse(cursor.fetchone()[1])
    except psycopg2.errors.QueryCanceled:
        otherwise = "" if stream else _DO_WITHOUT
        if server.in_recovery:
            raise TransientError(
                f"slot {slot} found no consistent point within {timeout_seconds:g} s, because on a standby it waits "
                "until the primary has logged its running transactions, and these have ended",
                remedy="run SELECT pg_log_standby_snapshot() on the primary while the slot waits; or raise slotTimeout"
                f"{otherwise}",
            ) from None
        raise TransientError(
            f"slot {slot} found no consistent point within {timeout_seconds:g} s, because it waits for every running "
            f"transaction that has written: {_writers(watcher)}",
            remedy=f"end them, or raise slotTimeout{otherwise}",
        ) from None
    except psycopg2.errors.ConfigurationLimitExceeded as error:
        raise ServerSetupError(
            f"slot {slot} cannot be created: {error.diag.message_primary}",
            remedy="raise max_replication_slots, or drop slots that nobody uses (pg_replication_slots)",
        ) from None
    except psycopg2.Error as error:
        raise translate(error, f"creating slot {slot}") from None
    finally:
        timer.cancel()


def _writers(session: Session) -> str:
    with translated("looking for running transactions"), session.cursor() as cursor:
        cursor.execute(
            "SELECT 'pid ' || coalesce(a.pid::text, '? (prepared)') || ' for '"
            " || extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, p.prepared))::int || ' s'"
            " FROM (SELECT pid, xact_start, backend_xid FROM pg_catalog.pg_stat_activity"
            " WHERE backend_xid IS NOT NULL) AS a"
            " FULL JOIN pg_catalog.pg_prepared_xacts AS p ON p.transaction = a.backend_xid"
            " ORDER BY coalesce(a.xact_start, p.prepared) LIMIT 5"
        )
        return ", ".join(text for (text,) in cursor) or "none is visible to this role any more"


def export_snapshot(session: Session) -> str:
    with translated("exporting a snapshot"), session.cursor() as cursor:
        cursor.execute("SELECT pg_catalog.pg_export_snapshot()")
        return str(cursor.fetchone()[0])


def import_snapshot(session: Session, snapshot_id: str) -> None:
    """Begin a read-only transaction that sees the snapshot. Raises SnapshotLostError when it has ended."""
    try:
        with session.cursor() as cursor:
            cursor.execute(sql.SQL("{}; SET TRANSACTION SNAPSHOT {}").format(sql.SQL(_BEGIN), sql.Literal(snapshot_id)))
    except psycopg2.Error as error:
        if error.pgcode in ("22023", "55000", "42704"):
            # The session may find another one.
            with translated(f"leaving snapshot {snapshot_id}"), session.cursor() as cursor:
                cursor.execute("ROLLBACK")
            raise SnapshotLostError(
                f"snapshot {snapshot_id} has ended ({error.diag.message_primary})",
                remedy="keep the session that exported it open until the last reader is done, and run the action again",
            ) from None
        raise translate(error, f"importing snapshot {snapshot_id}") from None


def announced_lsn(session: Session, snapshot_id: str) -> Lsn | None:
    """The LSN of a snapshot that a session of this package holds; None for one without, or of somebody else."""
    with translated(f"looking for the LSN of snapshot {snapshot_id}"), session.cursor() as cursor:
        cursor.execute(
            "SELECT (l.classid::bigint << 32) | l.objid::bigint FROM pg_catalog.pg_stat_activity AS a"
            " JOIN pg_catalog.pg_locks AS l ON l.pid = a.pid AND l.locktype = 'advisory' AND l.objsubid = 1"
            " WHERE a.application_name LIKE 'pgsnapshot:%%' AND right(a.application_name, %s) = %s LIMIT 1",
            (len(snapshot_id) + 1, f":{snapshot_id}"),
        )
        row = cursor.fetchone()
        return None if row is None else Lsn(row[0])


def begin_locking(session: Session) -> None:
    """Remember which locks the transaction has now; those that come are let go of by ``release_locks``."""
    with translated("preparing locks"), session.cursor() as cursor:
        cursor.execute("SAVEPOINT unlocked")


def release_locks(session: Session) -> None:
    """Let go of the locks since ``begin_locking``; the transaction and its snapshot stay."""
    with translated("releasing locks"), session.cursor() as cursor:
        cursor.execute("ROLLBACK TO unlocked")


def lock_relation(session: Session, oid: int, *, timeout: str = "0") -> None:
    """Lock a relation and all it consists of (ACCESS SHARE), for as long as the transaction runs.

    A SELECT locks partitions, children and the tables under a view as well, takes column privileges for enough, and
    works for kinds that LOCK TABLE refuses. Nothing is done for a relation that is gone.
    """
    with translated(f"locking the relation with oid {oid}"), session.cursor() as cursor:
        cursor.execute("SELECT %s::regclass::text FROM pg_catalog.pg_class WHERE oid = %s", (oid, oid))
        row = cursor.fetchone()
        if row is None:
            return
        cursor.execute("SAVEPOINT locks")
        try:
            cursor.execute("SELECT set_config('lock_timeout', %s, true)", (timeout,))
            cursor.execute(sql.SQL("SELECT FROM {} LIMIT 0").format(sql.SQL(row[0])))
        except psycopg2.Error:
            # The snapshot has to survive a lock that cannot be had.
            cursor.execute("ROLLBACK TO locks")
            raise
        finally:
            cursor.execute("RELEASE locks")


# Where the snapshot is not that of one action, another action would find it again.
_RETAKE = (
    "run the action again: it takes a new snapshot; one that open_snapshot() or a stream's query holds is replaced by "
    "opening or starting that again"
)


def check_files(session: Session, doing: str) -> None:
    """Raise SchemaChangedError when a relation locked by this session was rewritten or made after its snapshot.

    pg_class as a query sees it belongs to the snapshot; pg_relation_filenode() looks at the catalog as it is now. Under
    a lock, the same file in both means that the heap still holds what the snapshot should see.
    """
    with translated(doing), session.cursor() as cursor:
        cursor.execute(
            "SELECT l.relation::regclass::text, c.oid IS NULL FROM pg_catalog.pg_locks AS l"
            " LEFT JOIN pg_catalog.pg_class AS c ON c.oid = l.relation"
            " WHERE l.pid = pg_catalog.pg_backend_pid() AND l.locktype = 'relation' AND (c.oid IS NULL"
            " OR c.relkind IN ('r', 'm', 't') AND c.relfilenode <> 0"
            " AND c.relfilenode IS DISTINCT FROM pg_catalog.pg_relation_filenode(c.oid)) LIMIT 1"
        )
        row = cursor.fetchone()
    if row is not None:
        what = "was created" if row[1] else "was truncated or rewritten"
        raise SchemaChangedError(
            f"{doing}: {row[0]} {what} after the snapshot was taken, so the snapshot does not see its rows",
            remedy=_RETAKE,
        )


def check_expansion(session: Session, present: Session, doing: str) -> None:
    """Raise SchemaChangedError when what this session has locked was made of other parts under its snapshot.

    PostgreSQL expands partitions, children and views by the catalog as it is now, whatever the snapshot sees of it. So
    the rows of the catalog that say so are compared with those that ``present`` sees, a session without a snapshot.
    """
    with translated(doing), session.cursor() as cursor:
        cursor.execute(
            "SELECT c.oid::bigint FROM pg_catalog.pg_locks AS l JOIN pg_catalog.pg_class AS c ON c.oid = l.relation"
            " WHERE l.pid = pg_catalog.pg_backend_pid() AND l.locktype = 'relation'"
            " AND c.relkind IN ('r', 'p', 'v', 'm', 'f')"
        )
        oids = [oid for (oid,) in cursor]
    then, now = (_parts(of, oids, doing) for of in (session, present))
    if then != now:
        with translated(doing), present.cursor() as cursor:
            cursor.execute("SELECT %s::oid::regclass::text", (min(then ^ now)[0],))
            [name] = cursor.fetchone()
        raise SchemaChangedError(
            f"{doing}: {name} got or lost a partition or child, or was defined anew, after the snapshot was taken, so "
            "other rows would be read than the snapshot's",
            remedy=_RETAKE,
        )


def _parts(session: Session, oids: list[int], doing: str) -> set[tuple[str, ...]]:
    """The rows of the catalog by which PostgreSQL expands these relations; ``xmin`` shows one that came and went."""
    with translated(doing), session.cursor() as cursor:
        cursor.execute(
            "SELECT inhparent::text, inhrelid::text, xmin::text FROM pg_catalog.pg_inherits"
            " WHERE inhparent = ANY(%(oids)s::oid[]) OR inhrelid = ANY(%(oids)s::oid[])"
            " UNION ALL SELECT ev_class::text, oid::text, xmin::text FROM pg_catalog.pg_rewrite"
            " WHERE ev_class = ANY(%(oids)s::oid[])",
            {"oids": oids},
        )
        return set(cursor)


@dataclass(frozen=True, slots=True)
class OpenSnapshot:
    """A snapshot that is held open: pass ``options`` to ``spark.read.format("pgsnapshot").options(**options)``.

    ``lsn`` is the greatest position it contains, None without a consistent point.
    """

    lsn: Lsn | None
    options: dict[str, str] = field(repr=False)


@contextmanager
def open_snapshot(
    url: str | None = None, *, tables: Sequence[str] = (), slot: str | None = None, **options: str
) -> Iterator[OpenSnapshot]:
    """Hold one snapshot for several reads, also of several Spark actions, until the block ends.

    ``tables`` are locked (ACCESS SHARE) at once, so that no TRUNCATE or rewrite takes their rows away from the
    snapshot. With ``slot`` a durable slot of that name is created at the snapshot's consistent point and left for a
    stream to start from. ``options`` are the connection options of the format, ``consistentPoint`` and ``slotTimeout``.
    The snapshot is held by one session of this process.
    """
    given = {**options, **({"url": url} if url is not None else {}), **({"slot": slot} if slot else {})}
    # A query stands in for dbtable, which the parser asks for; it is never run.
    parsed = parse_snapshot_options({**given, "query": "SELECT"})
    spec = SnapshotSpec(parsed.consistent_point, parsed.slot, parsed.slot_timeout_seconds)
    names = [QualifiedName.parse(table) for table in tables]
    with contextlib.closing(connect(parsed.connection, "pgsnapshot:open")) as session:
        relations: list[Relation] = [catalog.find_relation(session, name) for name in names]
    token = secrets.token_hex(8)
    held = make_snapshot(
        parsed.connection, spec, lambda snapshot_id: f"pgsnapshot:{token}:open:{snapshot_id}", holders=1
    )
    try:
        held.lock([relation.oid for relation in relations], timeout="60s")
        for holder, _ in held.holders:
            check_files(holder, "opening a snapshot")
        passed_on = {k: v for k, v in given.items() if k.lower() not in ("slot", "consistentpoint", "slottimeout")}
        yield OpenSnapshot(held.lsn, {**passed_on, "snapshot": held.holders[0][1]})
    finally:
        held.close()
