"""Notices that a server shuts down while nothing is read from its walsender.

Such a server waits until each walsender has sent what is left, and refuses everybody meanwhile. But it ends plain
sessions at once, and so this idle one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import psycopg2
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import PgCdcError, TransientError
from pg_cdc_source.postgres.connect_errors import is_shutting_down

# The buffer of a backlog is full again with each batch.
KEPT_SECONDS = 60.0
# Where no session could be opened.
AGAIN_SECONDS = 60.0


class ServerWatch:
    """Keeps a session from ``connect`` while nothing is read, and for a while behind that."""

    def __init__(self, connect: Callable[[], Session]) -> None:
        self._connect = connect
        self._session: Session | None = None
        self._open_at = self._close_at = 0.0  # time.monotonic()

    def look(self) -> None:
        """Raise TransientError where the server has ended the session. Called now and then while nothing is read."""
        now = time.monotonic()
        self._close_at = now + KEPT_SECONDS
        if self._session is not None:
            self._require_answer(self._session)
        elif now >= self._open_at:
            self._open_at = now + AGAIN_SECONDS
            try:
                self._session = self._connect()
            except PgCdcError as error:
                # The server may have no room, or a token may not be had: the walsender is there all the same.
                if is_shutting_down(error):
                    raise TransientError(error.what) from None

    def rest(self) -> None:
        """Something is read again."""
        if self._session is not None and time.monotonic() >= self._close_at:
            self.close()

    def close(self) -> None:
        """Give the session up."""
        self._open_at = 0.0
        if self._session is not None:
            self._session.close()
            self._session = None

    def _require_answer(self, session: Session) -> None:
        try:
            session.poll()
        except psycopg2.Error as error:
            self.close()
            raise TransientError(f"the server shuts down, or is gone: {' '.join(str(error).split())}") from None
