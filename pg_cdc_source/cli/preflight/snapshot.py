"""Check a read by ``pgsnapshot``: the table or query, and the point in time that it would be read at."""

from __future__ import annotations

import contextlib

from psycopg2.extensions import connection as Session

from pg_cdc_source.cli.preflight.endpoint import NAME
from pg_cdc_source.cli.preflight.findings import Status, counted
from pg_cdc_source.cli.preflight.server import Need, Reached, check_replication
from pg_cdc_source.options.names import listed, quoted
from pg_cdc_source.options.snapshot_options import SnapshotOptions
from pg_cdc_source.postgres import catalog, exported_snapshots, search_path, slot_creation
from pg_cdc_source.postgres.connection import connect
from pg_cdc_source.postgres.minor_versions import INCOMPLETE_EXPORT, newest_without
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.standby_snapshots import may_look, require_complete_import
from pg_cdc_source.snapshot import scan


def check_snapshot(reached: Reached[SnapshotOptions]) -> None:
    checks, options, session = reached.checks, reached.options, reached.session

    if options.values and options().without_effect:
        checks.add("options of jdbc", "warning", options().without_effect, remedy="leave them out")

    def plan() -> scan.Plan:
        table = options().dbtable
        relation = catalog.find_relation(session(), table) if table else None
        return scan.plan_in(session(), reached.server(), scan.spec_of(options(), relation))

    def tell(planned: scan.Plan) -> str:
        ranges = scan.ranges_in(session(), planned)
        return f"{planned.what}: {counted(len(planned.arrow_schema()), 'column')}, {counted(len(ranges), 'part')}"

    planned = checks.run("table", plan, tell)
    if planned.values and _runs_users_sql(planned().spec) and (schemas := _open_schemas(session())):
        checks.add(
            "search path",
            "warning",
            f"everybody may create objects in {listed(schemas)}, which is in this role's search_path: where, query and "
            "views may call a function there in place of PostgreSQL's own, with the rights of this role",
            remedy="; ".join(f"REVOKE CREATE ON SCHEMA {quoted(schema)} FROM PUBLIC" for schema in schemas)
            + "; or set the role's search_path to pg_catalog, and qualify names in such SQL",
        )
    _check_standby(reached)
    if options.values and options().snapshot is not None:
        checks.run("snapshot", lambda: _find_snapshot(options()))
    else:
        _check_point(reached)


def _check_standby(reached: Reached[SnapshotOptions]) -> None:
    """Warn of a standby that may export snapshots without transactions that were running."""
    server = reached.server
    required = reached.options.values and reached.options().consistent_point == "require"
    if required or not (server.values and server().in_recovery and INCOMPLETE_EXPORT.is_in(server().version_num)):
        return
    fixed = newest_without(INCOMPLETE_EXPORT, server().version_num)
    remedy = f"set consistentPoint=require (PostgreSQL 16); or update to PostgreSQL {fixed}, or read the primary"
    if may_look(reached.session()):
        while_so = "while a transaction on its primary has more than 64 subtransactions"
        reached.checks.add("standby", "warning", f"actions fail {while_so}", remedy)
    else:
        reached.checks.add("standby", "warning", INCOMPLETE_EXPORT.effect, remedy)


def _runs_users_sql(spec: scan.ScanSpec) -> bool:
    return bool(spec.written) or (spec.relation is not None and spec.relation.kind == "v")


def _open_schemas(session: Session) -> list[str]:
    """The schemas of the search_path in which everybody may create: by default public, before PostgreSQL 15."""
    with translated("looking at the search_path"), session.cursor() as cursor:
        search_path.execute_by_role(
            cursor,
            """
            SELECT s.name::pg_catalog.text
            FROM pg_catalog.unnest(pg_catalog.current_schemas(false)) AS s (name)
            WHERE pg_catalog.has_schema_privilege('public', s.name::pg_catalog.text, 'CREATE')
            """,
        )
        return [name for (name,) in cursor]


def _find_snapshot(options: SnapshotOptions) -> str:
    with contextlib.closing(connect(options.connection, NAME)) as importing:
        if exported_snapshots.import_snapshot(importing, options.snapshot or ""):
            require_complete_import(importing, options.snapshot or "")
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
