"""Columns of the lake that stay when PostgreSQL has others, and which changes a table may take over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import pyarrow as pa

from pg_cdc_source.errors import RESNAPSHOT, SchemaChangedError
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
        return f"move the lake's table away; then {RESNAPSHOT}"
    return f"{RESNAPSHOT}. The stream does that by itself where PostgreSQL has rewritten the table"


def require_allowed(table: str, shape: Shape, wanted: Sequence[Described], present: Sequence[Described]) -> None:
    """Raise SchemaChangedError where columns change in a way that ``onSchemaChange`` does not allow."""
    if shape.on_schema_change == "evolve":
        return
    is_fail = shape.on_schema_change == "fail"
    places = places_among([column[:2] for column in wanted], [column[:2] for column in present])
    news = {place: new for place, new in zip(places, wanted, strict=True) if place is not None}
    found = []
    for place, (_, name, kind) in enumerate(present):
        if place not in news:
            if is_fail and not shape.keeps_columns:
                found.append(f"{name} was dropped")
            continue
        _, new_name, new_kind = news[place]
        if new_name != name:
            found.append(f"{name} is called {new_name}")
        elif new_kind != kind:
            found.append(f"{name} is {new_kind} and was {kind}")
    found += [
        f"{name} was added" for place, (_, name, _) in zip(places, wanted, strict=True) if place is None and is_fail
    ]
    if found:
        raise SchemaChangedError(
            f"{table}: columns have changed in PostgreSQL, which onSchemaChange={shape.on_schema_change} does not take "
            f"over: {', '.join(found)}",
            remedy=f"start the mirror with onSchemaChange=evolve, and {RESNAPSHOT}",
        )


def places_among(wanted: Sequence[tuple[int, str]], present: Sequence[tuple[int, str]]) -> list[int | None]:
    """Return which of the ``present`` columns each of the ``wanted`` ones is; None for a new one.

    A column is its number and its name. It is told by its number, and by its name where PostgreSQL did not know one of
    two numbers any more (0).
    """
    by_number = {number: place for place, (number, _) in enumerate(present) if number}
    places = [by_number.get(number) if number else None for number, _ in wanted]
    by_name = {name: place for place, (_, name) in enumerate(present) if place not in places}
    for i, (number, name) in enumerate(wanted):
        place = by_name.get(name)
        if places[i] is None and place is not None and 0 in (number, present[place][0]):
            places[i] = place
    return places


class _Named(Protocol):
    @property
    def name(self) -> str: ...


F = TypeVar("F", bound=_Named)


def numbers_in_log(wanted: Sequence[tuple[int, str]], present: Sequence[tuple[int, str]]) -> list[int]:
    """Return the numbers of a log's ``present`` columns, where it is to have the ``wanted`` ones.

    One that was dropped and comes again under its name is the same one there, and has the new number from then on: the
    next change of its name is that of this number.
    """
    places = places_among(wanted, present)
    new = {name: number for place, (number, name) in zip(places, wanted, strict=True) if place is None}
    return [number if i in places else new.get(name, number) for i, (number, name) in enumerate(present)]


def with_kept(
    table: str, shape: Shape, wanted: Sequence[tuple[int, F]], present: Sequence[tuple[int, F]]
) -> list[tuple[int, F]]:
    """Return the ``wanted`` columns of a table, and behind them those that it has besides; each with its number.

    Raises SchemaChangedError where a name would be that of two.
    """
    places = places_among(*([(number, field.name) for number, field in columns] for columns in (wanted, present)))
    kept = {field.name: (number, field) for i, (number, field) in enumerate(present) if i not in places}
    found = list(wanted)
    if shape.is_log:
        for i, (place, (_, field)) in enumerate(zip(places, wanted, strict=True)):
            # The number stays that of before: another one would have all rows written anew.
            if place is not None:
                found[i] = present[place][0], field
    found += kept.values()
    names = [field.name.lower() for _, field in found]
    for name in names:
        if names.count(name) > 1:
            raise SchemaChangedError(
                f"{table}: column {name} has the name of one that was dropped, which the lake keeps",
                remedy=f"rename it in PostgreSQL, or move the lake's table away; then {RESNAPSHOT}",
            )
    return found
