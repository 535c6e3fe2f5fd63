"""The columns of a mirrored table: what a run of the stream says of them, and what the lake makes of their types."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from pg_cdc_source.errors import RESNAPSHOT, UnrepresentableError
from pg_cdc_source.lake.shape import Shape, Unrepresentable
from pg_cdc_source.options.names import listed_names
from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.protocol.refused import RefusedValueError, accept, in_words
from pg_cdc_source.values import registry
from pg_cdc_source.values.arrow import field_of, from_texts
from pg_cdc_source.values.registry import Codec, Column

log = logging.getLogger(__name__)

_NUMERIC_AS = NumericAs("string")
_JSON_OIDS = (114, 3802)  # json, jsonb: pg_type.dat


def unrepresentable_error(what: str) -> UnrepresentableError:
    """Return the error for a value that the lake's type cannot hold."""
    return UnrepresentableError(
        what,
        remedy=f"start the mirror with asString=schema.table.column, which has the column as text, or with "
        f"unrepresentable=null (not for keys); or give the row another value in PostgreSQL; then {RESNAPSHOT}",
    )


@dataclass(frozen=True, slots=True)
class MirroredColumn:
    """One column. ``attnum`` tells it from others when names change; None where PostgreSQL did not know it any more."""

    attnum: int | None
    codec: Codec
    key: bool
    as_string: bool = False
    unrepresentable: Unrepresentable = "error"

    @property
    def name(self) -> str:
        return self.codec.column.name

    @property
    def type(self) -> pa.DataType:
        return self.codec.arrow_type

    @property
    def is_json(self) -> bool:
        return self.codec.column.type_oid in _JSON_OIDS and not self.as_string

    def value_of(self, text: str) -> Any:
        """Return what PostgreSQL's text is. Raises as :meth:`values_of` does."""
        return self.values_of("", from_texts([text]), lambda _: "rows from before it was added")[0].as_py()

    def values_of(self, table: str, texts: pa.Array, place: Callable[[int], str]) -> pa.Array:
        """Return what PostgreSQL's texts are; ``place`` says in words where one of them is.

        Raises UnrepresentableError for a value that the type cannot hold.
        """
        of_table = f"{table}, " if table else ""
        try:
            # Two keys would become one.
            unrepresentable = "error" if self.key else self.unrepresentable
            return accept(of_table, unrepresentable, self.codec.column, self.codec.decode_text, field_of(texts))
        except RefusedValueError as refused:
            raise unrepresentable_error(
                f"{of_table}{in_words(refused.column)}, {place(refused.row)}: {refused.reason}"
            ) from None


@dataclass(frozen=True, slots=True)
class MirroredLayout:
    """The columns of a table from some change on. ``identity`` is pg_class.relreplident; ``text`` is the run's own."""

    oid: int
    identity: str
    columns: tuple[MirroredColumn, ...]
    text: str = field(default="", compare=False, repr=False)

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns if column.key)

    def place_of(self, column: MirroredColumn) -> int | None:
        """Which of these columns is ``column`` of another layout of the table."""
        for place, ours in enumerate(self.columns):
            if ours.attnum == column.attnum if None not in (ours.attnum, column.attnum) else ours.name == column.name:
                return place
        return None

    def place_of_former(self, column: MirroredColumn, last: MirroredLayout) -> int | None:
        """Which of these columns had the name of ``column`` before it, and is not in the ``last`` layout any more."""
        for place, ours in enumerate(self.columns):
            if ours.name == column.name and last.place_of(ours) is None:
                return place
        return None

    def arrow_schema(self) -> pa.Schema:
        return pa.schema([pa.field(column.name, column.type) for column in self.columns])


@functools.lru_cache(maxsize=64)
def read_layout(text: str) -> MirroredLayout:
    """Read what a run says of its columns (``protocol.packed.layout_text``, ``as_wanted``)."""
    said = json.loads(text)
    numeric_as = NumericAs.parse(said.get("numeric_as", "string"))
    columns = []
    for given in said["columns"]:
        found = registry.catalog_type(given["catalog"])
        column = Column(given["name"], given["attnum"] or 0, found, given["type"], not given["nullable"])
        as_string = given.get("as_string", False)
        codec = registry.plan(column, as_string=as_string or is_kept_as_text(column), numeric_as=numeric_as)
        unrepresentable = said.get("unrepresentable", "error")
        columns.append(MirroredColumn(given["attnum"], codec, given["key"], as_string, unrepresentable))
    return MirroredLayout(said["oid"], said["identity"], tuple(columns), text)


@functools.lru_cache(maxsize=256)
def as_wanted(table: str, text: str, shape: Shape) -> str:
    """Return what a run of ``table`` says of its columns, with what the user wants them to be in the lake."""
    said = json.loads(text)
    if lacking := sorted(set(shape.as_string) - {column["name"] for column in said["columns"]}):
        log.warning("%s has no column %s, which asString names", table, listed_names(lacking))
    for column in said["columns"]:
        if column["name"] in shape.as_string:
            column["as_string"] = True
    if shape.numeric_as != "string":
        said["numeric_as"] = shape.numeric_as
    if shape.unrepresentable != "error":
        said["unrepresentable"] = shape.unrepresentable
    return json.dumps(said, ensure_ascii=False, separators=(",", ":"))


def with_dropped(last: MirroredLayout, layouts: Sequence[MirroredLayout]) -> MirroredLayout:
    """Return the ``last`` layout of a table with the columns that those before it had besides."""
    said = json.loads(last.text)
    found = last
    for layout in reversed(layouts):
        for place, column in enumerate(layout.columns):
            names = {ours.name.lower() for ours in found.columns}
            if layout.oid == last.oid and found.place_of(column) is None and column.name.lower() not in names:
                said["columns"].append({**json.loads(layout.text)["columns"][place], "key": False})
                found = read_layout(json.dumps(said))
    return found


def is_kept_as_text(column: Column) -> bool:
    """Whether Delta and Iceberg lack the column's type, so that they have PostgreSQL's text."""
    return not is_storable(registry.plan(column, as_string=False, numeric_as=_NUMERIC_AS).arrow_type)


def is_storable(found: pa.DataType) -> bool:
    """Whether Delta and Iceberg have the type."""
    if pa.types.is_nested(found):
        return all(is_storable(found.field(i).type) for i in range(found.num_fields))
    return not (pa.types.is_duration(found) or pa.types.is_interval(found) or pa.types.is_time(found))
