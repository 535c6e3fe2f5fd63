"""Create and drop replication slots, and say what keeps a server or a role from it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg2
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import DefiniteError, PgCdcError, ServerSetupError, TransientError
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.postgres.catalog import DECODING_ON_DEMAND_VERSION, Server
from pg_cdc_source.postgres.decoding_messages import MESSAGES_VERSION
from pg_cdc_source.postgres.server_errors import translate, translated
from pg_cdc_source.postgres.slots import read_user

log = logging.getLogger(__name__)

# The end of remedies where a snapshot is what is wanted: a stream cannot do without a slot.
_DO_WITHOUT = ", or use consistentPoint=off (a snapshot without LSN)"


# How soon a creation ends that is given up.
_LOOK_SECONDS = 0.2
# When the log says for the first time what a creation waits for.
SAY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class NewSlot:
    """A slot to be created. ``failover`` has standbys keep copies of it; ``for_stream`` words errors for a stream.

    Its creation ends without it when ``given_up`` is set.
    """

    name: str
    temporary: bool
    failover: bool
    timeout_seconds: float
    for_stream: bool
    given_up: threading.Event | None = None


def require_consistent_point(
    server: Server, *, stream: bool = False, failover: bool = False, messages: bool = False
) -> None:
    """Raise ServerSetupError when this server or role cannot make a logical slot (see ``lacks_for_slot``)."""
    for error in lacks_for_slot(server, stream=stream, failover=failover, messages=messages):
        raise error


def lacks_for_slot(server: Server, *, stream: bool, failover: bool, messages: bool) -> Iterator[ServerSetupError]:
    """Everything that keeps this server or role from making a logical slot, worded for a stream or for a snapshot.

    ``failover`` asks for a slot that standbys keep a copy of, ``messages`` for logical decoding messages.
    """
    what, otherwise = ("a stream", "") if stream else ("a consistent point", _DO_WITHOUT)
    if (error := _lacks_decoding(server, what, otherwise)) is not None:
        yield error
    if not server.may_replicate:
        yield ServerSetupError(
            f"{what} needs the right to use replication slots, which role {server.role} lacks",
            remedy=server.replication_grant + otherwise,
        )
    if server.in_recovery and server.version_num < 160000:
        yield ServerSetupError(
            f"{what} on a standby needs PostgreSQL 16 or later", remedy=f"connect to the primary{otherwise}"
        )
    if failover and server.version_num < 170000:
        yield ServerSetupError(
            "standbys keep copies of slots from PostgreSQL 17 on", remedy="leave out the option failover"
        )
    elif failover and server.in_recovery:
        yield ServerSetupError(
            "a standby makes no slots that other standbys keep copies of",
            remedy="connect to the primary, or leave out the option failover",
        )
    if messages and server.version_num < MESSAGES_VERSION:
        yield ServerSetupError(
            "pgoutput sends logical decoding messages from PostgreSQL 14 on",
            remedy="leave out the option messagePrefixes; an outbox can be a table that the stream reads",
        )


def _lacks_decoding(server: Server, what: str, otherwise: str) -> ServerSetupError | None:
    """What keeps the server from decoding its WAL, if anything does."""
    if server.effective_wal_level == "logical" or server.decodes_on_demand:
        return None
    if server.in_recovery and server.version_num >= DECODING_ON_DEMAND_VERSION:
        return ServerSetupError(
            f"{what} on a standby needs a primary that writes for logical decoding, but effective_wal_level is "
            f"{server.effective_wal_level}",
            remedy=f"on the primary, create a logical slot and keep it, or set wal_level=logical{otherwise}",
        )
    level = "replica" if server.version_num >= DECODING_ON_DEMAND_VERSION else "logical"
    turn_on = server.service.decoding if server.service else f"set wal_level={level} and restart PostgreSQL"
    return ServerSetupError(
        f"{what} needs wal_level={level}, but it is {server.wal_level}", remedy=f"{turn_on}{otherwise}"
    )


def refuse_existing_slot(session: Session, slot: str, *, stream: bool) -> None:
    """Raise DefiniteError when a slot of this name exists: a snapshot can only be taken where a new one starts."""
    with translated(f"looking for slot {slot}"), session.cursor() as cursor:
        cursor.execute("SELECT plugin, database FROM pg_catalog.pg_replication_slots WHERE slot_name = %s", (slot,))
        row = cursor.fetchone()
    if row is None:
        return
    plugin, database = row
    reader = read_user(session, slot)
    state = f"in use by {reader.text}" if reader is not None else "not in use"
    drop = f", or drop it: SELECT pg_drop_replication_slot('{slot}')" if reader is None else ""
    hint = (
        "A DataFrame with the option slot makes its slot in its first action; for several actions at that point use "
        "open_snapshot()"
    )
    if stream:
        hint = "To read on from where it stands, without a snapshot: startFrom=slot"
    raise DefiniteError(
        f"slot {slot} exists already (plugin {plugin}, database {database}, {state}); a snapshot can only be taken "
        "where a new slot starts",
        remedy=f"choose another name{drop}. {hint}",
    )


def create_slot(cursor: Any, slot: NewSlot, watcher: Session, server: Server) -> Lsn:
    """Create a logical slot and return its consistent point; the transaction then has the snapshot of that point.

    ``cursor`` is one of a replication session, in a transaction without a command yet. ``watcher`` is another session,
    which looks for what the slot waits for.
    """
    kind = "TEMPORARY " if slot.temporary else ""
    # The bare word works on every supported version.
    how = "(SNAPSHOT 'use', FAILOVER true)" if slot.failover else "USE_SNAPSHOT"
    created = threading.Event()
    # statement_timeout does not end this command, a cancel does.
    waiting = threading.Thread(target=_wait, args=(cursor.connection, slot, created, watcher, server), daemon=True)
    waiting.start()
    try:
        cursor.execute(f'CREATE_REPLICATION_SLOT "{slot.name}" {kind}LOGICAL pgoutput {how}')
        return Lsn.parse(cursor.fetchone()[1])
    except psycopg2.Error as error:
        raise _creation_error(error, slot, watcher, server) from None
    finally:
        created.set()
        waiting.join()


def _wait(session: Session, slot: NewSlot, created: threading.Event, watcher: Session, server: Server) -> None:
    """Say what the creation of a slot waits for, and cancel it when its time is over, or it is given up."""
    began = time.monotonic()
    deadline, say_at = began + slot.timeout_seconds, began + SAY_SECONDS
    while not created.wait(min(_LOOK_SECONDS, max(deadline - time.monotonic(), 0.0))):
        now = time.monotonic()
        if now >= deadline or (slot.given_up is not None and slot.given_up.is_set()):
            _cancel(session, slot, watcher)
            created.wait(_LOOK_SECONDS)
            continue
        if now >= say_at:
            say_at = now + (now - began)
            # Whoever waits for the slot finds out as well that the session is lost.
            with contextlib.suppress(PgCdcError):
                waited = f"slot {slot.name} has waited {now - began:.0f} s for its consistent point"
                log.warning("%s: %s", waited, _waits_for(watcher, server))


_CANCEL = """
SELECT pg_catalog.pg_cancel_backend(active_pid)
FROM pg_catalog.pg_replication_slots
WHERE slot_name = %s AND active_pid IS NOT NULL
"""


def _cancel(session: Session, slot: NewSlot, watcher: Session) -> None:
    with contextlib.suppress(psycopg2.Error), watcher.cursor() as cursor:
        # Behind a pooler, the session does not know its own process.
        cursor.execute(_CANCEL, (slot.name,))
        if cursor.fetchone() == (True,):
            return
    # Not encrypted, without an answer, and lost where only TLS is let through: so this comes second.
    with contextlib.suppress(psycopg2.Error):
        session.cancel()


def _creation_error(error: psycopg2.Error, slot: NewSlot, watcher: Session, server: Server) -> PgCdcError:
    if isinstance(error, psycopg2.errors.ConfigurationLimitExceeded):
        return ServerSetupError(
            f"slot {slot.name} cannot be created: {error.diag.message_primary}",
            remedy="raise max_replication_slots, or drop slots that nobody uses (pg_replication_slots)",
        )
    if not isinstance(error, psycopg2.errors.QueryCanceled):
        return translate(error, f"creating slot {slot.name}")
    late = f"slot {slot.name} found no consistent point within {slot.timeout_seconds:g} s, because"
    otherwise = "" if slot.for_stream else _DO_WITHOUT
    what = f"{late} {_waits_for(watcher, server)}"
    if server.in_recovery:
        return TransientError(
            what,
            remedy="run SELECT pg_log_standby_snapshot() on the primary while the slot waits; or raise slotTimeout"
            f"{otherwise}",
        )
    return TransientError(what, remedy=f"end them, or raise slotTimeout{otherwise}")


def _waits_for(watcher: Session, server: Server) -> str:
    if server.in_recovery:
        return "on a standby it waits until the primary has logged its running transactions, and these have ended"
    return f"it waits for every running transaction that has written: {_read_writers(watcher)}"


# Of other roles' transactions only members of pg_read_all_stats see the beginning.
_READ_WRITERS = """
SELECT 'pid ' || coalesce(a.pid::text, '? (prepared)')
    || coalesce(' for ' || extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, p.prepared))::int || ' s', '')
FROM (
    SELECT pid, xact_start, backend_xid
    FROM pg_catalog.pg_stat_activity
    WHERE backend_xid IS NOT NULL
) AS a
FULL JOIN pg_catalog.pg_prepared_xacts AS p ON p.transaction = a.backend_xid
ORDER BY coalesce(a.xact_start, p.prepared)
LIMIT 5
"""


def _read_writers(session: Session) -> str:
    """In words the transactions that have written and still run, the oldest first."""
    with translated("looking for running transactions"), session.cursor() as cursor:
        cursor.execute(_READ_WRITERS)
        return ", ".join(text for (text,) in cursor) or "none is visible to this role any more"


def drop_slot(session: Session, slot: str) -> None:
    """Drop a slot; one that does not exist is passed over."""
    with translated(f"dropping slot {slot}"), session.cursor() as cursor:
        cursor.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_catalog.pg_replication_slots WHERE slot_name = %s",
            (slot,),
        )


def give_up_slot(slot: str, drop: Callable[[], None]) -> None:
    """Have ``drop`` drop a slot that this process has created, while another error is on its way to the user.

    Nobody would know of the slot, and it would hold WAL. So where that fails the log says it.
    """
    try:
        drop()
    except PgCdcError as error:
        log.error(
            "slot %s was created and could not be dropped, so it holds WAL: %s\n  Remedy: "
            "SELECT pg_drop_replication_slot('%s')",
            *(slot, error.what, slot),
        )
