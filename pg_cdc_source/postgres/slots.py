"""Replication slots as the server shows them, and who uses them."""

from __future__ import annotations

import zlib
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from psycopg2.extensions import connection as Session

from pg_cdc_source.offsets import Lsn
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.server_errors import translated


@dataclass(frozen=True, slots=True)
class Slot:
    """A row of pg_replication_slots.

    ``invalidation`` is why the server gave it up, in the words of invalidation_reason (17), concluded on older ones.
    ``failover``: standbys keep copies of it. ``synced``: it is such a copy, on a standby.
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

    ``running`` is the format of this package that uses it now, also before the slot is read: pgcdc or pgsnapshot.
    ``lag_bytes`` of WAL are not confirmed, ``held_bytes`` are kept for the slot; None where it has lost its position.
    """

    slot: Slot
    application: str | None
    running: str | None
    lag_bytes: int | None
    held_bytes: int | None


# As JSON, because columns differ by version: two_phase came with 14, conflicting with 16, others with 17.
_READ_SLOT = """
SELECT to_jsonb(s) || jsonb_build_object('in_recovery', pg_is_in_recovery())
FROM pg_catalog.pg_replication_slots AS s
WHERE s.slot_name = %s
"""


def read_slot(session: Session, name: str) -> Slot | None:
    """The slot of this name; None where there is none."""
    with translated(f"reading slot {name}"), session.cursor() as cursor:
        cursor.execute(_READ_SLOT, (name,))
        found = cursor.fetchone()
    return None if found is None else _slot(found[0])


_READ_LOGICAL_SLOTS = """
SELECT to_jsonb(s) || jsonb_build_object('in_recovery', pg_is_in_recovery())
FROM pg_catalog.pg_replication_slots AS s
WHERE s.slot_type = 'logical'
ORDER BY s.slot_name
"""


def read_usages(session: Session) -> list[Usage]:
    """The logical slots of the server, of all its databases, by name."""
    with translated("reading the slots"), session.cursor() as cursor:
        cursor.execute(_READ_LOGICAL_SLOTS)
        slots = [_slot(row) for (row,) in cursor]
        cursor.execute(
            "SELECT datname, pid, application_name FROM pg_catalog.pg_stat_activity WHERE application_name <> ''"
        )
        # A session of another database has another slot of the name in mind.
        names: dict[str | None, dict[int, str]] = defaultdict(dict)
        for database, pid, name in cursor:
            names[database][pid] = name
    if not slots:
        # A server that does not write for logical decoding may refuse to say how far its WAL is, as Aurora does.
        return []
    # Read after the slots, which only move forward, so that none is ahead of it.
    end = read_end_of_wal(session)
    return [
        Usage(
            slot,
            None if slot.active_pid is None else names[slot.database].get(slot.active_pid),
            _running(slot, names[slot.database]),
            _bytes_between(slot.confirmed_flush, end),
            _bytes_between(slot.restart_lsn, end),
        )
        for slot in slots
    ]


# PostgreSQL cuts an application_name (NAMEDATALEN) without an error. The longest purposes have 8 letters.
_SLOT_IN_NAME = 63 - len("pgcdc::snapshot")


def stream_session_name(slot: str, what: str) -> str:
    """The application_name of a session of the stream that reads a slot; ``what`` is its purpose."""
    if len(slot) > _SLOT_IN_NAME:
        # No slot has such a name.
        mark = f"~{zlib.crc32(slot.encode()):08x}"
        slot = f"{slot[: _SLOT_IN_NAME - len(mark)]}{mark}"
    return f"pgcdc:{slot}:{what}"


def _running(slot: Slot, names: dict[int, str]) -> str | None:
    if any(name.startswith(stream_session_name(slot.name, "")) for name in names.values()):
        return "pgcdc"
    reader = names.get(slot.active_pid or 0, "")
    return "pgsnapshot" if reader.startswith("pgsnapshot:") else None


def _bytes_between(start: Lsn | None, end: Lsn) -> int | None:
    # A standby's copies of slots may be ahead of what it has replayed.
    return None if start is None else max(0, end - start)


# Besides who reads the slot, who holds the snapshot of a stream that has not come to reading it yet.
_READ_USER = """
SELECT u.pid, a.application_name, coalesce(host(a.client_addr), 'a local socket'),
    extract(epoch FROM clock_timestamp() - a.backend_start)::bigint
FROM (
    SELECT active_pid AS pid, 1 AS place
    FROM pg_catalog.pg_replication_slots
    WHERE slot_name = %(slot)s AND active_pid IS NOT NULL
    UNION ALL
    SELECT pid, 2
    FROM pg_catalog.pg_stat_activity
    WHERE application_name = %(snapshot)s
        -- One of another database has another slot of this name in mind.
        AND datname = coalesce(
            (SELECT database FROM pg_catalog.pg_replication_slots WHERE slot_name = %(slot)s), datname
        )
) AS u
LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = u.pid
ORDER BY u.place
LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class User:
    """A session that has a slot; ``text`` names it as far as this role may see it."""

    pid: int
    text: str


def read_user(session: Session, slot: str, *, with_snapshot: bool = False) -> User | None:
    """Who reads a slot; ``with_snapshot``, also the stream of this package that reads its tables before."""
    name = stream_session_name(slot, "snapshot") if with_snapshot else None
    with translated(f"looking for who uses slot {slot}"), session.cursor() as cursor:
        cursor.execute(_READ_USER, {"slot": slot, "snapshot": name})
        row = cursor.fetchone()
    if row is None:
        return None
    pid, application, address, age_seconds = row
    # Of other roles' sessions, a role without pg_read_all_stats sees only the pid and the name.
    known = f", from {address}, connected for {age_seconds} s" if age_seconds is not None else ""
    return User(pid, f"pid {pid} (application_name {application!r}{known})")


_READ_END_OF_WAL = """
SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END::text
"""


# Of the WAL; larger ones are multiples.
_PAGE_BYTES = 8192


def may_be_within_a_record(lsn: Lsn) -> bool:
    """Whether a position that was the end of the WAL on disk may lie within a record: PostgreSQL writes whole pages.

    A stream that begins there is not sent a logical decoding message whose record begins before. Commits do not care:
    their positions are where their records begin.
    """
    return lsn % _PAGE_BYTES == 0


def read_end_of_wal(session: Session) -> Lsn:
    """How far the WAL is safe on disk: what may be decoded."""
    with translated("reading the WAL's position"), session.cursor() as cursor:
        cursor.execute(_READ_END_OF_WAL)
        return Lsn.parse(cursor.fetchone()[0])


_READ_END_OF_WRITTEN = """
SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END::text,
    extract(epoch FROM current_setting('wal_writer_delay')::interval)::float8
"""
# The header of a page counts for where the next record goes, and not for where the last one ended.
_LONGEST_PAGE_HEADER = 40


def wait_for_end_of_wal(session: Session) -> Lsn:
    """As ``read_end_of_wal``, past all that other sessions can see by now.

    What was committed with synchronous_commit = off is seen before it is on disk. It is there within three rounds of
    the WAL writer, for which this waits at most. What is not there by then is of transactions that are open: the WAL
    writer leaves their last page to whoever commits next.
    """
    with translated("reading the WAL's position"), session.cursor() as cursor:
        cursor.execute(_READ_END_OF_WRITTEN)
        text, delay_seconds = cursor.fetchone()
    written, on_disk = Lsn.parse(text), Lsn(0)
    for _ in Backoff(0.005, longest_seconds=0.1, within_seconds=3 * delay_seconds + 1).polls():
        on_disk = read_end_of_wal(session)
        if on_disk >= written or (may_be_within_a_record(on_disk) and written - on_disk <= _LONGEST_PAGE_HEADER):
            break
    return on_disk


_READ_WAL_CLOCK = """
SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END::text,
    extract(epoch FROM clock_timestamp())::float8
"""


def read_wal_clock(session: Session) -> tuple[Lsn, float]:
    """As ``read_end_of_wal``, with the server's time in seconds since 1970."""
    with translated("reading the WAL's position"), session.cursor() as cursor:
        cursor.execute(_READ_WAL_CLOCK)
        lsn, now = cursor.fetchone()
        return Lsn.parse(lsn), now


def _slot(row: dict[str, Any]) -> Slot:
    reason = row.get("invalidation_reason")
    if reason is None and (row["wal_status"] == "lost" or row.get("conflicting")):
        # 16 also invalidates slots for conflicts and does not say which it was, but it takes the position away only
        # where WAL was removed.
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
