"""How a task waits for what it reads in, without a server."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pg_cdc_source.errors import ServerFullError, TransientError
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.postgres import connection
from pg_cdc_source.postgres.connection import FULL_SECONDS
from pg_cdc_source.snapshot.board import NoAnswerError
from pg_cdc_source.snapshot.reader import ATTEMPTS, _Reader
from pg_cdc_source.snapshot.reading_session import TASK_FULL_SECONDS, ReadingSession

OPTIONS = parse_connection_options({"url": "host=db user=me dbname=shop"})


@pytest.mark.parametrize(("name", "bound"), [("reading", TASK_FULL_SECONDS), ("checking", FULL_SECONDS)])
def test_both_sessions_of_a_task_wait_for_a_full_server(
    name: str, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is refused the second one would read all that it has read again."""
    began = now = time.monotonic()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def refuse(*_: Any, **__: Any) -> None:
        raise ServerFullError("sorry, too many clients already")

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(connection, "_connect_once", refuse)
    plan: Any = SimpleNamespace(relation=None, spec=SimpleNamespace(connection=OPTIONS), what="a query")
    source: Any = SimpleNamespace(session_name=lambda *_: "pgsnapshot:k:17?0")
    session = ReadingSession(plan, source, cast(Any, SimpleNamespace(heaps=(), pieces=())), "17")
    with pytest.raises(ServerFullError, match="of waiting for a connection"):
        session.present.open() if name == "checking" else session.open_unlocked()
    assert now - began > 0.9 * bound


@pytest.mark.parametrize(("error", "times"), [
    (TransientError("it was lost"), ATTEMPTS), (ServerFullError("too many"), 1), (NoAnswerError("it is silent"), 1),
])  # fmt: skip
def test_what_was_waited_for_is_not_waited_for_again(error: TransientError, times: int) -> None:
    asked = []

    def refuse(_: object) -> None:
        asked.append("a session")
        raise error

    session: Any = SimpleNamespace(open=refuse, close=lambda: None)
    plan: Any = SimpleNamespace(
        spec=SimpleNamespace(where=None, unrepresentable="fail"), codecs=(), arrow_schema=lambda: ()
    )
    with pytest.raises(type(error)):
        list(_Reader(plan, (), session).batches())
    assert len(asked) == times
