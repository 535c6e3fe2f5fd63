"""What lies between a slot and Spark: messages are assembled and decoded into chunks, and batches are cut from them.

::

    message ──► assembler ──► Changes ──► decoder ──► chunks ──► batches
                                             ▲            │
                            what a relation's rows are    └── forgotten when Spark is done with them

No thread and no socket: the one that reads the slot puts messages in, the one that Spark asks takes batches out, and
both hold the reader's lock meanwhile.

- Decoding commit by commit would cost a hundred NumPy calls for each. So messages wait until there are enough of them
  or somebody asks for a batch.
- A definite error while decoding ends the stream there, and so does a chunk that cannot be stored. All that came before
  is handed out first.
- After a transient error the next session brings the same messages again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from pg_cdc_source.errors import PgCdcError, TransientError
from pg_cdc_source.offsets import Position
from pg_cdc_source.protocol.changes import ChangeDecoder, Described
from pg_cdc_source.protocol.decoding_messages import OWN_PREFIX, read_request
from pg_cdc_source.protocol.transactions import Changes, SentRelation, TransactionAssembler
from pg_cdc_source.protocol.walsender import Keepalive
from pg_cdc_source.stream.received.batches import Limits, end_of_batch
from pg_cdc_source.stream.received.chunks import Chunk, ChunkStore
from pg_cdc_source.values.wire import Collected

log = logging.getLogger(__name__)

# The buffer holds this many batches at the limits: the one that Spark works on, and the next.
BATCHES_AHEAD = 2

# What a relation's rows are to become, given the relation and the position of the first row: None where they are not
# wanted. Raises where they cannot be.
Match = Callable[[SentRelation, Position], Described | None]


@dataclass(frozen=True, slots=True)
class BufferLevel:
    """What waits for Spark behind some position.

    ``through``: up to there is nothing else. ``oldest_us``: when the first of the changes was committed, in
    microseconds since 1970; None where there are none. ``file_bytes`` are on disk, also of transactions that have not
    committed yet.
    """

    rows: int
    bytes: int
    file_bytes: int
    through: Position
    oldest_us: int | None


class Request(NamedTuple):
    """Somebody has asked, in the commit at ``position``, for tables to be read again: their names, or EVERY_TABLE."""

    position: Position
    tables: tuple[str, ...]


class Matched:
    """What relations' rows are to become, found out once for each."""

    def __init__(self, match: Match) -> None:
        self._match = match
        self._found: dict[int, tuple[SentRelation, Described | None]] = {}

    def of(self, changes: Changes, oid: int, position: Position) -> Described | None:
        """What rows of the relation become, the first of which is at ``position``."""
        sent = changes.relation(oid)
        found = self._found.get(oid)
        if found is None or found[0] is not sent:
            described = self._match(sent, position)
            # What is announced comes once.
            later = None if described is None else replace(described, announced=None)
            self._found[oid] = (sent, later)
            return described
        return found[1]


class ChangeBuffer:
    """The changes of ``slot`` from where ``assembler`` begins.

    ``error``: what made reading or decoding end for good. ``lost``: what keeps the present session from going on; the
    next one brings what could not be decoded again.
    """

    def __init__(
        self,
        assembler: TransactionAssembler,
        decoder: ChangeDecoder,
        match: Match,
        chunks: ChunkStore,
        limits: Limits,
        slot: str,
    ) -> None:
        self.error: BaseException | None = None
        self.lost: TransientError | None = None
        self._assembler = assembler
        self._decoder = decoder
        self._matched = Matched(match)
        self._chunks = chunks
        self._limits = limits
        self._slot = slot
        self._requests: list[Request] = []

    # --- the slot's side ----------------------------------------------------------------------------------------------

    @property
    def received(self) -> Position:
        """Everything through here is in chunks or was not wanted."""
        return self._assembler.received

    @property
    def can_go_on(self) -> bool:
        """Whether the present session can."""
        return self.error is None and self.lost is None

    @property
    def rows(self) -> Collected | None:
        """Where messages of rows go without being looked at; :meth:`make_room` follows when it is full."""
        return self._assembler.rows

    @property
    def is_replaying(self) -> bool:
        """Whether :meth:`replay` comes before the next message."""
        return self._assembler.is_replaying

    @property
    def is_full(self) -> bool:
        """Whether nothing should be received until Spark has taken something."""
        messages, size_bytes = self._assembler.left
        return (
            self._chunks.rows + len(self._assembler) - messages > BATCHES_AHEAD * self._limits.rows
            or self._chunks.raw_bytes + self._assembler.size_bytes - size_bytes > BATCHES_AHEAD * self._limits.bytes
        )

    def begin_session(self) -> None:
        """Keep what the session before has brought; the rest of its transaction comes with the whole again."""
        self.decode()
        self._assembler.begin_session()
        # What was asked for behind this comes again as well.
        self._requests = [request for request in self._requests if request.position <= self.received]
        self.lost = None

    def receive(self, data: bytes) -> bool:
        """Take one message; whether the server wants an answer now."""
        event = self._assembler.receive(data)
        if isinstance(event, Keepalive):
            return event.wants_answer
        self._keep(event)
        self._note_requests()
        return False

    def make_room(self) -> None:
        self._keep(self._assembler.make_room())

    def replay(self) -> None:
        """Take a part of a streamed transaction that has committed."""
        self._keep(self._assembler.replay())
        self._note_requests()

    def decode(self) -> None:
        """Decode what waits."""
        self._keep(self._assembler.take())

    def _keep(self, changes: Changes | None) -> None:
        if changes is None:
            return
        try:
            batch, last_seq = self._decoder.decode(
                changes.messages,
                changes.runs,
                lambda oid, position: self._matched.of(changes, oid, position),
                changes.after,
            )
            if batch.num_rows:
                self._chunks.append(batch)
        except BaseException as error:
            self._assembler.refused(changes)
            if isinstance(error, TransientError):
                self.lost = error
            else:
                self.error = error
            if not isinstance(error, PgCdcError):
                raise
            return
        self._assembler.kept(changes, last_seq)

    def _note_requests(self) -> None:
        for position, content in self._assembler.requests:
            try:
                asked = read_request(content)
                if asked.slot in (None, self._slot):
                    self._requests.append(Request(position, asked.tables))
            except ValueError as error:
                log.warning("the %s message in the commit at %s is ignored: %s", OWN_PREFIX, position, error)
        self._assembler.requests.clear()

    # --- Spark's side -------------------------------------------------------------------------------------------------

    def has(self, end: Position) -> bool:
        """Whether everything up to ``end`` is here."""
        self.decode()
        return max(self._assembler.complete, self.received) >= end

    def end_of_batch(self, start: Position, ceiling: Position | None, *, only_rows: bool = False) -> Position:
        """Where a batch from ``start`` ends; ``start`` itself where there is nothing for one.

        Nothing beyond ``ceiling`` is taken. With ``only_rows``, an end before it is nothing that has neither a row nor
        a request before it.
        """
        # Within a commit that goes on, chunks are left to fill.
        if self._assembler.complete > start or self.is_full:
            self.decode()
        complete = self._assembler.complete
        bound = complete if ceiling is None else min(complete, ceiling)
        is_stuck = self.error is not None or (bound <= start and self.is_full)
        end = end_of_batch(self._chunks, start, self._limits, complete, ceiling, is_stuck=is_stuck)
        return start if only_rows and end != ceiling and self.is_quiet(start, end) else end

    def fills_batch(self, ceiling: Position | None) -> bool:
        """Whether a batch that ends no later than ``ceiling`` would not be larger later on, as far as can be told."""
        return (
            self.error is not None
            or (ceiling is not None and self._assembler.complete >= ceiling)
            or self._chunks.rows + len(self._assembler) >= self._limits.rows
            or self._chunks.raw_bytes + self._assembler.size_bytes >= self._limits.bytes
        )

    def batch(self, start: Position, end: Position) -> list[Chunk]:
        """The chunks with the rows after ``start`` up to ``end``, among others."""
        self.decode()
        return self._chunks.between(start, end)

    def waiting(self, position: Position) -> BufferLevel:
        """What is here of the changes after ``position``."""
        chunks = [chunk for chunk in self._chunks if chunk.last > position]
        through = position if chunks else max(position, self.received)
        return BufferLevel(
            sum(chunk.rows for chunk in chunks) + len(self._assembler),
            sum(chunk.raw_bytes for chunk in chunks) + self._assembler.size_bytes,
            self._chunks.file_bytes + self._assembler.file_bytes,
            through,
            chunks[0].committed_us if chunks else self._assembler.oldest_us,
        )

    def is_quiet(self, start: Position, end: Position) -> bool:
        """Whether nothing is after ``start`` up to ``end``, neither row nor request, and no error right behind it."""
        if self.error is not None or self.requests(start, end):
            return False
        return not any(chunk.last > start and chunk.first <= end for chunk in self._chunks)

    def requests(self, after: Position, through: Position) -> list[Request]:
        """What was asked for behind ``after`` and up to ``through``, in order; everything through there has come."""
        return [request for request in self._requests if after < request.position <= through]

    def drop(self, position: Position) -> bool:
        """Forget what Spark is done with; whether that makes room."""
        self._requests = [request for request in self._requests if request.position > position]
        return self._chunks.drop(position)

    def close(self) -> None:
        self._chunks.close()
        self._assembler.close()
