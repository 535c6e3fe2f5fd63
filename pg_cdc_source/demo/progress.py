"""Show on a terminal how far a Spark action is that reads PostgreSQL: rows and bytes as the server counts them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg2
from psycopg2.extensions import connection as Session
from pyspark.sql import SparkSession
from rich.console import Console

_LOOK_SECONDS = 0.25


class Copied:
    """Rows and bytes of all ``COPY`` statements that were seen running. The server forgets them when they end."""

    def __init__(self) -> None:
        self._ended = (0, 0)
        self._running: dict[int, tuple[int, int]] = {}

    def look(self, found: dict[int, tuple[int, int]]) -> tuple[int, int]:
        """Take in what each backend's ``COPY`` has sent, by pid, and return what all have sent so far."""
        for pid, (rows, size) in self._running.items():
            if pid not in found or found[pid][0] < rows:
                self._ended = self._ended[0] + rows, self._ended[1] + size
        self._running = found
        parts = [self._ended, *found.values()]
        return sum(rows for rows, _ in parts), sum(size for _, size in parts)


@contextmanager
def shown(console: Console, spark: SparkSession, doing: str, url: str | None = None) -> Iterator[None]:
    """Show, while the block runs a Spark action, its tasks and, with the server's ``url``, what ``COPY`` sends.

    A ``COPY`` that takes less than a moment is not seen, so this is for large ranges.
    """
    if not console.is_terminal:
        yield
        return
    done = threading.Event()
    with console.status(doing) as status:

        def watch() -> None:
            with contextlib.ExitStack() as stack, contextlib.suppress(psycopg2.Error):
                sent: Callable[[], str] = str  # nothing
                if url is not None:
                    sent = _sent(stack.enter_context(contextlib.closing(_session(url))))
                while not done.wait(_LOOK_SECONDS):
                    status.update(f"{doing}: {_tasks(spark)}{sent()}")

        watcher = threading.Thread(target=watch, name="progress", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join(1)


def _session(url: str) -> Session:
    session = psycopg2.connect(url)
    session.autocommit = True
    return session


def _sent(session: Session) -> Callable[[], str]:
    """What says how much has been sent since now."""
    copied, start = Copied(), time.monotonic()

    def say() -> str:
        with session.cursor() as cursor:
            cursor.execute("SELECT pid, tuples_processed, bytes_processed FROM pg_stat_progress_copy")
            rows, size = copied.look({pid: (tuples, sent) for pid, tuples, sent in cursor})
        return f", {rows:,} rows, {size / 1e6 / (time.monotonic() - start):,.0f} MB/s" if rows else ""

    return say


def _tasks(spark: SparkSession) -> str:
    tracker = spark.sparkContext.statusTracker()
    stages = [info for stage in tracker.getActiveStageIds() if (info := tracker.getStageInfo(stage)) is not None]
    if not stages:
        return "planning"
    return f"{sum(s.numCompletedTasks for s in stages)} of {sum(s.numTasks for s in stages)} ranges"
