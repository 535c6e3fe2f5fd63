"""How long a session may be silent when it was asked something."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import TransientError

# For all questions of one kind together; thousands of tables take a while.
ANSWER_SECONDS = 600.0


@contextmanager
def answered_within(session: Session, seconds: float = ANSWER_SECONDS) -> Iterator[None]:
    """Have what waits for an answer in ``session`` fail after so many seconds, as if the connection was lost.

    TCP notices a server that is gone, but not one that hangs, nor a proxy that has lost it. Raises TransientError where
    this process has no file or no thread left.
    """

    turn, is_over = threading.Lock(), False
    with contextlib.ExitStack() as stack:
        try:
            # A file of its own: the session may be closed meanwhile, and its number be somebody else's.
            connection = stack.enter_context(socket.socket(fileno=os.dup(session.fileno())))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise _no_room(error) from None

        def give_up() -> None:
            with turn:
                if not is_over:
                    connection.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, give_up)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError as error:
            raise _no_room(error) from None
        try:
            yield
        finally:
            timer.cancel()
            with turn:
                is_over = True


def _no_room(error: Exception) -> TransientError:
    return TransientError(
        f"a question to the server cannot be bounded: {error}",
        remedy="give this process, or its container, more threads and files",
    )
