"""The tables that wait to join a stream: those that are new or had a gap, and those whose rows were asked for again.

The stream does not stop for them, so it may have read beyond their consistent point when that is found. Then it goes
back for their changes; until that is done the slot has to stay where the waiting began.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pg_cdc_source.errors import DefiniteError, PgCdcError, SchemaChangedError
from pg_cdc_source.offsets import Lsn, Position, StreamOffset
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres.decoding_messages import MESSAGES_VERSION, emit_message
from pg_cdc_source.postgres.snapshots import Held
from pg_cdc_source.protocol.decoding_messages import EVERY_TABLE, OWN_PREFIX, Asked, write_request
from pg_cdc_source.stream.first_rows.held_snapshot import check_files
from pg_cdc_source.stream.joining import Joining
from pg_cdc_source.stream.membership import Membership
from pg_cdc_source.stream.planned_reader import PlannedReader
from pg_cdc_source.stream.tables.source_session import SourceSession
from pg_cdc_source.stream.tables.stream_plan import PlannedTable

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Join:
    """Tables that join at the consistent point of a snapshot, and the publication's mark there.

    ``due`` has the oids of what had been asked for when it was planned, and ``late`` those that wait for another one.
    """

    held: Held
    tables: tuple[PlannedTable, ...]
    mark: str
    due: frozenset[int]
    late: frozenset[int]

    @property
    def point(self) -> Lsn:
        return self.held.point

    @property
    def position(self) -> Position:
        """Everything before the point."""
        return Position.before(self.point)


class Joins:
    """Finds the point for the tables that wait, and knows where the slot has to stay for them."""

    def __init__(self, options: StreamOptions, membership: Membership) -> None:
        self._membership = membership
        self._slot = options.slot
        self._is_changelog = options.change_format == "changelog"
        self._joining = Joining(options)
        self._ready: Join | None = None  # what comes once the stream has read so far
        self._refused = ""  # why the last plan for them failed
        self._stays: dict[Lsn | None, Position] = {}  # of the slot, by point; None is one that is not known yet
        self._ends: dict[Lsn, Position] = {}  # of the batches in which tables join, by point

    def due(
        self, start: StreamOffset, end: Position, reader: PlannedReader, rewritten: Iterable[int]
    ) -> tuple[str, ...]:
        """The tables whose rows were asked for up to ``end``, and have not come, or were ``rewritten``: their names
        now. Those that were rewritten are given by oid.
        """
        requests = [] if reader.current is None else reader.current.requests(start.position, end)
        asked = [name for request in requests for name in request.tables]
        if asked and self._is_changelog:
            # It has no row that takes back all others. Whoever may write in the database may ask.
            log.warning("rows of %s were asked for again, which a changelog does not give", ", ".join(asked))
            asked = []
        followed = self._membership.plan.planned
        # It may have been renamed since it was asked for.
        oids = {member.name: member.oid for member in start.members or ()} | {p.name: p.oid for p in followed}
        if strangers := [name for name in asked if name != EVERY_TABLE and name not in oids]:
            log.warning("rows of %s were asked for, which the stream does not have", ", ".join(strangers))
        due = start.due_oids.union(rewritten, (oids[name] for name in asked if name in oids))
        if EVERY_TABLE in asked:
            due |= {planned.oid for planned in followed}
        # One that waits by another entry, or under another name, is not followed for a while, and still due.
        return tuple(member.name for member in self._membership.plan.members if member.oid in due)

    def are_awaited(self, start: StreamOffset) -> bool:
        return self._membership.has_waiting or bool(self._membership.plan.with_oids(start.due_oids | start.gap_oids))

    def ask_again(self, names: Sequence[str], source: SourceSession) -> bool:
        """Ask for the rows of tables by a message behind all that is in the WAL, as ``pg-cdc resnapshot`` does.

        Return whether that was possible.
        """
        try:
            if source.ask(lambda session: session.server_version >= MESSAGES_VERSION and not source.in_recovery):
                request = write_request(Asked(tuple(names), self._slot))
                source.ask(lambda session: emit_message(session, OWN_PREFIX, request))
                return True
            why = "no message can be written on this server"
        except DefiniteError as error:
            why = error.what
        log.warning(
            "rows of %s come again, which cannot be noted in the WAL: %s\n  Remedy: should the query stop before they "
            "have come, ask for them by pg-cdc resnapshot",
            *(", ".join(names), why),
        )
        return False

    def ready(self, start: StreamOffset, patience_seconds: float) -> Join | None:
        """The tables that join, as soon as their consistent point is known."""
        if self._ready is not None:
            return self._ready
        if not self.are_awaited(start):
            self._give_up()
            return None
        if not self._joining.is_running or self._joining.is_pausing:
            # A snapshot that came to nothing needs no changes, and the next one's point is behind this position.
            self._stays[None] = start.position
        if not self._joining.is_running:
            self._membership.begin_join()
            self._joining.begin()
        held = self._joining.take(patience_seconds)
        if held is None:
            return None
        try:
            # A gap that a row has said ends with the table's rows, also where its cause has gone again.
            tables, mark = self._membership.plan_join(held, start.due_oids | start.gap_oids)
            if there := _with_their_files(held, tables):
                late = frozenset(planned.oid for planned in tables if planned not in there)
                self._ready = Join(held, there, mark, start.due_oids & {planned.oid for planned in there}, late)
            self._refused = ""
        except SchemaChangedError:
            raise
        except PgCdcError as error:
            if isinstance(error, DefiniteError) and str(error) == self._refused:
                raise
            # DDL may have come between the plan's queries (see second_look); its transaction ends with the first error.
            self._refused = str(error)
            log.warning("tables that join the stream have to wait: %s; trying again", error.what)
            return None
        finally:
            if self._ready is None:
                held.close()
        if not tables:
            self._membership.join((), mark)
            self._stays.pop(None, None)
        return self._ready

    def _give_up(self) -> None:
        """Those that waited have gone: neither the slot nor a snapshot stays for them."""
        self._joining.close()
        self._stays.pop(None, None)

    def done(self, join: Join, end: Position) -> None:
        """The batch in which they join is given out, up to ``end``; whoever does that has the snapshot now."""
        self._membership.join(join.tables, join.mark)
        self._ready = None
        self.stay(join.point, self._stays.pop(None, join.position), end)

    def stay(self, point: Lsn, position: Position, end: Position) -> None:
        """Keep the slot at ``position`` until the batch up to ``end`` is committed: tables join in it at ``point``."""
        self._stays.setdefault(point, position)
        self._ends[point] = end

    def committed(self, end: StreamOffset) -> Position:
        """Where the slot may move when everything through ``end`` is committed."""
        # With asynchronous progress tracking, Spark does not say of every batch that it is committed.
        for point in [point for point, behind in self._ends.items() if point == end.at or behind < end.position]:
            del self._ends[point]
            self._stays.pop(point, None)
        return self.safe(end.position)

    def safe(self, position: Position) -> Position:
        """Where the slot may move when everything through ``position`` is committed, and nothing else is said."""
        return min([position, *self._stays.values()])

    def close(self) -> None:
        """Give up what is under way."""
        self._joining.close()
        if self._ready is not None:
            self._ready.held.close()
            self._ready = None
        self._stays.clear()
        self._ends.clear()


def _with_their_files(held: Held, tables: tuple[PlannedTable, ...]) -> tuple[PlannedTable, ...]:
    """The tables that were not rewritten after the snapshot was taken; others need another one."""
    try:
        check_files(held, tables)
    except SchemaChangedError as error:
        if len(tables) > 1:
            return tuple(planned for planned in tables if _with_their_files(held, (planned,)))
        log.warning("%s has to wait before it joins the stream: %s", tables[0].name, error.what)
        return ()
    return tables
