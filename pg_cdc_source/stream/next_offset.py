"""Where the next batch of a stream ends: with changes, with tables that join or leave, or with what may be missing."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from pg_cdc_source.errors import SchemaChangedError, SlotLostError
from pg_cdc_source.offsets import Horizon, Member, Position, StreamOffset
from pg_cdc_source.stream.first_rows.batch_rows import rows_of
from pg_cdc_source.stream.joins import Join
from pg_cdc_source.stream.layouts.schema_history import NewTableError
from pg_cdc_source.stream.stream_parts import StreamParts
from pg_cdc_source.stream.tables.leaving import Leaving

# How long an answer may wait for changes: it spares Spark's loop its polling, and stop() waits no longer than this.
PATIENCE_SECONDS = 0.25
# How often the offset of a quiet stream moves on: each move is an empty batch, and lets the slot forget WAL.
IDLE_SECONDS = 10.0


class NextOffset:
    """Finds the end of the batch behind a start whose initial snapshot is read."""

    def __init__(self, parts: StreamParts, interval: float) -> None:
        self._parts = parts
        self._interval = interval
        self._target: Position | None = None
        self._moved_at = time.monotonic()
        # What waits for a stream that starts comes at once: it may be started more often than at an interval.
        self._batch_at = -math.inf

    @property
    def has_target(self) -> bool:
        """Whether the batches end where the server stood at a moment."""
        return self._target is not None

    def stop_at_present(self) -> None:
        """Take nothing that is committed from now on."""
        self._target = Position.before(self._parts.source.wait_for_end_of_wal())

    def after(self, start: StreamOffset) -> StreamOffset:
        """The end of the next batch; ``start`` if there is nothing for one."""
        parts = self._parts
        membership, joins, altered = parts.membership, parts.joins, parts.altered
        if membership.look_sometimes() or not altered.were_looked_for:
            self._look_for_altered(start)
        if altered.old_names_until is not None and start.position >= altered.old_names_until:
            # One that begins before would send the old names again.
            parts.reader.close()
            altered.old_names_until = None
        leaving = membership.leaving
        if leaving is not None and self._target is not None:
            # Who takes what is there takes in what has left, too. It is a moment ago that the target was set.
            self._target = max(self._target, leaving.through)
        if leaving is not None and start.position >= leaving.through:
            membership.leave()
            # It would still bring rows of one that is published again, which a repeated batch would not have.
            parts.reader.close()
            left = self._offset(start, start.position)
            parts.layouts.keep(membership.plan.members)
            return left
        if self._gaps(start) != start.gaps:
            # Before more of their changes come.
            return self._offset(start, start.position)
        if start.due and not joins.are_awaited(start):
            # They have left since.
            return replace(self._offset(start, start.position), due=())
        if altered.position == start.position and (end_here := self._end_at(start, start.position)) != start:
            return end_here
        while True:
            join = joins.ready(start, 0.0 if self._target is None else PATIENCE_SECONDS)
            if join is not None and join.position <= start.position and start.position.is_whole:
                return self._join_offset(start, join)
            if self._target is not None and start.position >= self._target and not joins.are_awaited(start):
                return start
            end = self._cut(start, join, leaving)
            if end > start.position:
                break
            # To give the start again would say that there is no more, so on the way to a target it waits.
            if self._target is None:
                return start
            parts.require_driver()
        self._moved_at = self._batch_at = time.monotonic()
        # Tables that join at this end do so with the next batch. A session that has decoded what comes before their
        # point has built its view of the publication there, and older servers never renew it: it would leave out their
        # changes. What was decoded before would also be decoded anew, and compared with a later catalog.
        return self._end_at(start, end)

    def _end_at(self, start: StreamOffset, end: Position) -> StreamOffset:
        """A batch of changes and of what no row says: of tables that were altered, and whose rows were asked for."""
        parts = self._parts
        coming = start.due_oids | start.gap_oids
        # A sink that keeps what PostgreSQL gives up has a use for changes before a table is rewritten. Those of a batch
        # that says so are void to it.
        ends = parts.layouts.ends_before_rewritten(start.position, end)
        earlier = next((found for found in ends if not self._is_quiet(start, found)), end)
        if earlier < end:
            end, self._moved_at, self._batch_at = earlier, -math.inf, -math.inf
        elif start.position == end or not parts.altered.rewrites_at(end, coming) or self._is_quiet(start, end):
            parts.altered.reach(start.position, end, coming)
        start = replace(start, due=parts.due(start, end), members=parts.membership.plan.members)
        return self._offset(start, end)

    def _is_quiet(self, start: StreamOffset, end: Position) -> bool:
        reader = self._parts.reader.current
        return reader is None or reader.is_quiet(start.position, end)

    def _look_for_altered(self, start: StreamOffset) -> None:
        altered = self._parts.altered
        coming = start.due_oids | start.gap_oids
        altered.look([p.member for p in self._parts.membership.plan.planned if p.oid not in coming])
        if self._target is not None and altered.position is not None:
            # Who takes what is there has it altered, too. It is a moment ago that the target was set.
            self._target = max(self._target, altered.position)

    def at_end_of_wal(self, offset: StreamOffset, members: Sequence[Member], seen: Horizon) -> StreamOffset:
        """``offset``, moved to the end of what is committed by now; where it starts may not be known.

        Its tables were found behind ``seen``.
        """
        session = self._parts.source.open()
        end = self._parts.layouts.with_layouts_at_end_of_wal(
            session, members, offset, lambda: self._end_of_wal(offset.position)
        )
        return end if end.position == offset.position else replace(end, seen=seen)

    def _end_of_wal(self, at_least: Position) -> Position:
        return max(at_least, self._target or Position.before(self._parts.source.read_end_of_wal()))

    def _cut(self, start: StreamOffset, join: Join | None, leaving: Leaving | None) -> Position:
        """Where the next batch ends; where it starts, if there is nothing for one."""
        parts = self._parts
        stops = [] if leaving is None else [leaving.through]
        if parts.altered.position is not None:
            stops.append(parts.altered.position)
        if join is not None:
            stops.append(join.position)
        elif self._target is not None and not parts.joins.are_awaited(start):
            stops.append(self._target)
        ceiling = min((stop for stop in stops if stop > start.position), default=None)
        # A batch without rows only moves the slot, which need not happen all the time.
        only_rows = ceiling in (None, parts.altered.position) and time.monotonic() < self._moved_at + IDLE_SECONDS
        reader = parts.open_reader(start.position, lambda: parts.membership.plan)
        try:
            # On the way to a target nobody waits for a change, and a sink has a cost for each batch.
            only_full = self._target is not None and ceiling is not None
            # The rest of a transaction that is larger than a batch does not wait: tables show half of it.
            only_full = only_full or (start.position.is_whole and time.monotonic() < self._batch_at + self._interval)
            return reader.cut(start.position, ceiling, PATIENCE_SECONDS, only_rows=only_rows, only_full=only_full)
        except NewTableError:
            parts.membership.follow_new(start.position)
            parts.reader.close()
            return start.position
        except SlotLostError:
            before = parts.history.identify()
            parts.history.forget_identity()
            if parts.history.identify() == before:
                raise
            # What the reader had ahead of Spark is of a timeline that the server has left; what Spark has may not be.
            parts.history.require_common(start.identity, start.position)
            parts.reader.close()
            return start.position
        except SchemaChangedError:
            # A column that the publication leaves out looks like one that was dropped.
            parts.membership.look()
            raise

    def _offset(self, start: StreamOffset, position: Position) -> StreamOffset:
        membership, gaps = self._parts.membership, self._gaps(start)
        members = membership.plan.members
        layouts = self._parts.layouts.text(start.position, position, (*(start.members or ()), *members))
        # They may have been renamed since.
        due = tuple(member.name for member in members if member.oid in start.due_oids)
        end = replace(start, position=position, publication=membership.mark, members=members, due=due, gaps=gaps)
        return replace(end, layouts=layouts, seen=None)

    def _gaps(self, start: StreamOffset) -> tuple[str, ...]:
        """The tables whose changes may be missing, by the names that they have in the stream."""
        membership = self._parts.membership
        there = {member.oid: member.name for member in membership.plan.members}
        oids = {member.name: member.oid for member in start.members or ()}
        # One may have been renamed since it was said.
        said = [there[oids[name]] for name in start.gaps if oids.get(name) in there]
        return tuple(dict.fromkeys((*said, *(name for name in membership.gaps if name in there.values()))))

    def _join_offset(self, start: StreamOffset, join: Join) -> StreamOffset:
        parts = self._parts
        membership, layouts = parts.membership, parts.layouts
        position = start.position
        parts.snapshot.hold(join.held)
        parts.joins.done(join, position)
        # The one that was read by the plan of before has left out their changes.
        parts.reader.close()
        layouts.keep((*(start.members or ()), *membership.plan.members))
        names = tuple(planned.name for planned in join.tables)
        session = join.held.first.session
        layouts.note_snapshot(session, [planned.member for planned in join.tables], join.point)
        end = replace(self._offset(start, position), tables=names, done=len(names), at=join.point)
        if join.position < position:
            self._read_layouts(start, end)
        # What was rewritten after the point is said again behind these rows.
        again = layouts.take_rewritten(join.position, position)
        later = (start.due_oids - join.due).union(join.late, again)
        due = tuple(member.name for member in membership.plan.members if member.oid in later)
        # What these tables' layouts were from the point on comes again, too.
        text = layouts.text(join.position, position, (*(start.members or ()), *(end.members or ())))
        gaps = tuple(name for name in end.gaps if name not in names)
        return replace(end, due=due, gaps=gaps, layouts=text)

    def _read_layouts(self, start: StreamOffset, end: StreamOffset) -> None:
        """Come to the layouts that the tables which join had since their point: the stream went past it without them.

        A batch's end carries them, so they have to be known before it is given.
        """
        parts = self._parts
        if parts.layouts.are_emitted:
            rows = rows_of(start, end, (), parts.membership.plan)
            begin = rows.begin(start.position)
            plan = rows.plan_from(parts.membership.plan, begin, start.position)
            parts.open_reader(begin, lambda: plan).read_through(end.position, parts.require_driver)
