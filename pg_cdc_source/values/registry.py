"""One table of PostgreSQL's types: how each is selected, which Arrow type it becomes, and who decodes it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.values.arrays import Array, PrintedArray
from pg_cdc_source.values.decoder import Decoded, Decoder, Field, Fixed
from pg_cdc_source.values.hstore import PrintedHstore
from pg_cdc_source.values.moments import Moment, PrintedMoment
from pg_cdc_source.values.numbers import Boolean, Number, PrintedBoolean, PrintedFloat, PrintedInteger
from pg_cdc_source.values.numeric import Decimal, PrintedDecimal, PrintedDouble
from pg_cdc_source.values.pgvector import PrintedVector, Vector
from pg_cdc_source.values.strings import Jsonb, Octets, PrintedOctets, PrintedUuid, Text, Uuid

_MAX_DECIMAL_PRECISION = 38
_MICROSECONDS_PER_DAY = 86_400_000_000


@dataclass(frozen=True, slots=True)
class CatalogType:
    """A type with its modifier, as the catalog has it. For a domain, this is the type that it is over in the end."""

    oid: int
    typmod: int = -1  # -1: none
    name: str = ""  # pg_type.typname
    extension: str = ""  # the one that the type belongs to
    element: CatalogType | None = None  # of an array
    element_oid: int = 0  # as arrays have it on the wire; a domain has its own
    delimiter: str = ","  # between the elements of an array
    # Whether ::text calls another function than the type's output function, which psql and the stream use. The cast of
    # bool gives 'true' instead of 't', that of inet '10.0.0.1/32' instead of '10.0.0.1'.
    has_text_cast: bool = False


# A layout has few types, and astuple copies deeply.
@functools.lru_cache(maxsize=1024)
def plain_type(type: CatalogType) -> tuple[Any, ...]:
    """Return a type as JSON takes it."""
    return astuple(type)


def catalog_type(values: Sequence[Any]) -> CatalogType:
    """Read what :func:`plain_type` gives of a type, by way of JSON. Raises TypeError for other values."""
    oid, typmod, name, extension, element, *rest = values
    return CatalogType(oid, typmod, name, extension, None if element is None else catalog_type(element), *rest)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a relation or query, as the catalog describes it."""

    name: str
    attnum: int
    type: CatalogType
    type_name: str  # format_type()'s text, for messages
    not_null: bool

    @property
    def type_oid(self) -> int:
        return self.type.oid


@dataclass(frozen=True, slots=True)
class PgType:
    """One type of PostgreSQL, and how its values reach Spark.

    ``decoder`` None: the values are selected as text. ``text_decoder`` None: the type modifier decides which it is.
    """

    name: str
    oid: int  # 0: the type is an extension's and has another oid in every database
    decoder: Decoder | None  # of the binary format
    text_decoder: Decoder | None
    jdbc: str = ""  # what Spark's JDBC source does differently, and what is wrong with that
    extension: str = ""


def _number(wire: str, memory: str, arrow: pa.DataType) -> Number:
    return Number(arrow, np.dtype(wire), np.dtype(memory))


def _integer(arrow: pa.DataType) -> PrintedInteger:
    return PrintedInteger(arrow, range=arrow)


_TEXT = Text()
_DATE = Moment(pa.date32(), np.dtype(">i4"), np.dtype("i4"), units_per_day=1)
_TIMESTAMP = Moment(pa.timestamp("us"), np.dtype(">i8"), np.dtype("i8"), _MICROSECONDS_PER_DAY)
_TIMESTAMPTZ = Moment(pa.timestamp("us", tz="UTC"), np.dtype(">i8"), np.dtype("i8"), _MICROSECONDS_PER_DAY)
_VECTOR, _HALFVEC = Vector(np.dtype(">f4")), Vector(np.dtype(">f2"))
_GEOMETRY = PrintedOctets(prefix="", upper_case=True)

# The oids are those of catalog/pg_type.dat, which never change. A type that is not listed comes as STRING, as its
# output function prints it. So do a few that are listed only because the JDBC source differs.
TYPES = (
    PgType("bool", 16, Boolean(), PrintedBoolean()),
    PgType("bytea", 17, Octets(), PrintedOctets()),
    PgType("name", 19, _TEXT, _TEXT),
    PgType("int8", 20, _number(">i8", "i8", pa.int64()), _integer(pa.int64())),
    PgType("int2", 21, _number(">i2", "i2", pa.int16()), _integer(pa.int16())),
    PgType("int4", 23, _number(">i4", "i4", pa.int32()), _integer(pa.int32())),
    PgType("text", 25, _TEXT, _TEXT),
    PgType(
        "oid",
        26,
        _number(">u4", "i8", pa.int64()),
        PrintedInteger(pa.int64(), range=pa.uint32()),
        "DECIMAL(20,0), though BIGINT holds all",
    ),
    PgType("json", 114, _TEXT, _TEXT),
    PgType("float4", 700, _number(">i4", "i4", pa.float32()), PrintedFloat(pa.float32())),
    PgType("float8", 701, _number(">i8", "i8", pa.float64()), PrintedFloat(pa.float64())),
    PgType("bpchar", 1042, _TEXT, _TEXT),
    PgType("varchar", 1043, _TEXT, _TEXT),
    PgType("date", 1082, _DATE, PrintedMoment(_DATE.arrow)),
    PgType("time", 1083, None, _TEXT, "TIMESTAMP of 1970-01-01; 24:00 is the next day"),
    PgType("timestamp", 1114, _TIMESTAMP, PrintedMoment(_TIMESTAMP.arrow), "TIMESTAMP, an instant, which it is not"),
    PgType("timestamptz", 1184, _TIMESTAMPTZ, PrintedMoment(_TIMESTAMPTZ.arrow)),
    PgType("interval", 1186, None, _TEXT, "STRING in the style that the server is set to"),
    PgType("timetz", 1266, None, _TEXT, "TIMESTAMP of about 1970-01-01; loses the offset"),
    PgType("bit", 1560, None, None, "BINARY of the characters 0 and 1"),
    PgType("numeric", 1700, None, None, "DECIMAL of 38 digits; rounds, or fails"),
    PgType("uuid", 2950, Uuid(), PrintedUuid()),
    PgType("jsonb", 3802, Jsonb(), _TEXT),
    PgType("citext", 0, _TEXT, _TEXT, extension="citext"),
    PgType("hstore", 0, None, PrintedHstore(), "STRING to be taken apart", extension="hstore"),
    PgType("vector", 0, _VECTOR, PrintedVector(), "STRING to be taken apart", extension="vector"),
    PgType("halfvec", 0, _HALFVEC, PrintedVector(), "STRING to be taken apart", extension="vector"),
    PgType("geometry", 0, Octets(), _GEOMETRY, "STRING of hex digits", extension="postgis"),
    PgType("geography", 0, Octets(), _GEOMETRY, "STRING of hex digits", extension="postgis"),
)
_BUILT_IN = {pg_type.oid: pg_type for pg_type in TYPES if pg_type.oid}
_OF_EXTENSIONS = {(pg_type.extension, pg_type.name): pg_type for pg_type in TYPES if not pg_type.oid}
_BIT_OID, _NUMERIC_OID = 1560, 1700

_AS_IT_IS = "{0}"
# A search_path may have a type of that name before pg_catalog's.
_AS_TEXT = "{0}::pg_catalog.text"
# concat() calls the output function whatever casts there are, but makes an empty text of NULL; num_nulls(), unlike IS
# NULL, does not count a row of NULLs as NULL. This costs 0.1 µs more than a cast, and evaluates a view's expression
# twice.
_AS_PRINTED = "CASE WHEN pg_catalog.num_nulls({0}) OPERATOR(pg_catalog.=) 0 THEN pg_catalog.concat({0}) END"


@dataclass(frozen=True, slots=True)
class Codec:
    """How one column is selected and decoded."""

    column: Column
    decoder: Decoder  # of what COPY sends for ``select_sql``
    select_sql: str  # with {0} for the column's name
    text_decoder: Decoder  # of what the type's output function prints: for pgoutput and the envelope

    @property
    def arrow_type(self) -> pa.DataType:
        return self.decoder.arrow

    @property
    def width(self) -> int | None:
        """Return how many bytes every value has on the wire; None where that varies."""
        return self.decoder.wire.itemsize if isinstance(self.decoder, Fixed) else None

    def decode(self, values: Field) -> Decoded:
        """Decode at least one value from COPY. Raises :class:`~pg_cdc_source.values.decoder.MalformedError`."""
        return self.decoder.read(values)

    def decode_text(self, values: Field) -> Decoded:
        """Decode at least one value from text, to the same as :meth:`decode` from COPY. Raises the same."""
        return self.text_decoder.read(values)


def plan(column: Column, *, as_string: bool, numeric_as: NumericAs) -> Codec:
    """Choose how ``column`` is read: in binary if the table has a decoder for that, else as it is printed."""
    decoder, text_decoder = _decoders(column.type, numeric_as)
    if as_string:
        # Text is selected as it is: a cast would strip the padding of bpchar.
        decoder, text_decoder = decoder if decoder is _TEXT else None, _TEXT
    if decoder is not None:
        return Codec(column, decoder, _AS_IT_IS, text_decoder)
    return Codec(column, text_decoder, _AS_PRINTED if column.type.has_text_cast else _AS_TEXT, text_decoder)


def _decoders(found: CatalogType, numeric_as: NumericAs) -> tuple[Decoder | None, Decoder]:
    """Return the decoders of the binary format, None where it is not used, and of the text format."""
    if found.element is not None:
        decoder, text_decoder = _decoders(found.element, numeric_as)
        return decoder and Array(decoder, found.element_oid), PrintedArray(text_decoder, found.delimiter)
    if found.oid == _NUMERIC_OID:
        return _numeric(found.typmod, numeric_as)
    if found.oid == _BIT_OID:
        return None, PrintedBoolean("1", "0") if found.typmod == 1 else _TEXT
    pg_type = _BUILT_IN.get(found.oid) or _OF_EXTENSIONS.get((found.extension, found.name))
    return (None, _TEXT) if pg_type is None else (pg_type.decoder, pg_type.text_decoder or _TEXT)


def _numeric(typmod: int, numeric_as: NumericAs) -> tuple[Decoder | None, Decoder]:
    arrow = _declared_decimal(typmod)
    if arrow is None and numeric_as.kind == "decimal":
        arrow = pa.decimal128(numeric_as.precision, numeric_as.scale)
    if arrow is not None:
        return Decimal(arrow), PrintedDecimal(arrow)
    return None, PrintedDouble() if numeric_as.kind == "double" else _TEXT


def _declared_decimal(typmod: int) -> pa.Decimal128Type | None:
    """Return the DECIMAL that holds every value of ``numeric(p, s)``; None where there is none."""
    if typmod < 0:
        return None
    # numeric.c: make_numeric_typmod. The scale is a signed number of 11 bits (before 15: never negative).
    packed = typmod - 4
    precision, scale = packed >> 16 & 0xFFFF, ((packed & 0x7FF) ^ 1024) - 1024
    if scale < 0:
        precision, scale = precision - scale, 0
    precision = max(precision, scale)
    return pa.decimal128(precision, scale) if precision <= _MAX_DECIMAL_PRECISION else None
