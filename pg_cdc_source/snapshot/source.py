"""In which snapshot a scan reads: one that the keeper has for the action, or one that somebody else holds open.

A source is made while the scan is planned and shipped to every task, which imports the snapshot into its own session.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass, replace

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import SnapshotLostError, TransientError
from pg_cdc_source.logs import fields
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.options.snapshot_options import SnapshotOptions
from pg_cdc_source.postgres import exported_snapshots
from pg_cdc_source.postgres.instances import Instance, require_instance
from pg_cdc_source.postgres.snapshots import SnapshotSpec
from pg_cdc_source.postgres.standby_snapshots import require_complete_import
from pg_cdc_source.snapshot import board
from pg_cdc_source.snapshot.connections import Planning, bound, planning_session
from pg_cdc_source.snapshot.driver_files import context_number, lsn_file
from pg_cdc_source.snapshot.keeper.launch import find_keeper, read_site, start_keeper
from pg_cdc_source.snapshot.scan import Plan, ScanRange, look_up, ranges_in

log = logging.getLogger(__name__)

# Each holder of a snapshot may be lost between being found and being used; the keeper replaces it.
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Imported:
    """The snapshot of a session's transaction: under which id it was imported, and its LSN where it has one.

    ``on_standby`` is what the server was then: since planning, it may have become one, or come from one.
    """

    snapshot_id: str
    lsn: Lsn | None
    on_standby: bool


@dataclass(frozen=True, slots=True)
class GivenSnapshot:
    """A snapshot that ``open_snapshot()`` or a stream's query holds, on the server that it or the planning has seen."""

    snapshot_id: str
    instance: Instance

    def session_name(self, execution: str, oid: int) -> str:
        """The application_name of a session that reads the relation ``oid`` (0: a query)."""
        return "pgsnapshot:reading"

    def import_into(self, session: Session, execution: str, doing: str) -> Imported:
        """Begin the session's transaction in the snapshot."""
        require_instance(session, self.instance, doing)
        lsn = exported_snapshots.announced_lsn(session, self.snapshot_id)
        on_standby = exported_snapshots.import_snapshot(session, self.snapshot_id)
        # Of those with an LSN, decoding has made the snapshot.
        if on_standby and lsn is None:
            require_complete_import(session, self.snapshot_id)
        return Imported(self.snapshot_id, lsn, on_standby)


@dataclass(frozen=True, slots=True)
class KeptSnapshot:
    """The snapshot that the keeper of this name makes for an execution. ``request`` lacks only the execution.

    ``context`` tells the stages of a SparkContext from those of another.
    A task finds keeper, snapshot and its id on the server that it has come to, so it never takes another server's. It
    may have come to another one than ``planned_on``, which was restarted or failed over; the keeper then has as well.
    """

    keeper: str
    request: board.Request
    planned_on: Instance
    context: int

    def session_name(self, execution: str, oid: int) -> str:
        """As above; the keeper counts sessions of this name as readers of the execution."""
        return board.reader_name(self.keeper, board.lasting_key(execution, self.context), oid)

    def import_into(self, session: Session, execution: str, doing: str) -> Imported:
        """As above; the keeper is asked for the snapshot where it has not made it yet."""
        request = replace(self.request, execution=board.lasting_key(execution, self.context))
        for _ in range(_ATTEMPTS):
            found = board.find_snapshot(session, self.keeper, request, self.planned_on)
            for snapshot_id in found.ids:
                # A holder may have been lost since; the other one has the same snapshot under another id.
                with contextlib.suppress(SnapshotLostError):
                    on_standby = exported_snapshots.import_snapshot(session, snapshot_id)
                    return Imported(snapshot_id, found.lsn, on_standby)
        raise TransientError(f"{doing}: no holder of the snapshot of execution {execution} lasted")


Source = GivenSnapshot | KeptSnapshot


# A load that is acted on at once is planned in one session. Tables, partitions and free connections change slowly.
_FRESH_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class PlannedRanges:
    """The ranges of a scan and their source, as of ``at`` (``time.monotonic()``, the same for the host's processes)."""

    source: Source
    ranges: list[ScanRange]
    at: float


def plan_load(options: SnapshotOptions) -> tuple[Plan, PlannedRanges | None]:
    """Look up what is to be read, and cut a plain table into ranges where its snapshot needs no new keeper.

    Partitions are looked at when an action begins, because more of them may be there by then.
    """
    with planning_session(options.connection, options.max_connections) as planning:
        plan = look_up(planning.session, options)
        if plan.relation is None or plan.relation.kind != "r":
            return plan, None
        return plan, _plan_ranges(planning, plan, options, starts_keeper=False)


def plan_ranges(
    plan: Plan, options: SnapshotOptions, planned: PlannedRanges | None = None
) -> tuple[Source, list[ScanRange]]:
    """Cut a scan into ranges, and make sure that its tasks will find the snapshot that the options ask for.

    What was ``planned`` a moment ago will do.
    """
    if planned is None or time.monotonic() - planned.at > _FRESH_SECONDS:
        with planning_session(plan.spec.connection, options.max_connections) as planning:
            planned = _plan_ranges(planning, plan, options, starts_keeper=True)
    assert planned is not None
    log.info("planned %s", fields(table=plan.what, ranges=len(planned.ranges), snapshot=options.snapshot))
    return planned.source, planned.ranges


def _plan_ranges(
    planning: Planning, plan: Plan, options: SnapshotOptions, *, starts_keeper: bool
) -> PlannedRanges | None:
    """None where a keeper is needed, does not run, and is not to be started."""
    session = planning.session
    # One transaction, so that the ranges and the identity of the heaps belong to the same heaps.
    ranges = ranges_in(session, plan, begins=True)
    site = read_site(session)
    at = time.monotonic()
    max_connections = bound(options.max_connections, site.connections_left)
    if plan.relation is not None and plan.relation.kind in "rpm" and plan.spec.where is None:
        planning.keep(max_connections)
    if options.snapshot is not None:
        return PlannedRanges(GivenSnapshot(options.snapshot, site.instance), ranges, at)
    spec = SnapshotSpec(options.consistent_point, options.slot, options.slot_timeout_seconds)
    shows_lsn = options.lsn_column is not None
    noted = lsn_file(session, site.instance)
    request = board.Request("", options.snapshot_idle_seconds, max_connections, shows_lsn, noted, spec)
    name = find_keeper(site)
    if name is None and starts_keeper:
        name = start_keeper(plan.spec.connection, session, site, request)
    if name is None:
        return None
    return PlannedRanges(KeptSnapshot(name, request, site.instance, context_number()), ranges, at)
