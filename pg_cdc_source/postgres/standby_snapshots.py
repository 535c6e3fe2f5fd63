"""Whether those who import a snapshot that a standby has exported see the same rows as who exported it.

On a standby, a snapshot has all transactions that were running among its subtransactions. While one on the primary has
more than 64 of these, PostgreSQL exports none of them, before the minor versions of November 2026. Whoever imports such
a snapshot takes all that were running for ended. It sees what commits meanwhile, or not, by when it reads. And it may
note on the standby's pages that those which still run were rolled back, which everybody believes from then on.
"""

from __future__ import annotations

import logging

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import SnapshotLostError, TransientError
from pg_cdc_source.postgres.minor_versions import INCOMPLETE_EXPORT, newest_without
from pg_cdc_source.postgres.server_errors import translated

log = logging.getLogger(__name__)

# The file of a snapshot names each transaction that was running, which are some thousands at most.
_READ_FILE = "pg_catalog.pg_read_file(text, bigint, bigint, boolean)"
_MOST_BYTES = 1 << 24

_has_said = False


class IncompleteSnapshotError(TransientError):
    """A snapshot was exported without transactions that were running. The transaction that exported it goes on."""


# Whether the statement's snapshot may be exported without some: where nothing runs, there are none.
MAY_LACK_SOME = """
    SELECT pg_is_in_recovery() AND pg_snapshot_xmin(present) < pg_snapshot_xmax(present)
    FROM pg_catalog.pg_current_snapshot() AS present
"""


def require_complete_import(session: Session, snapshot_id: str) -> None:
    """As :func:`require_complete`, for a session that has imported the snapshot, and that has read no row yet."""
    with translated("looking at an imported snapshot"), session.cursor() as cursor:
        cursor.execute(MAY_LACK_SOME)
        [may_lack_some] = cursor.fetchone()
    if may_lack_some:
        require_complete(session, snapshot_id)


def may_look(session: Session) -> bool:
    """Whether the role can see what an exported snapshot has."""
    with translated("looking at rights"), session.cursor() as cursor:
        cursor.execute("SELECT has_function_privilege(%s, 'EXECUTE')", (_READ_FILE,))
        return bool(cursor.fetchone()[0])


def require_complete(session: Session, snapshot_id: str) -> None:
    """Raise IncompleteSnapshotError for a snapshot that a standby has exported without transactions that were running.

    Raises SnapshotLostError where it has ended meanwhile. Where the role cannot see that, and the server's version may
    do it, the log says so once in this process.
    """
    if not may_look(session):
        _say_once(session.server_version)
        return
    with translated("looking at an exported snapshot"), session.cursor() as cursor:
        place = f"pg_snapshots/{snapshot_id}"
        cursor.execute("SELECT pg_catalog.pg_read_file(%s, 0, %s, true)", (place, _MOST_BYTES))
        [text] = cursor.fetchone()
    if text is None:
        raise SnapshotLostError(f"snapshot {snapshot_id} has ended: nobody can see any more whether it is complete")
    if is_complete(text):
        return
    raise IncompleteSnapshotError(
        "this standby cannot export a snapshot now: a transaction on its primary has more than 64 subtransactions "
        "(savepoints, or blocks with EXCEPTION in PL/pgSQL), and who imports the snapshot would see other rows",
        remedy=f"run the action again when that has ended; or {_OTHERWISE}",
    )


def is_complete(text: str) -> bool:
    """Whether the file of an exported snapshot has all transactions that were running."""
    fields = dict(line.partition(":")[::2] for line in text.splitlines())
    return fields.get("rec") != "1" or fields.get("sof") != "1" or "sxcnt" in fields


_OTHERWISE = "set consistentPoint=require (PostgreSQL 16), update the standby, or read the primary"


def _say_once(version: int) -> None:
    global _has_said
    if not INCOMPLETE_EXPORT.is_in(version) or _has_said:
        return
    _has_said = True
    log.warning(
        "this standby may export snapshots that lack transactions which are running, while one of them has more than "
        "64 subtransactions: then the rows of an action are not of one point, and other clients of the standby may see "
        "rows of before. This role cannot see whether that is so (pg_read_file). %s\n  Remedy: %s",
        f"PostgreSQL {newest_without(INCOMPLETE_EXPORT, version)} does not do it",
        _OTHERWISE,
    )
