"""A relation's columns at a commit are matched with the planned ones, by name; with a server, in integration/."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from messages import TYPED, streamed

from pg_cdc_source.errors import SchemaChangedError
from pg_cdc_source.offsets import Horizon, Lsn, Member
from pg_cdc_source.options.stream_options import parse_stream_options
from pg_cdc_source.protocol.pgoutput import RelationColumn, RelationMessage
from pg_cdc_source.protocol.transactions import SentRelation
from pg_cdc_source.stream.layouts.schema_history import match_relation
from pg_cdc_source.stream.tables.stream_plan import PlannedTable, StreamPlan

TABLE = streamed(7, "public.t", {"id": "int4", "a": "text"}, ["id"])
EXCHANGED = {"a": 25, "id": 23}
BEFORE, AFTER = Lsn(50), Lsn(150)
XID = 7
HORIZON = Horizon(Lsn(100), next_xid=20, in_progress=frozenset([9]))
COLUMNS = {"id": 23, "a": 25}


def plan(**options: str) -> StreamPlan:
    parsed = parse_stream_options({"url": "postgresql://u@h/d", "slot": "s", "dbtable": "t", **options})
    # No scan: nothing is read here.
    planned = PlannedTable(None, TABLE, Member(7, "public.t", Lsn(1), ""), HORIZON)  # type: ignore[arg-type]
    return StreamPlan(parsed, TYPED, (planned,), TYPED.schema([TABLE]), HORIZON)


def sent(columns: dict[str, int] = COLUMNS, **changed: Any) -> RelationMessage:
    described = tuple(RelationColumn(name == "id", name, oid, -1) for name, oid in columns.items())
    return replace(RelationMessage(7, "public", "t", "d", described), **changed)


OTHER_KEY = tuple(replace(column, is_key=not column.is_key) for column in sent().columns)


@pytest.mark.parametrize(
    ("columns", "lsn", "index"),
    [({"gone": 25, **COLUMNS}, BEFORE, (1, 2)), ({**COLUMNS, "new": 25}, AFTER, (0, 1))],
)
def test_columns_are_found_by_name(columns: dict[str, int], lsn: Lsn, index: tuple[int, ...]) -> None:
    found = match_relation(plan(onSchemaChange="ignore"), SentRelation(sent(columns), lsn, XID))
    assert found is not None
    assert (found.table, found.index) == (TABLE, index)


@pytest.mark.parametrize("on_schema_change", ["fail", "ignore"])
def test_a_name_that_an_added_column_took_over_is_a_change(on_schema_change: str) -> None:
    """``RENAME a TO b``, then ``ADD a``: PostgreSQL adds columns behind all others."""
    columns = {"id": 23, "b": 25, "a": 25}
    planned = plan(onSchemaChange=on_schema_change)
    with pytest.raises(SchemaChangedError, match="before the commit at 0/96 the names a went to other columns"):
        match_relation(planned, SentRelation(sent(columns), AFTER, XID))


def test_a_name_that_an_added_column_took_over_later_is_a_change() -> None:
    table = streamed(7, "public.t", {"id": "int4", "b": "text", "a": "text"}, ["id"])
    planned = replace(plan(), planned=(replace(plan().planned[0], table=table),))
    with pytest.raises(SchemaChangedError, match="after the commit at 0/32 the names a went to other columns"):
        match_relation(planned, SentRelation(sent(), BEFORE, XID))
    # A generated column that became a plain one stands where it was. With the next one's type it would look the same.
    other = streamed(7, "public.t", {"id": "int4", "b": "int4", "a": "text"}, ["id"])
    planned = replace(plan(), planned=(replace(plan().planned[0], table=other),))
    found = match_relation(planned, SentRelation(sent(), BEFORE, XID))
    assert found is not None
    assert found.index == (0, None, 1)
    # One that is not sent.
    planned = replace(plan(), planned=(replace(plan().planned[0], table=replace(table, unsent=("b",))),))
    found = match_relation(planned, SentRelation(sent(), BEFORE, XID))
    assert found is not None
    assert found.index == (0, None, 1)


@pytest.mark.parametrize("on_schema_change", ["fail", "ignore"])
def test_names_that_went_to_other_columns_are_a_change(on_schema_change: str) -> None:
    planned = plan(onSchemaChange=on_schema_change)
    with pytest.raises(SchemaChangedError, match="before the commit at 0/96 the names a, id went to other columns"):
        match_relation(planned, SentRelation(sent(EXCHANGED), AFTER, XID))


def test_names_that_went_to_other_columns_later_are_taken_where_the_option_says_so() -> None:
    exchanged = SentRelation(sent(EXCHANGED), BEFORE, XID)
    with pytest.raises(SchemaChangedError, match="after the commit at 0/32 the names a, id went to other columns"):
        match_relation(plan(), exchanged)
    found = match_relation(plan(onSchemaChange="ignore"), exchanged)
    assert found is not None
    assert found.index == (1, 0)


@pytest.mark.parametrize(
    ("relation", "index"),
    [
        (sent({"id": 23, "gone": 25, "a": 25}), (0, 2)),
        (sent({"id": 23}), (0, None)),
        (sent(name="earlier_name"), (0, 1)),
        (sent(identity="f"), (0, 1)),
        (replace(sent(), columns=OTHER_KEY), (0, 1)),
    ],
)
def test_what_differed_before_the_plan_is_history(relation: RelationMessage, index: tuple[int | None, ...]) -> None:
    found = match_relation(plan(), SentRelation(relation, BEFORE, XID))
    assert found is not None
    assert found.index == index


@pytest.mark.parametrize(
    ("relation", "said"),
    [
        (sent({**COLUMNS, "new": 25}), "public.t: column new was added before the commit at 0/96"),
        (sent({"id": 23}), "public.t: column a was dropped or renamed before the commit at 0/96"),
        (sent({"id": 23, "b": 25}), "column a was dropped or renamed"),
        (sent(name="u"), "public.t was renamed to public.u before the commit at 0/96"),
        (sent(oid=8), "public.t was dropped and created again"),
        (sent(identity="f"), "public.t: the replica identity was changed before the commit at 0/96"),
        (replace(sent(), columns=OTHER_KEY), "the replica identity was changed"),
    ],
)
def test_what_differs_after_the_plan_is_a_change(relation: RelationMessage, said: str) -> None:
    with pytest.raises(SchemaChangedError, match=said):
        match_relation(plan(), SentRelation(relation, AFTER, XID))


def test_a_column_that_was_replaced_before_the_plan_has_values_that_the_stream_would_not_have() -> None:
    renamed = sent({"id": 23, "earlier": 25})
    with pytest.raises(SchemaChangedError, match="column earlier was replaced or renamed to a"):
        match_relation(plan(), SentRelation(renamed, BEFORE, XID))
    found = match_relation(plan(onSchemaChange="ignore"), SentRelation(renamed, BEFORE, XID))
    assert found is not None
    assert found.index == (0, None)


def test_a_relation_from_before_a_table_joins_is_refused_for_its_rows_from_then_on() -> None:
    joining = replace(plan(), since={7: Lsn(60)})
    found = match_relation(joining, SentRelation(sent({"id": 23, "earlier": 25}), BEFORE, XID))
    assert found is not None
    assert found.since == Lsn(60)
    assert "column earlier was replaced or renamed to a" in str(found.refused)
    found = match_relation(joining, SentRelation(sent(), BEFORE, XID))
    assert found is not None
    assert found.refused is None


def test_another_relation_is_not_read() -> None:
    assert match_relation(plan(), SentRelation(sent(oid=8, name="other"), AFTER, XID)) is None


@pytest.mark.parametrize(
    ("lsn", "xid", "is_history"),
    [
        (BEFORE, 7, True),
        # It waited for a synchronous standby when the plan was made.
        (BEFORE, 9, False),
        (BEFORE, 20, False),
        (BEFORE, 21, False),
        # Older than the plan by all that xids can tell.
        (BEFORE, (20 - (1 << 31) + 1) % (1 << 32), True),
        (AFTER, 7, False),
    ],
)
def test_what_the_plan_could_not_see_is_a_change(lsn: Lsn, xid: int, is_history: bool) -> None:
    added = SentRelation(sent({**COLUMNS, "new": 25}), lsn, xid)
    if is_history:
        assert match_relation(plan(), added) is not None
    else:
        with pytest.raises(SchemaChangedError, match="column new was added before the commit at"):
            match_relation(plan(), added)
