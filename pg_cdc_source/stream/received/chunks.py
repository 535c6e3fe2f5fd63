"""Decoded rows that wait for Spark: chunks of compressed Arrow IPC, beyond some tens of megabytes in files.

Chunks stay until Spark is done with their batch, because it can be handed out again. Their payloads go to Spark's tasks
as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from pg_cdc_source.errors import DefiniteError
from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.protocol.ipc import from_ipc, to_ipc
from pg_cdc_source.protocol.stream_rows import rows_through
from pg_cdc_source.stream.received.spill import Spill

# Compressed chunks in memory; more of them go to the file.
MEMORY_BYTES = 64 << 20


@dataclass(slots=True)
class Chunk:
    """Decoded rows that follow each other: ``first`` and ``last`` are positions of rows; ``raw_bytes`` uncompressed.

    ``committed_us`` is when the first row was committed, in microseconds since 1970; None in rows of a snapshot.
    """

    rows: int
    raw_bytes: int
    first: Position
    last: Position
    payload: bytes | None
    spill: Spill | None = None
    place: tuple[int, int] = (0, 0)
    committed_us: int | None = None

    @classmethod
    def of(cls, batch: pa.RecordBatch, first: Position, last: Position) -> Chunk:
        committed_us = batch.column("_commit_ts").view(pa.int64())[0].as_py() if batch.num_rows else None
        return cls(batch.num_rows, batch.nbytes, first, last, to_ipc(batch), committed_us=committed_us)

    def data(self) -> bytes:
        """The payload, wherever it is."""
        if self.payload is not None:
            return self.payload
        assert self.spill is not None
        return self.spill.read(self.place)

    def between(self, start: Position, end: Position) -> Chunk:
        """The rows after ``start`` up to ``end``; itself where that is all."""
        if start < self.first and self.last <= end:
            return self
        batch = from_ipc(self.data())
        first, after = rows_through(batch, start, batch.schema), rows_through(batch, end, batch.schema)
        return Chunk.of(batch.slice(first, after - first), self.first, self.last)


class ChunkStore:
    """The chunks that Spark is not done with, in the order of their rows.

    ``rows`` and ``raw_bytes`` count what is in them, ``file_bytes`` what of them is in files; ``dropped`` is how far
    they were forgotten.
    """

    def __init__(
        self, start: Position, new_file: Callable[[], Spill] = Spill, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        self.dropped = start
        self.rows = 0
        self.raw_bytes = 0
        self.file_bytes = 0
        self._new_file = new_file
        self._memory_bytes_most = memory_bytes
        self._memory_bytes = 0
        self._chunks: deque[Chunk] = deque()
        self._spill: Spill | None = None

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks)

    def append(self, batch: pa.RecordBatch) -> None:
        """Keep rows, at least one, that come after all that are here."""
        self._chunks.append(self._stored(Chunk.of(batch, position_of(batch, 0), position_of(batch, -1))))

    def between(self, start: Position, end: Position) -> list[Chunk]:
        """The chunks that have rows after ``start`` up to ``end``; they may have others, too."""
        if start < self.dropped:
            raise DefiniteError(
                f"changes after {start} are asked for again, when Spark was done with all up to {self.dropped}",
                remedy="read a batch's DataFrame only while its foreachBatch function runs, or persist() it there",
            )
        return [chunk for chunk in self._chunks if chunk.last > start and chunk.first <= end]

    def drop(self, position: Position) -> bool:
        """Forget the rows up to ``position``; whether there were any."""
        had = False
        while self._chunks and self._chunks[0].last <= position:
            self._give_up(self._chunks.popleft())
            had = True
        if self._chunks and self._chunks[0].first <= position:
            self._trim(position)
            had = True
        self.dropped = max(self.dropped, position)
        return had

    def close(self) -> None:
        while self._chunks:
            self._give_up(self._chunks.popleft())
        self._spill = None

    def _trim(self, position: Position) -> None:
        """Forget the rows of the first chunk up to ``position``: what they leave free lets a commit come whole."""
        chunk = self._chunks[0]
        batch = from_ipc(chunk.data())
        rest = batch.slice(rows_through(batch, position, batch.schema))
        trimmed = Chunk.of(rest, position_of(rest, 0), chunk.last)
        self._give_up(chunk)
        self._chunks[0] = self._stored(trimmed)

    def _stored(self, chunk: Chunk) -> Chunk:
        """Count a new chunk, and move it to a file where memory has enough."""
        assert chunk.payload is not None
        if self._memory_bytes + len(chunk.payload) > self._memory_bytes_most:
            if self._spill is None or self._spill.is_large:
                self._spill = self._new_file()
            chunk.place = self._spill.append(chunk.payload)
            chunk.spill, chunk.payload = self._spill, None
            self._spill.users += 1
            self.file_bytes += chunk.place[1]
        else:
            self._memory_bytes += len(chunk.payload)
        self.rows += chunk.rows
        self.raw_bytes += chunk.raw_bytes
        return chunk

    def _give_up(self, chunk: Chunk) -> None:
        self.rows -= chunk.rows
        self.raw_bytes -= chunk.raw_bytes
        if chunk.payload is not None:
            self._memory_bytes -= len(chunk.payload)
        elif chunk.spill is not None:
            chunk.spill.users -= 1
            self.file_bytes -= chunk.place[1]
            # It closes itself with the last chunk: a batch that was planned before may have some of them yet.
            if not chunk.spill.users and chunk.spill is self._spill:
                self._spill = None


def position_of(batch: pa.RecordBatch, row: int) -> Position:
    """The position of a row of the stream."""
    return Position(Lsn(batch.column("_commit_lsn")[row].as_py()), batch.column("_seq")[row].as_py())
