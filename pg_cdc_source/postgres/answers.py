"""How long a session may be silent when it was asked something."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from psycopg2.extensions import connection as Session

# For all questions of one kind together; thousands of tables take a while.
ANSWER_SECONDS = 600.0


@contextmanager
def answered_within(session: Session, seconds: float = ANSWER_SECONDS) -> Iterator[None]:
    """Have what waits for an answer in ``session`` fail after so many seconds, as if the connection was lost.

    TCP notices a server that is gone, but not one that hangs, nor a proxy that has lost it.
    """

    turn, is_over = threading.Lock(), False
    # A file of its own: the session may be closed meanwhile, and its number be somebody else's.
    with socket.socket(fileno=os.dup(session.fileno())) as connection:

        def give_up() -> None:
            with turn:
                if not is_over:
                    connection.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            with turn:
                is_over = True
