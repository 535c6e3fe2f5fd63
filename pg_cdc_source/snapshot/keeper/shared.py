"""Snapshots that executions share, and the work on their sessions, which threads do.

A snapshot with a consistent point takes a session, and a second one that can replace it. Where nobody is to see an LSN
a snapshot is a statement in a session that has many of them, the *pool*, until it has been read for a while: then it
has sessions of its own as well, which import it.

Only the keeper's main thread calls this, and it never waits for PostgreSQL to make, replace or lock anything. While a
thread works on a snapshot, that is ``busy`` and nothing else touches its sessions.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from pg_cdc_source.errors import DefiniteError, PgCdcError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.postgres.connection import FULL_SECONDS
from pg_cdc_source.postgres.exported_snapshots import (
    LockKey,
    announce,
    announce_one_more,
    export_snapshot,
    set_savepoint,
)
from pg_cdc_source.postgres.snapshots import Held, Holder, make_snapshot, open_exporter
from pg_cdc_source.postgres.standby_snapshots import IncompleteSnapshotError
from pg_cdc_source.snapshot.board import Request, execution_key, holder_name, snapshot_number
from pg_cdc_source.snapshot.keeper.liveness import is_lost
from pg_cdc_source.snapshot.keeper.workers import Finish, Workers

log = logging.getLogger(__name__)

HOLDERS = 2
MEND_SECONDS = 1.0  # before another try to have one more holder
# How long the server is tried to be had for a snapshot. Readers wait longer.
RETRY_SECONDS = 20.0


@dataclass(slots=True, eq=False)
class Shared:
    """A snapshot for the executions ``keys``, as ``request``, the first one's, asks for it.

    A ``pool`` is a session that has exported others besides, for executions that came later: ``exported`` has the id
    of each execution's snapshot.
    """

    request: Request
    keys: tuple[str, ...]
    pool: bool = False
    exported: dict[str, str] = field(default_factory=dict)  # by executions' keys
    since: float = field(default_factory=time.monotonic)
    held: Held | None = None  # None until it is made
    locked: set[int] = field(default_factory=set)  # the oids of relations
    busy: bool = False  # a thread works on it
    mend_after: float = 0.0  # time.monotonic(); a server that refuses sessions is not asked in a loop
    left: threading.Event = field(default_factory=threading.Event)  # nobody is to have it any more

    @property
    def holding(self) -> Held | None:
        """The snapshot, where no thread works on it now."""
        return None if self.busy else self.held

    @property
    def sessions(self) -> int:
        return 1 if self.held is None else len(self.held.holders)

    def leave(self) -> None:
        """Let the snapshot go; while a thread works on it, once that is done."""
        self.left.set()
        if self.held is not None and not self.busy:
            self.held.close()

    def drop_second_holder(self) -> bool:
        """Do with one session from now on; False where there is no other."""
        if self.holding is None or len(self.holding.holders) < HOLDERS:
            return False
        session, _ = self.holding.holders.pop()
        session.close()
        return True


class SnapshotWork:
    """What threads do to the snapshots of one keeper. ``failed`` is told of one that could not be made."""

    def __init__(
        self,
        options: ConnectionOptions,
        keeper: str,
        workers: Workers,
        failed: Callable[[Shared, PgCdcError], None],
    ) -> None:
        self._options = options
        self._keeper = keeper
        self._workers = workers
        self._failed = failed
        self.made_some = False  # since it was set to False

    def _submit(self, shared: Shared, work: Callable[[Shared], Finish | None]) -> None:
        """Run ``work`` in a thread; an error ends the snapshot."""
        shared.busy = True

        def run() -> Finish:
            finish: Finish | None
            try:
                finish = work(shared)
            except PgCdcError as error:
                finish = self._failing(shared, error)
            except Exception as error:
                log.exception("execution %s", shared.request.execution)
                finish = self._failing(shared, _unexpected(error))

            def finish_and_rest() -> None:
                shared.busy = False
                if finish is not None:
                    finish()
                if shared.left.is_set():
                    shared.leave()

            return finish_and_rest

        self._workers.submit(run)

    def _failing(self, shared: Shared, why: PgCdcError) -> Finish:
        return lambda: self._failed(shared, why)

    def make(self, shared: Shared) -> None:
        self._submit(shared, self._make)

    def _make(self, shared: Shared) -> Finish:
        held = make_snapshot(
            self._options,
            replace(shared.request.spec, given_up=shared.left),
            self._namer(shared),
            announced=[execution_key(key) for key in shared.keys],
            retry_seconds=RETRY_SECONDS,
            full_seconds=FULL_SECONDS,
        )

        def take() -> None:
            shared.held = held
            self.made_some = True

        return take

    def export(self, shared: Shared, keys: tuple[str, ...], refused: Callable[[PgCdcError | None], None]) -> None:
        """Take a snapshot in a pool, the first or another, for the executions ``keys``.

        ``refused`` is told where another one could not be had: why, or None where the pool was lost.
        """
        first = shared.held is None
        self._submit(shared, lambda pool: self._open(pool, keys) if first else self._add(pool, keys, refused))

    def _open(self, pool: Shared, keys: tuple[str, ...]) -> Finish:
        session, instance = open_exporter(
            self._options, "pgsnapshot:making", retry_seconds=RETRY_SECONDS, full_seconds=FULL_SECONDS
        )
        try:
            snapshot_id = export_snapshot(session)
            announce(session, None, _keys_in_pool(keys, snapshot_id), self._namer(pool)(snapshot_id))
        except BaseException:
            session.close()
            raise

        def take() -> None:
            pool.held = Held(None, instance, holders=[Holder(session, snapshot_id)])
            self._have_exported(pool, keys, snapshot_id)

        return take

    def _add(self, pool: Shared, keys: tuple[str, ...], refused: Callable[[PgCdcError | None], None]) -> Finish:
        assert pool.held is not None
        session, first_id = pool.held.first
        try:
            snapshot_id = export_snapshot(session)
            set_savepoint(session)
        except IncompleteSnapshotError as error:
            # The others that the pool has are as they were.
            return partial(refused, error)
        except PgCdcError:

            def lose() -> None:
                # Its transaction is over, and with it all snapshots of the pool: ``mend`` finds that out.
                session.close()
                refused(None)

            return lose
        try:
            announce_one_more(session, _keys_in_pool(keys, snapshot_id), self._namer(pool)(first_id))
        except PgCdcError as error:
            # The session may be lost, and the announcement heard all the same: tasks may read by this snapshot until
            # the server notices. So the execution never gets another one.
            return partial(refused, error)
        return lambda: self._have_exported(pool, keys, snapshot_id)

    def _have_exported(self, pool: Shared, keys: tuple[str, ...], snapshot_id: str) -> None:
        pool.exported.update(dict.fromkeys(keys, snapshot_id))
        self.made_some = True

    def take_out(self, pool: Shared, shared: Shared, then: Callable[[], None]) -> None:
        """Hold the snapshot that executions have in a pool in a session of its own, as ``shared``, and go on ``then``.

        Where that fails it is not held, and the pool's is all there is.
        """
        assert pool.held is not None
        instance, snapshot_id = pool.held.instance, pool.exported[shared.keys[0]]

        def hold(shared: Shared) -> Finish:
            held = Held(None, instance, [execution_key(key) for key in shared.keys])
            try:
                held.add_holder(self._options, self._namer(shared), snapshot_id)
            except PgCdcError as error:
                log.warning("execution %s: no session of its own: %s", shared.request.execution, error)

            def take() -> None:
                if held.holders:
                    shared.held = held
                    self.made_some = True
                then()

            return take

        self._submit(shared, hold)

    def _namer(self, shared: Shared) -> Callable[[str], str]:
        # While an id is not known, the name must not look like a holder's.
        return lambda snapshot_id: (
            holder_name(self._keeper, shared.request.execution, snapshot_id) if snapshot_id else "pgsnapshot:making"
        )

    def mend(self, shared: Shared, *, may_add: bool) -> bool:
        """Close the holders that were lost, and add one where ``may_add`` allows; False where none is left."""
        held = shared.holding
        if held is None:
            return True
        for holder in [holder for holder in held.holders if is_lost(holder.session)]:
            holder.session.close()
            held.holders.remove(holder)
        may_add = may_add and not shared.pool
        if held.holders and len(held.holders) < HOLDERS and may_add and time.monotonic() > shared.mend_after:
            self._submit(shared, self._add_holder)
        return bool(held.holders)

    def _add_holder(self, shared: Shared) -> None:
        held = shared.held
        assert held is not None
        try:
            held.add_holder(self._options, self._namer(shared), held.first.snapshot_id)
        except PgCdcError as error:
            # The other holder still works; a later tick tries again, or finds that one lost as well.
            shared.mend_after = time.monotonic() + MEND_SECONDS
            log.warning("execution %s: there is no second holder: %s", shared.request.execution, error)
        self._lock(shared)

    def lock(self, shared: Shared, oids: set[int]) -> None:
        """Lock further relations on every holder."""
        shared.locked |= oids
        self._submit(shared, self._lock)

    def unlock(self, shared: Shared) -> None:
        """Let go of all locks of a snapshot's holders."""
        shared.locked.clear()
        self._submit(shared, self._unlock)

    def _lock(self, shared: Shared) -> None:
        held = shared.held
        assert held is not None
        try:
            held.lock(sorted(shared.locked), within_seconds=10)
        except PgCdcError as error:
            # A reader that is harmed by the missing lock finds out by itself, see check_files.
            log.warning("execution %s: %s", shared.request.execution, error)

    def _unlock(self, shared: Shared) -> None:
        assert shared.held is not None
        shared.held.unlock()


def _keys_in_pool(keys: tuple[str, ...], snapshot_id: str) -> list[LockKey]:
    return [execution_key(key, snapshot_number(snapshot_id)) for key in keys]


def _unexpected(error: Exception) -> DefiniteError:
    return DefiniteError(
        f"the keeper (process that holds snapshots) failed: {type(error).__name__}: {error}",
        remedy="the driver's standard error has the traceback; report it as a defect",
    )
