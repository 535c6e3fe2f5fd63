"""Which committed transactions a look at the catalog has seen.

A commit that is on disk can be decoded, and yet nobody may see it: it may wait for a synchronous standby, for any time.
So a position in the WAL alone does not tell what a catalog knew that was read behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import TransientError
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.slots import read_end_of_wal

_XIDS = 1 << 32
_WAITING = Backoff(0.01, longest_seconds=0.5, within_seconds=5)


@dataclass(frozen=True, slots=True)
class Horizon:
    """What a session knows that reads the catalog behind it.

    ``lsn``: the WAL was on disk up to there. ``next_xid`` and those after it, and those ``in_progress``, could not be
    seen then; they have 32 bits, as pgoutput sends them.
    """

    lsn: Lsn
    next_xid: int = 0
    in_progress: frozenset[int] = frozenset()

    def has(self, lsn: Lsn, xid: int) -> bool:
        """Whether the transaction that was committed at ``lsn`` had been seen for sure."""
        return lsn < self.lsn and self.can_see(xid)

    def can_see(self, xid: int) -> bool:
        """Whether a transaction that is known to have been committed could be seen."""
        # Of two transactions, the one up to 2 billion before the other is the older one.
        is_older = 0 < (self.next_xid - xid) % _XIDS < _XIDS // 2
        return is_older and xid not in self.in_progress


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
        return Horizon(lsn, int(next_xid) % _XIDS, frozenset(int(xid) % _XIDS for xid in in_progress))


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
