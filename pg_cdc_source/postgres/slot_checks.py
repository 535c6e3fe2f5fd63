"""Whether a slot still has what a stream needs, and whether it may be dropped."""

from __future__ import annotations

from collections.abc import Sequence

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import (
    AccessError,
    OptionError,
    PgCdcError,
    ServerSetupError,
    SlotLostError,
    TransientError,
)
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.options.names import quoted
from pg_cdc_source.postgres.catalog import read_server
from pg_cdc_source.postgres.instances import read_instance
from pg_cdc_source.postgres.server_errors import READ_ALL_AGAIN, RESNAPSHOT
from pg_cdc_source.postgres.slots import Slot, User, read_usages, read_user

_PLUGIN = "pgoutput"


def missing_error(name: str, *, begun: bool) -> SlotLostError | OptionError:
    """The error for a slot that is not there: lost where the stream had ``begun``, never made where it had not."""
    if begun:
        return SlotLostError(
            f"slot {name} does not exist any more, and with it are gone the changes since the checkpoint",
            remedy=f"{RESNAPSHOT}; or {READ_ALL_AGAIN}",
        )
    return OptionError(
        f"slot {name} does not exist, and startFrom=slot starts from one that does",
        remedy="use startFrom=snapshot or startFrom=now, which create it; or correct the option slot",
    )


def missing_now_error(session: Session, name: str) -> PgCdcError:
    """The error for the slot of a stream that has begun, which is not on the server that this session has come to."""
    if not read_instance(session).in_recovery:
        return missing_error(name, begun=True)
    return ServerSetupError(
        f"slot {name} is not on this server, which is a standby",
        remedy="connect to the primary, where the stream's slot is; several servers in host with "
        "target_session_attrs=primary find it by themselves. If the stream has read from this standby, its slot was "
        f"dropped: {READ_ALL_AGAIN}",
    )


def behind_now_error(session: Session, name: str, position_end: Lsn, end_of_wal: Lsn) -> PgCdcError:
    """The error for a server whose WAL ends before what the stream has read from it, in the same timeline.

    PostgreSQL does not refuse this either: it leaves out whatever is committed up to there.
    """
    ends = f"the server's WAL ends at {end_of_wal}, and the stream of slot {name} has read up to {position_end}"
    if read_instance(session).in_recovery:
        return TransientError(f"{ends}: the standby has not replayed that again yet")
    return SlotLostError(
        f"{ends}: the server was set back, by a copy of its directory or volume, and what it commits in between would "
        "be missing",
        remedy=f"drop the slot, and {READ_ALL_AGAIN}",
    )


def check_slot(slot: Slot, database: str, *, failover: bool = False) -> None:
    """Raise OptionError for a slot that no stream in this database can read, SlotLostError for one that is given up.

    Raises TransientError while it is being created. With ``failover`` it has to be one that standbys copy.
    """
    drop = f"SELECT pg_drop_replication_slot('{slot.name}')"
    unneeded = f"; or, if nobody needs it, drop it: {drop}" if slot.active_pid is None else _used_by(slot)
    refuse_unreadable(slot, database, f"choose another name in the option slot{unneeded}")
    if failover and not slot.failover:
        raise OptionError(
            f"slot {slot.name} was made without failover: standbys keep no copy of it",
            remedy="from PostgreSQL 17 on, run in a replication connection (psql 'replication=database …'): "
            f"ALTER_REPLICATION_SLOT {slot.name} (FAILOVER true); or leave out the option failover",
        )
    if slot.invalidation is not None:
        why = slot.invalidation
        if why == "wal_removed":
            why += " (max_slot_wal_keep_size was too little for the time that nobody read it)"
        raise SlotLostError(
            f"slot {slot.name} was given up by the server: {why}; the changes since the checkpoint are gone",
            remedy=f"{RESNAPSHOT}; or drop it: {drop}; then {READ_ALL_AGAIN}",
        )
    if slot.confirmed_flush is None and slot.active_pid is None:
        # Copies of slots by other means than the server's own may be so for good.
        raise TransientError(
            f"slot {slot.name} has no confirmed position, and nobody is creating it", remedy=f"drop it: {drop}"
        )
    if slot.confirmed_flush is None:
        raise TransientError(f"slot {slot.name} is still being created by pid {slot.active_pid}")


def _used_by(slot: Slot) -> str:
    return f"; pid {slot.active_pid} uses this one"


def refuse_unreadable(slot: Slot, database: str, other: str) -> None:
    """Raise OptionError for a slot of a kind that a stream cannot read; ``other`` is the remedy for most of them."""
    if slot.slot_type != "logical":
        raise OptionError(f"slot {slot.name} is a {slot.slot_type} slot, a stream needs a logical one", remedy=other)
    if slot.plugin != _PLUGIN:
        raise OptionError(
            f"slot {slot.name} decodes with the plugin {slot.plugin}, a stream needs {_PLUGIN}", remedy=other
        )
    if slot.database != database:
        raise OptionError(
            f"slot {slot.name} belongs to the database {quoted(slot.database or '')}, the connection is to "
            f"{quoted(database)}",
            remedy=f"connect to that database; or {other}",
        )
    if slot.synced:
        raise OptionError(
            f"slot {slot.name} is this standby's copy of its primary's slot, to be read once the standby was promoted",
            remedy="connect to the primary; several in host with target_session_attrs=primary find it by themselves",
        )
    if slot.temporary:
        raise OptionError(f"slot {slot.name} is temporary: it ends with the session that made it", remedy=other)
    if slot.two_phase:
        raise OptionError(
            f"slot {slot.name} sends transactions when they are prepared (two_phase), a stream reads them when they "
            "are committed",
            remedy=other,
        )


def check_confirmed(slot: Slot, position_end: Lsn, reader: User | None = None) -> None:
    """Raise SlotLostError when the slot has moved past where the checkpoint ends. ``reader`` is who reads it now.

    PostgreSQL does not refuse this: asked for an earlier position, it starts where the slot stands without a word.
    """
    if slot.confirmed_flush is not None and slot.confirmed_flush > position_end:
        remedy = (
            "make sure that nothing else reads this slot; drop it: "
            f"SELECT pg_drop_replication_slot('{slot.name}'); then {READ_ALL_AGAIN}"
        )
        if reader is not None:
            remedy = f"leave the slot to its reader, and choose another name in the option slot; {READ_ALL_AGAIN}"
        raise SlotLostError(
            f"slot {slot.name} stands at {slot.confirmed_flush}, past the end of the checkpoint at {position_end}: the "
            "changes between them were read by somebody else, or the checkpoint is an old copy, and they are gone"
            + (f". The slot is in use by {reader.text}" if reader is not None else ""),
            remedy=remedy,
        )


def undroppable(session: Session, names: Sequence[str]) -> list[PgCdcError]:
    """An error for each of the slots that may not be dropped: it is in use or does not exist, or the role may not."""
    server = read_server(session)
    errors: list[PgCdcError] = []
    if names and not server.may_replicate:
        errors.append(AccessError(f"role {server.role} has no right to drop slots", remedy=server.replication_grant))
    usages = {usage.slot.name: usage for usage in read_usages(session)}
    for name in names:
        usage = usages.get(name)
        if usage is None:
            errors.append(
                OptionError(f"there is no logical slot {name}", remedy="without --drop, pg-cdc slots lists them")
            )
        elif usage.slot.synced:
            copied = f"slot {name} is this standby's copy of its primary's slot"
            errors.append(OptionError(copied, remedy="drop it on the primary, and it goes here"))
        elif usage.slot.active_pid is not None:
            errors.append(in_use_error(session, usage.slot))
        elif usage.running is not None:
            errors.append(
                TransientError(
                    f"slot {name} belongs to a {usage.running} stream that runs now, though it does not read it yet",
                    remedy="stop its query first",
                )
            )
    return errors


def in_use_error(session: Session, slot: Slot, *, with_snapshot: bool = False) -> TransientError:
    """The error for a slot that another session has (see ``read_user``), which it names."""
    user = read_user(session, slot.name, with_snapshot=with_snapshot)
    if user is None:
        who = "another session" if slot.active_pid is None else f"pid {slot.active_pid}"
        return TransientError(f"slot {slot.name} was in use by {who} a moment ago")
    return TransientError(
        f"slot {slot.name} is in use by {user.text}",
        remedy="a slot has one reader at a time: stop that one, or give this stream a slot of its own. The session of "
        f"a reader that crashed ends after wal_sender_timeout, or a minute, at the latest, and at once by "
        f"SELECT pg_terminate_backend({user.pid})",
    )


def require_unused(session: Session, slot: Slot) -> None:
    """Raise TransientError where another stream has the slot: it reads it, or the tables that come before."""
    if slot.active_pid is not None or read_user(session, slot.name, with_snapshot=True) is not None:
        raise in_use_error(session, slot, with_snapshot=True)
