"""Write and read rows as JSON objects, a column at a time: the envelope of a stream of several tables.

Values are PostgreSQL's texts. Booleans and integers become JSON's, every other value a string, and NULL null. A value
that did not travel is left out of its object. So no value is rounded, and each text comes back as it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.errors import SchemaChangedError, UnrepresentableError, WireError
from pg_cdc_source.options.names import quoted
from pg_cdc_source.values.wire import MAX_OFFSET

# catalog/pg_type.dat: bool; int8, int2, int4 and oid.
_BOOL_OID = 16
_INTEGER_OIDS = frozenset((20, 21, 23, 26))
_TOO_LONG = "more than an Arrow array can hold"
_WITHOUT_JSON = "use envelope=arrow, or a stream of this table alone (dbtable): neither has JSON"


def json_kind(type_oid: int) -> str:
    """What values of a type are in JSON: boolean, integer or string."""
    if type_oid == _BOOL_OID:
        return "boolean"
    return "integer" if type_oid in _INTEGER_OIDS else "string"


@dataclass(frozen=True, slots=True)
class EnvelopeColumn:
    """One column of the objects; ``type_oid`` is that of a domain's base type."""

    name: str
    type_oid: int

    @property
    def kind(self) -> str:
        """As ``json_kind`` says."""
        return json_kind(self.type_oid)


# --- written ---------------------------------------------------------------------------------------------------------


def json_objects(
    table: str, columns: Sequence[EnvelopeColumn], texts: Sequence[pa.Array], absent: Sequence[pa.BooleanArray | None]
) -> pa.StringArray:
    """Return one JSON object for each row of ``table``, a name for errors.

    ``texts`` has PostgreSQL's texts of each of ``columns``, of which there is at least one; a null is SQL's NULL.
    ``absent`` says for each column where its value is left out; None leaves out none. Raises WireError for a text that
    its type cannot have, and UnrepresentableError for more text than an array can hold.
    """
    try:
        members = []
        for column, text, left_out in zip(columns, texts, absent, strict=True):
            # Braces and names are constants of the column, so that a row is one join.
            name = f"{json.dumps(column.name, ensure_ascii=False)}:"
            member = _joined(name, pc.fill_null(_values(table, column, text), "null"))
            members.append(member if left_out is None else pc.if_else(left_out, pa.scalar(None, pa.string()), member))
        # The brace is joined as well, because Arrow joins a row of nothing but nulls to null.
        joined = pc.binary_join_element_wise("{", *members, ",", null_handling="skip")
        return _joined(pc.binary_replace_slice(joined, 0, len("{,"), "{"), "}")
    except pa.ArrowCapacityError:
        size = sum(text.nbytes for text in texts)
        raise UnrepresentableError(
            f"{table}: the JSON of a batch with {size:,} bytes of values is {_TOO_LONG}", remedy=_WITHOUT_JSON
        ) from None


def _joined(*parts: str | pa.Array) -> pa.StringArray:
    return pc.binary_join_element_wise(*parts, "", null_handling="emit_null")


def _values(table: str, column: EnvelopeColumn, texts: pa.StringArray) -> pa.StringArray:
    """Return JSON values, null where the text is."""
    if column.kind == "boolean":
        values = pc.if_else(pc.equal(texts, "t"), "true", "false")
        return _expect(column, values, pc.is_in(texts, pa.array(["t", "f", None])))
    if column.kind == "integer":
        try:
            # Cast and back, because a cast also accepts what is no integer in JSON (0x1F, 007).
            same = pc.equal(pc.cast(pc.cast(texts, pa.int64()), pa.string()), texts)
        except pa.ArrowInvalid:
            same = pa.array([False])
        return _expect(column, texts, same)
    return _joined('"', _escaped(table, column, texts), '"')


def _expect(column: EnvelopeColumn, values: pa.StringArray, fits: pa.BooleanArray) -> pa.StringArray:
    if pc.all(fits).as_py() is False:
        raise WireError(f"envelope: column {quoted(column.name)}: expected a JSON {column.kind}, got other text")
    return values


# RFC 8259, section 7: what a string must not hold unescaped. Everything else may stand, U+2028 too. The backslash comes
# first, since the other escapes add backslashes.
_ESCAPES = {character: json.dumps(character)[1:-1] for character in ("\\", '"', *map(chr, range(0x20)))}
_PLAIN_BYTES = bytes(byte for byte in range(256) if chr(byte) not in _ESCAPES)


def _escaped(table: str, column: EnvelopeColumn, texts: pa.StringArray) -> pa.StringArray:
    # Looking once at all bytes costs less than looking at each value, and mostly finds nothing.
    octets = _bytes(texts)
    found = octets.translate(None, _PLAIN_BYTES)
    if not found:
        return texts
    counts = {character: found.count(ord(character)) for character in _ESCAPES}
    size = len(octets) + sum(n * (len(_ESCAPES[character]) - 1) for character, n in counts.items())
    # Arrow does not look whether its 32-bit offsets reach that far.
    if size > MAX_OFFSET:
        raise UnrepresentableError(
            f"{table}, column {quoted(column.name)}: with {len(found):,} characters escaped, values of a batch are "
            f"{size:,} bytes of JSON, {_TOO_LONG}",
            remedy=_WITHOUT_JSON,
        )
    for character, escape in _ESCAPES.items():
        if counts[character]:
            texts = pc.replace_substring(texts, character, escape)
    return texts


def _bytes(texts: pa.StringArray) -> bytes:
    """Return all bytes of the values of a string array, and no others."""
    _, offsets, data = texts.buffers()
    if data is None or not len(texts):
        return b""
    ends = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    return bytes(data[int(ends[0]) : int(ends[-1])])


# --- read ------------------------------------------------------------------------------------------------------------


class _NoValue:
    """Stands for a JSON value that no column can have."""


class _Absent:
    """Stands for a value that an object lacks."""


_ABSENT = _Absent()


def _no_value(_: str) -> _NoValue:
    return _NoValue()


# Integers are left to Python, whose integers have no bounds: every digit arrives.
_DECODER = json.JSONDecoder(parse_float=_no_value, parse_constant=_no_value)
_PYTHON_TYPE = {"boolean": bool, "integer": int, "string": str}


def columns_from_json(
    objects: pa.StringArray, columns: Sequence[EnvelopeColumn]
) -> list[tuple[pa.StringArray, pa.BooleanArray]]:
    """Return the texts of each column, and where it was present. A null object lacks every column.

    Raises WireError for what :func:`json_objects` does not write, SchemaChangedError for an object with columns or
    values of another layout.
    """
    names = frozenset(column.name for column in columns)
    rows: list[Mapping[str, Any]] = []
    for text in objects.to_pylist():
        row = {} if text is None else _parsed(text)
        if not row.keys() <= names:
            raise _other_columns(row.keys() - names)
        rows.append(row)
    return [_column(column, rows) for column in columns]


def _parsed(text: str) -> Mapping[str, Any]:
    try:
        row = _DECODER.decode(text)
    except (ValueError, RecursionError):
        raise WireError(f"envelope: expected a JSON object, got {len(text)} other characters") from None
    if not isinstance(row, dict):
        raise WireError("envelope: expected a JSON object, got another JSON value")
    return row


def _column(column: EnvelopeColumn, rows: Sequence[Mapping[str, Any]]) -> tuple[pa.StringArray, pa.BooleanArray]:
    values = list(map(dict.get, rows, repeat(column.name), repeat(_ABSENT)))  # type: ignore[arg-type]
    # A look at the few types of a column replaces one at each value. They are compared exactly, since True is an int.
    kinds = set(map(type, values))
    if not kinds <= {_PYTHON_TYPE[column.kind], type(None), _Absent}:
        raise _other_value(column)
    present = np.ones(len(values), np.bool_)
    if _Absent in kinds:
        present = np.fromiter((value is not _ABSENT for value in values), np.bool_, len(values))
        values = [None if value is _ABSENT else value for value in values]
    try:
        if column.kind == "boolean":
            texts = pc.if_else(pa.array(values, pa.bool_()), "t", "f")
        elif column.kind == "integer":
            texts = pa.array(values, pa.int64()).cast(pa.string())
        else:
            texts = pa.array(values, pa.string())
    except (UnicodeEncodeError, OverflowError):
        # Half a surrogate pair, or more than 64 bits.
        raise _other_value(column) from None
    return texts, pa.array(present)


# What a reader of the envelope that has planned one layout does about rows of another.
OTHER_TYPE = (
    "the column was of another type when the row was written: start again, so that the table is looked at anew; rows "
    "from before the type was changed are to be read with Spark's from_json()"
)


def _other_value(column: EnvelopeColumn) -> SchemaChangedError:
    name = quoted(column.name)
    return SchemaChangedError(
        f"envelope: column {name}: expected a JSON {column.kind} or null, got another value", remedy=OTHER_TYPE
    )


def _other_columns(names: set[str]) -> SchemaChangedError:
    shown = ", ".join(sorted(map(quoted, names)))
    return SchemaChangedError(
        f"the table has no column {shown}, which rows of the stream have",
        remedy="for a column that was added since, start again, so that the table is looked at anew; rows from before "
        "a column was dropped or renamed are to be read with Spark's from_json()",
    )
