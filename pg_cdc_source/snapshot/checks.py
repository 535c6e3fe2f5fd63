"""Check in a task's session that a range still reads what was planned, and all that the snapshot should see of it.

Planning may have been an hour ago, and a snapshot does not protect from all DDL: TRUNCATE and rewrites of tables do not
follow snapshots, and PostgreSQL expands partitions, children and views by its present catalog (see
``postgres.locks``). Locks keep things as they were found, for as long as they are read.

The heaps of a step are locked and checked together, with as many statements as one of them takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from psycopg2 import sql
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import QueryError, SchemaChangedError
from pg_cdc_source.postgres import locks, search_path
from pg_cdc_source.postgres.catalog import Relation
from pg_cdc_source.postgres.columns import describe_columns, describe_tables
from pg_cdc_source.postgres.kept_session import KeptSession
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.snapshot.scan import (
    LOAD_AGAIN,
    Piece,
    Plan,
    ScanRange,
    another_column,
    expect_same,
    identify_heaps,
    reading,
    select_from,
)
from pg_cdc_source.values.registry import Column


def check_heaps(session: Session, plan: Plan, scan_range: ScanRange, doing: str) -> None:
    """Raise SchemaChangedError where the snapshot sees other heaps than were planned."""
    # A scan that is not cut into ranges is expanded by PostgreSQL itself.
    if scan_range.pieces and identify_heaps(session, plan) != scan_range.heaps:
        raise SchemaChangedError(
            f"{doing}: {plan.relation} has other partitions or children, or other columns in them, than when the "
            "DataFrame was planned",
            remedy="load the DataFrame again; where open_snapshot() or a stream's query holds the snapshot, open "
            "or start that again",
        )


def lock_and_check(session: Session, present: KeptSession, plan: Plan, pieces: Sequence[Piece]) -> None:
    """Lock what pieces are read from, or where there are none all of the scan; call it with nothing locked.

    Raises SchemaChangedError where that is not what was planned.
    """
    doing = reading(plan, pieces)
    if pieces:
        _lock_and_check_heaps(session, present, plan, pieces, doing)
        return
    names: list[sql.Composable] = [sql.Identifier(column.name) for column in plan.columns]
    with _as_loaded(plan):
        select, written = select_from(plan, (), names), plan.spec.written
        columns = describe_columns(session, select, doing, known=plan.columns, written=written)
    check_contents(session, present, plan, doing)
    _check_columns(plan, [column.attnum for column in plan.columns], columns, doing)


def check_contents(session: Session, present: KeptSession, plan: Plan, doing: str) -> None:
    """Raise SchemaChangedError where what a scan as a whole has locked is no longer what the snapshot should see."""
    locks.check_files(session, doing)
    locked = locks.read_locked(session, doing)
    locks.check_expansion(session, present.open(), locked, doing)
    # The COPY of a view may take hours, and is looked at before and after alone.
    present.close()
    if plan.spec.written:
        locks.check_names(session, locked, doing, whole=locked)


def check_predicate(session: Session, present: KeptSession, plan: Plan, heaps: Sequence[Relation], doing: str) -> None:
    """As ``check_contents``, for a predicate on the ``heaps`` that a step reads, and what its own queries have locked.

    The heaps themselves may have got columns, unless the predicate may have their whole rows; and children, unless it
    may read tables, of which they may be some.
    """
    locks.check_files(session, doing)
    locked = locks.read_locked(session, doing)
    others = locked - {heap.oid for heap in heaps}
    if expanded := locked if plan.spec.may_read_tables else others:
        locks.check_expansion(session, present.open(), expanded, doing)
    locks.check_names(session, locked, doing, whole=locked if plan.spec.may_read_whole_row else others)


def _lock_and_check_heaps(
    session: Session, present: KeptSession, plan: Plan, pieces: Sequence[Piece], doing: str
) -> None:
    assert plan.relation is not None
    attnums = {piece.heap: piece.attnums for piece in pieces}
    heaps = list(attnums)
    named = list(dict.fromkeys((plan.relation, *heaps)))
    expect_same(session, named, doing)
    with _as_loaded(plan):
        if len(heaps) > 1:
            locks.lock_together(session, heaps, doing)
        columns = describe_tables(session, heaps, plan.columns, doing)
        if plan.spec.where is not None:
            _lock_predicate(session, plan, pieces[0], doing)
    # Once more, since only now the locks keep the names with their heaps.
    expect_same(session, named, doing)
    if plan.spec.where is None:
        locks.check_files_of(session, heaps, doing, virtual=plan.has_virtual)
    else:
        check_predicate(session, present, plan, heaps, doing)
    for heap, found in zip(heaps, columns, strict=True):
        _check_columns(plan, attnums[heap], found, f"reading {heap}")


def _lock_predicate(session: Session, plan: Plan, piece: Piece, doing: str) -> None:
    """Lock the tables that the predicate reads."""
    with translated(doing, plan.spec.written), session.cursor() as cursor:
        statement = sql.SQL("SELECT FROM ({}) AS scan LIMIT 0").format(select_from(plan, [piece], []))
        search_path.execute_by_role(cursor, statement)


@contextlib.contextmanager
def _as_loaded(plan: Plan) -> Iterator[None]:
    """Run statements that PostgreSQL took as they are when the DataFrame was loaded."""
    try:
        yield
    except QueryError as error:
        if plan.relation is None:
            raise
        what = f"{error.what}; PostgreSQL accepted this SQL when the DataFrame was loaded"
        raise SchemaChangedError(what, remedy=LOAD_AGAIN) from None


def _check_columns(plan: Plan, attnums: Sequence[int], columns: Sequence[Column], doing: str) -> None:
    """Raise SchemaChangedError where columns are not those of the plan; ``attnums`` are the planned ones there."""
    for planned, attnum, found in zip(plan.columns, attnums, columns, strict=False):
        if planned.name == found.name and attnum != found.attnum:
            raise another_column(planned.name, doing)
        if planned.name != found.name or not _decoded_alike(plan, planned, found):
            raise SchemaChangedError(
                f"{doing}: column {planned.name} ({planned.type_name}) is not the column it was when the "
                f"DataFrame was loaded; it is {found.name} ({found.type_name}) now",
                remedy=LOAD_AGAIN,
            )
    if len(plan.columns) != len(columns):
        raise SchemaChangedError(f"{doing}: the number of columns has changed", remedy=LOAD_AGAIN)


def _decoded_alike(plan: Plan, planned: Column, found: Column) -> bool:
    if planned.type == found.type:
        return True
    # A modifier that says nothing about decoding, as varchar's, may have changed.
    codec, found_codec = plan.codec(planned), plan.codec(found)
    return (planned.type_oid, codec.decoder, codec.select_sql) == (
        found.type_oid,
        found_codec.decoder,
        found_codec.select_sql,
    )
