"""Watch the readers of executions: lock what they read, and release snapshots that nobody reads any more."""

from __future__ import annotations

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import SnapshotLostError
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.snapshot.board import read_readers
from pg_cdc_source.snapshot.keeper.executions import Execution, Executions

_LOOK_SECONDS = 1.0  # how often readers are looked for while snapshots are held, if not more often for snapshotIdle
# Tasks that are connected for a fifth of the time only are missed by most looks, but not by so many in a row. Four in a
# row did miss them.
_LOOKS_PER_IDLE = 20
# Nobody tells when an action is done, so its snapshot waits for snapshotIdle. A loop of short actions must not take the
# server's connections for that: at two sessions a snapshot, a tenth of them at most.
_CONNECTIONS_PER_IDLE_SNAPSHOT = 20
_IDLE_KEPT_AT_LEAST = 4


def idle_kept(max_connections: int) -> int:
    """How many snapshots may wait for readers on a server with so many connections."""
    return max(_IDLE_KEPT_AT_LEAST, max_connections // _CONNECTIONS_PER_IDLE_SNAPSHOT)


def look_seconds(executions: Executions) -> float:
    """How long to wait between two looks, so that no ``snapshotIdle`` passes with too few of them."""
    idle = (execution.request.snapshot_idle_seconds for execution in executions.all())
    return min([_LOOK_SECONDS, *(seconds / _LOOKS_PER_IDLE for seconds in idle)])


def watch(board: Session, keeper: str, executions: Executions, idle_kept: int, now: float) -> set[str]:
    """Look once who reads, and act on it; returns the executions that have readers and are not known."""
    readers = read_readers(board, keeper)
    for execution in executions.all():
        new = readers.get(execution.key, set()) - execution.locked - {0}
        if new and execution.holding:
            executions.lock(execution, new)
    _unlock(board, executions, readers)
    for execution in executions.all():
        if execution.key in readers or execution.being_read:
            execution.last_reader = now
        execution.being_read = execution.key in readers
    _release(executions, idle_kept, now)
    return {key for key in readers if executions.get(key) is None}


def _unlock(board: Session, executions: Executions, readers: dict[str, set[int]]) -> None:
    """Release locks: DDL must not wait for a snapshot that nobody reads, nor everybody else behind the DDL."""
    waited_for = _find_waited_for(board) if any(execution.locked for execution in executions.all()) else set()
    for execution in executions.all():
        held = execution.holding
        if held is None or not execution.locked:
            continue
        pids = {session.info.backend_pid for session, _ in held.holders}
        if execution.key not in readers or pids & waited_for:
            executions.unlock(execution)


def _find_waited_for(board: Session) -> set[int]:
    """The sessions that hold locks on tables somebody waits for."""
    with translated("looking for who waits"), board.cursor() as cursor:
        cursor.execute("""
            SELECT DISTINCT holding.pid
            FROM pg_catalog.pg_locks AS waiting
            JOIN pg_catalog.pg_locks AS holding USING (locktype, database, relation)
            WHERE locktype = 'relation' AND NOT waiting.granted AND holding.granted
        """)
        return {pid for (pid,) in cursor}


def _release(executions: Executions, kept: int, now: float) -> None:
    """End snapshots without a reader for ``snapshotIdle``, and beyond ``kept`` those that are longest without one."""
    for execution in executions.all():
        idle_seconds = execution.request.snapshot_idle_seconds
        if execution.holding and now - execution.last_reader > idle_seconds:
            executions.end(execution, _idle_error(idle_seconds))
    idle = [execution for execution in executions.all() if execution.holding and execution.last_reader < now]
    for execution in longest_idle(idle, kept):
        executions.end(execution, _surplus_error(kept))


def longest_idle(idle: list[Execution], kept: int) -> list[Execution]:
    """Those of the idle executions that are beyond ``kept``, the longest without a reader first."""
    oldest_first = sorted(idle, key=lambda execution: (execution.last_reader, execution.key))
    return oldest_first[: max(0, len(idle) - kept)]


def _idle_error(idle_seconds: float) -> SnapshotLostError:
    return SnapshotLostError(
        f"the snapshot of this action has ended, because no task of it read from PostgreSQL for {idle_seconds:g} s",
        remedy="raise snapshotIdle above the longest pause between two reads of one action",
    )


def _surplus_error(kept: int) -> SnapshotLostError:
    return SnapshotLostError(
        f"the snapshot of this action has ended, because {kept} later ones waited for readers too, and each takes two "
        "of the server's connections",
        remedy="run fewer actions at a time, read all tables of an action early (cache()), or raise the server's "
        "max_connections",
    )
