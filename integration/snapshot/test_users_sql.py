"""Errors in the SQL of ``where``, ``query`` and ``dbtable`` say where they are, and what PostgreSQL's hint is."""

from __future__ import annotations

import pytest
from frames import load
from psycopg2.extensions import connection as Session
from pyspark.sql import SparkSession
from refusals import refusal

from pg_cdc_source.errors import PgCdcError
from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.snapshot.scan import make_plan


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"dbtable": "orders", "where": "amuont > 5"},
            ("QueryError", "at character 1 of the option where\n", 'hint: Perhaps you meant to reference the column'),
        ),
        (
            {"dbtable": "orders", "where": "id = 1 AND id = 'x'"},
            ("invalid input syntax", "at character 17 of the option where\n"),
        ),
        ({"dbtable": "orders", "where": "id = 1 AND"}, ("syntax error", "at character 11 of the option where\n")),
        ({"dbtable": "orders", "where": "id ="}, ("syntax error", "at character 5 of the option where\n")),
        # Ranges of partitions and children have the table's name only.
        (
            {"dbtable": "orders", "where": "public.orders.id = 1"},
            ("AccessError", "at character 1 of the option where\n", "with its name alone, without the schema"),
        ),
        (
            {"query": "\n  SELECT id,\n    lowr(note)\n  FROM orders"},
            ("at line 3, character 5 of the option query\n", "hint: No function matches"),
        ),
        ({"query": "SELECT größe, größer FROM orders"}, ("at character 15 of the option query\n",)),
        (
            {"dbtable": "(SELECT id FROM ordres) AS t"},
            ("AccessError", "at character 17 of the option dbtable\n", "check the name"),
        ),
        (
            {"dbtable": "(SELECT o.id, sum(amount) FROM orders AS o) AS t"},
            ("QueryError", "GROUP BY", "at character 9 of the option dbtable\n"),
        ),
        ({"query": "EXPLAIN SELECT id FROM orders"}, ("QueryError", "is one SELECT")),
        ({"query": "SELECT id FROM orders WHERE id = $1"}, ("QueryError", "at character 34 of the option query\n")),
        (
            {"query": "WITH gone AS (DELETE FROM orders RETURNING id) SELECT id FROM gone"},
            ("QueryError", "at character 6 of the option query\n"),
        ),
        ({"query": "SELECT id::integr FROM orders"}, ("DefiniteError", "at character 12 of the option query")),
    ],
)  # fmt: skip
def test_an_error_in_it_has_its_place_and_hint(
    options: dict[str, str], expected: tuple[str, ...], db: str, pg: Session
) -> None:
    pg.cursor().execute('CREATE TABLE orders (id int, amount numeric, note text, "größe" int)')
    with pytest.raises(PgCdcError, match="SQLSTATE") as caught:
        make_plan(parse_snapshot_options({"url": db, **options}))
    text = f"{type(caught.value).__name__}: {caught.value}"
    for part in expected:
        assert part in text


def test_a_hint_comes_along_when_rows_are_read(db: str, pg: Session, spark: SparkSession) -> None:
    pg.cursor().execute(
        "CREATE TABLE t AS SELECT 1 AS id;"
        "CREATE FUNCTION refuse(id int) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN"
        " RAISE 'not this one' USING HINT = 'take another', ERRCODE = 'data_exception'; END $$",
    )
    df = load(spark, db, dbtable="t", where="refuse(id)")
    refusal(df.collect, "QueryError", "not this one", "PostgreSQL's hint: take another")
