"""One stream in the driver's source process: what Spark asks of it, and the offsets that it answers with.

Spark asks for the newest offset, then for the partitions between two offsets, and says later which one it has
committed. It may ask for partitions of a batch that an earlier process has planned, and it may never say anything
again. So every offset says by itself what a batch ends with. What is kept in this process only makes answering fast:
the snapshot's session, and the reader of the slot.

::

    initial ──► origin, k of n tables read ──► … ──► origin, all n read ──► LSN ──► LSN, a table joins ──► LSN ──► …
                └───────── at the slot's consistent point ─────────┘       └─ changes from the slot ─┘

- The slot stays at its origin until the tables are read and Spark has committed the first changes after them. It does
  not pass the position at which a table began to wait until that one has joined.
- Where Spark gives no start (before 4.2), the first offset of a process is the end of the server's WAL: at or after
  whatever an earlier process has given out, and all that a query has which asks only once. A query that is known to ask
  again goes on from the checkpoint's last offset (``go_on_from``).
- Such an end is given before its changes are read. So it says which transactions its tables were found behind
  (``seen``): a table of a later one is new within the batch, each time that the batch is asked for.
- An offset that a batch ends with is never found out again: the same (start, end) gives the same rows.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import pyarrow as pa

from pg_cdc_source.errors import SlotLostError
from pg_cdc_source.offsets import StreamOffset
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.stream.batch_reading import Batch, BatchReading
from pg_cdc_source.stream.lag import Lag, LagMeter
from pg_cdc_source.stream.next_offset import NextOffset
from pg_cdc_source.stream.stream_parts import GivenOffsets, StreamParts

log = logging.getLogger(__name__)


class Capture:
    """The stream, from its first offset to its last."""

    def __init__(self, options: StreamOptions, schema: pa.Schema, interval: float = 0.0) -> None:
        """``interval``: how many seconds lie at least between two batches that are not full."""
        self._parts = StreamParts(options, schema)
        self._given = GivenOffsets()
        self._next = NextOffset(self._parts, interval)
        self._reading = BatchReading(self._parts, self._given)
        self._lag = LagMeter(self._parts.source)

    def newest(self, start: StreamOffset | None, *, limited: bool) -> StreamOffset:
        """The end of the next batch after ``start``, None being the initial offset; ``start`` if there is nothing."""
        parts = self._parts
        try:
            end = self._newest(start, limited=limited)
        except SlotLostError as error:
            if start is None or not parts.beginning.may_be_anew(start):
                raise
            end = self._begin_anew(error)
        if self._next.has_target and end == start:
            # The last question of a run that ends where the server stood. Spark asks it behind the commit of the last
            # batch, and says nothing of that: the slot would keep WAL from the start of this run to the next one's.
            self.commit(start)
        if parts.source.in_recovery and (start is None or end.position != start.position):
            # A timeline that is asked for only now is at or after that of everything up to the end.
            parts.history.forget_identity()
        is_guessed = end is self._given.guessed
        end = replace(end, identity=parts.history.identify())
        if is_guessed:
            self._given.guessed = end
        if limited:
            self._given.planned = end
        return end

    def newest_without_start(self, *, may_go_on: bool) -> StreamOffset:
        """As ``newest``, for a Spark that neither says where it starts nor limits a batch.

        ``may_go_on``: whether the stream may have begun long ago where no end of a batch is known.
        """
        given = self._given
        given.newest = given.newest or given.resumed
        if given.newest is None:
            given.newest = self._first_without_start() if may_go_on else self.newest(None, limited=True)
            given.may_be_repeated = True
        elif given.may_be_repeated:
            # With triggerAvailableNowWrapper.enabled, Spark asks twice before it reads. To go on from the first answer
            # would let the snapshot go, and have the slot move there.
            given.may_be_repeated = False
        else:
            given.newest = self.newest(given.newest, limited=True)
        return given.newest

    def _first_without_start(self) -> StreamOffset:
        """The end of this process' first batch, whose start may be that of a stream, or of one long ago."""
        parts = self._parts
        try:
            slot = parts.history.find_slot()
        except SlotLostError as error:
            if parts.options.on_slot_lost == "fail":
                raise
            end = self._begin_anew(error)
            return replace(end, done=len(end.tables))
        if slot is None:
            end = parts.beginning.find()
            # Should there have been a stream before, its tables come again.
            at = end.origin if parts.options.on_slot_lost == "resnapshot" and end.tables else None
            return replace(end, done=len(end.tables), at=at)
        # It may go on from a checkpoint, which only the batch's start will tell.
        end = parts.beginning.at(slot, guessed=True)
        self._given.guessed = end = self._at_end_of_wal(replace(end, done=len(end.tables)))
        return end

    def go_on_from(self, start: StreamOffset | None) -> None:
        """Take ``start`` for the end of the last batch, for a Spark that does not say it when it asks for the next."""
        self._given.resumed = start

    def batch(self, start: StreamOffset | None, end: StreamOffset) -> Batch:
        """The rows after ``start`` (None: the initial offset) up to ``end``."""
        self._given.may_be_repeated = False
        try:
            if start is not None:
                self._reading.require_order(start, end)
            return self._reading.read(start, end)
        except SlotLostError as error:
            if start is None or not self._parts.beginning.may_be_anew(start):
                raise
            log.warning("%s; the batch after %s stays empty, and all tables come again", error.what, start.position)
            # What is missing may end before this batch does: whoever goes on from there has to find no slot.
            self._parts.reader.forget()
            self._parts.history.drop_lost_slot()
            return self._reading.none(end)

    def commit(self, end: StreamOffset | None) -> None:
        """Spark has committed everything through ``end``: the slot may move there."""
        self._given.may_be_repeated = False
        if end is not None and not end.is_reading:
            self._parts.reader.release(self._parts.joins.committed(end))

    def standing(self, end: StreamOffset) -> Lag | None:
        """How far behind its server a stream is whose last batch ends at ``end``; None where that is not known."""
        return self._lag.measure(self._parts.reader.current, end.position)

    def stop_at_present(self) -> None:
        """Take nothing that is committed from now on."""
        self._next.stop_at_present()

    def close(self) -> None:
        """End the reader, the snapshots and the session."""
        self._parts.close()

    def _newest(self, start: StreamOffset | None, *, limited: bool) -> StreamOffset:
        parts, membership = self._parts, self._parts.membership
        if start is None:
            end = parts.beginning.find()
            return end if limited else self._at_end_of_wal(replace(end, done=len(end.tables)))
        parts.history.require_common(start.identity, start.position)
        parts.layouts.resume(start)
        if membership.resume(start):
            # It would take the new name for a change that comes while it reads, and leave out the new table.
            parts.reader.close()
        if start.is_reading:
            if limited:
                return replace(start, done=parts.beginning.done_after_next(start.tables, start.done))
            start = replace(start, done=len(start.tables))
            if start.at == start.origin:
                # With rows of a slot that was made anew come no changes.
                return start
            if parts.options.on_new_table == "changes" and start.members is not None:
                # Those that have come since the start was given have changes before the end.
                known = {member.oid for member in start.members}
                new = (member for member in membership.plan.members if member.oid not in known)
                start = replace(start, members=(*start.members, *new))
            return self._at_end_of_wal(start)
        parts.snapshot.end()
        start = replace(start, tables=(), done=0, at=None)
        if limited:
            return self._next.after(start)
        members, _, seen = membership.guess(start.position.next_lsn)
        end = self._next.at_end_of_wal(start, members, seen)
        members, mark, seen = membership.guess(end.position.next_lsn)
        if end.position > start.position:
            end = replace(end, seen=seen)
        self._given.guessed = end = replace(end, members=members, publication=mark, due=(), gaps=())
        return end

    def _at_end_of_wal(self, offset: StreamOffset) -> StreamOffset:
        """``offset``, whose tables were found by the present plan, moved to the end of the WAL."""
        return self._next.at_end_of_wal(offset, offset.members or (), self._parts.membership.plan.horizon)

    def _begin_anew(self, error: SlotLostError) -> StreamOffset:
        self._parts.reader.forget()
        self._parts.joins.close()
        self._parts.snapshot.end()
        return self._parts.beginning.anew(error)
