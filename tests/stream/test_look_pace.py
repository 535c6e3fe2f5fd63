"""Looks are further apart where all of them take long, and never much further."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pg_cdc_source.stream.tables import look_pace
from pg_cdc_source.stream.tables.look_pace import LookPace


class Clock:
    """``time`` as the test sets it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """``rests(2.0, *took)``: for how long nobody looks after looks that took so long."""
    clock = Clock()
    monkeypatch.setattr(look_pace, "time", clock)

    def measure(seconds: float, *took: float) -> float:
        pace = LookPace()
        for look in took:
            pace.took(look)
        pace.rest(seconds)
        began = clock.now
        while not pace.is_due():
            clock.now += 0.125
        return clock.now - began

    return measure


@pytest.mark.parametrize(
    ("took", "expected"),
    [
        ([], 2.0),
        ([0.01] * 20, 2.0),
        ([0.25] * 20, 5.0),
        ([0.25] * 7, 2.0),
        ([60.0] * 20, 10.0),
        # Most have waited for locks.
        ([0.01] + [60.0] * 7, 2.0),
        ([60.0] * 7 + [0.25], 5.0),
    ],
)
def test_the_quickest_of_the_last_looks_says_how_far_they_are_apart(
    took: list[float], expected: float, rests: Callable[..., float]
) -> None:
    assert rests(2.0, *took) == expected


def test_where_everything_is_looked_at_it_stays_so(rests: Callable[..., float]) -> None:
    assert rests(0.0, *[60.0] * 20) == 0.0


def test_a_look_that_is_wanted_is_due_at_once() -> None:
    pace = LookPace()
    assert pace.is_due()
    pace.rest(3600.0)
    assert not pace.is_due()
    pace.hurry()
    assert pace.is_due()


def test_that_looks_fail_is_said_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(look_pace, "time", clock)
    pace = LookPace()

    def said(looks: int) -> list[float]:
        found = []
        for _ in range(looks):
            found.append(pace.failed())
            clock.now += 2.0
        return [seconds for seconds in found if seconds is not None]

    assert said(200) == [30.0, 60.0, 120.0, 240.0]
    pace.took(0.01)
    assert said(20) == [30.0]
