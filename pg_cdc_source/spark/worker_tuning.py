"""Settings of Spark's Python worker that make small tasks shorter.

There are two, and neither changes a result. The user's own code may run in the same worker, so this is all they touch:

- Modules are kept out of garbage collections (``gc.freeze``).
- A thread acknowledges the JVM's messages on the worker's connection to it at the end of each task (TCP_QUICKACK; Linux
  only). No other socket is touched.

``PG_CDC_WORKER_TUNING=off`` in the environment of Spark's workers leaves out both. What they spare of an action of
1,000 rows in 8 tasks, two at a time (medians of the ratio in 21 interleaved rounds):

=======================================  ============  =======================  ============
.                                        Spark 4.3     4.3, Unix sockets        Spark 4.0
=======================================  ============  =======================  ============
modules out of collections               13 %          29 %                     7 %
both                                     53 %          28 %                     9 %
=======================================  ============  =======================  ============

TCP_NODELAY on the worker's side was tried as well: 2 % slower to 2 % faster, and so left out.
"""

from __future__ import annotations

import functools
import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

ENVIRONMENT = "PG_CDC_WORKER_TUNING"

_INTERNET = (socket.AF_INET, socket.AF_INET6)
# After the last row the worker has its last answer sent within a millisecond or a few.
_ANSWERED_AFTER_SECONDS = (0.002, 0.003, 0.005)


@contextmanager
def small_task() -> Iterator[None]:
    """Wrap the part of a task that yields its rows."""
    freeze_modules()
    rows_given = _tune_connection()
    yield
    if rows_given is not None:
        rows_given.set()


@functools.cache
def freeze_modules() -> None:
    """Keep what is loaded now out of garbage collections, once in a process.

    Spark's Python workers collect garbage after each task (``pyspark/daemon.py``). Going through all that pyspark,
    NumPy and pyarrow consist of took 16 ms, most of what a small task costs, while the worker's next task waits.
    """
    if _is_on():
        gc.collect()
        gc.freeze()


@functools.cache
def _tune_connection() -> threading.Event | None:
    """Let small messages pass between Spark's JVM and this worker without delay, if they talk over TCP.

    Each of them writes twice before it waits for the other. Nagle's algorithm keeps the second message back until the
    first is acknowledged, and Linux acknowledges up to 40 ms later. Return the event to set at the end of each task,
    or None.
    """
    connection = _connection_to_spark() if _is_on() else None
    return None if connection is None else _acknowledge_after_tasks(connection)


def _is_on() -> bool:
    return os.environ.get(ENVIRONMENT) != "off"


def _connection_to_spark() -> socket.socket | None:
    """Return the socket of this worker's connection to the JVM; None unless it is one of TCP's.

    ``pyspark/daemon.py`` forks the worker for one connection, and runs its tasks in ``worker(sock, authenticated)``.
    Other daemons, and workers that no daemon forked, are left as they are.
    """
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        code = frame.f_code
        if code.co_name == "worker" and code.co_filename.endswith(os.path.join("pyspark", "daemon.py")):
            found = frame.f_locals.get("sock")
            return found if isinstance(found, socket.socket) and found.family in _INTERNET else None
    return None


def _acknowledge_after_tasks(connection: socket.socket) -> threading.Event | None:
    """Let the JVM's messages not wait for an acknowledgement, from the end of each task: set the event then.

    Linux delays acknowledgements on connections that take turns, and counts the task's own answer as a turn. So they
    have to be asked for after the answer, and until the next one.
    """
    if sys.platform != "linux":
        return None
    rows_given = threading.Event()
    threading.Thread(target=_acknowledge, args=(connection, rows_given), name="pgcdc-acknowledge", daemon=True).start()
    return rows_given


def _acknowledge(connection: socket.socket, rows_given: threading.Event) -> None:
    while rows_given.wait():
        rows_given.clear()
        for pause_seconds in _ANSWERED_AFTER_SECONDS:
            time.sleep(pause_seconds)
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            except OSError:
                return  # closed: the worker ends
