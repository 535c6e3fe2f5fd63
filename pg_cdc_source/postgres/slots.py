"""Look at the replication slot of a stream, and find out whether it still has what the stream needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import AccessError, OptionError, PgCdcError, SlotLostError, TransientError
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.options.names import quoted
from pg_cdc_source.postgres import catalog
from pg_cdc_source.postgres.server_errors import translated

_PLUGIN = "pgoutput"

# The end of every remedy after which changes are missing. A snapshot is the one way to a complete copy again.
_START_OVER = "start over with a new checkpoint location, which reads the tables again (startFrom=snapshot)"


@dataclass(frozen=True, slots=True)
class Slot:
    """A row of pg_replication_slots.

    ``invalidation`` is why the server gave it up, in the words of invalidation_reason (17), found out on older ones.
    ``failover`` says that standbys keep copies of it; on a standby, ``synced`` that it is such a copy.
    ``confirmed_flush`` is None while it is being created and for physical slots.
    """

    name: str
    plugin: str | None
    slot_type: str
    database: str | None
    active_pid: int | None
    restart_lsn: Lsn | None
    confirmed_flush: Lsn | None
    wal_status: str | None
    invalidation: str | None
    temporary: bool
    two_phase: bool
    failover: bool
    synced: bool


@dataclass(frozen=True, slots=True)
class Usage:
    """A slot and who uses it. ``application`` is the name of the session that reads it.

    ``running`` is the format of this package whose stream or snapshot runs with it now, also before it reads the slot.
    ``lag_bytes`` of WAL are not confirmed, ``held_bytes`` are kept for the slot; None where it has lost its place.
    """

    slot: Slot
    application: str | None
    running: str | None
    lag_bytes: int | None
    held_bytes: int | None


# As JSON, because columns differ by version: two_phase came with 14, conflicting with 16, others with 17.
_SELECT = (
    "SELECT to_jsonb(s) || jsonb_build_object('in_recovery', pg_is_in_recovery())"
    " FROM pg_catalog.pg_replication_slots AS s"
)


def read_slot(session: Session, name: str) -> Slot | None:
    """The slot of this name; None where there is none."""
    with translated(f"reading slot {name}"), session.cursor() as cursor:
        cursor.execute(f"{_SELECT} WHERE s.slot_name = %s", (name,))
        found = cursor.fetchone()
    return None if found is None else _slot(found[0])


def read_usages(session: Session) -> list[Usage]:
    """The logical slots of the server, of all its databases, by name."""
    with translated("reading the slots"), session.cursor() as cursor:
        cursor.execute(f"{_SELECT} WHERE s.slot_type = 'logical' ORDER BY s.slot_name")
        slots = [_slot(row) for (row,) in cursor]
        cursor.execute("SELECT pid, application_name FROM pg_catalog.pg_stat_activity WHERE application_name <> ''")
        names: dict[int, str] = dict(cursor.fetchall())
    # After the slots, which only move on.
    end = read_end_of_wal(session)
    return [
        Usage(
            slot,
            None if slot.active_pid is None else names.get(slot.active_pid),
            _running(slot, names),
            _bytes_between(slot.confirmed_flush, end),
            _bytes_between(slot.restart_lsn, end),
        )
        for slot in slots
    ]


def _running(slot: Slot, names: dict[int, str]) -> str | None:
    # PostgreSQL cuts a name off at 63 bytes.
    if any(name.startswith(f"pgcdc:{slot.name}:"[:63]) for name in names.values()):
        return "pgcdc"
    reader = names.get(slot.active_pid or 0, "")
    return "pgsnapshot" if reader.startswith("pgsnapshot:") else None


def _bytes_between(start: Lsn | None, end: Lsn) -> int | None:
    # A standby has copies of slots that are ahead of what it has replayed.
    return None if start is None else max(0, end - start)


def read_end_of_wal(session: Session) -> Lsn:
    """How far the WAL is safe on disk: what may be decoded."""
    with translated("reading the WAL's position"), session.cursor() as cursor:
        cursor.execute(
            "SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()"
            " ELSE pg_current_wal_flush_lsn() END::text"
        )
        return Lsn.parse(cursor.fetchone()[0])


def _slot(row: dict[str, Any]) -> Slot:
    reason = row.get("invalidation_reason")
    if reason is None and (row["wal_status"] == "lost" or row.get("conflicting")):
        # 16 gives up slots for conflicts as well and says no more, but only for removed WAL it takes the position away.
        conflict = row.get("conflicting") and row["restart_lsn"] is not None
        reason = "conflict with recovery" if conflict else "wal_removed"
    return Slot(
        name=row["slot_name"],
        plugin=row["plugin"],
        slot_type=row["slot_type"],
        database=row["database"],
        active_pid=row["active_pid"],
        restart_lsn=_lsn(row["restart_lsn"]),
        confirmed_flush=_lsn(row["confirmed_flush_lsn"]),
        wal_status=row["wal_status"],
        invalidation=reason,
        temporary=row["temporary"],
        two_phase=row.get("two_phase", False),
        failover=row.get("failover", False),
        synced=row.get("synced", False) and row["in_recovery"],
    )


def _lsn(text: str | None) -> Lsn | None:
    return None if text is None else Lsn.parse(text)


def missing_error(name: str, *, begun: bool) -> SlotLostError | OptionError:
    """The error for a slot that is not there: lost where the stream had ``begun``, never made where it had not."""
    if begun:
        return SlotLostError(
            f"slot {name} does not exist any more, and with it are gone the changes since the checkpoint",
            remedy=_START_OVER,
        )
    return OptionError(
        f"slot {name} does not exist, and startFrom=slot starts from one that does",
        remedy="use startFrom=snapshot or startFrom=now, which create it; or correct the option slot",
    )


def check_slot(slot: Slot, database: str, *, failover: bool = False) -> None:
    """Raise OptionError for a slot that is none of a stream in this database, SlotLostError for one that is given up.

    TransientError says that it is still being created. With ``failover`` it has to be one that standbys copy.
    """
    drop = f"SELECT pg_drop_replication_slot('{slot.name}')"
    other = f"choose another name in the option slot; or, if nobody needs it, drop it: {drop}"
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
            remedy="connect to the primary; several in host with target_session_attrs=read-write find it by themselves",
        )
    if slot.temporary:
        raise OptionError(f"slot {slot.name} is temporary: it ends with the session that made it", remedy=other)
    if slot.two_phase:
        raise OptionError(
            f"slot {slot.name} sends transactions when they are prepared (two_phase), a stream reads them when they "
            "are committed",
            remedy=other,
        )
    if failover and not slot.failover:
        raise OptionError(
            f"slot {slot.name} was made without failover: standbys keep no copy of it",
            remedy="run, in a replication connection (psql 'replication=database …'): ALTER_REPLICATION_SLOT "
            f"{slot.name} (FAILOVER true); or leave out the option failover",
        )
    if slot.invalidation is not None:
        why = slot.invalidation
        if why == "wal_removed":
            why += " (max_slot_wal_keep_size was too little for the time that nobody read it)"
        raise SlotLostError(
            f"slot {slot.name} was given up by the server: {why}; the changes since the checkpoint are gone",
            remedy=f"drop it: {drop}; then {_START_OVER}",
        )
    if slot.confirmed_flush is None:
        raise TransientError(
            f"slot {slot.name} is still being created" + (f" by pid {slot.active_pid}" if slot.active_pid else "")
        )


def check_confirmed(slot: Slot, position_end: Lsn) -> None:
    """Raise SlotLostError when the slot has moved past where the checkpoint ends.

    PostgreSQL does not: asked for an earlier position, it starts where the slot stands without a word.
    """
    if slot.confirmed_flush is not None and slot.confirmed_flush > position_end:
        raise SlotLostError(
            f"slot {slot.name} stands at {slot.confirmed_flush}, past the end of the checkpoint at {position_end}: the "
            "changes between them were read by somebody else, or the checkpoint is an old copy, and they are gone",
            remedy="make sure that nothing else reads this slot; drop it: "
            f"SELECT pg_drop_replication_slot('{slot.name}'); then {_START_OVER}",
        )


def undroppable(session: Session, names: Sequence[str]) -> list[PgCdcError]:
    """An error for each of the slots that may not be dropped: it is in use or does not exist, or the role may not."""
    server = catalog.read_server(session)
    errors: list[PgCdcError] = []
    if names and not server.may_replicate:
        errors.append(
            AccessError(
                f"role {server.role} has no right to drop slots",
                remedy=f"ALTER ROLE {quoted(server.role)} REPLICATION",
            )
        )
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


def in_use_error(session: Session, slot: Slot) -> TransientError:
    """The error for a slot that another session reads, which it names as far as this role may see it."""
    with translated(f"looking for who uses slot {slot.name}"), session.cursor() as cursor:
        cursor.execute(
            "SELECT s.active_pid, a.application_name, coalesce(a.client_addr::text, 'a local socket'),"
            " extract(epoch FROM clock_timestamp() - a.backend_start)::bigint"
            " FROM pg_catalog.pg_replication_slots AS s"
            " LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = s.active_pid WHERE s.slot_name = %s",
            (slot.name,),
        )
        row = cursor.fetchone()
    pid, name, address, age_seconds = row or (None, None, None, None)
    if pid is None:
        pid = slot.active_pid
        who = "another session" if pid is None else f"pid {pid}"
        return TransientError(f"slot {slot.name} was in use by {who} a moment ago")
    # Of other roles' sessions a role without pg_read_all_stats sees the pid and the name.
    known = f", from {address}, connected for {age_seconds} s" if age_seconds is not None else ""
    return TransientError(
        f"slot {slot.name} is in use by pid {pid} (application_name {name!r}{known})",
        remedy="a slot has one reader at a time: stop that one, or give this stream a slot of its own. The session of "
        f"a reader that crashed ends after wal_sender_timeout at the latest, and at once by "
        f"SELECT pg_terminate_backend({pid})",
    )
