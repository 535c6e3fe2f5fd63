"""What tells that a server shuts down while nothing is read from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg2
import pytest

from pg_cdc_source.errors import ConnectError, PgCdcError, ServerFullError, TransientError
from pg_cdc_source.stream.received import server_watch
from pg_cdc_source.stream.received.server_watch import ServerWatch


class Session:
    """An idle session, and what its server says when it ends it."""

    ended: str | None = None
    closed = False

    def poll(self) -> None:
        if self.ended is not None:
            raise psycopg2.OperationalError(self.ended)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def watching() -> Callable[..., tuple[ServerWatch, list[Session]]]:
    """``watching(error)``: a watch whose attempts to connect end with ``error``, if any, and its sessions."""

    def watching(error: PgCdcError | None = None) -> tuple[ServerWatch, list[Session]]:
        sessions: list[Session] = []

        def connect() -> Any:
            if error is not None:
                raise error
            sessions.append(Session())
            return sessions[-1]

        return ServerWatch(connect), sessions

    return watching


def test_a_session_that_the_server_ends_tells(watching: Callable[..., tuple[ServerWatch, list[Session]]]) -> None:
    watch, sessions = watching()
    watch.look()
    watch.look()
    (session,) = sessions
    session.ended = "terminating connection due to administrator command\n"
    with pytest.raises(TransientError, match="the server shuts down, or is gone: terminating connection"):
        watch.look()
    assert session.closed


@pytest.mark.parametrize(
    "error",
    [ServerFullError("sorry, too many clients already"), TransientError("no token"), ConnectError("refused")],
)
def test_a_session_that_cannot_be_had_tells_nothing(
    error: PgCdcError, watching: Callable[..., tuple[ServerWatch, list[Session]]]
) -> None:
    watch, _ = watching(error)
    watch.look()


@pytest.mark.parametrize("said", ["the database system is shutting down", "das Datenbanksystem fährt herunter"])
def test_a_server_that_says_so_shuts_down(
    said: str, watching: Callable[..., tuple[ServerWatch, list[Session]]]
) -> None:
    watch, _ = watching(TransientError(f"cannot connect to PostgreSQL at db: FATAL: {said}"))
    with pytest.raises(TransientError, match=said):
        watch.look()


def test_a_session_goes_once_it_is_not_needed_for_a_while(
    watching: Callable[..., tuple[ServerWatch, list[Session]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, sessions = watching()
    watch.look()
    watch.rest()
    assert not sessions[0].closed
    monkeypatch.setattr(server_watch, "KEPT_SECONDS", 0.0)
    watch.look()
    watch.rest()
    assert sessions[0].closed
    watch.look()
    watch.close()
    assert [session.closed for session in sessions] == [True, True]
