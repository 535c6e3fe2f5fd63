"""The table of types: what each column is selected as, and which Arrow and Spark type it becomes."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pyarrow as pa
import pytest
from columns import OIDS, STRING, codec, decode, typmod
from pyspark.sql import types as spark
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema

from pg_cdc_source.values.arrays import Array, PrintedArray
from pg_cdc_source.values.registry import TYPES, CatalogType, Column, plan

pytestmark = pytest.mark.usefixtures("accelerated")


@pytest.mark.parametrize("name", list(OIDS))
def test_as_string_reads_what_postgresql_prints(name: str) -> None:
    # bpchar::text strips the padding; what is text already needs no cast.
    as_it_is = {"name", "text", "json", "bpchar", "varchar", "citext"}
    how = codec(name, as_string=True)
    assert how.select_sql == ("{0}" if name in as_it_is else "{0}::pg_catalog.text")
    assert decode(how, "é".encode(), None) == ["é", None]
    elements = codec(name, array=True, as_string=True)
    assert (elements.arrow_type, elements.select_sql) == (pa.string(), "{0}::pg_catalog.text")


PRINTED = "CASE WHEN pg_catalog.num_nulls({0}) OPERATOR(pg_catalog.=) 0 THEN pg_catalog.concat({0}) END"


@pytest.mark.parametrize("oid", [1186, 869, 650, 99_999])
def test_a_type_without_a_row_in_the_table_is_read_as_text(oid: int) -> None:
    for has_text_cast, select in ((False, "{0}::pg_catalog.text"), (True, PRINTED)):
        found = CatalogType(oid, has_text_cast=has_text_cast)
        how = plan(Column("c", 1, found, "whatever", False), as_string=False, numeric_as=STRING)
        assert (how.arrow_type, how.select_sql, how.width) == (pa.string(), select, None)
        of_it = CatalogType(99_998, element=found, element_oid=oid)
        how = plan(Column("c", 1, of_it, "whatever[]", False), as_string=False, numeric_as=STRING)
        assert (how.arrow_type.value_type, how.select_sql) == (pa.string(), "{0}::pg_catalog.text")
        assert decode(how, b'{a,NULL,"{b}"}', b"{}", None) == [["a", None, "{b}"], [], None]


def test_a_cast_of_users_does_not_print() -> None:
    """A type that has a row of its own, but another cast to text."""
    how = plan(Column("c", 1, CatalogType(16, has_text_cast=True), "bool", False), as_string=True, numeric_as=STRING)
    assert how.select_sql == PRINTED


@pytest.mark.parametrize("name", ["hstore", "vector", "halfvec", "geometry", "geography", "citext"])
def test_only_an_extensions_own_types_are_read_as_its_types(name: str) -> None:
    for found in (CatalogType(OIDS[name], -1, name), CatalogType(OIDS[name], -1, name, "other")):
        how = plan(Column("c", 1, found, name, False), as_string=False, numeric_as=STRING)
        assert (how.arrow_type, how.select_sql) == (pa.string(), "{0}::pg_catalog.text")


def test_the_table_names_each_type_once() -> None:
    assert len({(pg_type.extension, pg_type.name) for pg_type in TYPES}) == len(TYPES)
    assert len({pg_type.oid for pg_type in TYPES}) == 1 + sum(pg_type.oid > 0 for pg_type in TYPES)


SPARK_TYPES: dict[str, spark.DataType] = {
    "bool": spark.BooleanType(),
    "bytea": spark.BinaryType(),
    "name": spark.StringType(),
    "int8": spark.LongType(),
    "int2": spark.ShortType(),
    "int4": spark.IntegerType(),
    "text": spark.StringType(),
    "oid": spark.LongType(),
    "json": spark.StringType(),
    "float4": spark.FloatType(),
    "float8": spark.DoubleType(),
    "bpchar": spark.StringType(),
    "varchar": spark.StringType(),
    "date": spark.DateType(),
    "timestamp": spark.TimestampNTZType(),
    "timestamptz": spark.TimestampType(),
    "numeric": spark.DecimalType(12, 2),
    "uuid": spark.StringType(),
    "jsonb": spark.StringType(),
    "time": spark.StringType(),
    "timetz": spark.StringType(),
    "interval": spark.StringType(),
    "bit": spark.StringType(),
    "citext": spark.StringType(),
    "hstore": spark.MapType(spark.StringType(), spark.StringType()),
    "vector": spark.ArrayType(spark.FloatType()),
    "halfvec": spark.ArrayType(spark.FloatType()),
    "geometry": spark.BinaryType(),
    "geography": spark.BinaryType(),
}


@pytest.mark.parametrize("name", list(OIDS))
def test_arrow_types_are_those_of_spark(name: str) -> None:
    expected = spark.StructType(
        [spark.StructField("c", SPARK_TYPES[name]), spark.StructField("l", spark.ArrayType(SPARK_TYPES[name]))]
    )
    # 4.2 replaced timestamp_utc=True, the default, by a time zone that has none.
    zone: dict[str, Any] = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
    modifier = typmod(12, 2) if name == "numeric" else -1
    scalar, elements = codec(name, modifier), codec(name, modifier, array=True)
    assert pa.schema([("c", scalar.arrow_type), ("l", elements.arrow_type)]) == to_arrow_schema(expected, **zone)
    for how, field in ((scalar, expected["c"]), (elements, expected["l"])):
        assert from_arrow_type(how.arrow_type, prefer_timestamp_ntz=True) == field.dataType


@pytest.mark.parametrize("name", list(OIDS))
def test_columns_and_codecs_survive_pickling(name: str) -> None:
    for how in (codec(name), codec(name, array=True), codec(name, typmod(9, 3))):
        assert pickle.loads(pickle.dumps(how)) == how  # noqa: S301 - made here
        assert isinstance(how.decoder, Array | PrintedArray) == how.column.type_name.endswith("[]")
