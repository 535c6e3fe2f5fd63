"""The rows of tables as of a consistent point, in ranges that Spark's tasks read.

The point is the slot's own for the initial snapshot, and a later one for tables that join (``joining``). A session here
holds it until the last table is read. When that session is gone with its process, the point cannot be read any more; so
the tables that are left are read at a later point and turned back (``rewind``)::

    slot created ──► snapshot held ──► table 1, table 2, … ──► end
                          ✗ lost  ──► new snapshot, rewound ──► the tables that are left ──► end

- Holding locks as well would make DDL wait until the last table is read, the tasks behind the DDL, and everybody else
  behind those. So locks last only while it is checked that no table was rewritten before the snapshot was there. A task
  finds out under its own lock whether its table still has what the snapshot should see.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import SchemaChangedError, ServerSetupError, TransientError
from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres import locks, slot_creation, snapshots
from pg_cdc_source.postgres.connection import FULL_SECONDS, rename
from pg_cdc_source.postgres.lasting_keys import read_lasting_keys
from pg_cdc_source.postgres.publication import find_left_out
from pg_cdc_source.postgres.replication import ReplicationStream
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.snapshots import Held, SnapshotSpec
from pg_cdc_source.protocol.layout import TRUNCATED, StreamedTable
from pg_cdc_source.protocol.stream_rows import change_columns, nothing_unchanged, truncate_rows
from pg_cdc_source.snapshot import scan
from pg_cdc_source.snapshot.scan import Plan, ScanRange
from pg_cdc_source.snapshot.source import GivenSnapshot
from pg_cdc_source.stream.first_rows.batch_rows import BatchRows
from pg_cdc_source.stream.first_rows.rewind import Stretch, rewind
from pg_cdc_source.stream.first_rows.rewound import Rewound
from pg_cdc_source.stream.received.buffer import Match
from pg_cdc_source.stream.received.chunks import Chunk
from pg_cdc_source.stream.tables.slot_history import SlotHistory
from pg_cdc_source.stream.tables.source_session import SourceSession
from pg_cdc_source.stream.tables.stream_plan import PlannedTable, StreamPlan, session_name

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """One range of a table of the snapshot. ``rewound`` says what to leave out, None being nothing.

    Rows may be as of any point from ``lsn`` through ``through``: these differ where a table could not be turned back,
    or not exactly.
    """

    scan: Plan
    table: StreamedTable
    source: GivenSnapshot
    range: ScanRange
    lsn: Lsn
    through: Lsn
    rewound: Rewound | None


_BYTES_OF_KEYS = 256 << 20


def _fewer(ranges: list[ScanRange], most: int) -> list[ScanRange]:
    """Put neighbours together, where there are more than ``most`` ranges; at least one is left."""
    step = -(-len(ranges) // max(1, most))
    groups = (ranges[begin : begin + step] for begin in range(0, len(ranges), max(1, step)))
    return [
        ScanRange(
            tuple(piece for part in group for piece in part.pieces),
            group[0].heaps,
            sum(part.size_bytes or 0 for part in group),
        )
        if len(group) > 1
        else group[0]
        for group in groups
    ]


# A server has some thousands of locks for everybody, and a table's indexes are locked with it.
_LOCKED_AT_ONCE = 500


class HeldSnapshot:
    """Holds the snapshot. ``created`` is where the slot begins, if this process has made it."""

    def __init__(
        self, options: StreamOptions, source: SourceSession, history: SlotHistory, require_driver: Callable[[], None]
    ) -> None:
        self.created: Lsn | None = None
        self._options = options
        self._source = source
        self._history = history
        self._require_driver = require_driver
        self._held: Held | None = None
        self._ahead: Held | None = None  # a later one, which rows are turned back from
        self._point: Lsn | None = None  # whose rows can be had
        self._rewound: dict[int, Rewound] = {}
        self._rewound_as: dict[int, PlannedTable] = {}  # all tables as they were then

    @property
    def session(self) -> Session | None:
        """A session that sees what the snapshot does, None where none is held."""
        return None if self._held is None else self._held.first.session

    def create_slot(self, tables: Sequence[PlannedTable]) -> Lsn:
        """Create the slot and return where it begins. Hold its snapshot if there are ``tables`` to read."""
        held = self._make(self._options.slot)
        self.created = held.point
        if not tables:
            held.close()
            return self.created
        try:
            self.hold(_checked(held, tables))
        except BaseException:
            self.give_up_slot()
            raise
        return self.created

    def give_up_slot(self) -> None:
        """Drop the slot that this process has created, because of an error that is raised behind this."""
        self.end()
        slot = self._options.slot
        slot_creation.give_up_slot(slot, lambda: slot_creation.drop_slot(self._source.open(), slot))

    def hold(self, held: Held) -> None:
        """Take over a snapshot whose files have been checked; the one that was held before ends."""
        self.end()
        self._held, self._point = held, held.point

    def keep_for(self, rows: BatchRows) -> bool:
        """Keep the snapshot if it has ``rows`` as it is; if not, let it go. :meth:`parts` reads the slot then."""
        if self._held is not None and self._point == rows.point and not self._is_stale(self._held, rows.tables):
            return True
        self._let_go()
        return False

    def hold_ahead(self, point: Lsn) -> None:
        """Take a snapshot now, before the slot is read for long, unless that of ``point`` is held.

        Rows as of ``point`` are turned back from it, and each change in between is one that they may lack.
        """
        if self._held is not None and self._point == point:
            return
        self.end()
        try:
            self._ahead = self._make(None, "ahead")
        except (ServerSetupError, TransientError) as error:
            # Long transactions may end while the slot is read.
            log.warning("%s; so rows are read as of a later point", error.what)

    def _is_stale(self, held: Held, tables: Sequence[PlannedTable]) -> bool:
        """Whether tables were truncated, rewritten or altered since the snapshot was taken, or it is lost."""
        if any(map(self._is_altered, tables)):
            return True
        session = held.first.session
        try:
            locks.check_files_under(session, [planned.oid for planned in tables], "reading rows of the snapshot")
        except (SchemaChangedError, TransientError) as error:
            log.warning("%s; so they are read as of a later point, and turned back", error.what)
            return True
        return False

    def _is_altered(self, planned: PlannedTable) -> bool:
        """Whether a table is not read any more as it was turned back, or by names that the snapshot does not have."""
        then = self._rewound_as.get(planned.oid)
        if then is not None:
            return (then.table, then.scan.columns) != (planned.table, planned.scan.columns)
        table = planned.table
        said = [codec.column.name for codec in table.codecs if codec.column.name not in table.unsent]
        return [column.name for column in planned.scan.columns] != said

    def parts(
        self, plan: StreamPlan, mark: str, match: Match, rows: BatchRows, confirmed: Lsn
    ) -> tuple[list[SnapshotPart], list[Chunk]]:
        """What ``rows`` consist of: ranges, and old rows. ``mark`` is the publication's.

        Where the snapshot is not held, the slot is read, so nobody else may. It stays at ``confirmed``.
        """
        if self._point != rows.point:
            self._rewind(plan, mark, match, rows, confirmed)
        assert self._held is not None
        parts: list[SnapshotPart] = []
        olds: list[Chunk] = []
        session, snapshot_id = self._held.first
        lsn, source = Lsn(rows.point - 1), GivenSnapshot(snapshot_id, self._held.instance)
        read_at = lsn if self._held.lsn is None else max(lsn, self._held.lsn)
        for planned in rows.tables:
            rewound = self._rewound.get(planned.oid)
            with translated(f"planning {planned.name}"):
                ranges = scan.ranges_in(session, planned.scan)
            if rewound is not None and rewound.whole:
                ranges = [scan.WHOLE]
            if rewound is not None:
                # Each part carries all keys.
                ranges = _fewer(ranges, _BYTES_OF_KEYS // max(1, len(rewound.keys)))
                olds += rewound.old_rows
                # They come once; every part would carry them.
                rewound = replace(rewound, old_rows=())
            through = lsn if rewound is not None and rewound.is_exact else read_at
            parts += [SnapshotPart(planned.scan, planned.table, source, part, lsn, through, rewound) for part in ranges]
        return parts, olds

    def end(self) -> None:
        """Let the snapshot go: all tables are read, or nobody will read them."""
        self._let_go()
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.close()
        self._held = self._point = None
        self._rewound, self._rewound_as = {}, {}

    def _make(self, slot: str | None, purpose: str = "snapshot") -> Held:
        options = self._options
        spec = SnapshotSpec("require", slot, options.slot_timeout_seconds, bool(slot) and options.failover)
        return snapshots.make_snapshot(
            options.connection,
            spec,
            lambda snapshot_id: session_name(options, purpose),
            stream=True,
            full_seconds=FULL_SECONDS,
        )

    def _rewind(self, plan: StreamPlan, mark: str, match: Match, rows: BatchRows, confirmed: Lsn) -> None:
        self._let_go()

        def connect(position: Position) -> ReplicationStream:
            # The slot may be read twice, and its server takes a moment to notice that a session has ended.
            self._history.require_free(position)
            return self._history.connect_stream(position, streaming=False)

        self._history.require_free(Position.before(rows.point), with_snapshot=True)
        held = self._take_ahead(rows) or _checked(self._make(None), rows.unread)
        try:
            assert held.lsn is not None
            tables = [planned.table for planned in rows.unread if _has_same_columns(plan.find(planned.oid), planned)]
            rewound = rewind(
                connect,
                plan.layout,
                plan.schema,
                # Not those whose columns were altered since: they are taken as they are.
                tables,
                self._find_keyed(plan, tables),
                {planned.oid: find_left_out(mark, planned.member.entry) for planned in rows.unread},
                match,
                Stretch(rows.point, held.lsn, confirmed),
                self._require_driver,
            )
        except BaseException:
            held.close()
            raise
        self._held, self._point, self._rewound = held, rows.point, rewound
        self._rewound_as = {planned.oid: planned for planned in rows.unread}

    def _take_ahead(self, rows: BatchRows) -> Held | None:
        """The snapshot that was taken ahead, if the tables can be read in it as they are."""
        held, self._ahead = self._ahead, None
        if held is None:
            return None
        try:
            _checked(held, rows.unread)
            # By this name other processes find out that somebody reads the rows.
            rename(held.first.session, session_name(self._options, "snapshot"))
        except (SchemaChangedError, TransientError) as error:
            log.warning("%s; so they are read as of a later point", error.what)
            held.close()
            return None
        return held

    def _find_keyed(self, plan: StreamPlan, tables: Sequence[StreamedTable]) -> set[int]:
        """The tables, by oid, whose keys tell rows apart, as they have done all the time."""
        present = {planned.oid: planned.table.key for planned in plan.planned}
        oids = [table.oid for table in tables if present[table.oid] == table.key]
        return set(self._source.ask(lambda session: read_lasting_keys(session, self._options.slot, oids)))


def _has_same_columns(present: PlannedTable | None, said: PlannedTable) -> bool:
    """Whether a table's rows are read with the columns that are said of them: its key and identity may be others."""
    if present is None:
        return False
    return (present.table.codecs, present.table.unsent) == (said.table.codecs, said.table.unsent)


def _checked(held: Held, tables: Sequence[PlannedTable]) -> Held:
    """``held``, whose files were checked; it ends where they are others."""
    try:
        check_files(held, tables)
    except BaseException:
        held.close()
        raise
    return held


def check_files(held: Held, tables: Sequence[PlannedTable]) -> None:
    """Make sure that no table was rewritten between its plan and the snapshot, under locks that do not stay."""
    oids = [planned.oid for planned in tables]
    for begin in range(0, len(oids), _LOCKED_AT_ONCE):
        try:
            held.lock(oids[begin : begin + _LOCKED_AT_ONCE], within_seconds=60)
            for session, _ in held.holders:
                locks.check_files(session, "starting the snapshot")
        finally:
            held.unlock()


def emptying_rows(plan: StreamPlan, rows: BatchRows, had: Mapping[int, Position]) -> Chunk:
    """A truncate row for each table whose rows come again: a sink gives up those that it has.

    They stand right before the rows. WAL records begin at multiples of 8 bytes, so no commit is there. ``had``: up to
    where earlier batches had changes of a table that come again, by its oid.
    """
    tables, point = rows.emptied(), rows.point
    again = [had.get(oid) for oid in rows.wanted]
    texts = [None if at is None else json.dumps({"lsn": at.lsn, "seq": at.seq}) for at in again]
    n, lsn = len(tables), Lsn(point - 2)
    changes = change_columns(
        np.full(n, TRUNCATED), np.full(n, lsn, np.int64), np.zeros(n, np.int64), None, None, nothing_unchanged(n)
    )
    found = truncate_rows(tables, changes, plan.layout, plan.schema, texts)
    return Chunk.of(found, Position(lsn, 0), Position(lsn, 0))
