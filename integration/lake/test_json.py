"""``json`` and ``jsonb`` as VARIANT, in the formats that have it."""

from __future__ import annotations

import json
from operator import itemgetter
from typing import Any

import pytest
from driving import run
from lake import Begin, CatalogLake, Lake
from psycopg2.extensions import connection as Session
from pyspark.sql import Row
from watch import wait_until

from pg_cdc_source.lake.shape import Shapes
from pg_cdc_source.mirrors.catalog_tables import refresh

U = ("CREATE TABLE u (id int PRIMARY KEY, v text)", "INSERT INTO u VALUES (1, 'x')")
LARGE = "(SELECT jsonb_object_agg(md5(i::text), i / 8.0) FROM generate_series(1, 200) AS i)"


def values(lake: Lake, table: str) -> list[tuple[Any, ...]]:
    """What the VARIANT columns ``a`` and ``b`` say, in the order of ``id``."""
    found = selected(lake, table, "id", "n", "to_json(a) AS a", "to_json(b) AS b")
    rows = [(*row[:2], *(None if text is None else json.loads(text) for text in row[2:])) for row in found]
    return sorted(rows, key=itemgetter(0))


def selected(lake: Lake, table: str, *what: str) -> list[Row]:
    assert isinstance(lake, CatalogLake)
    name = f"{lake._namespace}.{table}"
    refresh(lake._spark, name, lake._lake._kind.provider)
    return lake._spark.table(name).selectExpr(*what).collect()


def wanted(pg: Session) -> list[tuple[Any, ...]]:
    rows = run(pg, "SELECT id, n, a::text, b::text FROM t ORDER BY id")
    return [(*row[:2], *(None if text is None else json.loads(text) for text in row[2:])) for row in rows]


@pytest.fixture(scope="module")
def lake_conf(lake_conf: dict[str, str]) -> dict[str, str]:
    # Without compiled plans Spark 4.0 cannot read a VARIANT from a table with deletion vectors.
    return {**lake_conf, "spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}


@pytest.mark.corner
@pytest.mark.parametrize("deletes", ["hard", "soft"])
def test_json_is_variant(deletes: str, pg: Session, begin: Begin, format: str) -> None:
    if format == "deltalake":
        pytest.skip("it has no VARIANT")
    if (format, deletes) == ("delta", "soft"):
        pytest.skip("what is kept of deleted rows is told apart before any format comes into it")
    lake = begin(*U, json_as="variant", deletes=deletes)
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, n int, a json, b jsonb)", "ALTER TABLE t ALTER b SET STORAGE EXTERNAL",
        """INSERT INTO t VALUES (1, 0, '{"z": 1, "y": [1.10, null]}', '"text"'), (2, 0, 'null', NULL)""",
        f"INSERT INTO t SELECT 3, 0, NULL, {LARGE}", "ALTER PUBLICATION s ADD TABLE t")  # fmt: skip

    def is_same() -> bool:
        lake.step()
        last = lake.ledger.last()
        assert last is not None
        assert last.set_aside == {}
        return "public.t" in last.tables and values(lake, "t") == wanted(pg)

    wait_until(is_same)
    # Values that did not travel: under the same key, and under another one.
    run(pg, "UPDATE t SET n = 1", """INSERT INTO t VALUES (4, 1, '[]', '{"a": 12345678901234567890123456789}')""")
    wait_until(is_same)
    if deletes == "hard":
        run(pg, "UPDATE t SET id = 30 WHERE id = 3", "DELETE FROM t WHERE id = 2")
        wait_until(is_same)
    run(pg, """ALTER TABLE t ADD c jsonb DEFAULT '{"c": 1}'""", "UPDATE t SET b = '[7]' WHERE id = 1")
    wait_until(is_same)
    assert {row.c for row in selected(lake, "t", "to_json(c) AS c")} == {'{"c":1}'}
    # What VARIANT does not hold does not become another value.
    run(pg, """INSERT INTO t VALUES (5, 5, '{"a": 1, "a": 2}', NULL)""", "INSERT INTO u VALUES (2, 'y')")
    wait_until(lambda: lake.step() is not None and "JSON with a duplicate key" in str(lake.ledger.last()))
    last = lake.ledger.last()
    assert last is not None
    assert "column a (json)" in last.set_aside["public.t"]
    lake.begin_as(Shapes.of("merge", deletes, format))
    run(pg, "INSERT INTO u VALUES (3, 'z')")
    wait_until(lambda: lake.step() is not None and "JSON as variant, and cannot go on with" in str(lake.ledger.last()))
