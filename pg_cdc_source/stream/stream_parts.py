"""What a stream has in the driver's source process: kept there, it only makes answering fast (see ``capture``)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from pg_cdc_source.errors import TransientError
from pg_cdc_source.offsets import Position, StreamOffset
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.snapshot.driver import Process, driver_process
from pg_cdc_source.stream.beginning import Beginning
from pg_cdc_source.stream.first_rows.held_snapshot import HeldSnapshot
from pg_cdc_source.stream.joins import Joins
from pg_cdc_source.stream.layouts.altered_tables import AlteredTables
from pg_cdc_source.stream.layouts.emitted_layouts import EmittedLayouts
from pg_cdc_source.stream.membership import Membership
from pg_cdc_source.stream.planned_reader import PlannedReader
from pg_cdc_source.stream.received.slot_reader import SlotReader
from pg_cdc_source.stream.tables.slot_history import SlotHistory
from pg_cdc_source.stream.tables.source_session import SourceSession
from pg_cdc_source.stream.tables.stream_plan import StreamPlan


class StreamParts:
    """The parts of a stream, which its offsets and its batches share."""

    def __init__(self, options: StreamOptions, schema: pa.Schema) -> None:
        self.options = options
        self.driver: Process = driver_process()
        self.source = SourceSession(options)
        self.history = SlotHistory(options, self.source)
        self.membership = Membership(options, schema, self.source)
        self.snapshot = HeldSnapshot(options, self.source, self.history, self.require_driver)
        self.layouts = EmittedLayouts(options, schema)
        self.beginning = Beginning(options, self.source, self.history, self.membership, self.snapshot, self.layouts)
        self.reader = PlannedReader(options, self.history, self.layouts)
        self.joins = Joins(options, self.membership)
        self.altered = AlteredTables(self.source, self.layouts)

    def require_driver(self) -> None:
        """Raise TransientError where the driver's JVM does not run any more."""
        if not self.driver.runs():
            raise TransientError("the driver's JVM is gone")

    def open_reader(self, position: Position, plan: Callable[[], StreamPlan]) -> SlotReader:
        """The slot's reader; see :meth:`PlannedReader.open`."""
        return self.reader.open(position, plan, self.joins.safe(position))

    def due(self, start: StreamOffset, end: Position) -> tuple[str, ...]:
        """The tables whose rows have to come again behind the batch from ``start`` to ``end``."""
        return self.joins.due(start, end, self.reader, self.layouts.take_rewritten(start.position, end))

    def close(self) -> None:
        """End the reader, the snapshots and the session."""
        with contextlib.ExitStack() as stack:
            # From the last to the first, each of them also where another one fails.
            stack.callback(self.source.close)
            stack.callback(self.layouts.close)
            stack.callback(self.snapshot.end)
            stack.callback(self.joins.close)
            stack.callback(self.reader.close)


@dataclass(slots=True)
class GivenOffsets:
    """What this process has answered Spark with.

    ``resumed`` is where Spark has said that the stream goes on: another process has given it. ``newest`` is the last
    offset given out. ``guessed`` is the last one given before its batch's rows were read: its
    tables and layouts are the catalog's. ``planned`` is the last one given with start and limit: nothing about it has
    to be found out again. ``may_be_repeated``: Spark may ask for the first answer once more before it reads
    up to there.
    """

    resumed: StreamOffset | None = None
    newest: StreamOffset | None = None
    guessed: StreamOffset | None = None
    planned: StreamOffset | None = None
    may_be_repeated: bool = False
