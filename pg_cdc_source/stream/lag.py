"""How far a stream is behind its server: in bytes of WAL, and in seconds.

Where changes wait, the time at which the first of them was committed says it exactly. Otherwise there is WAL that has
not arrived yet, and no server says when that was written. So each question notes the end of the WAL and the server's
time, and a later one finds out how old the WAL behind the stream is at least::

    asked at      12:00:00   12:00:05   12:00:10   now
    end of WAL     0/1000     0/2000     0/3000
                                  ▲ the stream stands here, behind since 12:00:10 or longer
"""

from __future__ import annotations

from dataclasses import dataclass

from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.postgres.slots import read_wal_clock
from pg_cdc_source.stream.received.buffer import BufferLevel
from pg_cdc_source.stream.received.slot_reader import SlotReader
from pg_cdc_source.stream.tables.source_session import SourceSession

# Beyond this, every second note is given up: older ones need not be as close to each other.
MOST_NOTES = 1024


@dataclass(frozen=True, slots=True)
class Lag:
    """Where the server is, and what of it Spark does not have yet."""

    end_of_wal: Lsn
    lag_bytes: int
    lag_seconds: float
    waiting: BufferLevel


class WalClock:
    """Knows when the WAL had come how far, of the times at which it was noted."""

    def __init__(self) -> None:
        self._notes: list[tuple[Lsn, float]] = []

    def note(self, end: Lsn, now: float) -> None:
        """Note where the WAL ends ``now``."""
        if not self._notes or end > self._notes[-1][0]:
            self._notes.append((end, now))
        if len(self._notes) > MOST_NOTES:
            self._notes = self._notes[::2]

    def seconds_behind(self, position: Lsn, now: float) -> float:
        """For how long at least there has been WAL from ``position`` on. Earlier positions are forgotten."""
        while self._notes and self._notes[0][0] <= position:
            del self._notes[0]
        return now - self._notes[0][1] if self._notes else 0.0


class LagMeter:
    """Measures one stream, in the source's own session."""

    def __init__(self, source: SourceSession) -> None:
        self._source = source
        self._clock = WalClock()

    def measure(self, reader: SlotReader | None, end: Position) -> Lag | None:
        """Where a stream is whose last batch ends at ``end``; None where the server does not answer."""
        waiting = BufferLevel(0, 0, 0, end, None) if reader is None else reader.waiting(end)
        answer = self._source.ask_in_passing(read_wal_clock)
        if answer is None:
            return None
        end_of_wal, now = answer
        self._clock.note(end_of_wal, now)
        stands_at = waiting.through.next_lsn
        seconds = self._clock.seconds_behind(stands_at, now)
        if waiting.oldest_us is not None:
            seconds = now - waiting.oldest_us / 1e6
        return Lag(end_of_wal, max(0, end_of_wal - stands_at), max(0.0, seconds), waiting)
