"""What all COPY statements have sent so far, though the server forgets those that ended."""

from __future__ import annotations

from pg_cdc_source.demo.progress import Copied


def test_what_ended_counts_with_what_it_had_when_it_was_last_seen() -> None:
    copied = Copied()
    assert copied.look({}) == (0, 0)
    assert copied.look({1: (10, 100), 2: (5, 50)}) == (15, 150)
    assert copied.look({1: (20, 200)}) == (25, 250), "the second backend's has ended"
    assert copied.look({1: (3, 30)}) == (28, 280), "the first backend has begun another"
    assert copied.look({}) == (28, 280)
