"""The SQL executions that a keeper serves: how they get their snapshots, keep them, and lose them for good.

Executions to which an LSN makes no difference get a snapshot in the pool, for which there is always a session. Others
wait in line until there is room for one more snapshot among ``most_sessions``. The snapshot that is taken then is for
all that wait for the same: it only has to be taken after they have begun, and they have, since they ask. Those that ask
while it is being taken share the next one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import PgCdcError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.snapshot.board import LINE_SECONDS, Request
from pg_cdc_source.snapshot.keeper.execution import Execution, line_error, lost_error, surplus_error
from pg_cdc_source.snapshot.keeper.liveness import is_lost
from pg_cdc_source.snapshot.keeper.marks import Marks
from pg_cdc_source.snapshot.keeper.shared import MEND_SECONDS, Shared, SnapshotWork
from pg_cdc_source.snapshot.keeper.workers import Workers

ENDED_REMEMBERED = 100_000
# A snapshot that has no reader for so long makes room for executions in line. Between two stages of one action there
# is a shorter pause, unless others have taken all of Spark's slots.
IDLE_SECONDS = 1.0
# A pool takes no more snapshots then, where there is room for another: VACUUM waits for its oldest.
POOL_SECONDS = 10.0
POOL_SNAPSHOTS = 500
# Each has a lock that lasts as long as the pool, and the server has 6,400 by default, for everybody.
MOST_IN_POOLS = 2_000
# What is read for longer has sessions of its own: it has more to lose with the pool, and its tables want locks.
OWN_SECONDS = 1.0
# Tasks in line ask again every three seconds; an action of which none does has ended.
GONE_SECONDS = 15.0


class Executions:
    """The executions of one keeper, by their keys, and why others have no snapshot any more.

    ``most_sessions`` bounds the sessions of the keeper, its own and those of marks included.
    """

    def __init__(self, options: ConnectionOptions, keeper: str, marks: Marks, workers: Workers) -> None:
        self._marks = marks
        self._work = SnapshotWork(options, keeper, workers, self._fail)
        self._running: dict[str, Execution] = {}
        self._ended: dict[str, PgCdcError] = {}  # and why; oldest first
        self._coming: set[Shared] = set()  # out of pools
        self.most_sessions = 0
        # On a standby only the first session that has a snapshot vouches for its rows: reading_session.py.
        self.on_standby = False

    def __len__(self) -> int:
        return len(self._running)

    def get(self, key: str) -> Execution | None:
        return self._running.get(key)

    def all(self) -> list[Execution]:
        return list(self._running.values())

    def snapshots(self) -> dict[Shared, list[Execution]]:
        """The snapshots that are there or being made, and which executions share each."""
        found: dict[Shared, list[Execution]] = {}
        for execution in self._running.values():
            if execution.shared is not None:
                found.setdefault(execution.shared, []).append(execution)
        return found

    def any_in_line(self) -> bool:
        return any(execution.shared is None for execution in self._running.values())

    def idle_holders(self) -> Iterable[Session]:
        """The holders' sessions that no thread uses; one becomes readable when the server ends it."""
        return (
            session for s in self.snapshots() if s.holding for session, _ in s.holding.holders if not session.closed
        )

    def hold_any(self) -> bool:
        """Whether any snapshot is still there."""
        return any(not is_lost(session) for s in self.snapshots() if s.held for session, _ in s.held.holders)

    def take_made_some(self) -> bool:
        """Whether a snapshot was made since this was last asked."""
        made, self._work.made_some = self._work.made_some, False
        return made

    def close(self) -> None:
        for shared in self.snapshots():
            if shared.held:
                shared.held.close()

    # --- beginning and end --------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """Have a new execution wait in line for a snapshot."""
        now = time.monotonic()
        self._running[request.execution] = Execution(request, now, now)

    def end(self, execution: Execution, why: PgCdcError) -> None:
        """End an execution; ``why`` is what later requests are told. A snapshot ends with its last execution."""
        if self._running.get(execution.key) is not execution:
            return  # it has ended before
        self._leave(execution)
        self._ended[execution.key] = why
        if len(self._ended) > ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def end_all_of(self, shared: Shared, why: PgCdcError) -> None:
        for execution in self.snapshots().get(shared, ()):
            self.end(execution, why)

    def _leave(self, execution: Execution) -> None:
        del self._running[execution.key]
        if execution.shared is not None and execution.shared not in self.snapshots():
            execution.shared.leave()

    def _fail(self, shared: Shared, why: PgCdcError) -> None:
        self._coming.discard(shared)
        for execution in self.snapshots().get(shared, ()):
            self.end(execution, why)
            self.tell_why_ended(execution.key)

    def tell_why_ended(self, key: str) -> bool:
        """Show readers why the execution has ended; False where it has not."""
        if key not in self._ended:
            return False
        self._marks.show(key, self._ended[key])
        return True

    # --- the line -----------------------------------------------------------------------------------------------------

    def serve_line(self, now: float) -> None:
        """Make snapshots for those that wait in line, as far as there is room: one for all that may share it."""
        for execution in [execution for execution in self.all() if execution.shared is None]:
            if now - execution.began > LINE_SECONDS:
                self.end(execution, line_error(self.most_sessions))
                self.tell_why_ended(execution.key)
            elif now - execution.last_reader > GONE_SECONDS:
                self._leave(execution)
        for group in self._line():
            self._serve(group, now)

    def _serve(self, group: list[Execution], now: float) -> None:
        """Have a snapshot made for a group of the line, unless it has to go on waiting."""
        request, keys = group[0].request, tuple(execution.key for execution in group)
        if group[0].may_do_without_lsn:
            pool = self._pool(request, keys, now)
            if pool is None:
                return
            shared = pool
            self._work.export(pool, keys, partial(self._not_exported, pool, keys))
        elif self._has_room():
            shared = Shared(request, keys)
            self._work.make(shared)
        else:
            return
        for execution in group:
            execution.shared = shared

    def _not_exported(self, pool: Shared, keys: Iterable[str], why: PgCdcError | None) -> None:
        """End executions that a pool has no snapshot for; without a reason, they go on waiting in line."""
        for execution in [self._running[key] for key in keys if key in self._running]:
            if why is None:
                execution.shared = None
            else:
                self.end(execution, why)
                self.tell_why_ended(execution.key)
        if pool not in self.snapshots():
            pool.leave()

    def _has_room(self) -> bool:
        """Whether there is room for one more session beside those of pools; one snapshot always has."""
        snapshots = self.snapshots()
        to_come = 0 if all(shared.pool for shared in snapshots) else self._pools_to_come()
        return not snapshots or self._sessions() + to_come < self.most_sessions

    def _pools_to_come(self) -> int:
        """The sessions that are kept for pools: one that is in use, and an old one that is still read."""
        return max(0, 2 - sum(shared.pool for shared in self.snapshots()))

    def _pool(self, request: Request, keys: tuple[str, ...], now: float) -> Shared | None:
        """The pool for one more snapshot; None while it is busy. A new one once that is over, where there is room."""
        last = max((shared for shared in self.snapshots() if shared.pool), key=lambda pool: pool.since, default=None)
        if last is None:
            return Shared(request, keys, pool=True)
        over = now - last.since > POOL_SECONDS or len(last.exported) >= POOL_SNAPSHOTS
        if over and self._sessions() < self.most_sessions:
            return Shared(request, keys, pool=True)
        return None if last.busy else last

    def _line(self) -> list[list[Execution]]:
        """Those in line, by who shares a snapshot, without those who came too late for one that is being made now."""
        line: dict[object, list[Execution]] = {}
        for execution in self.all():
            if execution.shared is None:
                line.setdefault(execution.company, []).append(execution)
        # Until that one is made, the next one gathers more of the same company.
        being_made = {group[0].company for shared, group in self.snapshots().items() if shared.held is None}
        return [group for company, group in line.items() if company not in being_made]

    def make_room(self, now: float) -> None:
        """Close sessions where the line needs them: second holders, then those longest without a reader.

        Pools are closed only where they hold too many locks. It has to be known who reads ``now``.
        """
        snapshots = self.snapshots()
        line = sum(not group[0].may_do_without_lsn for group in self._line())
        wanted = line and line + self._sessions() + self._pools_to_come() - self.most_sessions
        for shared in snapshots:
            if wanted > 0 and shared.drop_second_holder():
                wanted -= 1
        idle_since = {shared: max(execution.last_reader for execution in group) for shared, group in snapshots.items()}
        too_many = sum(len(shared.exported) for shared in snapshots) - MOST_IN_POOLS
        for shared in sorted(snapshots, key=lambda shared: idle_since[shared]):
            if not shared.holding or now - idle_since[shared] <= IDLE_SECONDS:
                continue
            if shared.pool and too_many > 0:
                self.end_all_of(shared, surplus_error())
                too_many -= len(shared.exported)
            elif not shared.pool and wanted > 0:
                self.end_all_of(shared, surplus_error())
                wanted -= 1

    def _sessions(self) -> int:
        """The sessions that the keeper has."""
        return 1 + len(self._marks) + len(self._coming) + sum(shared.sessions for shared in self.snapshots())

    # --- holders and locks --------------------------------------------------------------------------------------------

    def mend(self) -> None:
        """Replace the holders that were lost; executions that have none left end.

        Second holders are those that can be done without: they take at most half of the sessions.
        """
        for shared in self.snapshots():
            if not self._work.mend(shared, may_add=self._may_add()):
                self.end_all_of(shared, lost_error())

    def _may_add(self) -> bool:
        return not self.on_standby and self._sessions() < self.most_sessions / 2 and not self.any_in_line()

    def take_out_of_pools(self, now: float) -> None:
        """Have what is read for longer held by sessions of its own. It has to be known who reads ``now``."""
        for pool, group in self.snapshots().items():
            if not pool.pool or pool.holding is None or now < pool.mend_after:
                continue
            coming = {key for shared in self._coming for key in shared.keys}
            by_snapshot: dict[str, list[Execution]] = {}
            for execution in group:
                by_snapshot.setdefault(pool.exported[execution.key], []).append(execution)
            for sharing in by_snapshot.values():
                read_long = any(execution.being_read and now - execution.began > OWN_SECONDS for execution in sharing)
                if read_long and sharing[0].key not in coming and self._may_add():
                    self._take_out(pool, sharing)

    def _take_out(self, pool: Shared, sharing: list[Execution]) -> None:
        shared = Shared(sharing[0].request, tuple(execution.key for execution in sharing))

        def move() -> None:
            self._coming.discard(shared)
            if shared.held is None:
                pool.mend_after = time.monotonic() + MEND_SECONDS
            moved = [] if shared.held is None else [e for e in sharing if self._running.get(e.key) is e]
            for execution in moved:
                execution.shared = shared
            snapshots = self.snapshots()
            for holding in (pool, shared):
                if holding not in snapshots:
                    holding.leave()

        self._coming.add(shared)
        self._work.take_out(pool, shared, move)

    def lock(self, shared: Shared, oids: set[int]) -> None:
        """Lock further relations on every holder of a snapshot."""
        self._work.lock(shared, oids)

    def unlock(self, shared: Shared) -> None:
        """Let go of all locks of a snapshot's holders."""
        self._work.unlock(shared)
