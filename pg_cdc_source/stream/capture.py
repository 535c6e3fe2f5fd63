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
  whatever an earlier process has given out.
- An offset that a batch ends with is never found out again: the same (start, end) gives the same rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from pg_cdc_source.errors import DefiniteError, SchemaChangedError, SlotLostError, TransientError
from pg_cdc_source.offsets import Member, Position, StreamOffset
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres.slot_checks import behind_now, missing_error
from pg_cdc_source.snapshot.driver import Process, driver_process
from pg_cdc_source.stream.batch_rows import BatchRows, rows_of
from pg_cdc_source.stream.beginning import Beginning
from pg_cdc_source.stream.chunks import Chunk
from pg_cdc_source.stream.emitted_layouts import EmittedLayouts
from pg_cdc_source.stream.held_snapshot import HeldSnapshot, SnapshotPart, emptying_rows
from pg_cdc_source.stream.joins import Join, Joins
from pg_cdc_source.stream.lag import LagMeter, Standing
from pg_cdc_source.stream.leaving import Leaving
from pg_cdc_source.stream.members import find_dropped
from pg_cdc_source.stream.membership import Membership
from pg_cdc_source.stream.planned_reader import PlannedReader
from pg_cdc_source.stream.schema_history import NewTableError
from pg_cdc_source.stream.slot_history import SlotHistory
from pg_cdc_source.stream.slot_reader import SlotReader
from pg_cdc_source.stream.source_session import SourceSession
from pg_cdc_source.stream.stream_plan import StreamPlan

log = logging.getLogger(__name__)

# How long an answer may wait for changes: it spares Spark's loop its polling, and stop() waits no longer than this.
PATIENCE_SECONDS = 0.25
# How often the offset of a quiet stream moves on: each move is an empty batch, and lets the slot forget WAL.
IDLE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Batch:
    """What the rows between two offsets are made of. ``first`` come before all others.

    ``at`` is where it ends. It lies within a commit also where the tables are as of several points behind it.
    """

    first: tuple[Chunk, ...]
    parts: tuple[SnapshotPart, ...]
    chunks: tuple[Chunk, ...]
    at: Position


class Capture:
    """The stream, from its first offset to its last."""

    def __init__(self, options: StreamOptions, schema: pa.Schema) -> None:
        self._options = options
        self._driver: Process = driver_process()
        self._source = SourceSession(options)
        self._history = SlotHistory(options, self._source)
        self._membership = Membership(options, schema, self._source)
        self._snapshot = HeldSnapshot(options, self._source, self._history, self._is_driver_there)
        self._layouts = EmittedLayouts(options, schema)
        self._beginning = Beginning(
            options, self._source, self._history, self._membership, self._snapshot, self._layouts
        )
        self._reader = PlannedReader(options, self._history, self._layouts)
        self._joins = Joins(options, self._membership)
        self._given: StreamOffset | None = None  # the newest offset that this process has given out
        self._guess: StreamOffset | None = None  # one that was given without its start, or without a limit
        self._asked: StreamOffset | None = None  # the end of a batch whose tables were asked for again in the WAL
        self._planned: StreamOffset | None = None  # the newest one of which all was known when it was given
        self._target: Position | None = None
        self._moved_at = time.monotonic()
        self._lag = LagMeter(self._source)

    # --- Spark's questions --------------------------------------------------------------------------------------------

    def newest(self, start: StreamOffset | None, *, limited: bool) -> StreamOffset:
        """The end of the next batch after ``start``, None being the initial offset; ``start`` if there is nothing."""
        try:
            end = self._newest(start, limited=limited)
        except SlotLostError as error:
            if start is None or not self._beginning.may_be_anew(start):
                raise
            end = self._begin_anew(error)
        if self._source.in_recovery and (start is None or end.position != start.position):
            # A timeline that is asked for only now is at or after that of everything up to the end.
            self._history.forget_identity()
        end = replace(end, identity=self._history.identify())
        if limited:
            self._planned = end
        return end

    def newest_without_start(self) -> StreamOffset:
        """As ``newest``, for a Spark that neither says where it starts nor limits a batch."""
        if self._given is not None:
            self._given = self.newest(self._given, limited=True)
            return self._given
        try:
            slot = self._history.find_slot()
        except SlotLostError as error:
            if self._options.on_slot_lost == "fail":
                raise
            end = self._begin_anew(error)
            self._given = replace(end, done=len(end.tables))
            return self._given
        if slot is None:
            end = self._beginning.find()
            # Should there have been a stream before, its tables come again.
            at = end.origin if self._options.on_slot_lost == "resnapshot" and end.tables else None
            self._given = replace(end, done=len(end.tables), at=at)
        else:
            # It may go on from a checkpoint, which only the batch's start will tell.
            end = self._beginning.at(slot, guessed=True)
            self._given = self._guess = self._at_end_of_wal(replace(end, done=len(end.tables)), end.members or ())
        return self._given

    def batch(self, start: StreamOffset | None, end: StreamOffset) -> Batch:
        """The rows after ``start`` (None: the initial offset) up to ``end``."""
        try:
            if start is not None:
                self._require_order(start, end)
            return self._batch(start, end)
        except SlotLostError as error:
            if start is None or not self._beginning.may_be_anew(start):
                raise
            log.warning("%s; the batch after %s stays empty, and all tables come again", error.what, start.position)
            # What is missing may end before this batch does: whoever goes on from there has to find no slot.
            self._reader.close()
            self._history.drop_lost_slot()
            self._given = end
            return Batch((), (), (), _within(end.position))

    def commit(self, end: StreamOffset | None) -> None:
        """Spark has committed everything through ``end``: the slot may move there."""
        if end is not None and not end.is_reading:
            self._reader.release(self._joins.committed(end))

    def standing(self, end: StreamOffset) -> Standing | None:
        """How far behind its server a stream is whose last batch ends at ``end``; None where that is not known."""
        return self._lag.measure(self._reader.current, end.position)

    def stop_at_present(self) -> None:
        """Take nothing that is committed from now on."""
        self._target = Position.before(self._source.read_end_of_wal())

    def close(self) -> None:
        """End the reader, the snapshots and the session."""
        self._reader.close()
        self._joins.close()
        self._snapshot.end()
        self._layouts.close()
        self._source.close()

    # --- offsets ------------------------------------------------------------------------------------------------------

    def _newest(self, start: StreamOffset | None, *, limited: bool) -> StreamOffset:
        if start is None:
            end = self._beginning.find()
            return end if limited else self._at_end_of_wal(replace(end, done=len(end.tables)), end.members or ())
        self._history.require_common(start.identity, start.position)
        self._layouts.resume(start)
        if self._membership.resume(start):
            # It would take the new name for a change that comes while it reads.
            self._reader.close()
        if start.is_reading:
            if limited:
                return replace(start, done=self._beginning.read_through(start.tables, start.done))
            return self._at_end_of_wal(replace(start, done=len(start.tables)), start.members or ())
        self._snapshot.end()
        start = replace(start, tables=(), done=0, at=None)
        if limited:
            return self._next(start)
        members, _ = self._membership.guess(start.position.next_lsn)
        end = self._at_end_of_wal(start, members)
        members, mark = self._membership.guess(end.position.next_lsn)
        self._guess = replace(end, members=members, publication=mark, due=(), gaps=())
        return self._guess

    def _begin_anew(self, error: SlotLostError) -> StreamOffset:
        self._reader.close()
        self._joins.close()
        self._snapshot.end()
        return self._beginning.anew(error)

    def _next(self, start: StreamOffset) -> StreamOffset:
        self._membership.look_sometimes()
        leaving = self._membership.leaving
        if leaving is not None and start.position >= leaving.through:
            self._membership.leave()
            # It would still bring rows of one that is published again, which a repeated batch would not have.
            self._reader.close()
            left = self._offset(start, start.position)
            self._layouts.keep(self._membership.plan.members)
            return left
        if self._gaps(start) != start.gaps:
            # Before more of their changes come.
            return self._offset(start, start.position)
        if start.due and not self._joins.are_awaited(start):
            # They have left since.
            return replace(self._offset(start, start.position), due=())
        while True:
            join = self._joins.ready(start, 0.0 if self._target is None else PATIENCE_SECONDS)
            if join is not None and join.position <= start.position and start.position.is_whole:
                return self._join_offset(start, join)
            if self._target is not None and start.position >= self._target and not self._joins.are_awaited(start):
                return start
            end = self._cut(start, join, leaving)
            if end > start.position:
                break
            # To give the start again would say that there is no more, so on the way to a target it waits.
            if self._target is None:
                return start
            if not self._is_driver_there():
                raise TransientError("the driver's JVM is gone")
        self._moved_at = time.monotonic()
        start = replace(start, due=self._due(start, end), members=self._membership.plan.members)
        # Tables that join at this end do so with the next batch. A session that has decoded what comes before their
        # point has built its view of the publication there, and older servers never renew it: it would leave out their
        # changes. What was decoded before would also be decoded anew, and compared with a later catalog.
        return self._offset(start, end)

    def _cut(self, start: StreamOffset, join: Join | None, leaving: Leaving | None) -> Position:
        """Where the next batch ends; where it starts, if there is nothing for one."""
        stops = [] if leaving is None else [leaving.through]
        if join is not None:
            stops.append(join.position)
        elif self._target is not None and not self._joins.are_awaited(start):
            stops.append(self._target)
        ceiling = min((stop for stop in stops if stop > start.position), default=None)
        # A batch without rows only moves the slot, which need not happen all the time.
        only_rows = ceiling is None and time.monotonic() < self._moved_at + IDLE_SECONDS
        reader = self._open_reader(start.position, lambda: self._membership.plan)
        try:
            return reader.cut(start.position, ceiling, PATIENCE_SECONDS, only_rows=only_rows)
        except NewTableError:
            self._membership.follow_new(start.position)
            self._reader.close()
            return start.position
        except SlotLostError:
            before = self._history.identify()
            self._history.forget_identity()
            if self._history.identify() == before:
                raise
            # What the reader had ahead of Spark is of a timeline that the server has left; what Spark has may not be.
            self._history.require_common(start.identity, start.position)
            self._reader.close()
            return start.position
        except SchemaChangedError:
            # A column that the publication leaves out looks like one that was dropped.
            self._membership.look()
            raise

    def _open_reader(self, position: Position, plan: Callable[[], StreamPlan]) -> SlotReader:
        return self._reader.open(position, plan, self._joins.safe(position))

    def _offset(self, start: StreamOffset, position: Position) -> StreamOffset:
        membership, gaps = self._membership, self._gaps(start)
        members = membership.plan.members
        layouts = self._layouts.text(start.position, position, (*(start.members or ()), *members))
        return replace(
            start, position=position, publication=membership.mark, members=members, gaps=gaps, layouts=layouts
        )

    def _gaps(self, start: StreamOffset) -> tuple[str, ...]:
        """The tables whose changes may be missing, by the names that they have in the stream."""
        there = {member.oid: member.name for member in self._membership.plan.members}
        oids = {member.name: member.oid for member in start.members or ()}
        # One may have been renamed since it was said.
        said = [there[oids[name]] for name in start.gaps if oids.get(name) in there]
        return tuple(dict.fromkeys((*said, *(name for name in self._membership.gaps if name in there.values()))))

    def _at_end_of_wal(self, offset: StreamOffset, members: Sequence[Member]) -> StreamOffset:
        """``offset``, moved to the end of what is committed by now; where it starts may not be known."""
        return self._layouts.guess(self._source.open(), members, offset, lambda: self._end_of_wal(offset.position))

    def _due(self, start: StreamOffset, end: Position) -> tuple[str, ...]:
        return self._joins.due(start, end, self._reader, self._layouts.rewritten(start.position, end))

    def _join_offset(self, start: StreamOffset, join: Join) -> StreamOffset:
        position = start.position
        self._snapshot.hold(join.held)
        self._joins.done(join)
        # The one that was read by the plan of before has left out their changes.
        self._reader.close()
        self._layouts.keep((*(start.members or ()), *self._membership.plan.members))
        names = tuple(planned.name for planned in join.tables)
        session, _ = join.held.holders[0]
        self._layouts.note_snapshot(session, [planned.member for planned in join.tables], join.point)
        end = replace(self._offset(start, position), tables=names, done=len(names), at=join.point)
        if join.position < position:
            self._read_layouts(start, end)
        # What was rewritten after the point is said again behind these rows.
        again = self._layouts.rewritten(join.position, position)
        later = self._membership.plan.with_oids(start.due_oids - join.due)
        due = tuple(dict.fromkeys((*(planned.name for planned in later), *again)))
        # What these tables' layouts were from the point on comes again, too.
        layouts = self._layouts.text(join.position, position, (*(start.members or ()), *(end.members or ())))
        gaps = tuple(name for name in end.gaps if name not in names)
        return replace(end, due=due, gaps=gaps, layouts=layouts)

    def _read_layouts(self, start: StreamOffset, end: StreamOffset) -> None:
        """Come to the layouts that the tables which join had since their point: the stream went past it without them.

        A batch's end carries them, so they have to be known before it is given.
        """
        if self._layouts.are_emitted:
            rows = rows_of(start, end, (), self._membership.plan)
            begin = rows.begin(start.position)
            plan = rows.plan_from(self._membership.plan, begin, start.position)
            self._open_reader(begin, lambda: plan).read_through(end.position, self._is_driver_there)

    def _end_of_wal(self, at_least: Position) -> Position:
        return max(at_least, self._target or Position.before(self._source.read_end_of_wal()))

    # --- what is read -------------------------------------------------------------------------------------------------

    def _require_order(self, start: StreamOffset, end: StreamOffset) -> None:
        """Raise SlotLostError for a batch whose end the server has and its start it does not: the next would go on."""
        if end.at == end.origin or (end.position >= start.position and end.identity == start.identity):
            return
        self._history.require_common(start.identity, start.position)
        if end.position < start.position:
            # Before Spark 4.2 the end is found out first, and its start tells only now that the server was further.
            session = self._source.open()
            if not self._source.in_recovery or self._source.read_end_of_wal() < start.position.next_lsn:
                raise behind_now(session, self._options.slot, start.position.next_lsn, end.position.next_lsn)
            raise DefiniteError(
                f"the batch that the checkpoint has begun ends at {end.position}, before it starts, {start.position}: "
                "the standby had not replayed that yet when the query started",
                remedy="delete the newest file in the checkpoint's directory offsets, which names a batch that was not "
                "committed, and start the query again",
            )

    def _require_past(self, start: StreamOffset | None, end: StreamOffset) -> None:
        """Raise SlotLostError unless both are of the past of this server, and ``start`` of that of its slot."""
        if start is not None and self._snapshot.created not in (None, start.origin):
            # Only the batch's start tells that there was a stream before (see newest_without_start).
            if not self._beginning.may_be_anew(start):
                self._snapshot.drop_slot()
                self._history.require_common(start.identity, start.position)
                raise missing_error(self._options.slot, begun=True)
        elif start is not None:
            self._history.require_common(start.identity, start.position)
        self._history.require_common(end.identity, end.position)

    def _batch(self, start: StreamOffset | None, end: StreamOffset) -> Batch:
        self._require_past(start, end)
        guessed = end == self._guess
        self._layouts.resume(start, end)
        joined = self._membership.repeat(start, end, guessed=guessed)
        # Where tables join in the batch, it is found out again should it be asked for again.
        self._given, self._guess = end, end if joined else None
        rows = self._rows(start, end, joined)
        position = Position.before(end.origin) if start is None else start.position
        is_anew = end.at == end.origin
        begin = position if is_anew else rows.begin(position)
        plan = rows.plan_from(self._membership.plan, begin, position)
        changes: list[Chunk] = []
        known = start.members if start is not None and begin < position else None
        had = {member.oid: position for member in known or ()}
        if end.position > begin and not is_anew:
            if end.at is not None:
                self._joins.stay(end.at, begin)
            reader = self._open_reader(begin, lambda: plan)
            reader.read_through(end.position, self._is_driver_there)
            changes += reader.batch(begin, end.position) + self._layouts.guessed(start, end)
            rows = self._with_due(rows, start, end, joined)
        elif not is_anew:
            # Nothing was read, and the next batch begins with these layouts.
            changes += self._layouts.guessed(start, end)
        parts: list[SnapshotPart] = []
        olds: list[Chunk] = []
        first = [emptying_rows(plan, rows, had)] if rows.again and rows.wanted else []
        first += self._layouts.of_snapshot(rows.wanted, rows.point, plan.members)
        if rows.tables:
            rows = self._as_said(rows)
            if not self._snapshot.keep_for(rows):
                self._reader.close()
            parts, olds = self._snapshot.parts(plan, self._layouts.match_back(plan), rows, begin.next_lsn)
        changes += self._layouts.left(start, end, self._membership.published.refused)
        changes += self._layouts.gaps(start, end, rows.missing)
        # Of a slot that was lost, some tables come again in later batches.
        at = _within(end.position) if is_anew and end.is_reading else end.position
        return Batch(tuple(first), tuple(parts), (*olds, *changes), at)

    def _with_due(
        self, rows: BatchRows, start: StreamOffset | None, end: StreamOffset, joined: Sequence[Member]
    ) -> BatchRows:
        """``rows`` with those that are due at ``end``. One that was given before its start was known cannot say them.

        Nor can the next one, if another process gives it. So they come with this batch; or, where it has rows as of
        another point, the stream asks for them as anybody else does, in the WAL.
        """
        if end.at is not None or end == self._planned:
            return rows
        since = replace(end, position=Position.before(end.origin)) if start is None else start
        known = (*end.due, *(member.name for member in joined))
        unsaid = [name for name in self._due(replace(since, due=()), end.position) if name not in known]
        if not unsaid or end == self._asked:
            return rows
        if not rows.wanted or joined:
            late = [planned.member for planned in self._membership.plan.named(unsaid)]
            return self._rows(start, end, (*joined, *late))
        if self._joins.ask_again(unsaid, self._source):
            self._asked = end
        else:
            self._given = replace(end, due=(*end.due, *unsaid))
        return rows

    def _rows(self, start: StreamOffset | None, end: StreamOffset, joined: Sequence[Member]) -> BatchRows:
        rows = rows_of(start, end, joined, self._membership.plan)
        if rows.tables:
            # In this process the snapshot may be held for longer than its tables are there.
            rows = rows.without(self._source.ask(lambda session: find_dropped(session, [p.oid for p in rows.tables])))
        if rows.missing:
            log.warning(
                "%s left the stream before its rows as of %s were read; only its changes come",
                ", ".join(list(rows.missing.values())[:10]),
                rows.point,
            )
        return rows

    def _as_said(self, rows: BatchRows) -> BatchRows:
        """The rows, whose tables may have been altered since they were planned, with the columns said before them."""
        if not self._layouts.are_emitted:
            return rows
        now = self._membership.published.as_they_are(rows.unread, self._membership.plan.lsn)
        said = {planned.oid: self._layouts.as_said(planned, rows.point) for planned in now}
        return replace(rows, tables=tuple(said[p.oid] for p in rows.tables), unread=tuple(said.values()))

    def _is_driver_there(self) -> bool:
        return self._driver.runs()


def _within(position: Position) -> Position:
    return Position(position.lsn, 0) if position.is_whole else position
