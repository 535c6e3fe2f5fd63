"""Spark's own JDBC source gives other types or values where the table of types says so, and nowhere else."""

from __future__ import annotations

import pytest
from frames import load
from jdbc import jdbc
from psycopg2.extensions import connection as Session
from pyspark.sql import SparkSession

from pg_cdc_source.values.registry import TYPES

# Values that tell the ways apart; elsewhere any value does.
VALUES = {
    **{"bool": "t", "bytea": "\\x00ff", "json": '{"a": 1}', "jsonb": '{"a": 1}', "uuid": "0" * 32, "bpchar": "a  "},
    **{"date": "2024-02-03", "time": "24:00", "timetz": "12:00+02", "interval": "1 mon 2 days"},
    **{"timestamp": "2024-02-03 04:05:06", "timestamptz": "2024-02-03 04:05:06+00", "numeric": "1.50", "bit": "1"},
    **{"hstore": "a=>1", "vector": "[1,2]", "halfvec": "[1,2]", "geometry": "POINT(1 2)", "geography": "POINT(1 2)"},
    # Not what TYPES says of the same types without a modifier.
    **{"numeric(12,2)": "1.50", "bit(1)": "1"},
}
DECLARED = {"bit": "bit(5)"}


@pytest.mark.debian
@pytest.mark.usefixtures("jdbc_driver")
def test_jdbc_differs_where_the_table_says_so(db: str, pg: Session, spark: SparkSession) -> None:
    with pg.cursor() as cursor:
        cursor.execute(
            "SELECT name FROM pg_available_extensions WHERE name IN ('hstore', 'citext', 'vector', 'postgis')"
        )
        there = {name for (name,) in cursor.fetchall()}
        assert {"hstore", "citext"} <= there
        for name in there:
            cursor.execute(f"CREATE EXTENSION {name}")
        said = {pg_type.name: pg_type.jdbc for pg_type in TYPES if not pg_type.extension or pg_type.extension in there}
        said |= {"numeric(12,2)": "", "bit(1)": ""}
        columns = ", ".join(f'"{name}" {DECLARED.get(name, name)}' for name in said)
        cursor.execute(f"CREATE TABLE t (id int, {columns})")
        values = [VALUES.get(name, "1").rjust(5, "0") if name == "bit" else VALUES.get(name, "1") for name in said]
        cursor.execute(f"INSERT INTO t VALUES (1, {', '.join(['%s'] * len(said))})", values)
    ours, theirs = load(spark, db, dbtable="t"), jdbc(spark, db, "t")
    (our_row,), (their_row,) = ours.collect(), theirs.collect()
    for name, remark in said.items():
        their_type = theirs.schema[name].dataType.simpleString().upper()
        same = ours.schema[name].dataType == theirs.schema[name].dataType and our_row[name] == their_row[name]
        assert same == (not remark), f"{name}: {their_type}, {their_row[name]!r}"
        assert same or remark.startswith(their_type.split("(")[0]), f"{name}: {their_type}"
