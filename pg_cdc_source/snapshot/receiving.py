"""Receive a COPY in chunks, and decode each as it comes.

Chunks are bounded by bytes, whatever a row weighs. With the accelerator they are pulled, and the socket's buffers let
the server go on. By itself psycopg2 pushes rows: there a thread receives and decodes them, and hands chunks over in a
queue of one. Either way one thread does both; two that take turns with the interpreter's lock took 7 % more CPU, and
no less time.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Generator
from types import SimpleNamespace

import psycopg2
import pyarrow as pa
from psycopg2 import sql
from psycopg2.extensions import connection as Session

from pg_cdc_source.postgres.copy_out import copy_out
from pg_cdc_source.postgres.server_errors import translate
from pg_cdc_source.values import native
from pg_cdc_source.values.wire import Messages

# Few enough to stay in cache while they are walked by columns, enough to share what Python takes for each chunk.
# Measured best: for NumPy alone between 1,024 and 16,384 rows; with the accelerator, which walks once, between 8,192
# and 32,768.
ROWS_PER_CHUNK = 16_384 if native.LIBRARY is not None else 8192
BYTES_PER_CHUNK = 2 << 20 if native.LIBRARY is not None else 1 << 20

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger: on, for no time

Decoded = tuple[list[pa.Array], int]  # of a chunk: its columns, its rows
Decode = Callable[[Messages], Decoded]


def receive(
    session: Session, copy: sql.Composable, doing: str, padding: int, decode: Decode
) -> Generator[Decoded, None, None]:
    """Run a COPY and yield its chunks, decoded, each with ``padding`` zeros behind it when ``decode`` gets it.

    Ending early closes the session, which ends the COPY on the server.
    """
    way = _pull if native.LIBRARY is not None else _take_pushed
    return way(session, copy, doing, padding, decode)


def _pull(
    session: Session, copy: sql.Composable, doing: str, padding: int, decode: Decode
) -> Generator[Decoded, None, None]:
    finished = False
    try:
        yield from map(decode, copy_out(session, copy, doing, ROWS_PER_CHUNK, BYTES_PER_CHUNK, padding))
        finished = True
    finally:
        if not finished:
            session.close()


class _StoppedError(Exception):
    """The reader wants no more rows."""


def _take_pushed(
    session: Session, copy: sql.Composable, doing: str, padding: int, decode: Decode
) -> Generator[Decoded, None, None]:
    """Receive in a thread that is one chunk ahead, and that stops while this chunk waits to be taken."""
    chunks: queue.Queue[Decoded | BaseException | None] = queue.Queue(maxsize=1)
    stopped = threading.Event()

    def put(item: Decoded | BaseException | None) -> None:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                chunks.put(item, timeout=0.5)
                return
        raise _StoppedError

    def receive() -> None:
        with contextlib.suppress(_StoppedError):
            try:
                _receive_by_rows(session, copy, padding, lambda chunk: put(decode(chunk)))
                put(None)
            except _StoppedError:
                raise
            except BaseException as error:
                put(_server_error(error))

    thread = threading.Thread(target=receive, name="pgsnapshot-copy", daemon=True)
    thread.start()
    finished = False
    try:
        while (item := chunks.get()) is not None:
            if isinstance(item, psycopg2.Error):
                raise translate(item, doing)
            if isinstance(item, BaseException):
                raise item
            yield item
        finished = True
    finally:
        stopped.set()
        if not finished:
            # The thread may be waiting for the server: hanging up wakes it, and the server as well.
            with contextlib.suppress(OSError, psycopg2.Error), socket.socket(fileno=os.dup(session.fileno())) as wire:
                # Closing is to reset the connection. Otherwise a server that had filled the buffers waits for room in
                # them until the kernel forgets the connection, which Linux does after a minute (tcp_fin_timeout).
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                wire.shutdown(socket.SHUT_RDWR)
        thread.join()
        if not finished:
            session.close()


def _receive_by_rows(session: Session, copy: sql.Composable, padding: int, put: Callable[[Messages], None]) -> None:
    """Receive a COPY by psycopg2, which calls for each row."""
    chunk: list[bytes] = []

    def rows() -> Generator[None, bytes, None]:
        # A generator's send is a C function that resumes a frame: half the price of a Python method per row.
        nonlocal chunk
        while True:
            size = 0
            while len(chunk) < ROWS_PER_CHUNK and size < BYTES_PER_CHUNK:
                row = yield
                chunk.append(row)
                size += len(row)
            full, chunk = chunk, []
            put(Messages.joined(full, padding))

    collector = rows()
    next(collector)
    with session.cursor() as cursor:
        cursor.copy_expert(copy, SimpleNamespace(write=collector.send), size=0)
    put(Messages.joined(chunk, padding))


def _server_error(error: BaseException) -> BaseException:
    """The error of the server behind what psycopg2 raises for a COPY that is cut off.

    It goes on working with the error set, and Python then reports a SystemError with the real one as its cause.
    """
    return error.__cause__ if isinstance(error, SystemError) and error.__cause__ is not None else error
