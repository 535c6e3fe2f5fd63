"""Threads that work beside a test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def at_work(*works: Callable[[threading.Event], None]) -> Iterator[list[BaseException]]:
    """Run each of ``works`` in a thread until the block ends; the event says that. Yield what they raise.

    What they raise is an error at the end of the block.
    """
    stop = threading.Event()
    failures: list[BaseException] = []

    def run(work: Callable[[threading.Event], None]) -> None:
        try:
            work(stop)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,), name="at work") for work in works]
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures, failures
