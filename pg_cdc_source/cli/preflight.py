"""Find everything that would keep a read from working, before it is tried, and change nothing.

Each check is the product's own: what a snapshot or stream would raise when it begins is raised here, and written down
instead. A check takes what it needs from the outcomes of others; where one of these has none, it is not done and names
it. So all that can be looked at is looked at, whatever else is wrong.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Generic, Literal, TypeVar

import psycopg2
import psycopg2.extensions
import pyarrow
from psycopg2.extensions import connection as Session
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from pg_cdc_source.errors import OptionError, PgCdcError, ServerSetupError
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.options.declared import OPTIONS
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.options.libpq_keywords import LIBPQ_KEYWORDS
from pg_cdc_source.options.names import quoted
from pg_cdc_source.options.snapshot_options import SnapshotOptions, parse_snapshot_options
from pg_cdc_source.options.stream_options import StreamOptions, parse_stream_options
from pg_cdc_source.postgres import catalog, publication, snapshots
from pg_cdc_source.postgres.catalog import Server
from pg_cdc_source.postgres.connection import connect, refuse_transaction_pooler
from pg_cdc_source.postgres.publication import Planned
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.slots import Usage, check_slot, in_use_error, missing_error, read_slot, read_usages
from pg_cdc_source.snapshot import scan
from pg_cdc_source.stream.schema_history import StreamPlan, plan_stream
from pg_cdc_source.values import native

T = TypeVar("T")
Given = TypeVar("Given", SnapshotOptions, StreamOptions)

Status = Literal["ok", "warning", "wrong", "not done"]

_NAME = "pg-cdc:check"
_STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "wrong": "bold red", "not done": "dim"}
_MOST_NAMED = 10


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has found. ``remedy`` is empty where there is nothing to do, or the text says it for each part."""

    check: str
    status: Status
    text: str
    remedy: str = ""


def check(format_name: str | None, given: Mapping[str, str]) -> list[Finding]:
    """Check the installation and, with the name of a format, whether a read with these options would work."""
    checks = _Checks()
    _check_installation(checks)
    with contextlib.ExitStack() as stack:
        if format_name == "pgsnapshot":
            _check_snapshot(_reach(checks, stack, given, parse_snapshot_options))
        elif format_name == "pgcdc":
            _check_stream(_reach(checks, stack, given, parse_stream_options))
    return checks.findings


def is_right(findings: list[Finding]) -> bool:
    return all(finding.status in ("ok", "warning") for finding in findings)


def print_json(findings: list[Finding]) -> None:
    print(json.dumps({"ok": is_right(findings), "findings": [asdict(finding) for finding in findings]}))


def print_text(findings: list[Finding]) -> None:
    # Lines are not wrapped: SQL is there to be copied.
    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        status = Text(f"{finding.status:<8}", _STYLES[finding.status])
        console.print(status, f"{finding.check:<11} {finding.text}", markup=False)
        if finding.remedy:
            console.print(f"{'':20} Remedy: {finding.remedy}", markup=False)
    wrong = sum(finding.status == "wrong" for finding in findings)
    console.print("[green]Nothing is wrong.[/]" if not wrong else f"[bold red]Wrong: {wrong}.[/]")


# --- running checks --------------------------------------------------------------------------------------------------


class _NotDoneError(Exception):
    """A check cannot be done for want of another one's outcome, which this names."""


class _ScarceError(ServerSetupError):
    """What works as it is, and may not for long."""


class _Outcome(Generic[T]):
    """What a check has brought; to ask for it is to need it."""

    def __init__(self, check: str) -> None:
        self.check = check
        self.values: list[T] = []

    def __call__(self) -> T:
        if not self.values:
            raise _NotDoneError(self.check)
        return self.values[0]


class _Checks:
    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def run(
        self, check: str, action: Callable[[], T], tell: Callable[[T], str] = str, failed: Status = "wrong"
    ) -> _Outcome[T]:
        """Run one check; ``tell`` says what it has found, ``failed`` how bad it is if it raises."""
        outcome: _Outcome[T] = _Outcome(check)
        try:
            value = action()
            self.add(check, "ok", tell(value))
            outcome.values.append(value)
        except _NotDoneError as needed:
            self.add(check, "not done", f"needs what is not there: {needed}")
        except PgCdcError as error:
            self.add_error(check, "warning" if isinstance(error, _ScarceError) else failed, error)
        return outcome

    def add(self, check: str, status: Status, text: str, remedy: str = "") -> None:
        self.findings.append(Finding(check, status, text, remedy))

    def add_error(self, check: str, status: Status, error: PgCdcError) -> None:
        problems = error.problems if isinstance(error, OptionError) else ()
        for problem in problems or (error,):
            self.add(check, status, problem.what, problem.remedy)


# --- the installation ------------------------------------------------------------------------------------------------


def _check_installation(checks: _Checks) -> None:
    checks.add("package", "ok", f"pg-cdc-source {importlib.metadata.version('pg-cdc-source')}")
    checks.add("Python", "ok", platform.python_version())
    try:
        import pyspark
    except ModuleNotFoundError:
        checks.add("PySpark", "ok", "not installed; drivers and executors need it")
    else:
        old = int(pyspark.__version__.split(".")[0]) < 4
        checks.add(
            "PySpark",
            "wrong" if old else "ok",
            pyspark.__version__,
            "install 4.0 or later: before, Spark has no data sources in Python" if old else "",
        )
    checks.add("pyarrow", "ok", pyarrow.__version__)
    libpq = psycopg2.extensions.libpq_version()
    version = psycopg2.__version__.split()[0]
    checks.add("psycopg2", "ok", f"{version} with libpq {libpq // 10000}.{libpq % 10000}")
    if native.LIBRARY is not None:
        accelerator = "compiled"
    elif os.environ.get(native.ENVIRONMENT) == "off":
        accelerator = f"turned off by {native.ENVIRONMENT}=off; NumPy does the work"
    else:
        accelerator = "not compiled; NumPy does the work. A C compiler at installation gives it"
    checks.add("accelerator", "ok", accelerator)


# --- what both formats need ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Reached(Generic[Given]):
    """What the checks of a read begin with."""

    checks: _Checks
    options: _Outcome[Given]
    session: _Outcome[Session]
    server: _Outcome[Server]


def _reach(
    checks: _Checks, stack: contextlib.ExitStack, given: Mapping[str, str], parse: Callable[[Mapping[str, str]], Given]
) -> _Reached[Given]:
    """Read the options, connect, and look at what lies between here and the server."""
    options = checks.run("options", lambda: parse(given), lambda _: "understood")

    def connection() -> ConnectionOptions:
        # Alone, so that others which are wrong do not keep the server from being looked at.
        names = LIBPQ_KEYWORDS | {option.name.lower() for option in OPTIONS if option.group == "connection"}
        try:
            return parse_connection_options({name: text for name, text in given.items() if name.lower() in names})
        except OptionError:
            raise _NotDoneError("options") from None

    session = checks.run(
        "connection",
        lambda: stack.enter_context(contextlib.closing(connect(connection(), _NAME))),
        lambda _: connection().display(),
    )
    checks.run(
        "pooler",
        lambda: refuse_transaction_pooler(connection(), session(), _NAME),
        lambda _: "none that shares sessions",
    )

    def tell(server: Server) -> str:
        version = session().info.parameter_status("server_version")
        kind = "standby" if server.in_recovery else "primary"
        return f"PostgreSQL {version}, {kind}, wal_level={server.wal_level}, role {quoted(server.role)}"

    server = checks.run("server", lambda: catalog.read_server(session()), tell)
    return _Reached(checks, options, session, server)


@dataclass(frozen=True, slots=True)
class _Need:
    """How many slots and walsenders have to be free: of each those for good, and those for a moment."""

    slots: tuple[int, int]
    walsenders: tuple[int, int]
    stream: bool
    failover: bool


def _check_replication(reached: _Reached[Given], need: Callable[[Given], _Need], failed: Status = "wrong") -> None:
    checks, options, session = reached.checks, reached.options, reached.session

    def free(kind: str, setting: str, used: str, remedy: str) -> str:
        for_good, for_a_moment = getattr(need(options()), kind)
        with translated(f"looking at {setting}"), session().cursor() as cursor:
            cursor.execute(
                f"SELECT current_setting('{setting}')::int, (SELECT count(*)::int FROM pg_catalog.{used} AS used)"
            )
            most, taken = cursor.fetchone()
        left = most - taken
        text = f"{left} of {most} free"
        if left >= for_good + for_a_moment:
            return text
        text += f"; needed: {for_good}" + (f", and {for_a_moment} for a moment" if for_a_moment else "")
        error = _ScarceError if left >= for_good else ServerSetupError
        raise error(text, remedy=f"raise {setting}, or {remedy}")

    # Before a walsender is opened here, which stays for a moment. Anybody sees the number of walsenders in the function
    # of pg_stat_replication; what pg_stat_activity says of their kind only few roles do.
    for kind, *place in (
        ("slots", "max_replication_slots", "pg_replication_slots", "drop slots that nobody uses (pg-cdc slots)"),
        ("walsenders", "max_wal_senders", "pg_stat_get_wal_senders()", "end what pg_stat_replication has in vain"),
    ):
        checks.run(kind, functools.partial(free, kind, *place), failed=failed)
    lacks: list[ServerSetupError] = []

    def open_walsender() -> str:
        needed = need(options())
        lacks.extend(snapshots.lacks_for_slot(reached.server(), stream=needed.stream, failover=needed.failover))
        if lacks:
            raise lacks.pop(0)
        # The only way to find out whether something between here and there refuses it.
        connect(options().connection, _NAME, replication=True).close()
        return "wal_level and role allow it, and a connection for it opens"

    checks.run("replication", open_walsender, failed=failed)
    for error in lacks:
        checks.add_error("replication", failed, error)


# --- pgsnapshot ------------------------------------------------------------------------------------------------------


def _check_snapshot(reached: _Reached[SnapshotOptions]) -> None:
    checks, options, session = reached.checks, reached.options, reached.session

    def plan() -> str:
        table = options().dbtable
        relation = catalog.find_relation(session(), table) if table else None
        planned = scan.plan_in(session(), reached.server(), scan.spec_of(options(), relation))
        ranges = scan.ranges_in(session(), planned)
        return f"{planned.what}: {_counted(len(planned.arrow_schema()), 'column')}, {_counted(len(ranges), 'part')}"

    checks.run("table", plan)
    if options.values and options().snapshot is not None:
        checks.run("snapshot", lambda: _find_snapshot(options()))
    else:
        _check_point(reached)


def _find_snapshot(options: SnapshotOptions) -> str:
    with contextlib.closing(connect(options.connection, _NAME)) as importing:
        snapshots.import_snapshot(importing, options.snapshot or "")
    return f"{options.snapshot} is there"


def _check_point(reached: _Reached[SnapshotOptions]) -> None:
    checks, options, server = reached.checks, reached.options, reached.server
    wanted, slot = (options().consistent_point, options().slot) if options.values else ("require", None)
    if wanted == "off" or (wanted == "auto" and server.values and server().in_recovery):
        checks.add("replication", "ok", f"not used: consistentPoint={wanted}; the snapshot's LSN is not known")
        return
    # A snapshot can be had all the same; only its LSN is not known then.
    failed: Status = "warning" if wanted == "auto" else "wrong"
    _check_replication(reached, lambda _: _Need((1, 0), (1, 0), stream=False, failover=False), failed)
    if slot:
        checks.run(
            "slot",
            lambda: snapshots.refuse_existing_slot(reached.session(), slot, stream=False),
            lambda _: f"{slot} does not exist yet: the first action makes it and leaves it",
        )


# --- pgcdc -----------------------------------------------------------------------------------------------------------


def _check_stream(reached: _Reached[StreamOptions]) -> None:
    checks, options, session = reached.checks, reached.options, reached.session

    def made() -> bool:
        """Whether a stream that begins now finds its slot, or would have to."""
        return options().start_from == "slot" or read_slot(session(), options().slot) is not None

    def need(options: StreamOptions) -> _Need:
        # The walsender for a moment makes the slot; the slot for a moment turns back an unfinished snapshot.
        slots = (0 if made() else 1, 1 if options.start_from == "snapshot" else 0)
        return _Need(slots, (1, 1), stream=True, failover=options.failover)

    _check_slot(reached)
    found = checks.run("publication", lambda: _find_publication(session(), options(), made=made()), _tell_publication)
    if found.values and found().create:
        checks.run(
            "rights",
            lambda: publication.require_rights(session(), found()),
            lambda _: "this role may create the publication",
        )
    _check_tables(reached, found)
    _check_replication(reached, need)
    checks.run("WAL", lambda: _kept_wal(session()))


def _check_slot(reached: _Reached[StreamOptions]) -> None:
    checks, options, session = reached.checks, reached.options, reached.session

    def find() -> Usage | None:
        name, start_from = options().slot, options().start_from
        found = read_slot(session(), name)
        if found is None:
            if start_from == "slot":
                raise missing_error(name, begun=False)
            return None
        with translated("looking for the database's name"), session().cursor() as cursor:
            cursor.execute("SELECT current_database()")
            (database,) = cursor.fetchone()
        check_slot(found, database, failover=options().failover)
        if found.active_pid is not None:
            raise in_use_error(session(), found)
        return next((usage for usage in read_usages(session()) if usage.slot.name == name), None)

    def tell(usage: Usage | None) -> str:
        name, start_from = options().slot, options().start_from
        if usage is None:
            rest = "and reads the tables at its point" if start_from == "snapshot" else "and begins with changes"
            return f"{name} does not exist yet: startFrom={start_from} makes it {rest}"
        begins = {
            "snapshot": "reads the tables and turns them back to there",
            "slot": "begins there",
            "now": "passes over what it holds",
        }[start_from]
        lag, held = decimal(usage.lag_bytes or 0), decimal(usage.held_bytes or 0)
        place = f"{name} stands at {usage.slot.confirmed_flush}, {lag} behind, and holds {held} of WAL"
        return f"{place}; without a checkpoint, startFrom={start_from} {begins}"

    usage = checks.run("slot", find, tell)
    if usage.values and (found := usage()) is not None and found.slot.wal_status == "unreserved":
        checks.add(
            "slot",
            "warning",
            f"{found.slot.name} holds more than max_slot_wal_keep_size: the server's next checkpoint may take it away",
            "start the stream now, or raise max_slot_wal_keep_size",
        )


def _find_publication(session: Session, options: StreamOptions, *, made: bool) -> Planned:
    """The publication; one that is there has nothing to create."""
    if made:
        return Planned(publication.require_publication(session, options.publication), (), "")
    found = publication.read_publication(session, options.publication)
    return Planned(found, (), "") if found is not None else publication.plan_publication(session, options)


def _tell_publication(found: Planned) -> str:
    name = quoted(found.publication.name)
    if found.create:
        return f"{name} does not exist yet: {found.create}"
    return f"{name} has {_counted(len(found.publication.tables), 'table')}"


def _check_tables(reached: _Reached[StreamOptions], found: _Outcome[Planned]) -> None:
    checks, options, session = reached.checks, reached.options, reached.session

    def tell(plan: StreamPlan) -> str:
        kinds = {"f": "FULL", "n": "NOTHING"}
        named = [
            f"{table.name} ({kinds.get(table.identity) or ', '.join(table.key) or 'no identity'})"
            for table in plan.tables[:_MOST_NAMED]
        ]
        more = len(plan.tables) - len(named)
        return "by replica identity: " + ", ".join(named) + (f" and {more} more" if more else "")

    plan = checks.run("tables", lambda: plan_stream(session(), options(), found().publication, Lsn(0)), tell)

    def identities() -> str:
        sends_old_values = found().publication.updates or found().publication.deletes
        relations = [scanned.relation for scanned in plan().scans if scanned.relation is not None]
        without, steps = publication.without_identity(session(), relations if sends_old_values else [])
        if without:
            raise _ScarceError(
                f"PostgreSQL refuses UPDATE and DELETE on {without}: published, and without a usable replica identity",
                remedy=f"add a primary key; or {steps}",
            )
        return "no table lacks the one that its publication needs"

    checks.run("identities", identities)


def _kept_wal(session: Session) -> str:
    with translated("reading max_slot_wal_keep_size"), session.cursor() as cursor:
        cursor.execute("SHOW max_slot_wal_keep_size")
        kept = str(cursor.fetchone()[0])
    if kept == "-1":
        raise _ScarceError(
            "max_slot_wal_keep_size is -1: a slot whose query is down keeps WAL until the disk is full",
            remedy="set it to what the disk has room for and the longest pause needs",
        )
    return f"slots keep {kept} at most"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
