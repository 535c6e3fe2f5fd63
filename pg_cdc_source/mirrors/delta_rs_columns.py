"""The columns of a delta-rs table, told apart by PostgreSQL's numbers, which are in their metadata."""

from __future__ import annotations

import pyarrow as pa

from pg_cdc_source.lake.columns import MirroredLayout
from pg_cdc_source.lake.kept_columns import numbers_in_log, places_among, with_kept
from pg_cdc_source.lake.shape import Shape

ATTNUM = "pgcdc.attnum"


def schema_of(layout: MirroredLayout, shape: Shape) -> pa.Schema:
    fields = [(column.attnum or 0, pa.field(column.name, column.type)) for column in layout.columns]
    return pa.schema([field.with_metadata({ATTNUM: str(number)}) for number, field in [*fields, *shape.fields()]])


def kept_in(table: str, shape: Shape, wanted: pa.Schema, present: pa.Schema) -> pa.Schema:
    found = with_kept(table, shape, *([(number_of(field), field) for field in schema] for schema in (wanted, present)))
    return pa.schema([field.with_metadata({ATTNUM: str(number)}) for number, field in found])


def renumbered(wanted: pa.Schema, present: pa.Schema) -> pa.Schema:
    """Return the columns of a log with the numbers that those have which come again."""
    numbers = numbers_in_log(*map(_numbered, (wanted, present)))
    return pa.schema([f.with_metadata({ATTNUM: str(number)}) for f, number in zip(present, numbers, strict=True)])


def with_columns_of(schema: pa.Schema, rows: pa.Table) -> pa.Table:
    """Rows with a table's columns; NULL in one that PostgreSQL has dropped and that has stayed."""
    arrays = []
    for field in schema:
        found = rows[field.name] if field.name in rows.column_names else pa.nulls(rows.num_rows)
        arrays.append(found.cast(field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def number_of(field: pa.Field) -> int:
    return int((field.metadata or {}).get(ATTNUM.encode(), b"0"))


def places_in(wanted: pa.Schema, present: pa.Schema) -> list[int | None]:
    return places_among(*map(_numbered, (wanted, present)))


def _numbered(schema: pa.Schema) -> list[tuple[int, str]]:
    return [(number_of(field), field.name) for field in schema]


def described(schema: pa.Schema) -> list[tuple[int, str, str]]:
    return [(number, name, str(kind)) for number, name, kind in numbered_types(schema)]


def numbered_types(schema: pa.Schema) -> list[tuple[int, str, pa.DataType]]:
    return [(number_of(field), field.name, field.type) for field in schema]
