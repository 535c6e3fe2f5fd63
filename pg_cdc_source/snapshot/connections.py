"""How many sessions a driver has on a server: ``maxConnections`` for planning and keeper together.

Spark asks for schemas and partitions in Python processes of their own, as many as there are threads that load. None of
them can count the sessions of the others before it has one itself. But all run on the driver's host: so they wait in
line for a few lock files, which the kernel unlocks when a process ends, however it ends. The keeper is one process, and
counts its own.

What tasks open is not part of the bound. Spark runs as many at once as it has slots, on hosts that know nothing of each
other, and a task that has to wait holds its slot. So a task opens its session, and waits where the server is full.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import TransientError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.connection import FULL_SECONDS, connect
from pg_cdc_source.snapshot.driver_files import driver_file

log = logging.getLogger(__name__)

# Planning takes some ten round trips, and starting Python for it more CPU than that.
_PLANNING_AT_ONCE = 2
_PLANNING_AT_MOST = 4
# Planning one scan, the keeper's own session, a mark, and one holder.
LEAST_CONNECTIONS = 4

_LINE = Backoff(0.005, growth=1.5, longest_seconds=0.1, within_seconds=600.0)


def planning_share(max_connections: int | None) -> int:
    """How many processes may plan at a time; None where the option is not set, and no server has been asked."""
    if max_connections is None:
        return _PLANNING_AT_ONCE
    return max(1, min(_PLANNING_AT_MOST, max_connections // 4))


def keeper_share(max_connections: int) -> int:
    """How many sessions the keeper may have."""
    return max(LEAST_CONNECTIONS - 1, max_connections - planning_share(max_connections))


@contextmanager
def planning_session(options: ConnectionOptions, max_connections: int | None) -> Iterator[Session]:
    """A session for planning, as soon as this process is in turn."""
    with _turn(options, max_connections):
        session = connect(options, "pgsnapshot:planning", full_seconds=FULL_SECONDS)
        with contextlib.closing(session):
            yield session


@contextmanager
def _turn(options: ConnectionOptions, max_connections: int | None) -> Iterator[None]:
    """Wait until fewer processes of this driver plan on the server than may at a time."""
    paths = [driver_file(options.display(), str(number)) for number in range(planning_share(max_connections))]
    try:
        place = next((place for _ in _LINE.polls() if (place := _first_free(paths)) is not None), None)
    except OSError as error:
        log.warning("planning does not wait in line, because %s cannot be written: %s", paths[0].parent, error)
        yield
        return
    if place is None:
        raise TransientError(
            f"planning has waited {_LINE.within_seconds:g} s in line: {len(paths)} processes plan at a time",
            remedy="load fewer DataFrames at a time, or raise maxConnections",
        )
    path, file = place
    try:
        yield
    finally:
        # Before it is unlocked: who has opened it meanwhile finds that it is not the path's any more.
        path.unlink(missing_ok=True)
        os.close(file)


def _first_free(paths: list[Path]) -> tuple[Path, int] | None:
    return next(((path, file) for path in paths if (file := _lock(path)) is not None), None)


def _lock(path: Path) -> int | None:
    """Lock a file, which is made if there is none, and return its descriptor; None where another process has it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file), path.stat()):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None


def bound(max_connections: int | None, left: int) -> int:
    """The bound that the option sets; without it, a third of the connections that are left to this role."""
    return max(LEAST_CONNECTIONS, left // 3) if max_connections is None else max_connections
