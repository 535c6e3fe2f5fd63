"""The slot's reader together with the plan that its rows are decoded by."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

from pg_cdc_source.offsets import Position
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres.replication import ReplicationStream
from pg_cdc_source.protocol.changes import ChangeDecoder
from pg_cdc_source.protocol.streamed import StreamedTransaction
from pg_cdc_source.protocol.transactions import TransactionAssembler
from pg_cdc_source.stream.layouts.emitted_layouts import EmittedLayouts
from pg_cdc_source.stream.received.batches import Limits
from pg_cdc_source.stream.received.buffer import ChangeBuffer
from pg_cdc_source.stream.received.chunks import ChunkStore
from pg_cdc_source.stream.received.server_watch import ServerWatch
from pg_cdc_source.stream.received.slot_reader import SlotReader
from pg_cdc_source.stream.received.spill import Spill
from pg_cdc_source.stream.tables.slot_history import SlotHistory
from pg_cdc_source.stream.tables.stream_plan import StreamPlan


class Sessions:
    """Connects a reader's sessions one after the other.

    Large transactions come while they run. They are sent whole where ``need_whole`` says so, and where the session
    before has brought nothing: should the server have lost it over one that is in progress, it gets past that one so.
    """

    def __init__(self, connect: Callable[..., ReplicationStream], need_whole: Callable[[], bool]) -> None:
        self._connect = connect
        self._need_whole = need_whole
        self._last: Position | None = None  # where the session before began

    def __call__(self, received: Position) -> ReplicationStream:
        stream = self._connect(received, streaming=received != self._last and not self._need_whole())
        self._last = received
        return stream


class PlannedReader:
    """Opens the reader when it is first needed, and again where another plan makes that necessary."""

    def __init__(self, options: StreamOptions, history: SlotHistory, layouts: EmittedLayouts) -> None:
        self._layouts = layouts
        self._options = options
        self._limits = Limits(options.max_rows_per_batch, options.max_bytes_per_batch)
        self._history = history
        self._reader: SlotReader | None = None
        self._safe: Position | None = None  # everything up to here is in the checkpoint

    @property
    def current(self) -> SlotReader | None:
        return self._reader

    def open(self, position: Position, plan: Callable[[], StreamPlan], safe: Position) -> SlotReader:
        """The reader; where there is none, a new one of all changes after ``position``, decoded by ``plan``.

        The slot may move through ``safe`` if this is the first one: a later one may begin where only Spark's memory is
        yet (asynchronous progress tracking).
        """
        if self._reader is None:
            planned = plan()
            # A table that was not wanted may be again, and is then described as before.
            are_renewed = self._layouts.are_emitted or self._options.on_new_table == "changes"
            self._history.require_free(position)
            assembler = TransactionAssembler(
                position,
                functools.partial(StreamedTransaction, Spill),
                prefixes=self._options.message_prefixes,
                renewed_before=sys.maxsize if are_renewed else planned.known_through,
            )
            buffer = ChangeBuffer(
                assembler,
                ChangeDecoder(planned.layout, planned.schema, planned.messages_since),
                self._layouts.match(planned),
                ChunkStore(position),
                self._limits,
                self._options.slot,
            )
            if self._safe is None:
                self._safe = safe
            sessions = Sessions(self._history.connect_stream, lambda: assembler.needs_whole)
            watch = ServerWatch(self._history.connect)
            self._reader = SlotReader(sessions, watch, buffer, self._safe)
        return self._reader

    def release(self, position: Position) -> None:
        """Let the slot move to ``position``, which the checkpoint has."""
        self._safe = position
        if self._reader is not None:
            self._reader.release(position)

    def safe(self, position: Position) -> Position:
        """Through where the slot may move, of everything up to ``position``."""
        return position if self._safe is None else min(position, self._safe)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def forget(self) -> None:
        """Close it; the next one is of another slot."""
        self.close()
        self._safe = None
