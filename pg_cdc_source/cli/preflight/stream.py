"""Check a read by ``pgcdc``: slot, publication, rights, tables and their replica identities, retained WAL."""

from __future__ import annotations

from collections.abc import Callable

from psycopg2.extensions import connection as Session
from rich.filesize import decimal

from pg_cdc_source.cli.preflight.findings import Outcome, ScarceError, counted
from pg_cdc_source.cli.preflight.server import Need, Reached, check_replication
from pg_cdc_source.errors import SlotLostError
from pg_cdc_source.options.names import listed, quoted
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres import publication
from pg_cdc_source.postgres.horizon import NOTHING
from pg_cdc_source.postgres.minor_versions import defects_of, newest_known
from pg_cdc_source.postgres.publication import PlannedPublication, Publication
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.slot_checks import check_slot, missing_error, require_unused
from pg_cdc_source.postgres.slots import Usage, read_slot, read_usages
from pg_cdc_source.stream.tables.stream_plan import StreamPlan, plan_stream


def check_stream(reached: Reached[StreamOptions]) -> None:
    checks, options, session = reached.checks, reached.options, reached.session

    def made() -> bool:
        """Whether a stream that starts now finds its slot, or requires one."""
        return options().start_from == "slot" or read_slot(session(), options().slot) is not None

    def need(options: StreamOptions) -> Need:
        # One walsender is needed for a moment to create the slot, and one slot to turn back an unfinished snapshot.
        slots = (0 if made() else 1, 1 if options.start_from == "snapshot" else 0)
        return Need(slots, (1, 1), stream=True, failover=options.failover, messages=bool(options.message_prefixes))

    _check_minor_version(reached)
    _check_slot(reached)
    found = checks.run("publication", lambda: _find_publication(session(), options(), made=made()), _tell_publication)
    if found.values and found().create:
        checks.run(
            "rights",
            lambda: publication.require_rights(session(), found()),
            lambda _: "this role may create the publication",
        )
    if found.values and options().start_from == "slot":
        checks.run("publication", lambda: _require_older(session(), options()))
    _check_tables(reached, found, makes_slot=lambda: not made())
    check_replication(reached, need)
    checks.run("commits", lambda: _waiting_commits(session()))
    checks.run("WAL", lambda: _kept_wal(session()))
    if reached.server.values and reached.server().in_recovery:
        checks.run("standby", lambda: _kept_catalogs(session()))


def _check_minor_version(reached: Reached[StreamOptions]) -> None:
    if not reached.session.values:
        return
    version = reached.session().server_version
    for defect in defects_of(version):
        remedy = f"update the server to {newest_known(version)} or later"
        reached.checks.add("minor version", "warning", defect.effect, remedy)


def _check_slot(reached: Reached[StreamOptions]) -> None:
    checks, options, session = reached.checks, reached.options, reached.session
    usage = checks.run("slot", lambda: _find_slot(session(), options()), lambda found: _tell_slot(found, options()))
    if usage.values and (found := usage()) is not None and found.slot.wal_status == "unreserved":
        checks.add(
            "slot",
            "warning",
            f"{found.slot.name} holds more than max_slot_wal_keep_size: the server may remove its WAL at the next"
            " checkpoint",
            "start the stream now, or raise max_slot_wal_keep_size",
        )


def _find_slot(session: Session, options: StreamOptions) -> Usage | None:
    """The slot, refused if this stream could not read it; None if the stream will create it."""
    found = read_slot(session, options.slot)
    if found is None:
        if options.start_from == "slot":
            raise missing_error(options.slot, begun=False)
        return None
    with translated("looking for the database's name"), session.cursor() as cursor:
        cursor.execute("SELECT current_database()")
        (database,) = cursor.fetchone()
    try:
        check_slot(found, database, failover=options.failover)
    except SlotLostError as error:
        if options.on_slot_lost == "fail":
            raise
        raise ScarceError(
            error.what,
            remedy="a query that goes on from a checkpoint makes a new slot and reads all rows again "
            "(onSlotLost=resnapshot); without a checkpoint, drop the slot before",
        ) from None
    require_unused(session, found)
    return next((usage for usage in read_usages(session) if usage.slot.name == options.slot), None)


def _tell_slot(usage: Usage | None, options: StreamOptions) -> str:
    name, start_from = options.slot, options.start_from
    if usage is None:
        rest = "and reads the tables at its position" if start_from == "snapshot" else "and starts with changes"
        return f"{name} does not exist yet: startFrom={start_from} makes it {rest}"
    starts = {
        "snapshot": "reads the tables and turns them back to that position",
        "slot": "starts there",
        "now": "skips what it holds",
    }[start_from]
    lag, held = decimal(usage.lag_bytes or 0), decimal(usage.held_bytes or 0)
    place = f"{name} stands at {usage.slot.confirmed_flush}, {lag} behind, and holds {held} of WAL"
    return f"{place}; without a checkpoint, startFrom={start_from} {starts}"


def _find_publication(session: Session, options: StreamOptions, *, made: bool) -> PlannedPublication:
    """The publication; one that exists has nothing to create."""
    if made:
        return PlannedPublication(publication.require_publication(session, options.publications), (), "")
    found = publication.read_publication(session, options.publications)
    return PlannedPublication(found, (), "") if found is not None else publication.plan_publication(session, options)


def _tell_publication(found: PlannedPublication) -> str:
    name = quoted(found.publication.name)
    if found.create:
        return f"{name} does not exist yet: {found.create}"
    unsent = found.publication.unsent
    without = f", and does not send {', '.join(unsent)}" if unsent else ""
    return f"{name} has {counted(len(found.publication.tables), 'table')}{without}"


def _require_older(session: Session, options: StreamOptions) -> str:
    """Whether the slot has all changes of the publication's tables: it lacks those from before they were published."""
    if lacking := publication.describe_since_slot(session, options.publications, options.slot):
        raise ScarceError(
            lacking,
            remedy="where that matters, drop the slot, and let startFrom=snapshot make a new one and read the tables",
        )
    return f"all that it has is older than slot {options.slot}"


def _check_tables(
    reached: Reached[StreamOptions], found: Outcome[PlannedPublication], makes_slot: Callable[[], bool]
) -> None:
    checks, options, session = reached.checks, reached.options, reached.session

    def planned() -> StreamPlan:
        if makes_slot() or options().on_new_table == "snapshot":
            reached.server().require_lasting_snapshots()
        return plan_stream(session(), options(), found().publication, NOTHING)

    plan = checks.run("tables", planned, _tell_tables)
    checks.run("identities", lambda: _require_identities(session(), found().publication, plan()))


def _tell_tables(plan: StreamPlan) -> str:
    kinds = {"f": "FULL", "n": "NOTHING"}
    named = [
        f"{table.name} ({kinds.get(table.identity) or ', '.join(table.key) or 'no identity'})" for table in plan.tables
    ]
    return f"by replica identity: {listed(named)}"


def _require_identities(session: Session, published: Publication, plan: StreamPlan) -> str:
    sends_old_values = published.updates or published.deletes
    only_inserted = {table.relation.oid for table in published.tables if table.inserts_only}
    scanned = [p.scan.relation for p in plan.planned if p.oid not in only_inserted]
    relations = [relation for relation in scanned if relation is not None]
    without, steps = publication.without_identity(session, relations if sends_old_values else [])
    if without:
        raise ScarceError(
            f"PostgreSQL refuses UPDATE and DELETE on {without}: published without a usable replica identity",
            remedy=f"add a primary key; or {steps}",
        )
    return "every table has the one that its publication needs"


def _kept_wal(session: Session) -> str:
    with translated("reading max_slot_wal_keep_size"), session.cursor() as cursor:
        cursor.execute(
            """
            SELECT current_setting('max_slot_wal_keep_size'),
                nullif(current_setting('idle_replication_slot_timeout', true), '0')
            """
        )
        kept, idle = cursor.fetchone()
    if idle is not None:
        raise ScarceError(
            f"idle_replication_slot_timeout is {idle}: the server invalidates a slot that nobody reads for so long, "
            "also while the initial snapshot is read, or between runs",
            remedy="set it to 0, or to more than the longest pause of the query",
        )
    if kept == "-1":
        raise ScarceError(
            "max_slot_wal_keep_size is -1: while its query is down, a slot retains WAL until the disk is full",
            remedy="set it to a size that the disk has room for and that covers the longest pause of the query",
        )
    return f"slots keep {kept} at most"


def _kept_catalogs(session: Session) -> str:
    with translated("reading hot_standby_feedback"), session.cursor() as cursor:
        cursor.execute("SHOW hot_standby_feedback")
        (feedback,) = cursor.fetchone()
    if feedback != "on":
        raise ScarceError(
            "hot_standby_feedback is off: VACUUM on the primary may remove rows of catalogs that the slot needs, and "
            "the standby then gives the slot up",
            remedy="turn it on, and have the standby stream from the primary by a physical slot (primary_slot_name)",
        )
    return "the primary keeps what the slot needs"


def _waiting_commits(session: Session) -> str:
    """Whether the server would have commits wait for a stream, as for a standby."""
    with translated("reading synchronous_standby_names"), session.cursor() as cursor:
        cursor.execute("SHOW synchronous_standby_names")
        names = str(cursor.fetchone()[0])
    if "*" in names:
        raise ScarceError(
            f"synchronous_standby_names is {names!r}, which a stream's session may be: commits of all clients would "
            "wait until Spark has committed their batch",
            remedy="name the standbys",
        )
    return "no commit waits for the stream"
