"""Pauses between attempts: how they grow, and where they end."""

from __future__ import annotations

import itertools
import time

import pytest

from pg_cdc_source.errors import AccessError, ServerFullError, TransientError
from pg_cdc_source.postgres.backoff import Backoff


class Clock:
    """Time that passes only in pauses, and where a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


def test_pauses_grow_up_to_the_longest() -> None:
    pauses = Backoff(0.5, longest_seconds=3.0).pauses()
    assert list(itertools.islice(pauses, 5)) == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert list(itertools.islice(Backoff(4.0, growth=1.5, longest_seconds=3.0).pauses(), 2)) == [3.0, 3.0]
    assert list(itertools.islice(Backoff(2.0, growth=1.5).pauses(), 3)) == [2.0, 3.0, 4.5]


def test_there_is_one_pause_less_than_attempts() -> None:
    assert list(Backoff(1.0, attempts=4).pauses()) == [1.0, 2.0, 4.0]
    assert list(Backoff(1.0, attempts=1).pauses()) == []


def test_the_last_pause_ends_at_the_bound(clock: Clock) -> None:
    assert [None for _ in Backoff(1.0, within_seconds=4.5).polls()] == [None] * 4
    assert clock.slept == [1.0, 2.0, 1.5]


def test_time_counts_from_the_call_whatever_attempts_take(clock: Clock) -> None:
    pauses = Backoff(1.0, within_seconds=10.0).pauses()
    clock.now += 9.5
    assert next(pauses) == 0.5
    clock.now += 0.5
    assert list(pauses) == []


@pytest.mark.parametrize("bound", [Backoff(1.0, within_seconds=0.0), Backoff(1.0, attempts=1)])
def test_the_first_attempt_is_always_made(clock: Clock, bound: Backoff) -> None:
    assert [None for _ in bound.polls()] == [None]
    assert bound.retrying(lambda: 7) == 7
    assert clock.slept == []


def test_transient_errors_are_tried_again_and_the_last_one_is_raised(clock: Clock) -> None:
    errors = [TransientError("first"), TransientError("second"), TransientError("third")]

    def fail() -> int:
        if errors:
            raise errors.pop(0)
        return 7

    assert Backoff(1.0, attempts=4).retrying(fail) == 7
    assert clock.slept == [1.0, 2.0, 4.0]
    errors += [TransientError("first"), TransientError("second"), TransientError("third")]
    with pytest.raises(TransientError, match="second"):
        Backoff(1.0, attempts=2).retrying(fail)


def test_an_error_that_was_waited_for_is_raised_at_once(clock: Clock) -> None:
    def fail() -> None:
        raise ServerFullError("full")

    with pytest.raises(ServerFullError):
        Backoff(1.0, attempts=4).retrying(fail, but=(ServerFullError,))
    assert clock.slept == []


def test_definite_errors_are_not_tried_again(clock: Clock) -> None:
    def refuse() -> None:
        raise AccessError("no")

    with pytest.raises(AccessError):
        Backoff(1.0).retrying(refuse)
    assert clock.slept == []
