"""The session in which a task reads: in the snapshot's transaction, with what it reads locked and checked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from psycopg2.extensions import connection as Session

from pg_cdc_source.offsets import Lsn
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.postgres import exported_snapshots, locks, search_path
from pg_cdc_source.postgres.catalog import Relation
from pg_cdc_source.postgres.connection import FULL_SECONDS, begin_anew, connect
from pg_cdc_source.postgres.kept_session import KeptSession
from pg_cdc_source.snapshot.checks import check_heaps, lock_and_check
from pg_cdc_source.snapshot.handover import HANDOVER, Purpose, Reading
from pg_cdc_source.snapshot.scan import Piece, Plan, ScanRange, reading
from pg_cdc_source.snapshot.source import Imported, Source

# How long a lost session is replaced before a task gives up.
RECONNECT_SECONDS = 30.0
# Where tasks themselves fill the server, it is full until one of them is done.
TASK_FULL_SECONDS = 300.0


def _connect(options: ConnectionOptions, name: str, full_seconds: float = TASK_FULL_SECONDS) -> Session:
    # Planning was let in, so the server is there.
    # Planning has looked for a pooler. Where one has few sessions, each task has room for one.
    return connect(
        options,
        name,
        retry_seconds=RECONNECT_SECONDS,
        full_seconds=full_seconds,
        was_there=True,
        known_to_last=True,
    )


class ReadingSession:
    """One range's session: taken over from the worker's last task, or begun; begun anew after it was lost.

    While it has locks it runs with the role's search_path: it reads.
    """

    def __init__(self, plan: Plan, source: Source, scan_range: ScanRange, execution: str) -> None:
        self._plan = plan
        self._source = source
        self._range = scan_range
        self._execution = execution
        relation = plan.relation
        name = source.session_name(execution, relation.oid if relation else 0)
        self._purpose = Purpose(plan.spec.connection, name, source, execution)
        self._scan = (plan, scan_range.heaps)
        self._session: Session | None = None
        # Without a snapshot, it sees the catalog as it is now. The session that reads has its locks meanwhile.
        begin = partial(_connect, plan.spec.connection, "pgsnapshot:checking", full_seconds=FULL_SECONDS)
        self.present = KeptSession(begin)
        self._locked: frozenset[Relation] | None = None  # and found to be what was planned; None: nothing was looked at
        self._snapshot: Imported | None = None

    @property
    def lsn(self) -> Lsn | None:
        """The snapshot's LSN, where it has one; known once the session is open."""
        return None if self._snapshot is None else self._snapshot.lsn

    @property
    def on_standby(self) -> bool:
        """Whether the snapshot is a standby's; known once the session is open."""
        return self._snapshot is not None and self._snapshot.on_standby

    def check_snapshot(self, doing: str) -> None:
        """Raise SnapshotLostError where what was read until now may not be all of the snapshot's.

        A standby that has to remove rows which a snapshot sees first ends the transactions that have it: those that
        have it when it finds out. One that imports the snapshot while the standby still waits for them
        (max_standby_streaming_delay) stays, and the rows go. The exporter has had the snapshot before everybody else,
        so while it is there, all rows are. standby.c, ResolveRecoveryConflictWithSnapshot.
        """
        if self.on_standby and self._session is not None and self._snapshot is not None:
            exported_snapshots.require_exporter(self._session, self._snapshot.snapshot_id, doing)

    def open(self, pieces: Sequence[Piece]) -> Session:
        """The session with the heaps of these pieces locked, or where there are none, all of the scan."""
        heaps = frozenset(piece.heap for piece in pieces)
        session = self._open()
        if self._locked is None or not heaps <= self._locked:
            # What is read by one COPY is locked at a time, and nothing else.
            self._unlock(session)
            lock_and_check(session, self.present, self._plan, pieces)
            search_path.take_roles(session, locally=True)
            self._locked = heaps
        return session

    def open_unlocked(self) -> Session:
        """The session without a lock on any heap, so that it may wait for one."""
        session = self._open()
        self._unlock(session)
        return session

    def _open(self) -> Session:
        if self._session is not None:
            return self._session
        doing = reading(self._plan, self._range.pieces)
        taken = HANDOVER.take(self._purpose, self._scan)
        # Kept before it is ready, so that close() ends it whatever fails.
        self._session = session = self._new() if taken is None else taken.session
        if taken is None:
            self._snapshot = self._source.import_into(session, self._execution, doing)
            locks.begin_locking(session)
        else:
            self._snapshot = taken.snapshot
            if taken.scan == self._scan:
                self._locked = taken.heaps
                return session
            self._unlock(session)
        check_heaps(session, self._plan, self._range, doing)
        return session

    def _new(self) -> Session:
        """The session of another scan's task, begun anew, or a new one."""
        purpose = self._purpose
        left = HANDOVER.take_session(purpose.connection)
        if left is not None and begin_anew(left, purpose.name):
            return left
        return _connect(purpose.connection, purpose.name)

    def _unlock(self, session: Session) -> None:
        """Release the locks, and with them the role's search_path."""
        self._locked = None
        locks.release_locks(session)

    def leave(self) -> None:
        """Leave the session to the worker's next task."""
        self.present.close()
        if self._session is not None and self._snapshot is not None:
            # Without pieces a view, a foreign table or a query is read.
            as_new = bool(self._range.pieces) and self._plan.spec.where is None
            locked = self._locked or frozenset()
            HANDOVER.leave(self._purpose, Reading(self._session, self._snapshot, self._scan, locked, as_new))
            self._session = self._locked = None

    def close(self) -> None:
        self.present.close()
        if self._session is not None:
            self._session.close()
            self._session = self._locked = None
