"""The SQL executions that a keeper serves: how they get their snapshots, keep them, and lose them for good.

Only the keeper's main thread calls this, and it never waits for PostgreSQL to make, replace or lock anything: threads
do. While one works on an execution, that is ``busy`` and nothing else touches its sessions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import DefiniteError, PgCdcError, SnapshotLostError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.postgres.snapshots import Held, make_snapshot
from pg_cdc_source.snapshot.board import Request, holder_name
from pg_cdc_source.snapshot.keeper.liveness import is_lost
from pg_cdc_source.snapshot.keeper.marks import Marks
from pg_cdc_source.snapshot.keeper.workers import Finish, Workers

log = logging.getLogger(__name__)

HOLDERS = 2
MEND_SECONDS = 1.0  # before another try to replace a holder
ENDED_REMEMBERED = 100_000


@dataclass(slots=True)
class Execution:
    """An SQL execution and its snapshot; ``held`` is None until it is made."""

    request: Request
    asked_at: float  # epoch seconds, the server's clock
    last_reader: float  # time.monotonic(); until then it may have had a reader
    being_read: bool = False  # at the last look
    held: Held | None = None
    locked: set[int] = field(default_factory=set)  # the oids of relations
    busy: bool = False  # a thread works on it
    mend_after: float = 0.0  # time.monotonic(); a server that refuses sessions is not asked in a loop

    @property
    def key(self) -> str:
        return self.request.execution

    @property
    def holding(self) -> Held | None:
        """Its snapshot, where no thread works on that now."""
        return None if self.busy else self.held


@dataclass(frozen=True, slots=True)
class Ended:
    """An execution that has no snapshot any more."""

    why: PgCdcError
    asked_at: float  # epoch seconds, the server's clock


class Executions:
    """The executions of one keeper, by their keys, and why others have no snapshot any more."""

    def __init__(self, options: ConnectionOptions, keeper: str, marks: Marks, workers: Workers) -> None:
        self._options = options
        self._keeper = keeper
        self._marks = marks
        self._workers = workers
        self._running: dict[str, Execution] = {}
        self._ended: dict[str, Ended] = {}  # oldest first
        self.made_some = False  # since it was set to False

    def __len__(self) -> int:
        return len(self._running)

    def get(self, key: str) -> Execution | None:
        return self._running.get(key)

    def all(self) -> list[Execution]:
        return list(self._running.values())

    def idle_holders(self) -> Iterable[Session]:
        """The holders' sessions that no thread uses; one becomes readable when the server ends it."""
        return (session for e in self.all() if e.holding for session, _ in e.holding.holders if not session.closed)

    def hold_any(self) -> bool:
        """Whether any snapshot is still there."""
        return any(not is_lost(session) for e in self.all() if e.held for session, _ in e.held.holders)

    def close(self) -> None:
        for execution in self.all():
            if execution.held:
                execution.held.close()

    # --- beginning and end --------------------------------------------------------------------------------------------

    def begin(self, request: Request, asked_at: float) -> None:
        """Make a snapshot for a new execution."""
        execution = self._running[request.execution] = Execution(request, asked_at, time.monotonic())
        self._submit(execution, self._make)

    def end(self, execution: Execution, why: PgCdcError) -> None:
        """End an execution's snapshot for good; ``why`` is what later requests for it are told."""
        if execution.held:
            execution.held.close()
        if self._running.get(execution.key, execution) is not execution:
            return  # it has ended before, and another one has its key
        self._running.pop(execution.key, None)
        self._ended[execution.key] = Ended(why, execution.asked_at)
        if len(self._ended) > ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def forget_older(self, key: str, planned_at: float) -> None:
        """Forget an execution that was asked for before ``planned_at``, so that another one may have its key."""
        execution = self._running.get(key)
        if execution is not None and execution.asked_at < planned_at and not execution.busy:
            del self._running[key]
            if execution.held:
                execution.held.close()
        ended = self._ended.get(key)
        if ended is not None and ended.asked_at < planned_at:
            del self._ended[key]
            self._marks.take_away(key)

    def tell_why_ended(self, key: str) -> bool:
        """Show readers why the execution has ended; False where it has not."""
        if key not in self._ended:
            return False
        self._marks.show(key, self._ended[key].why)
        return True

    # --- work for threads ---------------------------------------------------------------------------------------------

    def _submit(self, execution: Execution, work: Callable[[Execution], Finish | None]) -> None:
        """Run ``work`` in a thread; an error ends the execution."""
        execution.busy = True

        def run() -> Finish:
            finish: Finish | None
            try:
                finish = work(execution)
            except PgCdcError as error:
                finish = self._failing(execution, error)
            except Exception as error:
                log.exception("execution %s", execution.key)
                finish = self._failing(execution, DefiniteError(str(error)))

            def finish_and_rest() -> None:
                execution.busy = False
                if finish is not None:
                    finish()

            return finish_and_rest

        self._workers.submit(run)

    def _failing(self, execution: Execution, why: PgCdcError) -> Finish:
        def fail() -> None:
            self.end(execution, why)
            self.tell_why_ended(execution.key)

        return fail

    def _make(self, execution: Execution) -> Finish:
        held = make_snapshot(self._options, execution.request.spec, self._namer(execution), holders=HOLDERS)

        def take() -> None:
            execution.held = held
            if self._running.get(execution.key) is not execution:
                held.close()  # it was ended while it was made
            execution.last_reader = time.monotonic()
            self.made_some = True

        return take

    def _namer(self, execution: Execution) -> Callable[[str], str]:
        # While an id is not known, the name must not look like a holder's.
        return lambda snapshot_id: (
            holder_name(self._keeper, execution.key, snapshot_id) if snapshot_id else "pgsnapshot:making"
        )

    # --- holders ------------------------------------------------------------------------------------------------------

    def mend(self) -> None:
        """Replace the holders that were lost; an execution that has none left ends."""
        for execution in self.all():
            held = execution.holding
            if held is None:
                continue
            for session, snapshot_id in [holder for holder in held.holders if is_lost(holder[0])]:
                session.close()
                held.holders.remove((session, snapshot_id))
            if not held.holders:
                self.end(
                    execution,
                    SnapshotLostError(
                        "the snapshot of this action has ended, because PostgreSQL ended all sessions that held it",
                        remedy="run the action again: it takes a new snapshot",
                    ),
                )
            elif len(held.holders) < HOLDERS and time.monotonic() > execution.mend_after:
                self._submit(execution, self._replace_holder)

    def _replace_holder(self, execution: Execution) -> None:
        held = execution.held
        assert held is not None
        try:
            held.add_holder(self._options, self._namer(execution), held.holders[0][1])
        except PgCdcError as error:
            # The other holder still works; a later tick tries again, or finds that one lost as well.
            execution.mend_after = time.monotonic() + MEND_SECONDS
            log.warning("execution %s: a holder could not be replaced: %s", execution.key, error)
        self._lock(execution)

    # --- locks --------------------------------------------------------------------------------------------------------

    def lock(self, execution: Execution, oids: set[int]) -> None:
        """Lock further relations on every holder."""
        execution.locked |= oids
        self._submit(execution, self._lock)

    def unlock(self, execution: Execution) -> None:
        """Let go of all locks of an execution's holders."""
        execution.locked.clear()
        self._submit(execution, self._unlock)

    def _lock(self, execution: Execution) -> None:
        held = execution.held
        assert held is not None
        try:
            held.lock(sorted(execution.locked), timeout="10s")
        except PgCdcError as error:
            # A reader that is harmed by the missing lock finds out by itself, see check_files.
            log.warning("execution %s: %s", execution.key, error)

    def _unlock(self, execution: Execution) -> None:
        assert execution.held is not None
        execution.held.unlock()
