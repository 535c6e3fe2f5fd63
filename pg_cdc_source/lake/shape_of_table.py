"""A lake's table says of itself what it keeps, and of which table of PostgreSQL: neither may become another."""

from __future__ import annotations

from collections.abc import Mapping

from pg_cdc_source.errors import RESNAPSHOT, OptionError, SchemaChangedError
from pg_cdc_source.lake.columns import MirroredLayout
from pg_cdc_source.lake.shape import REPLACED, Shape

# Every mirror's table says which one of PostgreSQL it is of.
OF_TABLE = "pgcdc.table"
# Tables that have neither property are of the shape REPLACED.
SHAPE, OID = "pgcdc.mode", "pgcdc.oid"


def properties_of(shape: Shape, layout: MirroredLayout) -> dict[str, str]:
    """Return the properties that say it."""
    said = {} if shape.text == REPLACED.text else {SHAPE: shape.text}
    return {**said, OID: str(layout.oid)} if shape.keeps else said


def require_shape(name: str, properties: Mapping[str, str], shape: Shape) -> None:
    """Raise OptionError where a table keeps something else. ``name`` is its name or path."""
    text = properties.get(SHAPE, REPLACED.text)
    if text != shape.text:
        raise OptionError(
            f"{name} was written with the mode {text}, and cannot go on with {shape.text}",
            remedy="start with that mode again, or mirror into another target with another checkpoint and slot",
        )


def require_table(table: str, properties: Mapping[str, str], layout: MirroredLayout) -> None:
    """Raise SchemaChangedError where the rows that the lake keeps are of another table, which had the name before."""
    if properties.get(OID, str(layout.oid)) != str(layout.oid):
        raise SchemaChangedError(
            f"{table} was created again, and the lake keeps rows of the table that had the name before",
            remedy=f"move the lake's table away; then {RESNAPSHOT}",
        )
