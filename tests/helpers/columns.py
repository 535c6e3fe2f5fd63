"""Codecs of single columns, and one column as COPY sends it."""

from __future__ import annotations

import struct
from typing import Any

from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.protocol.binary_copy import CopyDecoder
from pg_cdc_source.values.registry import TYPES, CatalogType, Codec, Column, plan
from pg_cdc_source.values.wire import Messages

# An extension's types have other oids in every database.
OIDS = {pg_type.name: pg_type.oid or 90_000 + i for i, pg_type in enumerate(TYPES)}
EXTENSION_OF = {pg_type.name: pg_type.extension for pg_type in TYPES}
STRING = NumericAs("string")


def typmod(precision: int, scale: int) -> int:
    return (precision << 16 | scale & 0x7FF) + 4


def codec(
    name: str, modifier: int = -1, *, array: bool = False, as_string: bool = False, numeric_as: NumericAs = STRING
) -> Codec:
    found = CatalogType(OIDS[name], modifier, name, EXTENSION_OF[name])
    if array:
        found = CatalogType(99_999, modifier, f"_{name}", element=found, element_oid=found.oid)
    column = Column("c", 1, found, name + "[]" * array, False)
    return plan(column, as_string=as_string, numeric_as=numeric_as)


def row(value: bytes | None) -> bytes:
    return struct.pack(">hi", 1, -1) if value is None else struct.pack(">hi", 1, len(value)) + value


def joined(rows: list[bytes]) -> Messages:
    return Messages.joined(rows, padding=64)


def decode(how: Codec, *values: bytes | None, unrepresentable: Any = "error") -> list[Any]:
    (array,) = CopyDecoder([how], unrepresentable).decode(joined([row(value) for value in values]))
    array.validate(full=True)
    assert array.type == how.arrow_type
    decoded: list[Any] = array.to_pylist()
    return decoded
