"""How old the WAL behind a stream is, by what was noted of its end."""

from __future__ import annotations

import pytest

from pg_cdc_source.offsets import Lsn
from pg_cdc_source.stream import lag
from pg_cdc_source.stream.lag import WalClock


def noted(*ends: int) -> WalClock:
    """At 0, 10, 20, … seconds the WAL ended there."""
    clock = WalClock()
    for i, end in enumerate(ends):
        clock.note(Lsn(end), 10.0 * i)
    return clock


@pytest.mark.parametrize(
    ("position", "seconds"),
    [(50, 40.0), (99, 40.0), (100, 30.0), (150, 30.0), (200, 20.0), (299, 20.0), (300, 0.0), (999, 0.0)],
)
def test_wal_is_as_old_as_the_first_note_behind_the_position(position: int, seconds: float) -> None:
    assert noted(100, 200, 300).seconds_behind(Lsn(position), 40.0) == seconds


def test_an_end_that_stays_is_as_old_as_its_first_note() -> None:
    assert noted(100, 200, 200, 200).seconds_behind(Lsn(150), 40.0) == 30.0


def test_no_notes_tell_nothing() -> None:
    assert WalClock().seconds_behind(Lsn(1), 40.0) == 0.0


def test_a_stream_that_stands_still_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag, "MOST_NOTES", 8)
    clock = noted(*range(100, 200))
    assert len(clock._notes) <= 8
    # The oldest stays, because it says how long the stream has stood there.
    assert clock.seconds_behind(Lsn(50), 1000.0) == 1000.0
