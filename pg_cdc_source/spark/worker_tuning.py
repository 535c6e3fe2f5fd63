"""Settings of Spark's Python processes that make small tasks, and planning, shorter.

There are three, and none changes a result. The user's own code may run in the same process, so this is all they touch:

- Modules are kept out of garbage collections (``gc.freeze``).
- Spark's own archives (``pyspark.zip``, ``spark-core.jar``) are not read again before each task and each plan, as Spark
  4.0 and 4.1 have Python do.
- A thread acknowledges the JVM's messages on the worker's connection to it at the end of each task (TCP_QUICKACK; Linux
  only). No other socket is touched.

``PG_CDC_WORKER_TUNING=off`` in the environment of Spark's workers leaves out all. To load a table of five rows and
write it to a no-op sink took 0.50 s without all three on Spark 4.1 and Python 3.11, 0.12 s with them; sixty of them in
eight threads 18.2 and 3.4 s. What the other two spare of an action of 1,000 rows in 8 tasks, two at a time (medians of
the ratio in 21 interleaved rounds):

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
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from zipimport import zipimporter

ENVIRONMENT = "PG_CDC_WORKER_TUNING"

_INTERNET = (socket.AF_INET, socket.AF_INET6)
# After the last row the worker has its last answer sent within a millisecond or a few.
_ANSWERED_AFTER_SECONDS = (0.002, 0.003, 0.005)


@contextmanager
def small_task() -> Iterator[None]:
    """Wrap the part of a task that yields its rows."""
    tune_process()
    rows_given = _tune_connection()
    yield
    if rows_given is not None:
        rows_given.set()


def tune_process() -> None:
    """Do what does not need a connection: for a task, and for a process that plans. Call it each time."""
    if _is_on():
        _freeze_modules()
        _keep_archives()


# Spark sets them all as PYTHONPATH (PythonUtils.scala), also its own classes, which are some thousands.
_SPARKS_ARCHIVE = re.compile(r"pyspark\.zip|py4j-.+-src\.zip|spark-core_.+\.jar")


def _keep_archives() -> None:
    """Do not have Python read the directories of Spark's archives again when its caches are invalidated.

    Spark 4.0 and 4.1 invalidate them before each task and each plan, as modules may have been added
    (``pyspark/worker_util.py``); 4.3 does where some were. Python then reads the directory of an archive once
    for each package in it, in Python code. Nothing is added to Spark's own.
    """
    for finder in list(sys.path_importer_cache.values()):
        if isinstance(finder, zipimporter) and _SPARKS_ARCHIVE.fullmatch(os.path.basename(finder.archive)):
            vars(finder)["invalidate_caches"] = _do_nothing


def _do_nothing() -> None:
    pass


@functools.cache
def _freeze_modules() -> None:
    """Keep what is loaded now out of garbage collections, once in a process.

    Spark's Python workers collect garbage after each task (``pyspark/daemon.py``). Going through all that pyspark,
    NumPy and pyarrow consist of took 16 ms, most of what a small task costs, while the worker's next task waits.
    """
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
