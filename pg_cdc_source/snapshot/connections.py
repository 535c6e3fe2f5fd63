"""How many sessions a driver has on a server: ``maxConnections`` for planning and keeper together.

Spark asks for schemas and partitions in Python processes of their own, as many as there are threads that load. None of
them can count the sessions of the others before it has one itself. But all run on the driver's host: so they wait in
line for a few lock files, which the kernel unlocks when a process ends, however it ends. The keeper is one process, and
counts its own.

Spark gives such a process the next load, too. A new session costs the server more than all that planning asks in it, so
a process may keep its session for a moment: where one of some further files is free, which say how many may.

What tasks open is not part of the bound. Spark runs as many at once as it has slots, on hosts that know nothing of each
other, and a task that has to wait holds its slot. So a task opens its session, and waits where the server is full.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import TransientError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.connection import FULL_SECONDS, begin_anew, connect
from pg_cdc_source.snapshot.driver_files import driver_file, sparks_directory
from pg_cdc_source.snapshot.lingering import Lingering

log = logging.getLogger(__name__)

# Planning takes some ten round trips, and starting Python for it more CPU than that.
_PLANNING_AT_ONCE = 2
_PLANNING_AT_MOST = 4
# Planning one scan, the keeper's own session, a mark, and one holder.
LEAST_CONNECTIONS = 4
_KEPT_AT_MOST = 8
# Loads of several threads go round their processes.
_KEPT_SECONDS = 2.0

_NAME = "pgsnapshot:planning"
_LINE = Backoff(0.005, growth=1.5, longest_seconds=0.1, within_seconds=600.0)


def planning_share(max_connections: int | None) -> int:
    """How many processes may plan in new sessions at a time; None: the option is not set."""
    if max_connections is None:
        return _PLANNING_AT_ONCE
    return max(1, min(_PLANNING_AT_MOST, max_connections // 4))


def kept_share(max_connections: int) -> int:
    """How many processes may keep a session for their next load, or plan in one they have kept."""
    return max(0, min(_KEPT_AT_MOST, (max_connections - LEAST_CONNECTIONS) // 3))


def keeper_share(max_connections: int) -> int:
    """How many sessions the keeper may have."""
    left = max_connections - planning_share(max_connections) - kept_share(max_connections)
    return max(LEAST_CONNECTIONS - 1, left)


@dataclass(frozen=True, slots=True)
class _Place:
    """A file that this process has locked."""

    path: Path
    file: int

    def leave(self) -> None:
        # Before it is unlocked: who has opened it meanwhile finds that it is not the path's any more.
        self.path.unlink(missing_ok=True)
        os.close(self.file)


class Planning:
    """Planning, and the session for it: it ends with the planning, or is kept for the next one of this process."""

    def __init__(self, options: ConnectionOptions, session: Session) -> None:
        self.session = session
        self._options = options
        self._keeps_within: int | None = None
        self._place: _Place | None = None  # among those that are kept

    def keep(self, max_connections: int) -> None:
        """Keep the session, where the bound leaves room for it. No SQL of the user's may have run in it."""
        self._keeps_within = max_connections

    def begin_anew(self, options: ConnectionOptions) -> bool:
        """Whether the session that was kept is there still, and of use."""
        self._keeps_within = None
        return self._options == options and begin_anew(self.session, _NAME)

    def end(self) -> None:
        """Keep the session, or close it."""
        # A process that ends leaves its file, which Spark deletes with its directory.
        if self._keeps_within is not None and self._place is None and sparks_directory():
            # One that cannot be written has been warned of.
            with contextlib.suppress(OSError):
                self._place = _first_free(_files(self._options, "kept", kept_share(self._keeps_within)))
        if self._keeps_within is not None and self._place is not None:
            _KEPT.leave(self)
        else:
            self.close()

    def close(self) -> None:
        self.session.close()
        if self._place is not None:
            self._place.leave()
            self._place = None


_KEPT = Lingering(_KEPT_SECONDS, Planning.close)


@contextmanager
def planning_session(options: ConnectionOptions, max_connections: int | None) -> Iterator[Planning]:
    """Plan in the session that this process has kept, or in a new one as soon as it is in turn."""
    kept = _KEPT.take()
    if kept is not None and kept.begin_anew(options):
        with _ended(kept):
            yield kept
        return
    if kept is not None:
        kept.close()
    with _turn(options, max_connections):
        planning = Planning(options, connect(options, _NAME, full_seconds=FULL_SECONDS))
        with _ended(planning):
            yield planning


@contextmanager
def _ended(planning: Planning) -> Iterator[None]:
    try:
        yield
    except BaseException:
        planning.close()
        raise
    planning.end()


@contextmanager
def _turn(options: ConnectionOptions, max_connections: int | None) -> Iterator[None]:
    """Wait until fewer processes of this driver plan in new sessions on the server than may at a time."""
    paths = _files(options, "", planning_share(max_connections))
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
    try:
        yield
    finally:
        place.leave()


def _files(options: ConnectionOptions, kind: str, count: int) -> list[Path]:
    return [driver_file(options.display(), f"{kind}{number}") for number in range(count)]


def _first_free(paths: Sequence[Path]) -> _Place | None:
    return next((_Place(path, file) for path in paths if (file := _lock(path)) is not None), None)


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
