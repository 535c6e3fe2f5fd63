"""Hand a task's session on to the next task of the same worker.

Spark's Python workers run the tasks of a scan one after the other. Connecting, importing the snapshot and checking that
the relation is what was planned costs as much as reading some ten thousand rows, most of it on the server, and far more
with TLS. So what has read a range leaves its session, in its transaction, to the next range: of the same task, where
that reads several tables, or of the next one. A task of another scan gets the session alone, and begins anew in it.
This module holds that one session of the process. Nothing tells a worker that it will get no more tasks: a session that
nobody takes within half a second is closed.
"""

from __future__ import annotations

from dataclasses import dataclass

from psycopg2.extensions import connection as Session

from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.postgres.catalog import Relation
from pg_cdc_source.snapshot.lingering import Lingering
from pg_cdc_source.snapshot.scan import Plan
from pg_cdc_source.snapshot.source import Imported, Source


@dataclass(frozen=True, slots=True)
class Purpose:
    """All that a session and its snapshot depend on: only who needs the same may take it."""

    connection: ConnectionOptions
    name: str  # the application_name, which may tell what is read
    source: Source
    execution: str


@dataclass(frozen=True, slots=True)
class Reading:
    """A session in its snapshot's transaction; ``heaps`` are locked and were found to be what was planned.

    ``scan`` is the plan that they belong to, and what identifies all of its heaps. ``as_new`` says that the session is
    as it was opened once the transaction has ended: no expression of the user's was evaluated in it.
    """

    session: Session
    snapshot: Imported
    scan: tuple[Plan, int | None]
    heaps: frozenset[Relation]
    as_new: bool


class Handover:
    """Holds the session that a task has left, one at most, for up to ``linger_seconds``. Any thread may use it."""

    def __init__(self, linger_seconds: float) -> None:
        self._left = Lingering[tuple[Purpose, Reading]](linger_seconds, lambda left: left[1].session.close())

    def leave(self, purpose: Purpose, reading: Reading) -> None:
        """Leave a session to the next task of this process. One that was left before is closed."""
        self._left.leave((purpose, reading))

    def take(self, purpose: Purpose, scan: tuple[Plan, int | None]) -> Reading | None:
        """The session that was left for the same purpose, in its transaction: by this scan, or as new."""
        left = self._left.take(lambda left: left[0] == purpose and (left[1].as_new or left[1].scan == scan))
        return None if left is None else left[1]

    def take_session(self, connection: ConnectionOptions) -> Session | None:
        """The session that was left for another purpose, as it is; one of no use to ``connection`` is closed."""
        left = self._left.take()
        if left is None:
            return None
        purpose, reading = left
        if purpose.connection == connection and reading.as_new:
            return reading.session
        reading.session.close()
        return None


# Between two tasks of one stage a worker waits a few milliseconds for the driver, on a busy driver some hundred. DDL on
# the table waits as long after the last task, and so does VACUUM for the snapshot.
HANDOVER = Handover(linger_seconds=0.5)
