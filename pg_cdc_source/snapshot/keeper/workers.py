"""Threads that wait for PostgreSQL on behalf of the keeper's main thread."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait

Finish = Callable[[], None]


class Workers:
    """A pool of threads. Each work returns what the main thread has to do with its result."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="snapshot")
        self._done: queue.SimpleQueue[Finish] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()

    def fileno(self) -> int:
        """For ``select``: readable once some work is done."""
        return self._wake_read

    def submit(self, work: Callable[[], Finish]) -> None:
        def run() -> None:
            self._done.put(work())
            os.write(self._wake_write, b"x")

        self._pool.submit(run)

    def finish(self) -> None:
        """Do in this thread what finished works have left to do."""
        while wait([self._wake_read], 0):
            os.read(self._wake_read, 4096)
        while not self._done.empty():
            self._done.get()()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
