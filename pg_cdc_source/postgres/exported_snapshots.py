"""Snapshots that sessions give to one another: exported, announced and imported.

- Every id dies with the session that exported it, so each holder exports an id of its own and announces it in its
  ``application_name``. The LSN, and what else there is to say, it announces as shared advisory locks with those keys.
  Both are visible to every session of the role, on primaries and standbys, without a table, a port or a file.
"""

from __future__ import annotations

from collections.abc import Sequence

import psycopg2
from psycopg2 import sql
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import PgCdcError, SnapshotLostError
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.postgres.locks import RUN_AGAIN
from pg_cdc_source.postgres.server_errors import translate, translated
from pg_cdc_source.postgres.standby_snapshots import MAY_LACK_SOME, require_complete

LockKey = tuple[int, int]

BEGIN_READING = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"


def set_savepoint(session: Session) -> None:
    """Have ``announce_one_more`` fail alone."""
    with translated("announcing a snapshot"), session.cursor() as cursor:
        cursor.execute("SAVEPOINT one_more")


def announce_one_more(session: Session, keys: Sequence[LockKey], name: str) -> None:
    """As ``announce``, in a transaction that goes on where that fails, from the savepoint on."""
    with translated("announcing a snapshot"), session.cursor() as cursor:
        try:
            announce(session, None, keys, name)
        except PgCdcError:
            if not session.closed:
                cursor.execute("ROLLBACK TO one_more")
            raise
        finally:
            if not session.closed:
                cursor.execute("RELEASE one_more")


def announce(session: Session, lsn: Lsn | None, keys: Sequence[LockKey], name: str) -> None:
    """Have a session say that it is a holder: by shared locks, until its transaction ends, and its application_name."""
    with translated("announcing a snapshot"), session.cursor() as cursor:
        cursor.execute(
            """
            SELECT pg_advisory_xact_lock_shared(lsn)
            FROM unnest(%s::bigint[]) AS given (lsn);
            SELECT pg_advisory_xact_lock_shared(of, number)
            FROM unnest(%s::int[], %s::int[]) AS key (of, number);
            SELECT set_config('application_name', %s, false)
            """,
            ([] if lsn is None else [int(lsn)], [of for of, _ in keys], [number for _, number in keys], name),
        )


def export_snapshot(session: Session, *, of_slot: bool = False) -> str:
    """Export the transaction's snapshot, or the statement's under READ COMMITTED; valid until the transaction ends.

    Raises IncompleteSnapshotError where those who import it would see other rows. ``of_slot``: decoding has made it.
    """
    with translated("exporting a snapshot"), session.cursor() as cursor:
        cursor.execute(f"SELECT pg_catalog.pg_export_snapshot(), ({MAY_LACK_SOME})")
        snapshot_id, may_lack_some = cursor.fetchone()
    if may_lack_some and not of_slot:
        require_complete(session, snapshot_id)
    return str(snapshot_id)


def import_snapshot(session: Session, snapshot_id: str) -> bool:
    """Begin a read-only transaction that sees the snapshot; return whether the server is a standby now.

    Raises SnapshotLostError when it has ended.
    """
    statements = sql.SQL("{}; SET TRANSACTION SNAPSHOT {}; SELECT pg_catalog.pg_is_in_recovery()")
    try:
        with session.cursor() as cursor:
            cursor.execute(statements.format(sql.SQL(BEGIN_READING), sql.Literal(snapshot_id)))
            return bool(cursor.fetchone()[0])
    except psycopg2.Error as error:
        if error.pgcode in ("22023", "55000", "42704"):
            # The caller may go on with another snapshot in this session.
            with translated(f"leaving snapshot {snapshot_id}"), session.cursor() as cursor:
                cursor.execute("ROLLBACK")
            raise SnapshotLostError(
                f"snapshot {snapshot_id} has ended ({error.diag.message_primary})",
                remedy="keep the session that exported it open until the last reader is done, and run the action "
                "again. Only the server that exported it knows it: name that one, and no endpoint of several",
            ) from None
        raise translate(error, f"importing snapshot {snapshot_id}") from None


# Each transaction has a lock on its own virtual id, and a snapshot's id begins with that of its exporter, in
# hexadecimal: snapmgr.c, XactExportFilePath.
_IS_TRANSACTION_THERE = """
SELECT EXISTS (
    SELECT FROM pg_catalog.pg_locks
    WHERE locktype = 'virtualxid' AND mode = 'ExclusiveLock' AND virtualxid = %s
)
"""


def require_exporter(session: Session, snapshot_id: str, doing: str) -> None:
    """Raise SnapshotLostError where the transaction that has exported the snapshot has ended."""
    backend, number, _ = snapshot_id.split("-")
    with translated(doing), session.cursor() as cursor:
        cursor.execute(_IS_TRANSACTION_THERE, (f"{int(backend, 16)}/{int(number, 16)}",))
        is_there = cursor.fetchone()[0]
    if not is_there:
        raise SnapshotLostError(
            f"{doing}: snapshot {snapshot_id} has ended meanwhile, and the standby may have removed rows that it sees",
            remedy=f"{RUN_AGAIN}. Where recovery conflicts end snapshots often, set hot_standby_feedback = on on the "
            "standby",
        )


# The key of an advisory lock of one bigint stands in two columns.
_FIND_LSN = """
SELECT (l.classid::bigint << 32) | l.objid::bigint
FROM pg_catalog.pg_stat_activity AS a
JOIN pg_catalog.pg_locks AS l ON l.pid = a.pid AND l.locktype = 'advisory' AND l.objsubid = 1
WHERE a.application_name LIKE 'pgsnapshot:%%'
    AND right(a.application_name, %s) = %s
    -- Whoever may connect may call a session so.
    AND a.datname = current_database() AND a.usename = session_user
LIMIT 1
"""


def announced_lsn(session: Session, snapshot_id: str) -> Lsn | None:
    """The LSN of a snapshot that a session of this package holds; None for one without, or of somebody else."""
    with translated(f"looking for the LSN of snapshot {snapshot_id}"), session.cursor() as cursor:
        cursor.execute(_FIND_LSN, (len(snapshot_id) + 1, f":{snapshot_id}"))
        row = cursor.fetchone()
        return None if row is None else Lsn(row[0])
