"""Which committed transactions a look at the catalog has seen.

A commit that is on disk can be decoded, and yet nobody may see it: it may wait for a synchronous standby, for any time.
So a position in the WAL alone does not tell what a catalog knew that was read behind it.
"""

from __future__ import annotations

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import TransientError
from pg_cdc_source.offsets import XIDS, Horizon, Lsn
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.slots import read_end_of_wal

_WAITING = Backoff(0.01, longest_seconds=0.5, within_seconds=5)


# Of a catalog that is not compared with changes.
NOTHING = Horizon(Lsn(0))

_READ_SNAPSHOT = """
SELECT pg_snapshot_xmax(s)::text::numeric, ARRAY(SELECT pg_snapshot_xip(s)::text::numeric)
FROM pg_current_snapshot() AS s
"""


def read_horizon(session: Session, lsn: Lsn | None = None) -> Horizon:
    """The horizon of what ``session`` reads from now on; with ``lsn``, as of a snapshot that has all before it."""
    # In this order: a commit that is on disk by now has its xid, and is in the snapshot if it can be seen.
    lsn = read_end_of_wal(session) if lsn is None else lsn
    with translated("reading which transactions are in progress"), session.cursor() as cursor:
        cursor.execute(_READ_SNAPSHOT)
        next_xid, in_progress = cursor.fetchone()
        return Horizon(lsn, int(next_xid) % XIDS, frozenset(int(xid) % XIDS for xid in in_progress))


def wait_until_seen(session: Session, xid: int) -> None:
    """Wait until ``session`` sees what a transaction has done that has been decoded.

    Raises TransientError where that takes seconds: a synchronous standby is away.
    """
    for _ in _WAITING.polls():
        if read_horizon(session).can_see(xid):
            return
    raise TransientError(
        f"transaction {xid} has committed and cannot be seen yet, as while it waits for a synchronous standby",
        remedy="look for the standbys that synchronous_standby_names has",
    )
