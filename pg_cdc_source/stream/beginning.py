"""Where a stream begins: its slot, its tables, and the first offset that Spark is given."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from pg_cdc_source.errors import SlotLostError, TransientError
from pg_cdc_source.offsets import Lsn, Position, StreamOffset
from pg_cdc_source.options.names import listed
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres import publication, trees
from pg_cdc_source.postgres.minor_versions import may_begin_within_transactions
from pg_cdc_source.postgres.slot_checks import missing_error
from pg_cdc_source.postgres.slots import Slot
from pg_cdc_source.stream.first_rows.held_snapshot import HeldSnapshot
from pg_cdc_source.stream.layouts.emitted_layouts import EmittedLayouts
from pg_cdc_source.stream.membership import Membership
from pg_cdc_source.stream.tables.slot_history import SlotHistory
from pg_cdc_source.stream.tables.source_session import SourceSession
from pg_cdc_source.stream.tables.stream_plan import PlannedTable, StreamPlan

log = logging.getLogger(__name__)

_TRIES = 5


class Beginning:
    """Finds the first offset of a stream, also of one that begins anew under its checkpoint."""

    def __init__(
        self,
        options: StreamOptions,
        source: SourceSession,
        history: SlotHistory,
        membership: Membership,
        snapshot: HeldSnapshot,
        layouts: EmittedLayouts,
    ) -> None:
        self._options = options
        self._source = source
        self._history = history
        self._membership = membership
        self._snapshot = snapshot
        self._layouts = layouts

    def find(self) -> StreamOffset:
        """The first end of a stream: where it begins, and its tables, one of them to be read."""
        slot = self._history.find_slot()
        if slot is not None:
            if self._options.start_from == "slot":
                self._warn_of_what_is_younger(slot)
            return self.at(slot)
        if self._options.start_from == "slot":
            raise missing_error(self._options.slot, begun=False)
        if self._options.start_from == "now":
            plan = self._membership.begin(create=True)
            return self._first_end(plan, self._snapshot.create_slot(()), False)
        return self._first_end(*self._create_slot(guessed=False), True)

    def at(self, slot: Slot, *, guessed: bool = False) -> StreamOffset:
        """The first end of a stream of a slot that is there. ``guessed``: it may have begun long ago."""
        assert slot.confirmed_flush is not None
        # Nothing is created: what was committed before it would be missing, from PostgreSQL 18 on without an error.
        plan = self._membership.begin(guessed=guessed)
        origin = slot.confirmed_flush
        if self._options.start_from == "now":
            origin = max(self._source.read_end_of_wal(), origin)
        return self._first_end(plan, origin, self._options.start_from == "snapshot")

    def anew(self, error: SlotLostError) -> StreamOffset:
        """Make a new slot, and have all rows come again (onSlotLost=resnapshot)."""
        log.warning("%s; a new slot is made, and the rows of all tables come again", error.what)
        self._history.drop_lost_slot()
        plan, origin = self._create_slot(guessed=self._options.on_schema_change != "fail")
        return replace(self._first_end(plan, origin, True), at=origin)

    def _create_slot(self, *, guessed: bool) -> tuple[StreamPlan, Lsn]:
        """Create the slot and hold its snapshot; return the tables that it has, and where it begins.

        The slot waits for transactions that may create tables: their first rows are before it. Such a table joins with
        its rows, or is told (onNewTable). Where it would only be followed, the slot is made anew.
        """
        new: Sequence[PlannedTable] = ()
        for _ in range(_TRIES):
            plan = self._membership.begin(create=True, guessed=guessed)
            origin = self._snapshot.create_slot(plan.planned)
            try:
                session = self._snapshot.session
                only_follows = self._options.on_new_table == "changes" and bool(self._options.tables)
                new = self._membership.find_new(session) if only_follows and session is not None else ()
            except BaseException:
                self._snapshot.give_up_slot()
                raise
            if not new:
                return plan, origin
            self._snapshot.give_up_slot()
        raise TransientError(
            f"{listed(planned.name for planned in new)} came while slot {self._options.slot} was made, as others did "
            f"{_TRIES - 1} times before, and its first rows would be missing",
            remedy="start the query while no tables are created, or with onNewTable=snapshot",
        )

    def may_be_anew(self, offset: StreamOffset) -> bool:
        """Whether a lost slot is made anew: not where the checkpoint is of another server, database or slot."""
        if self._options.on_slot_lost == "fail":
            return False
        self._history.forget_identity()
        ours = self._history.identify()
        return replace(offset.identity, timeline=ours.timeline) == ours

    def done_after_next(self, tables: Sequence[str], done: int) -> int:
        """How many of ``tables`` are read behind the next batch: the next one, and with it what a batch may hold."""
        rest = tables[done:]
        if len(rest) < 2:
            return len(tables)
        oids = {planned.name: planned.oid for planned in self._membership.plan.named(rest)}
        sizes = self._source.ask(lambda session: trees.read_sizes(session, list(oids.values())))
        if sizes is None:
            return done + 1
        totals = accumulate(sizes.get(oids.get(name, 0), 0) for name in rest)
        return done + max(1, sum(total <= self._options.max_bytes_per_batch for total in totals))

    def _warn_of_what_is_younger(self, slot: Slot) -> None:
        names = self._options.publications
        lacking = self._source.ask(lambda session: publication.describe_since_slot(session, names, slot.name))
        if lacking:
            log.warning("%s", lacking)
        if self._source.ask(may_begin_within_transactions):
            log.warning(
                "slot %s may begin within a transaction, if pg_create_logical_replication_slot() made it: of that, "
                "this minor version of PostgreSQL then sends the last part alone",
                self._options.slot,
            )

    def _first_end(self, plan: StreamPlan, origin: Lsn, reads_rows: bool) -> StreamOffset:
        tables, start = tuple(planned.name for planned in plan.planned) if reads_rows else (), Position.before(origin)
        if reads_rows:
            session = self._snapshot.session or self._source.open()
            self._layouts.note_snapshot(session, [planned.member for planned in plan.planned], origin)
        return StreamOffset(
            self._history.identify(),
            origin,
            tables,
            self.done_after_next(tables, 0),
            start,
            self._membership.mark,
            tuple(replace(member, since=origin) for member in plan.members),
            layouts=self._layouts.text(start, start, plan.members),
        )
