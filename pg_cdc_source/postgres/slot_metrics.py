"""How far behind the logical slots of a server are, what they hold, and what decoding them has cost."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from psycopg2.errors import FeatureNotSupported, InsufficientPrivilege
from psycopg2.extensions import connection as Session

from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.slots import Usage, read_usages


@dataclass(frozen=True, slots=True)
class Decoding:
    """Counters of pg_stat_replication_slots, since the slot was made or they were reset.

    What exceeds logical_decoding_work_mem is spilled to the server's disk or streamed before it commits.
    """

    spilled_transactions: int
    spills: int
    spilled_bytes: int
    streamed_transactions: int
    streams: int
    streamed_bytes: int
    transactions: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SlotMetrics:
    """A slot's ``usage``, and what else the server tells of it; None where it tells nothing.

    ``lag_seconds``: the WAL that is not confirmed is at least so old. ``safe_bytes`` of WAL may be written before the
    server may give the slot up. ``catalog_age``: how many transactions ago rows of catalogs died that VACUUM has to
    leave for the slot. ``decoding`` is there from PostgreSQL 14 on.
    """

    usage: Usage
    lag_seconds: float | None
    safe_bytes: int | None
    catalog_age: int | None
    decoding: Decoding | None


# flush_lag is the time from sending a commit to its confirmation; it goes on to grow while the reader stands still.
_READ_SLOTS = """
SELECT s.slot_name, s.safe_wal_size, age(s.catalog_xmin), extract(epoch FROM r.flush_lag)::float8
FROM pg_catalog.pg_replication_slots AS s
LEFT JOIN pg_catalog.pg_stat_replication AS r ON r.pid = s.active_pid
WHERE s.slot_type = 'logical'
"""

# As JSON, because columns may be added.
_READ_COUNTERS = """
SELECT slot_name, to_jsonb(c)
FROM pg_catalog.pg_stat_replication_slots AS c
"""

_MAY_LIST_WAL = """
SELECT NOT pg_is_in_recovery() AND has_function_privilege('pg_catalog.pg_ls_waldir()', 'EXECUTE')
"""

# A segment was last written after everything in it.
_READ_AGES = """
SELECT s.slot_name, extract(epoch FROM clock_timestamp() - w.modification)::float8
FROM pg_catalog.pg_replication_slots AS s
JOIN pg_catalog.pg_ls_waldir() AS w ON w.name = pg_walfile_name(s.confirmed_flush_lsn)
WHERE s.slot_type = 'logical'
"""


def read_metrics(session: Session) -> list[SlotMetrics]:
    """The logical slots of the server, of all its databases, by name."""
    usages = read_usages(session)
    counters: dict[str, dict[str, Any]] = {}
    ages: dict[str, float] = {}
    with translated("reading the slots' metrics"), session.cursor() as cursor:
        cursor.execute(_READ_SLOTS)
        told = {name: tuple(row) for name, *row in cursor}
        if session.server_version >= 140000:
            cursor.execute(_READ_COUNTERS)
            counters = dict(cursor.fetchall())
        cursor.execute(_MAY_LIST_WAL)
        if cursor.fetchone()[0]:
            # Amazon Aurora has no such files, and refuses only the call.
            with contextlib.suppress(FeatureNotSupported, InsufficientPrivilege):
                cursor.execute(_READ_AGES)
                ages = dict(cursor.fetchall())
    return [_metrics(usage, told, ages, counters) for usage in usages]


def _metrics(
    usage: Usage,
    told: dict[str, tuple[Any, ...]],
    ages: dict[str, float],
    counters: dict[str, dict[str, Any]],
) -> SlotMetrics:
    name = usage.slot.name
    # A slot that was dropped in between is shown as it was.
    safe_bytes, catalog_age, flush_lag_seconds = told.get(name, (None, None, None))
    known = [seconds for seconds in (flush_lag_seconds, ages.get(name)) if seconds is not None]
    lag_seconds = max(0.0, *known) if known else None
    if not usage.lag_bytes:
        lag_seconds = None if usage.lag_bytes is None else 0.0
    counted = counters.get(name)
    return SlotMetrics(usage, lag_seconds, safe_bytes, catalog_age, None if counted is None else _decoding(counted))


def _decoding(row: dict[str, Any]) -> Decoding:
    return Decoding(
        spilled_transactions=row["spill_txns"],
        spills=row["spill_count"],
        spilled_bytes=row["spill_bytes"],
        streamed_transactions=row["stream_txns"],
        streams=row["stream_count"],
        streamed_bytes=row["stream_bytes"],
        transactions=row["total_txns"],
        bytes=row["total_bytes"],
    )
