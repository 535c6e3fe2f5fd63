"""Check in a task's session that a range still reads what was planned, and all that the snapshot should see of it.

Planning may have been an hour ago, and a snapshot does not protect from all DDL: TRUNCATE and rewrites of tables do not
follow snapshots, and PostgreSQL expands partitions, children and views by its present catalog (see
``postgres.locks``). Locks keep things as they were found, for as long as they are read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from psycopg2 import sql
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import QueryError, SchemaChangedError
from pg_cdc_source.postgres import locks
from pg_cdc_source.postgres.columns import describe_columns
from pg_cdc_source.postgres.connection import connect
from pg_cdc_source.snapshot.scan import Plan, ScanRange, expect_same, identify_heaps, select_from
from pg_cdc_source.values.registry import Column

# How long a lost session is replaced before a task gives up.
RECONNECT_SECONDS = 30.0


def lock_and_check(session: Session, plan: Plan, scan_range: ScanRange, doing: str) -> None:
    """Lock what a range reads; raises SchemaChangedError where that is not what was planned."""
    relation = plan.relation
    # A scan that is not cut into ranges is expanded by PostgreSQL itself.
    if scan_range.heap and identify_heaps(session, plan) != scan_range.heaps:
        raise SchemaChangedError(
            f"{doing}: {relation} has other partitions or children than when the DataFrame was planned",
            remedy="load the DataFrame again; where open_snapshot() or a stream's query holds the snapshot, open "
            "or start that again",
        )
    _expect_planned_names(session, plan, scan_range, doing)
    columns = _describe(session, plan, scan_range, doing)
    # Once more, since only now the lock keeps the name with its heap.
    _expect_planned_names(session, plan, scan_range, doing)
    check_contents(session, plan, scan_range, doing)
    _check_columns(plan, scan_range, columns, doing)


def check_contents(session: Session, plan: Plan, scan_range: ScanRange, doing: str) -> None:
    """Raise SchemaChangedError where what is locked no longer has, or consists of, what the snapshot should see."""
    locks.check_files(session, doing)
    if scan_range.heap is None:
        with contextlib.closing(
            connect(plan.spec.connection, "pgsnapshot:checking", retry_seconds=RECONNECT_SECONDS)
        ) as present:
            locks.check_expansion(session, present, doing)


def _expect_planned_names(session: Session, plan: Plan, scan_range: ScanRange, doing: str) -> None:
    if scan_range.heap is not None and plan.relation is not None:
        for planned in dict.fromkeys((plan.relation, scan_range.heap)):
            expect_same(session, planned, doing)


def _describe(session: Session, plan: Plan, scan_range: ScanRange, doing: str) -> Sequence[Column]:
    """The columns as they are now; describing them locks what they come from."""
    names: list[sql.Composable] = [sql.Identifier(column.name) for column in plan.columns]
    try:
        return describe_columns(session, select_from(plan, scan_range, names, None), doing, known=plan.columns)
    except QueryError as error:
        if plan.relation is None:
            raise
        raise SchemaChangedError(
            f"{error.what}; it did when the DataFrame was loaded", remedy="load the DataFrame again"
        ) from None


def _check_columns(plan: Plan, scan_range: ScanRange, columns: Sequence[Column], doing: str) -> None:
    # A modifier that says nothing about decoding, as varchar's, may have changed.
    found_codecs = replace(plan, columns=tuple(columns)).codecs
    for codec, attnum, found_codec in zip(plan.codecs, scan_range.attnums, found_codecs, strict=False):
        planned, found = codec.column, found_codec.column
        if (planned.name, attnum, planned.type_oid, codec.decoder, codec.select_sql) != (
            found.name,
            found.attnum,
            found.type_oid,
            found_codec.decoder,
            found_codec.select_sql,
        ):
            raise SchemaChangedError(
                f"{doing}: column {planned.name} ({planned.type_name}) is not the column it was when the "
                f"DataFrame was loaded; it is {found.name} ({found.type_name}) now",
                remedy="load the DataFrame again",
            )
    if len(plan.columns) != len(columns):
        raise SchemaChangedError(f"{doing}: the number of columns has changed", remedy="load the DataFrame again")
