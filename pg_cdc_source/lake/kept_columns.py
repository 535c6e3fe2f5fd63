"""Columns of the lake that stay when PostgreSQL has others, and which changes a table may take over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import pyarrow as pa

from pg_cdc_source.errors import SchemaChangedError
from pg_cdc_source.lake.shape import Shape

# A column's number, name and type.
Described = tuple[int, str, str]


def is_wider(was: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a type has all values of another one."""
    for is_kind in (pa.types.is_signed_integer, pa.types.is_floating):
        if is_kind(was) and is_kind(wanted):
            return bool(wanted.bit_width >= was.bit_width)
    if pa.types.is_decimal(was) and pa.types.is_decimal(wanted):
        return bool(wanted.scale == was.scale and wanted.precision >= was.precision)
    return False


def other_type_remedy(shape: Shape) -> str:
    """What helps where a column has another type, and rows that are there cannot have it."""
    if shape.keeps:
        return "move the lake's table away; then have the rows come again: pg-cdc resnapshot"
    return (
        "have its rows come again: pg-cdc resnapshot. The stream does that by itself where PostgreSQL has rewritten "
        "the table"
    )


def require_allowed(table: str, shape: Shape, wanted: Sequence[Described], present: Sequence[Described]) -> None:
    """Raise SchemaChangedError where columns change in a way that ``onSchemaChange`` does not allow."""
    if shape.on_schema_change == "evolve":
        return
    is_fail, rest = shape.on_schema_change == "fail", list(wanted)
    found = []
    for number, name, kind in present:
        new = next((column for column in rest if _is_same(column, (number, name, kind))), None)
        if new is not None:
            rest.remove(new)
            if new[1] != name:
                found.append(f"{name} is called {new[1]}")
            elif new[2] != kind:
                found.append(f"{name} is {new[2]} and was {kind}")
        elif is_fail and not shape.keeps_columns:
            found.append(f"{name} was dropped")
    found += [f"{name} was added" for _, name, _ in rest if is_fail]
    if found:
        raise SchemaChangedError(
            f"{table}: columns have changed in PostgreSQL, which onSchemaChange={shape.on_schema_change} does not take "
            f"over: {', '.join(found)}",
            remedy="start the mirror with onSchemaChange=evolve, and have the rows come again: pg-cdc resnapshot",
        )


def _is_same(column: Described, other: Described) -> bool:
    """Whether it is one column; PostgreSQL may not have known its number any more."""
    return column[0] == other[0] if column[0] and other[0] else column[1] == other[1]


class _Named(Protocol):
    @property
    def name(self) -> str: ...


F = TypeVar("F", bound=_Named)


def with_kept(
    table: str, shape: Shape, wanted: Sequence[tuple[int, F]], present: Sequence[tuple[int, F]]
) -> list[tuple[int, F]]:
    """Return the ``wanted`` columns of a table, and behind them those that it has besides; each with its number.

    In a log, a column that was dropped and comes again under its name is the same one. Raises SchemaChangedError where
    a name would be that of two.
    """
    numbers = {number for number, _ in wanted}
    dropped = {field.name: number for number, field in present if number not in numbers}
    are_there = {number for number, _ in present}
    found = list(wanted)
    if shape.is_log:
        found = [(number if number in are_there else dropped.pop(field.name, number), field) for number, field in found]
    found += [(number, field) for number, field in present if field.name in dropped and number not in numbers]
    names = [field.name.lower() for _, field in found]
    for name in names:
        if names.count(name) > 1:
            raise SchemaChangedError(
                f"{table}: column {name} has the name of one that was dropped, which the lake keeps",
                remedy="rename it in PostgreSQL, or move the lake's table away; then have the rows come again: "
                "pg-cdc resnapshot",
            )
    return found
