"""Watch the readers of executions: lock what they read, and release snapshots that nobody reads any more."""

from __future__ import annotations

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import SnapshotLostError
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.snapshot.board import holder_name, read_readers
from pg_cdc_source.snapshot.keeper.executions import Executions
from pg_cdc_source.snapshot.keeper.shared import Shared

_LOOK_SECONDS = 1.0  # how often readers are looked for while snapshots are held, if not more often for snapshotIdle
# Tasks that are connected for a fifth of the time only are missed by most looks, but not by so many in a row. Four in a
# row did miss them.
_LOOKS_PER_IDLE = 20
_LOOK_SECONDS_FOR_LINE = 0.2  # while executions wait for a snapshot that nobody reads any more


def look_seconds(executions: Executions) -> float:
    """How long to wait between two looks, so that no ``snapshotIdle`` passes with too few of them."""
    idle = (execution.request.snapshot_idle_seconds for execution in executions.all())
    longest_seconds = _LOOK_SECONDS_FOR_LINE if executions.any_in_line() else _LOOK_SECONDS
    return min([longest_seconds, *(seconds / _LOOKS_PER_IDLE for seconds in idle)])


def watch(board: Session, keeper: str, executions: Executions, now: float) -> set[str]:
    """Look once who reads, and act on it; returns the executions that have readers and are not known."""
    readers = read_readers(board, keeper)
    read = {
        shared: set().union(*(readers.get(execution.key, set()) for execution in group))
        for shared, group in executions.snapshots().items()
    }
    for shared, oids in read.items():
        if shared.holding and not shared.pool and (new := oids - shared.locked - {0}):
            executions.lock(shared, new)
    unlock(board, keeper, executions, read)
    for execution in executions.all():
        if execution.key in readers or execution.being_read:
            execution.last_reader = now
        execution.being_read = execution.key in readers
    _release(executions, now)
    executions.make_room(now)
    executions.take_out_of_pools(now)
    return {key for key in readers if executions.get(key) is None}


def unlock(board: Session, keeper: str, executions: Executions, read: dict[Shared, set[int]]) -> None:
    """Release locks: DDL must not wait for a snapshot that nobody reads, nor everybody else behind the DDL."""
    waited_for = _find_waited_for(board) if any(shared.locked for shared in read) else set()
    for shared, oids in read.items():
        if shared.holding is None or not shared.locked:
            continue
        execution = shared.request.execution
        names = {holder_name(keeper, execution, snapshot_id) for _, snapshot_id in shared.holding.holders}
        if not oids or names & waited_for:
            executions.unlock(shared)


def _find_waited_for(board: Session) -> set[str]:
    """The names of sessions that hold locks on tables somebody waits for. A pooler's client does not know its pid."""
    with translated("looking for who waits"), board.cursor() as cursor:
        cursor.execute("""
            SELECT DISTINCT activity.application_name
            FROM pg_catalog.pg_locks AS waiting
            JOIN pg_catalog.pg_locks AS holding USING (locktype, database, relation)
            JOIN pg_catalog.pg_stat_activity AS activity ON activity.pid = holding.pid
            WHERE locktype = 'relation' AND NOT waiting.granted AND holding.granted
        """)
        return {name for (name,) in cursor}


def _release(executions: Executions, now: float) -> None:
    """End snapshots without a reader for ``snapshotIdle``: nobody tells when an action is done."""
    for shared, group in executions.snapshots().items():
        idle = [
            execution for execution in group if now - execution.last_reader > execution.request.snapshot_idle_seconds
        ]
        # A pool has others' snapshots as well, and may never be without a reader.
        if shared.holding is not None and (shared.pool or len(idle) == len(group)):
            for execution in idle:
                executions.end(execution, _idle_error(execution.request.snapshot_idle_seconds))


def _idle_error(idle_seconds: float) -> SnapshotLostError:
    return SnapshotLostError(
        f"the snapshot of this action has ended, because no task of it read from PostgreSQL for {idle_seconds:g} s",
        remedy="raise snapshotIdle above the longest pause between two reads of one action",
    )
