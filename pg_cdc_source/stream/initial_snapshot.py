"""The initial snapshot: the tables' rows as of the slot's consistent point, in ranges that Spark's tasks read.

The slot is created first and exports its snapshot. A session here holds it until the last table is read. When that
session is gone with its process, the point cannot be read any more; so the tables that are left are read at a later
point and turned back (``rewind``)::

    slot created ──► snapshot held ──► table 1, table 2, … ──► end
                          ✗ lost  ──► new snapshot, rewound ──► the tables that are left ──► end

- Holding locks as well would make DDL wait until the last table is read, the tasks behind the DDL, and everybody else
  behind those. So locks last only while it is checked that no table was rewritten before the snapshot was there. A task
  finds out under its own lock whether its table still has what the snapshot should see.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from pg_cdc_source.errors import SchemaChangedError
from pg_cdc_source.offsets import Lsn, Position, StreamOffset
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres import locks, slot_creation, snapshots
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.snapshots import Held, SnapshotSpec
from pg_cdc_source.protocol.layout import StreamedTable
from pg_cdc_source.snapshot import scan
from pg_cdc_source.snapshot.scan import Plan, ScanRange
from pg_cdc_source.snapshot.source import GivenSnapshot
from pg_cdc_source.stream.buffer import Match
from pg_cdc_source.stream.chunks import Chunk
from pg_cdc_source.stream.rewind import rewind
from pg_cdc_source.stream.rewound import Rewound
from pg_cdc_source.stream.slot_history import SlotHistory
from pg_cdc_source.stream.source_session import SourceSession
from pg_cdc_source.stream.stream_plan import StreamPlan, session_name


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """One range of a table of the initial snapshot. ``rewound`` says what to leave out, None being nothing."""

    scan: Plan
    table: StreamedTable
    source: GivenSnapshot
    range: ScanRange
    lsn: Lsn
    rewound: Rewound | None


class InitialSnapshot:
    """Holds the snapshot. ``created`` is where the slot begins, if this process has made it."""

    def __init__(
        self, options: StreamOptions, source: SourceSession, history: SlotHistory, alive: Callable[[], bool]
    ) -> None:
        self.created: Lsn | None = None
        self._options = options
        self._source = source
        self._history = history
        self._alive = alive
        self._held: Held | None = None
        self._rewound: dict[int, Rewound] = {}

    def create_slot(self, plan: StreamPlan) -> Lsn:
        """Create the slot and return where it begins. Hold its snapshot if the stream begins with the tables' rows."""
        held = self._make(self._options.slot)
        assert held.lsn is not None
        self.created = Lsn(held.lsn + 1)
        if self._options.start_from != "snapshot":
            held.close()
            return self.created
        try:
            _check_files(held, plan)
        except BaseException:
            held.close()
            self.drop_slot()
            raise
        self._held = held
        return self.created

    def drop_slot(self) -> None:
        """Drop the slot that this process has created."""
        self.end()
        slot_creation.drop_slot(self._source.open(), self._options.slot)

    def parts(
        self, plan: StreamPlan, match: Match, end: StreamOffset, first: int, last: int
    ) -> tuple[list[SnapshotPart], list[Chunk]]:
        """What a batch with the tables from ``first`` up to ``last``, exclusive, consists of: ranges, and old rows."""
        if tuple(table.name for table in plan.tables) != end.tables:
            raise SchemaChangedError(
                "the stream's tables are not those that its initial snapshot began with",
                remedy="start over with a new checkpoint location and a new slot",
            )
        if self._held is None:
            self._rewind(plan, match, end.origin, first)
        assert self._held is not None
        parts: list[SnapshotPart] = []
        olds: list[Chunk] = []
        session, snapshot_id = self._held.holders[0]
        lsn, source = Lsn(end.origin - 1), GivenSnapshot(snapshot_id, self._held.instance)
        for table, scanned in zip(plan.tables[first:last], plan.scans[first:last], strict=True):
            rewound = self._rewound.get(table.oid)
            with translated(f"planning {table.name}"):
                ranges = scan.ranges_in(session, scanned)
            if rewound is not None and rewound.whole:
                ranges = [scan.whole(scanned)]
            if rewound is not None:
                olds += rewound.old_rows
                # They come once; every part would carry them.
                rewound = replace(rewound, old_rows=())
            parts += [SnapshotPart(scanned, table, source, scan_range, lsn, rewound) for scan_range in ranges]
        return parts, olds

    def end(self) -> None:
        """Let the snapshot go: all tables are read, or nobody will read them."""
        if self._held is not None:
            self._held.close()
            self._held = None
            self._rewound = {}

    def _make(self, slot: str | None) -> Held:
        options = self._options
        spec = SnapshotSpec("require", slot, options.slot_timeout_seconds, bool(slot) and options.failover)
        return snapshots.make_snapshot(
            options.connection, spec, lambda snapshot_id: session_name(options, "snapshot"), holders=1, stream=True
        )

    def _rewind(self, plan: StreamPlan, match: Match, origin: Lsn, first: int) -> None:
        self._history.require_free(Position.before(origin))
        held = self._make(None)
        try:
            _check_files(held, plan)
            assert held.lsn is not None
            self._rewound = rewind(
                functools.partial(self._history.connect_stream, streaming=False),
                plan.layout,
                plan.schema,
                plan.tables[first:],
                match,
                origin,
                held.lsn,
                self._alive,
            )
        except BaseException:
            held.close()
            raise
        self._held = held


def _check_files(held: Held, plan: StreamPlan) -> None:
    """Make sure that no table was rewritten between its plan and the snapshot, under locks that do not stay."""
    held.lock([table.oid for table in plan.tables], timeout="60s")
    for session, _ in held.holders:
        locks.check_files(session, "starting the snapshot")
    held.unlock()
