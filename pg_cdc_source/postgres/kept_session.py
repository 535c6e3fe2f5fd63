"""A session that is opened when it is first needed, and kept."""

from __future__ import annotations

from collections.abc import Callable

from psycopg2.extensions import connection as Session


class KeptSession:
    """Opened by ``begin`` when it is first needed, and again where it was lost or given up."""

    def __init__(self, begin: Callable[[], Session]) -> None:
        self._begin = begin
        self._session: Session | None = None

    @property
    def present(self) -> Session | None:
        """The session, None where there is none."""
        return None if self._session is None or self._session.closed else self._session

    def open(self) -> Session:
        """The session. Raises what ``begin`` raises."""
        session = self.present
        if session is None:
            session = self._session = self._begin()
        return session

    def close(self) -> None:
        """Give the session up."""
        if self._session is not None:
            self._session.close()
            self._session = None
