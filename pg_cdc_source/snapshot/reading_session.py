"""The session in which a task reads: in the snapshot's transaction, with what it reads locked and checked."""

from __future__ import annotations

from psycopg2.extensions import connection as Session

from pg_cdc_source.offsets import Lsn
from pg_cdc_source.postgres import locks
from pg_cdc_source.postgres.connection import connect
from pg_cdc_source.snapshot.checks import RECONNECT_SECONDS, lock_and_check
from pg_cdc_source.snapshot.handover import HANDOVER, Purpose, Reading
from pg_cdc_source.snapshot.scan import Plan, ScanRange
from pg_cdc_source.snapshot.source import Source


class ReadingSession:
    """One range's session: taken over from the worker's last task, or begun; begun anew after it was lost."""

    def __init__(self, plan: Plan, source: Source, scan_range: ScanRange, execution: str, doing: str) -> None:
        self._plan = plan
        self._source = source
        self._range = scan_range
        self._execution = execution
        self._doing = doing
        self._purpose = Purpose(plan, source, scan_range.heaps, execution)
        self._session: Session | None = None
        self.lsn: Lsn | None = None  # the snapshot's, known once the session is open

    def open(self) -> Session:
        """The session; where there is none, it is taken over or begun."""
        if self._session is not None:
            return self._session
        reading = HANDOVER.take(self._purpose)
        if reading is None:
            # Kept before it is ready, so that close() ends it whatever fails.
            self._session = session = self._connect()
            self.lsn = self._source.import_into(session, self._execution, self._doing)
            locks.begin_locking(session)
        else:
            self._session = session = reading.session
            self.lsn = reading.lsn
            if reading.heap == self._range.heap:
                return session
            # One table is locked at a time: DDL that locks several must not meet a session that does as well.
            locks.release_locks(session)
        lock_and_check(session, self._plan, self._range, self._doing)
        return session

    def _connect(self) -> Session:
        relation = self._plan.relation
        name = self._source.session_name(self._execution, relation.oid if relation else 0)
        return connect(self._plan.spec.connection, name, retry_seconds=RECONNECT_SECONDS)

    def leave(self) -> None:
        """Leave the session to the worker's next task."""
        if self._session is not None:
            HANDOVER.leave(self._purpose, Reading(self._session, self.lsn, self._range.heap))
            self._session = None

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
