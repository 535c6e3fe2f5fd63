"""Sessions that a task leaves to the next one: who gets them, and when they are closed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.snapshot.handover import Handover, Purpose, Reading


class OpenSession:
    """Stands for a session."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


CONNECTION = ConnectionOptions("dbname=one")
SCAN, OTHER_SCAN = (cast(Any, "plan"), None), (cast(Any, "other plan"), None)


def purpose(execution: str) -> Purpose:
    return Purpose(CONNECTION, "name", cast(Any, "source"), execution)


def left(handover: Handover, execution: str, *, as_new: bool = True) -> OpenSession:
    session = OpenSession()
    reading = Reading(cast(Any, session), cast(Any, "snapshot"), SCAN, frozenset(), as_new)
    handover.leave(purpose(execution), reading)
    return session


def wait_until(look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def handover() -> Handover:
    """One that closes nothing within any test."""
    return Handover(60.0)


def test_the_next_task_of_the_same_purpose_gets_the_session_once(handover: Handover) -> None:
    session = left(handover, "1")
    reading = handover.take(purpose("1"), SCAN)
    assert reading is not None
    assert cast(Any, reading.session) is session
    assert handover.take(purpose("1"), SCAN) is None
    assert session.closed == 0


def test_another_purpose_gets_the_session_alone(handover: Handover) -> None:
    session = left(handover, "1")
    assert handover.take(purpose("2"), SCAN) is None
    assert cast(Any, handover.take_session(CONNECTION)) is session
    assert session.closed == 0
    assert handover.take(purpose("1"), SCAN) is None
    assert handover.take_session(CONNECTION) is None


def test_another_scan_gets_the_transaction_only_if_it_is_as_new(handover: Handover) -> None:
    for as_new in (True, False):
        left(handover, "1", as_new=as_new)
        assert (handover.take(purpose("1"), OTHER_SCAN) is not None) == as_new
    assert handover.take(purpose("1"), SCAN) is not None


def test_a_session_of_no_use_is_closed(handover: Handover) -> None:
    changed = left(handover, "1", as_new=False)
    assert handover.take_session(CONNECTION) is None
    assert changed.closed == 1
    other = left(handover, "1")
    assert handover.take_session(ConnectionOptions("dbname=another")) is None
    assert other.closed == 1


def test_one_session_is_left_at_most(handover: Handover) -> None:
    first, second = left(handover, "1"), left(handover, "1")
    assert (first.closed, second.closed) == (1, 0)
    reading = handover.take(purpose("1"), SCAN)
    assert reading is not None
    assert cast(Any, reading.session) is second


def test_a_session_that_no_task_takes_is_closed() -> None:
    handover = Handover(0.01)
    session = left(handover, "1")
    wait_until(lambda: session.closed > 0)
    assert handover.take(purpose("1"), SCAN) is None


def test_a_session_that_was_taken_stays_open() -> None:
    # Long enough that it is not over before the session is taken.
    handover = Handover(1.0)
    session = left(handover, "1")
    reading = handover.take(purpose("1"), SCAN)
    # Also when it is left anew while a thread is at it.
    assert reading is not None
    handover.leave(purpose("1"), reading)
    assert handover.take(purpose("1"), SCAN) is reading
    # The time is over once another one, left later, has been closed.
    other = left(handover, "2")
    wait_until(lambda: other.closed > 0)
    assert session.closed == 0
