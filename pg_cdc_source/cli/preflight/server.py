"""Check what both formats need of the server: the connection, what lies between, room for slots and walsenders."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from psycopg2.extensions import ConnectionInfo
from psycopg2.extensions import connection as Session

from pg_cdc_source.cli.preflight.endpoint import NAME, require_one_server
from pg_cdc_source.cli.preflight.findings import Checks, NotDoneError, Outcome, ScarceError, Status
from pg_cdc_source.errors import ConnectError, OptionError, ServerSetupError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.options.given import connection_of
from pg_cdc_source.options.names import quoted
from pg_cdc_source.options.snapshot_options import SnapshotOptions
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres import catalog, slot_creation
from pg_cdc_source.postgres.catalog import Server
from pg_cdc_source.postgres.connection import connect, is_pooled
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.services import Service

Given = TypeVar("Given", SnapshotOptions, StreamOptions)

# Slots of REPACK (CONCURRENTLY) have room of their own (max_repack_replication_slots, PostgreSQL 19).
# All roles may call the function below pg_stat_replication; in pg_stat_activity only some see what a walsender is.
_ROOM = {
    "max_replication_slots": """
        SELECT current_setting('max_replication_slots')::int, (
            SELECT count(*)::int FROM pg_catalog.pg_replication_slots WHERE plugin IS DISTINCT FROM 'pgrepack'
        )
    """,
    "max_wal_senders": """
        SELECT current_setting('max_wal_senders')::int,
               (SELECT count(*)::int FROM pg_catalog.pg_stat_get_wal_senders())
    """,
}


@dataclass(frozen=True, slots=True)
class Reached(Generic[Given]):
    """What the checks of a read start with."""

    checks: Checks
    options: Outcome[Given]
    session: Outcome[Session]
    server: Outcome[Server]


def reach(
    checks: Checks, stack: contextlib.ExitStack, given: Mapping[str, str], parse: Callable[[Mapping[str, str]], Given]
) -> Reached[Given]:
    """Parse the options, connect, and look at what lies between here and the server."""
    options = checks.run("options", lambda: parse(given), lambda _: "understood")
    connection = functools.partial(_connection_options, given)
    session = checks.run(
        "connection",
        lambda: stack.enter_context(contextlib.closing(connect(connection(), NAME))),
        lambda _: connection().display(),
    )
    checks.run(
        "pooler",
        lambda: is_pooled(session()),
        lambda pooled: "one in session mode" if pooled else "none",
    )

    checks.run("encryption", lambda: _require_encryption(session()), failed="warning")
    checks.run("endpoint", lambda: require_one_server(connection(), session()))

    def tell(server: Server) -> str:
        version = session().info.parameter_status("server_version")
        kind = "standby" if server.in_recovery else "primary"
        level = f"wal_level={server.wal_level}"
        if server.effective_wal_level != server.wal_level:
            level += f" (effective_wal_level={server.effective_wal_level})"
        return f"PostgreSQL {version}, {kind}, {level}, role {quoted(server.role)}"

    server = checks.run("server", lambda: catalog.read_server(session()), tell)
    if server.values and (service := server().service) is not None:
        checks.run("service", lambda: _describe(session(), service))
    return Reached(checks, options, session, server)


_VERIFY = "set sslmode=verify-full, and sslrootcert to the file with the certificate of who has signed the server's"


def _require_encryption(session: Session) -> str:
    """How the connection is encrypted. Raises where others on the way can read it, or be taken for the server."""
    info = session.info
    mode = info.dsn_parameters.get("sslmode", "prefer")
    if info.ssl_in_use:
        text = f"{info.ssl_attribute('protocol')}, sslmode={mode}"
        if mode not in ("verify-ca", "verify-full") and not (mode == "require" and _has_root(info)):
            raise ConnectError(
                f"{text}: whoever answers is taken for the server, and given the password", remedy=_VERIFY
            )
        return text
    if _is_encrypted_by_gssapi(session):
        return "GSSAPI"
    if not _is_on_this_host(session):
        raise ConnectError("none: others on the way can read the password and the rows", remedy=_VERIFY)
    return "none, on this host"


def _has_root(info: ConnectionInfo) -> bool:
    """Whether libpq has certificates to look for: with them, it takes ``require`` for ``verify-ca``."""
    # A file that is not there is an error only for the modes that verify.
    return Path(info.dsn_parameters.get("sslrootcert") or "~/.postgresql/root.crt").expanduser().exists()


def _is_on_this_host(session: Session) -> bool:
    with socket.socket(fileno=os.dup(session.fileno())) as connection:
        if connection.family == socket.AF_UNIX:
            return True
        return ipaddress.ip_address(connection.getpeername()[0].partition("%")[0]).is_loopback


def _is_encrypted_by_gssapi(session: Session) -> bool:
    with translated("looking at the connection"), session.cursor() as cursor:
        cursor.execute("SELECT encrypted FROM pg_catalog.pg_stat_gssapi WHERE pid = pg_backend_pid()")
        row = cursor.fetchone()
        return row is not None and bool(row[0])


def _describe(session: Session, service: Service) -> str:
    """A managed service in words: its own setting as it stands, and what else a read there needs."""
    text = service.name
    if service.setting is not None:
        with translated(f"looking at {service.setting}"), session.cursor() as cursor:
            cursor.execute("SELECT current_setting(%s, true)", (service.setting,))
            text += f", {service.setting}={cursor.fetchone()[0] or 'not shown'}"
    return f"{text}: {service.advice}"


def _connection_options(given: Mapping[str, str]) -> ConnectionOptions:
    """Parse the connection's options alone, so that a mistake in another one does not keep the server unchecked."""
    try:
        return connection_of(given)
    except OptionError:
        raise NotDoneError("options") from None


@dataclass(frozen=True, slots=True)
class Need:
    """How many slots and walsenders have to be free: of each the lasting ones, and the ones needed for a moment.

    The others are what :func:`~pg_cdc_source.postgres.slot_creation.lacks_for_slot` takes.
    """

    slots: tuple[int, int]
    walsenders: tuple[int, int]
    stream: bool
    failover: bool
    messages: bool


def check_replication(reached: Reached[Given], need: Callable[[Given], Need], failed: Status = "wrong") -> None:
    """Check that there is room for a slot, and that role and server allow one."""
    checks, options, session = reached.checks, reached.options, reached.session

    def slots() -> str:
        return _require_room(
            session(), "max_replication_slots", need(options()).slots, "drop slots that nobody uses (pg-cdc slots)"
        )

    def walsenders() -> str:
        return _require_room(
            session(), "max_wal_senders", need(options()).walsenders, "end connections in pg_stat_replication"
        )

    # Before the connection below, whose walsender stays for a moment.
    checks.run("slots", slots, failed=failed)
    checks.run("walsenders", walsenders, failed=failed)
    lacks: list[ServerSetupError] = []

    def open_walsender() -> str:
        needed = need(options())
        lacks.extend(
            slot_creation.lacks_for_slot(
                reached.server(), stream=needed.stream, failover=needed.failover, messages=needed.messages
            )
        )
        if lacks:
            raise lacks.pop(0)
        # The only way to find out whether something between here and the server refuses it.
        connect(options().connection, NAME, replication=True).close()
        return "wal_level and role allow it, and a replication connection opens"

    checks.run("replication", open_walsender, failed=failed)
    for error in lacks:
        checks.add_error("replication", failed, error)


def _require_room(session: Session, setting: str, needed: tuple[int, int], remedy: str) -> str:
    lasting, for_a_moment = needed
    with translated(f"looking at {setting}"), session.cursor() as cursor:
        cursor.execute(_ROOM[setting])
        most, taken = cursor.fetchone()
    left = most - taken
    text = f"{left} of {most} free"
    if left >= lasting + for_a_moment:
        return text
    text += f"; needed: {lasting}" + (f", and {for_a_moment} for a moment" if for_a_moment else "")
    error = ScarceError if left >= lasting else ServerSetupError
    raise error(text, remedy=f"raise {setting}, or {remedy}")
