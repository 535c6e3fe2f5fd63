"""Show on a terminal how far a Spark action is that reads PostgreSQL: rows and bytes as the server counts them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg2
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
def shown(console: Console, spark: SparkSession, url: str, doing: str) -> Iterator[None]:
    """Show, while the block runs a Spark action, its tasks and what ``COPY`` sends."""
    if not console.is_terminal:
        yield
        return
    done = threading.Event()
    with console.status(doing) as status:

        def watch() -> None:
            copied, start = Copied(), time.monotonic()
            with contextlib.suppress(psycopg2.Error), contextlib.closing(psycopg2.connect(url)) as session:
                session.autocommit = True
                while not done.wait(_LOOK_SECONDS):
                    with session.cursor() as cursor:
                        cursor.execute("SELECT pid, tuples_processed, bytes_processed FROM pg_stat_progress_copy")
                        rows, size = copied.look({pid: (tuples, sent) for pid, tuples, sent in cursor})
                    rate = size / 1e6 / (time.monotonic() - start)
                    by_copy = f", {rows:,} rows, {rate:,.0f} MB/s" if rows else ""
                    status.update(f"{doing}: {_tasks(spark)}{by_copy}")

        watcher = threading.Thread(target=watch, name="progress", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join(1)


def _tasks(spark: SparkSession) -> str:
    tracker = spark.sparkContext.statusTracker()
    stages = [info for stage in tracker.getActiveStageIds() if (info := tracker.getStageInfo(stage)) is not None]
    if not stages:
        return "planning"
    return f"{sum(s.numCompletedTasks for s in stages)} of {sum(s.numTasks for s in stages)} ranges"
