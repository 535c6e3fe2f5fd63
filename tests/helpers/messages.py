"""pgoutput's messages of rows, and tables that they are rows of, as the tests put them together."""

from __future__ import annotations

import datetime as dt
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.protocol.changes import Described, Run
from pg_cdc_source.protocol.layout import Layout, StreamedTable
from pg_cdc_source.protocol.pgoutput import RelationColumn, RelationMessage
from pg_cdc_source.values.registry import CatalogType, Column, plan

# All in one record at 1: so the numbers of a commit count from there.
HEADER = struct.pack(">cQQQ", b"w", 1, 0, 0)
NOTHING = Position(Lsn(0))
TS = 1_706_933_106_789_000
MOMENT = dt.datetime(2024, 2, 3, 4, 5, 6, 789000, tzinfo=dt.timezone.utc)
TYPED = Layout(envelope=False, before_image=True, unrepresentable="error", on_truncate="emit")
ENVELOPE = replace(TYPED, envelope=True, before_image=False)

# --- what is sent ---------------------------------------------------------------------------------------------------

# A value: text, None for NULL, UNCHANGED for one that did not travel.
UNCHANGED = 0
Value = str | int | None
Image = Sequence[Value]


def image(tag: str, values: Image) -> bytes:
    forms = {None: b"n", UNCHANGED: b"u"}
    octets = [value.encode() if isinstance(value, str) else None for value in values]
    return (tag.encode() + struct.pack(">H", len(values))) + b"".join(
        forms[value] if text is None else b"t" + struct.pack(">I", len(text)) + text  # type: ignore[index]
        for value, text in zip(values, octets, strict=True)
    )


def insert(oid: int, new: Image) -> bytes:
    return HEADER + b"I" + struct.pack(">I", oid) + image("N", new)


def update(oid: int, new: Image, tag: str = "", old: Image = ()) -> bytes:
    return HEADER + b"U" + struct.pack(">I", oid) + (image(tag, old) if tag else b"") + image("N", new)


def delete(oid: int, tag: str, old: Image) -> bytes:
    return HEADER + b"D" + struct.pack(">I", oid) + image(tag, old)


def truncate(*oids: int) -> bytes:
    return HEADER + b"T" + struct.pack(f">IB{len(oids)}I", len(oids), 0, *oids)


def recorded(lsn: int, message: bytes) -> bytes:
    """The message of a change whose WAL record is at ``lsn``."""
    return message[:1] + struct.pack(">Q", lsn) + message[9:]


# --- what is streamed -----------------------------------------------------------------------------------------------

OIDS = {
    "int4": 23,
    "int8": 20,
    "text": 25,
    "numeric": 1700,
    "bool": 16,
    "int4[]": 1007,
    "date": 1082,
    "float4": 700,
    "float8": 701,
    "bytea": 17,
}
OF_10_2 = (10 << 16 | 2) + 4


def catalog_type(kind: str) -> CatalogType:
    if kind.endswith("[]"):
        element = catalog_type(kind.removesuffix("[]"))
        return CatalogType(OIDS[kind], element=element, element_oid=element.oid)
    return CatalogType(OIDS[kind], OF_10_2 if kind == "numeric" else -1)


def streamed(
    oid: int, name: str, columns: Mapping[str, str], key: Sequence[str] = (), identity: str = "d", **how: Any
) -> StreamedTable:
    planned = [Column(name, i + 1, catalog_type(kind), kind, False) for i, (name, kind) in enumerate(columns.items())]
    codecs = tuple(plan(column, **{"as_string": False, "numeric_as": NumericAs("string"), **how}) for column in planned)
    types = tuple((column.type_oid, column.type.typmod) for column in planned)
    return StreamedTable(oid, name, codecs, types, tuple(key), identity)


def described(table: StreamedTable, names: Sequence[str] | None = None, key: Sequence[str] | None = None) -> Described:
    """The table together with a relation of its columns, or of ``names`` in that order."""
    planned = [codec.column.name for codec in table.codecs]
    names = planned if names is None else names
    key = table.key if key is None else key
    sent = tuple(RelationColumn(table.identity == "f" or name in key, name, 25, -1) for name in names)
    index = tuple(names.index(name) if name in names else None for name in planned)
    return Described(table, RelationMessage(table.oid, "public", table.name, table.identity, sent), index)


COLUMNS = {"id": "int4", "a": "text", "b": "numeric"}
BY_KEY = streamed(1, "public.by_key", COLUMNS, ["id"])
FULL = streamed(2, "public.full", COLUMNS, ["id"], "f")
KEYLESS = streamed(3, "public.keyless", COLUMNS, (), "f")
OTHER = 9


def run(messages: int, lsn: int = 100, after_seq: int = 0) -> Run:
    return Run(Lsn(lsn), TS, 4_294_967_295, after_seq, messages)
