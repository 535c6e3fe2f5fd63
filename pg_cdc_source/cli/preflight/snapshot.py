"""Check a read by ``pgsnapshot``: the table or query, and the point in time that it would be read at."""

from __future__ import annotations

import contextlib

from pg_cdc_source.cli.preflight.endpoint import NAME
from pg_cdc_source.cli.preflight.findings import Status, counted
from pg_cdc_source.cli.preflight.server import Need, Reached, check_replication
from pg_cdc_source.options.snapshot_options import SnapshotOptions
from pg_cdc_source.postgres import catalog, slot_creation, snapshots
from pg_cdc_source.postgres.connection import connect
from pg_cdc_source.snapshot import scan


def check_snapshot(reached: Reached[SnapshotOptions]) -> None:
    checks, options, session = reached.checks, reached.options, reached.session

    if options.values and options().without_effect:
        checks.add("options of jdbc", "warning", options().without_effect, remedy="leave them out")

    def plan() -> str:
        table = options().dbtable
        relation = catalog.find_relation(session(), table) if table else None
        planned = scan.plan_in(session(), reached.server(), scan.spec_of(options(), relation))
        ranges = scan.ranges_in(session(), planned)
        return f"{planned.what}: {counted(len(planned.arrow_schema()), 'column')}, {counted(len(ranges), 'part')}"

    checks.run("table", plan)
    if options.values and options().snapshot is not None:
        checks.run("snapshot", lambda: _find_snapshot(options()))
    else:
        _check_point(reached)


def _find_snapshot(options: SnapshotOptions) -> str:
    with contextlib.closing(connect(options.connection, NAME)) as importing:
        snapshots.import_snapshot(importing, options.snapshot or "")
    return f"{options.snapshot} exists"


def _check_point(reached: Reached[SnapshotOptions]) -> None:
    checks, options, server = reached.checks, reached.options, reached.server
    wanted, slot = (options().consistent_point, options().slot) if options.values else ("require", None)
    if wanted == "off" or (wanted == "auto" and server.values and (server().in_recovery or server().decodes_on_demand)):
        checks.add("replication", "ok", f"not used: consistentPoint={wanted}; the snapshot's LSN is not known")
        return
    # The snapshot works without them; only its LSN is then unknown.
    failed: Status = "warning" if wanted == "auto" else "wrong"
    check_replication(reached, lambda _: Need((1, 0), (1, 0), stream=False, failover=False, messages=False), failed)
    if slot:
        checks.run(
            "slot",
            lambda: slot_creation.refuse_existing_slot(reached.session(), slot, stream=False),
            lambda _: f"{slot} does not exist yet: the first action makes it and leaves it",
        )
