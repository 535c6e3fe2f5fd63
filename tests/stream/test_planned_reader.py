"""How a reader's sessions ask for large transactions."""

from __future__ import annotations

from typing import Any

import pytest

from pg_cdc_source.errors import TransientError
from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.stream.planned_reader import Sessions


def test_large_transactions_come_while_they_run_unless_a_session_brought_nothing() -> None:
    asked: list[bool] = []
    is_full = False

    def connect(received: Position, *, streaming: bool) -> Any:
        asked.append(streaming)
        if is_full:
            raise TransientError("the server is full")

    sessions = Sessions(connect, lambda: False)
    first, second = Position(Lsn(100)), Position(Lsn(200))
    sessions(first)
    sessions(first)
    sessions(second)
    is_full = True
    for _ in range(3):
        with pytest.raises(TransientError):
            sessions(Position(Lsn(300)))
    is_full = False
    sessions(Position(Lsn(300)))
    assert asked == [True, False, True, *3 * [True], True]


def test_what_has_to_come_whole_does_whatever_the_session_before_brought() -> None:
    asked: list[bool] = []
    needs_whole = False

    def connect(_: Position, *, streaming: bool) -> Any:
        asked.append(streaming)

    sessions = Sessions(connect, lambda: needs_whole)
    sessions(Position(Lsn(100)))
    needs_whole = True
    sessions(Position(Lsn(200)))
    sessions(Position(Lsn(300)))
    needs_whole = False
    sessions(Position(Lsn(400)))
    assert asked == [True, False, False, True]
