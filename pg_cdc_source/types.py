"""One table of PostgreSQL's types: how each is selected, which Arrow type it becomes, and who decodes it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pg_cdc_source.arrays import Array
from pg_cdc_source.binary import Boolean, Decoded, Decoder, Field, Fixed, Jsonb, Moment, Number, Octets, Text, Uuid
from pg_cdc_source.numeric import Decimal, TextAsDouble
from pg_cdc_source.options import NumericAs
from pg_cdc_source.text import (
    PrintedArray,
    PrintedBoolean,
    PrintedDecimal,
    PrintedDouble,
    PrintedFloat,
    PrintedInteger,
    PrintedMoment,
    PrintedOctets,
    PrintedUuid,
)

_MAX_DECIMAL_PRECISION = 38
_MICROSECONDS_PER_DAY = 86_400_000_000


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a relation or query, as the catalog describes it."""

    name: str
    attnum: int
    type_oid: int  # of a domain's base type
    typmod: int  # -1: none
    type_name: str  # format_type()'s text, for messages
    not_null: bool


@dataclass(frozen=True, slots=True)
class PgType:
    """One type of PostgreSQL and how Spark gets it; decoders None: the type modifier decides."""

    name: str
    oid: int
    array_oid: int
    decoder: Decoder | None  # of the binary format
    text_decoder: Decoder | None


def _number(wire: str, memory: str, arrow: pa.DataType) -> Number:
    return Number(arrow, np.dtype(wire), np.dtype(memory))


def _integer(arrow: pa.DataType) -> PrintedInteger:
    return PrintedInteger(arrow, range=arrow)


_TEXT = Text()
_DATE = Moment(pa.date32(), np.dtype(">i4"), np.dtype("i4"), units_per_day=1)
_TIMESTAMP = Moment(pa.timestamp("us"), np.dtype(">i8"), np.dtype("i8"), _MICROSECONDS_PER_DAY)
_TIMESTAMPTZ = Moment(pa.timestamp("us", tz="UTC"), np.dtype(">i8"), np.dtype("i8"), _MICROSECONDS_PER_DAY)

# Object identifiers are those of catalog/pg_type.dat, which never change.
TYPES = (
    PgType("bool", 16, 1000, Boolean(), PrintedBoolean()),
    PgType("bytea", 17, 1001, Octets(), PrintedOctets()),
    PgType("name", 19, 1003, _TEXT, _TEXT),
    PgType("int8", 20, 1016, _number(">i8", "i8", pa.int64()), _integer(pa.int64())),
    PgType("int2", 21, 1005, _number(">i2", "i2", pa.int16()), _integer(pa.int16())),
    PgType("int4", 23, 1007, _number(">i4", "i4", pa.int32()), _integer(pa.int32())),
    PgType("text", 25, 1009, _TEXT, _TEXT),
    PgType("oid", 26, 1028, _number(">u4", "i8", pa.int64()), PrintedInteger(pa.int64(), range=pa.uint32())),
    PgType("json", 114, 199, _TEXT, _TEXT),
    PgType("float4", 700, 1021, _number(">i4", "i4", pa.float32()), PrintedFloat(pa.float32())),
    PgType("float8", 701, 1022, _number(">i8", "i8", pa.float64()), PrintedFloat(pa.float64())),
    PgType("bpchar", 1042, 1014, _TEXT, _TEXT),
    PgType("varchar", 1043, 1015, _TEXT, _TEXT),
    PgType("date", 1082, 1182, _DATE, PrintedMoment(_DATE.arrow)),
    PgType("timestamp", 1114, 1115, _TIMESTAMP, PrintedMoment(_TIMESTAMP.arrow)),
    PgType("timestamptz", 1184, 1185, _TIMESTAMPTZ, PrintedMoment(_TIMESTAMPTZ.arrow)),
    PgType("numeric", 1700, 1231, None, None),
    PgType("uuid", 2950, 2951, Uuid(), PrintedUuid()),
    PgType("jsonb", 3802, 3807, Jsonb(), _TEXT),
)
_SCALARS = {pg_type.oid: pg_type for pg_type in TYPES}
_ARRAYS = {pg_type.array_oid: pg_type for pg_type in TYPES}
_TEXT_OID = 25

# For these, ``::text`` calls a function that prints otherwise than the type's own output function does ('true' for 't',
# '10.0.0.1/32' for '10.0.0.1'), and which psql and the stream do not use. A cast to name goes through the output
# function; name holds 63 bytes, and these texts are shorter.
_CAST_TO_PRINT = {16: "name", 869: "name"}  # bool, inet


@dataclass(frozen=True, slots=True)
class Codec:
    """How one column is selected and decoded."""

    column: Column
    decoder: Decoder
    select_sql_cast: str | None  # None: the column as it is
    text_decoder: Decoder  # of what the type's output function prints, without the cast

    @property
    def arrow_type(self) -> pa.DataType:
        return self.decoder.arrow

    @property
    def width(self) -> int | None:
        """Bytes of every value on the wire, where they are the same."""
        return self.decoder.wire.itemsize if isinstance(self.decoder, Fixed) else None

    def decode(self, values: Field) -> Decoded:
        """Decode at least one value; raises :class:`~pg_cdc_source.binary.MalformedError`."""
        return self.decoder.read(values)

    def decode_text(self, values: Field) -> Decoded:
        """Decode at least one value from text, to what :meth:`decode` gives of the binary format; raises the same."""
        return self.text_decoder.read(values)


def plan(column: Column, *, as_string: bool, numeric_as: NumericAs) -> Codec:
    """Choose how ``column`` is read; a type without a row in the table comes as PostgreSQL prints it."""
    array_of = _ARRAYS.get(column.type_oid)
    pg_type = array_of or _SCALARS.get(column.type_oid)
    if pg_type is None or as_string:
        # Text comes as it is in any case, and bpchar's padding would not survive a cast.
        as_it_is = pg_type is not None and array_of is None and pg_type.decoder is _TEXT
        return Codec(column, _TEXT, None if as_it_is else _CAST_TO_PRINT.get(column.type_oid, "text"), _TEXT)
    decoder, text_decoder, element_oid, cast = pg_type.decoder, pg_type.text_decoder, pg_type.oid, None
    if decoder is None or text_decoder is None:
        decoder, text_decoder, cast = _numeric(column.typmod, numeric_as)
        element_oid = pg_type.oid if cast is None else _TEXT_OID
    if array_of is None:
        return Codec(column, decoder, cast, text_decoder)
    return Codec(column, Array(decoder, element_oid), None if cast is None else f"{cast}[]", PrintedArray(text_decoder))


def _numeric(typmod: int, numeric_as: NumericAs) -> tuple[Decoder, Decoder, str | None]:
    """Return numeric's decoders of both formats, and the cast that the binary one needs."""
    arrow = _declared_decimal(typmod)
    if arrow is None and numeric_as.kind == "decimal":
        arrow = pa.decimal128(numeric_as.precision, numeric_as.scale)
    if arrow is not None:
        return Decimal(arrow), PrintedDecimal(arrow), None
    if numeric_as.kind == "double":
        return TextAsDouble(), PrintedDouble(), "text"
    return _TEXT, _TEXT, "text"


def _declared_decimal(typmod: int) -> pa.Decimal128Type | None:
    """Return the DECIMAL that holds all of ``numeric(p, s)``, where there is one."""
    if typmod < 0:
        return None
    # numeric.c: make_numeric_typmod. The scale is a signed number of 11 bits (before 15: never negative).
    packed = typmod - 4
    precision, scale = packed >> 16 & 0xFFFF, ((packed & 0x7FF) ^ 1024) - 1024
    if scale < 0:
        precision, scale = precision - scale, 0
    precision = max(precision, scale)
    return pa.decimal128(precision, scale) if precision <= _MAX_DECIMAL_PRECISION else None
