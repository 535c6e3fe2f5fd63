"""The rows between two offsets of a stream, which are the same however often they are asked for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pg_cdc_source.errors import DefiniteError
from pg_cdc_source.offsets import Lsn, Member, Position, StreamOffset
from pg_cdc_source.options.names import listed
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.slot_checks import behind_now_error, missing_error
from pg_cdc_source.stream.first_rows.batch_rows import BatchRows, rows_of
from pg_cdc_source.stream.first_rows.held_snapshot import SnapshotPart, emptying_rows
from pg_cdc_source.stream.layouts.schema_history import NewTableError
from pg_cdc_source.stream.received.chunks import Chunk
from pg_cdc_source.stream.received.slot_reader import SlotReader
from pg_cdc_source.stream.stream_parts import GivenOffsets, StreamParts
from pg_cdc_source.stream.tables.members import find_dropped
from pg_cdc_source.stream.tables.stream_plan import StreamPlan

log = logging.getLogger(__name__)

# As long as a lost session is replaced, which a standby's restart ends as well.
_REPLAYED = Backoff(0.2, longest_seconds=2.0, within_seconds=60.0)


@dataclass(frozen=True, slots=True)
class Batch:
    """What the rows between two offsets are made of. ``first`` come before all others.

    ``at`` is where it ends. It lies within a commit also where the tables are as of several points behind it.
    """

    first: tuple[Chunk, ...]
    parts: tuple[SnapshotPart, ...]
    chunks: tuple[Chunk, ...]
    at: Position


class BatchReading:
    """Reads batches, also those that an earlier process has planned."""

    def __init__(self, parts: StreamParts, given: GivenOffsets) -> None:
        self._parts = parts
        self._given = given
        self._asked: StreamOffset | None = None  # the end of a batch whose tables were asked for again in the WAL

    def require_order(self, start: StreamOffset, end: StreamOffset) -> None:
        """Raise SlotLostError for a batch whose end the server has and its start it does not: the next would go on."""
        parts = self._parts
        if end.at == end.origin or (end.position >= start.position and end.identity == start.identity):
            return
        parts.history.require_common(start.identity, start.position)
        if end.position < start.position:
            # Before Spark 4.2 the end is found out first, and its start tells only now that the server was further.
            session = parts.source.open()
            if not parts.source.in_recovery or parts.source.read_end_of_wal() < start.position.next_lsn:
                raise behind_now_error(session, parts.options.slot, start.position.next_lsn, end.position.next_lsn)
            raise DefiniteError(
                f"the checkpoint's unfinished batch would end at {end.position}, before its start at {start.position}: "
                "when the query started, the standby had not yet replayed the WAL up to that start",
                remedy="delete the newest file in the checkpoint's directory offsets, which names a batch that was not "
                "committed, and start the query again",
            )

    def read(self, start: StreamOffset | None, end: StreamOffset) -> Batch:
        """The rows after ``start`` (None: the initial offset) up to ``end``."""
        parts, given = self._parts, self._given
        layouts, membership = parts.layouts, parts.membership
        self._require_past(start, end)
        guessed = end == given.guessed
        if guessed and layouts.are_emitted and parts.reader.current is not None:
            # Another batch was repeated before. What was decoded behind it has the layouts that the catalog has by now.
            parts.reader.close()
        layouts.resume(start, end, guessed=guessed)
        joined = membership.repeat(start, end, guessed=guessed)
        given.newest = end
        if guessed or joined:
            # Where tables join in the batch, it is found out again should it be asked for again. One before the guess,
            # which is repeated after a crash, leaves that to come.
            given.guessed = end if joined else None
        rows = self._rows(start, end, joined)
        position = Position.before(end.origin) if start is None else start.position
        is_anew = end.at == end.origin
        begin = position if is_anew else rows.begin(position)
        plan = rows.plan_from(membership.plan, begin, position)
        changes: list[Chunk] = []
        known = start.members if start is not None and begin < position else None
        had = {member.oid: position for member in known or ()}
        if end.position > begin and not is_anew:
            if end.at is not None:
                parts.joins.stay(end.at, begin, end.position)
            if joined and rows.tables:
                parts.snapshot.hold_ahead(rows.point)
            reader, plan = self._read_through(rows, begin, position, end)
            changes += reader.batch(begin, end.position) + layouts.rows_of_guesses(start, end)
            rows = self._with_due(rows, start, end, joined)
        elif not is_anew:
            # Nothing was read, and the next batch begins with these layouts.
            changes += layouts.rows_of_guesses(start, end)
            rows = self._with_due(rows, start, end, joined)
        changes += layouts.rows_of_announced(start, end, begin, rows.wanted.keys() if rows.again else ())
        scans: list[SnapshotPart] = []
        olds: list[Chunk] = []
        first = [emptying_rows(plan, rows, had)] if rows.again and rows.wanted else []
        first += layouts.rows_before_snapshot(rows.wanted, rows.point, plan.members)
        if rows.tables:
            rows = self._as_said(rows)
            if not parts.snapshot.keep_for(rows):
                parts.reader.close()
            scans, olds = parts.snapshot.parts(
                plan, membership.mark, layouts.match_back(plan), rows, parts.reader.safe(begin).next_lsn
            )
        changes += layouts.rows_of_left(start, end, membership.published.refused)
        changes += layouts.rows_of_gaps(start, end, rows.missing)
        # Of a slot that was lost, some tables come again in later batches.
        at = _within(end.position) if is_anew and end.is_reading else end.position
        return Batch(tuple(first), tuple(scans), (*olds, *changes), at)

    def _read_through(
        self, rows: BatchRows, begin: Position, position: Position, end: StreamOffset
    ) -> tuple[SlotReader, StreamPlan]:
        """Read all changes after ``begin`` up to ``end``; return the reader that has them, and the plan that it is of.

        Where ``end`` was given before they were read, a table that is new among them is followed from ``position`` on.
        """
        parts = self._parts

        def plan() -> StreamPlan:
            return rows.plan_from(parts.membership.plan, begin, position)

        while True:
            reader = parts.open_reader(begin, plan)
            try:
                reader.read_through(end.position, parts.require_driver)
                return reader, plan()
            except NewTableError:
                if end.seen is None or not parts.membership.follow_new(position):
                    raise
                parts.reader.close()

    def none(self, end: StreamOffset) -> Batch:
        """An empty batch in place of one that cannot be read any more; all tables come again behind it."""
        self._given.newest = end
        return Batch((), (), (), _within(end.position))

    def _require_past(self, start: StreamOffset | None, end: StreamOffset) -> None:
        """Raise SlotLostError unless both are of the past of this server, and ``start`` of that of its slot."""
        parts, given = self._parts, self._given
        if start is not None and parts.snapshot.created not in (None, start.origin):
            # Only the batch's start tells that there was a stream before (see Capture.newest_without_start).
            if not parts.beginning.may_be_anew(start):
                parts.snapshot.give_up_slot()
                parts.history.require_common(start.identity, start.position)
                raise missing_error(parts.options.slot, begun=True)
        elif start is not None:
            parts.history.require_common(start.identity, start.position)
        parts.history.require_common(end.identity, end.position)
        if end not in (given.newest, given.planned):
            _REPLAYED.retrying(lambda: self._require_written(end.position.next_lsn))

    def _require_written(self, needed: Lsn) -> None:
        """Raise SlotLostError where this server has not the WAL that another process has read: it was set back.

        Whoever waits for it there gets other rows. Raises TransientError on a standby, which may replay it again.
        """
        parts = self._parts
        if needed > (end_of_wal := parts.source.read_end_of_wal()):
            raise behind_now_error(parts.source.open(), parts.options.slot, needed, end_of_wal)

    def _with_due(
        self, rows: BatchRows, start: StreamOffset | None, end: StreamOffset, joined: Sequence[Member]
    ) -> BatchRows:
        """``rows`` with those that are due at ``end``. One that was given before its start was known cannot say them.

        Nor can the next one, if another process gives it. So they come with this batch; or, where it has rows as of
        another point, the stream asks for them as anybody else does, in the WAL.
        """
        parts = self._parts
        if end.at is not None or end == self._given.planned:
            return rows
        since = replace(end, position=Position.before(end.origin)) if start is None else start
        known = (*end.due, *(member.name for member in joined))
        unsaid = [name for name in parts.due(replace(since, due=()), end.position) if name not in known]
        if not unsaid or end == self._asked:
            return rows
        if not rows.wanted or joined:
            late = [planned.member for planned in parts.membership.plan.named(unsaid)]
            return self._rows(start, end, (*joined, *late))
        if parts.joins.ask_again(unsaid, parts.source):
            self._asked = end
        else:
            self._given.newest = replace(end, due=(*end.due, *unsaid))
        return rows

    def _rows(self, start: StreamOffset | None, end: StreamOffset, joined: Sequence[Member]) -> BatchRows:
        rows = rows_of(start, end, joined, self._parts.membership.plan)
        if rows.tables:
            # In this process the snapshot may be held for longer than its tables are there.
            oids = [planned.oid for planned in rows.tables]
            rows = rows.without(self._parts.source.ask(lambda session: find_dropped(session, oids)))
        if rows.missing:
            log.warning(
                "%s left the stream before its rows as of %s were read; only its changes come",
                listed(rows.missing.values()),
                rows.point,
            )
        return rows

    def _as_said(self, rows: BatchRows) -> BatchRows:
        """The rows, whose tables may have been altered since they were planned, with the columns said before them."""
        membership, layouts = self._parts.membership, self._parts.layouts
        if not layouts.are_emitted:
            return rows
        now = membership.published.as_they_are(rows.unread, membership.plan.horizon)
        said = {planned.oid: layouts.as_said(planned, rows.point) for planned in now}
        return replace(rows, tables=tuple(said[p.oid] for p in rows.tables), unread=tuple(said.values()))


def _within(position: Position) -> Position:
    return Position(position.lsn, 0) if position.is_whole else position
