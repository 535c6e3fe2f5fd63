"""Values are the same whether they come with the snapshot, as changes, as old values, or through the envelope."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from databases import connect
from frames import load
from psycopg2 import sql
from psycopg2.extensions import connection as Session
from psycopg2.extensions import make_dsn, parse_dsn
from pyspark.sql import SparkSession
from streamed_values import Rows, assert_same_values, old_values, one_array, streaming
from type_edges import PRINTED, make_types, printed_array
from type_values import VALUES, array_of, literal, literals
from watch import session_names, wait_until

from pg_cdc_source import project
from pg_cdc_source.protocol.layout import BEFORE

ROWS = 120
# What is added to the id of a row that is inserted again.
AGAIN = 1_000_000

# --- what is written ------------------------------------------------------------------------------------------------


def printed(name: str) -> tuple[str, list[str]]:
    texts = PRINTED[name]
    return f"{literals(texts)}[1 + floor(random() * {len(texts)})::int]", texts


def finite(declared: str, random: str, edges: list[str]) -> tuple[str, str, list[str]]:
    """Numerics without infinities, which came with PostgreSQL 14."""
    random, *edges = (text.replace("-Infinity", "NaN").replace("Infinity", "NaN") for text in (random, *edges))
    return declared, random, edges


def fill(pg: Session, kinds: Sequence[str]) -> list[str]:
    """Make the table ``t``: for each kind a column and one of its arrays, literals first; give their names."""
    columns = [
        (kind + suffix, *(array_of(kind) if suffix else VALUES[kind])) for kind in kinds for suffix in ("", "[]")
    ]
    if list(kinds) == list(VALUES):
        with pg.cursor() as cursor:
            there = make_types(cursor)
            cursor.execute("CREATE DOMAIN price AS numeric(12,2)")
        columns += [(name, *printed(name)) for name in there]
        # All of them are read in test_value_edges; these are printed in ways of their own.
        arrays = ("mood", "cast_mood", "pair", "d_pair", "flags", "inet", "box", "interval", "int4range")
        columns += [(f"{name}[]", literal(printed_array(name)), []) for name in arrays]
        columns += [("int4[][]", "'{{1,2},{3,4}}'", [])]
        columns += [("price", *VALUES["numeric(12,2)"]), ("price[]", *array_of("numeric(12,2)"))]
        columns += [("text", "(SELECT string_agg(md5(({g} + i)::text), '') FROM generate_series(1, 100) AS i)", [])]
    if pg.server_version < 140000:
        columns = [column if "numeric" not in column[0] else finite(*column) for column in columns]
    selected = [
        f"CASE WHEN g <= {len(edges)} THEN {literals(edges)}[g]::{declared}"
        f" WHEN g % 13 > 0 THEN ({random.replace('{g}', 'g')})::{declared} END"
        for declared, random, edges in columns
    ]
    names = [f"c{i}" for i in range(len(columns))]
    with pg.cursor() as cursor:
        cursor.execute("SELECT setseed(0.42)")
        cursor.execute(
            "CREATE TABLE t (id int PRIMARY KEY, version int, "
            + ", ".join(f"{name} {declared}" for name, (declared, _, _) in zip(names, columns, strict=True))
            + ")"
        )
        # So that the longest values are TOASTed, which compressing would spare.
        cursor.execute(f"ALTER TABLE t ALTER COLUMN {names[-1]} SET STORAGE EXTERNAL")
        cursor.execute(f"INSERT INTO t SELECT g, 0, {', '.join(selected)} FROM generate_series(1, {ROWS}) AS g")
    return names


# --- what is read ---------------------------------------------------------------------------------------------------


# --- snapshot and stream --------------------------------------------------------------------------------------------

NUMERICS = [kind for kind in VALUES if kind.startswith("numeric")]
CASES: dict[str, tuple[Sequence[str], dict[str, str]]] = {
    "as they are": (list(VALUES), {"unrepresentable": "null"}),
    "asString": (list(VALUES), {"asString": "all"}),
    "double": (NUMERICS, {"unrepresentable": "null", "numericAs": "double"}),
    "decimal": (NUMERICS, {"unrepresentable": "null", "numericAs": "decimal(38,9)"}),
}


@pytest.mark.matrix("every type, alike in snapshot and stream")
@pytest.mark.parametrize("case", CASES)
def test_snapshot_and_stream_give_identical_values(
    case: str, db: str, pg: Session, spark: SparkSession, tmp_path: Path
) -> None:
    kinds, options = CASES[case]
    names = fill(pg, kinds)
    if options.get("asString"):
        options = {**options, "asString": ",".join(names)}
    rows = Rows()
    with streaming(spark, pg, tmp_path, rows, url=db, dbtable="t", **options) as wait:
        wait("snapshot", ROWS)
        with pg.cursor() as cursor:
            cursor.execute(f"INSERT INTO t SELECT id + {AGAIN}, version, {', '.join(names)} FROM t")
        wait("insert", ROWS)
    snapshot, inserts = rows.of("snapshot"), rows.of("insert")
    assert pc.subtract(inserts["id"], AGAIN).to_pylist() == snapshot["id"].to_pylist() == list(range(1, ROWS + 1))
    read = load(spark, db, dbtable="t", where=f"id < {AGAIN}", **options).toArrow().sort_by("id")
    assert_same_values(snapshot, read, names)
    assert_same_values(inserts, snapshot, names)
    # All NULL would be identical as well. So it is with int4[][] only, which Spark does not have.
    assert sum(snapshot[name].null_count > 0.95 * ROWS for name in names) == (case == "as they are")
    assert inserts["_unchanged"].to_pylist() == [[]] * ROWS


@pytest.mark.corner
def test_the_envelope_gives_what_the_typed_rows_have(db: str, pg: Session, spark: SparkSession, tmp_path: Path) -> None:
    names = fill(pg, list(VALUES))
    with pg.cursor() as cursor:
        cursor.execute("ALTER TABLE t REPLICA IDENTITY FULL")
    ways: list[dict[str, Any]] = [
        {"unrepresentable": "null"},
        {"asString": ",".join(names)},
    ]

    def projected(way: dict[str, Any]) -> Rows:
        return Rows(lambda batch: project(batch, "t", url=db, beforeImage=True, **way))

    sinks = [projected(way) for way in ways]
    with streaming(spark, pg, tmp_path, sinks, url=db, tables="public.t") as wait:
        wait("snapshot", ROWS)
        wanted = [load(spark, db, dbtable="t", **way).toArrow().sort_by("id") for way in ways]
        with pg.cursor() as cursor:
            cursor.execute(f"INSERT INTO t SELECT id + {AGAIN}, version, {', '.join(names)} FROM t")
            cursor.execute(f"UPDATE t SET version = 1 WHERE id < {AGAIN}")
            cursor.execute(f"DELETE FROM t WHERE id < {AGAIN}")
        wait("delete", ROWS)
    for rows, values in zip(sinks, wanted, strict=True):
        for kind in ("snapshot", "insert", "update", "delete"):
            assert_same_values(rows.of(kind), values, names)
        for kind in ("update", "delete"):
            assert_same_values(old_values(rows.of(kind)), values, names)
        assert rows.of("update")["_unchanged"].to_pylist() == [[]] * ROWS


def test_old_values_are_those_that_rows_had(db: str, pg: Session, spark: SparkSession, tmp_path: Path) -> None:
    names = fill(pg, list(VALUES))
    every = ", ".join(names)
    rows = Rows()
    options = {"unrepresentable": "null", "beforeImage": "true"}
    with pg.cursor() as cursor:
        cursor.execute("ALTER TABLE t REPLICA IDENTITY FULL")
        with streaming(spark, pg, tmp_path, rows, url=db, dbtable="t", **options) as wait:
            wait("snapshot", ROWS)
            # TOASTed values of a row whose other columns change do not travel.
            cursor.execute("UPDATE t SET version = 1")
            # Each row gets the values of another one, which stays what it was.
            cursor.execute(
                f"UPDATE t SET (version, {every}) = (SELECT 2, {every.replace('c', 'o.c')} FROM t AS o"
                f" WHERE o.id = {ROWS} + 1 - t.id)"
            )
            cursor.execute(f"UPDATE t SET id = id + {AGAIN}")
            cursor.execute("DELETE FROM t")
            wait("delete", 2 * ROWS)
    snapshot = rows.of("snapshot")
    mirrored = snapshot.take(list(range(ROWS))[::-1])
    assert one_array(snapshot[BEFORE]).null_count == ROWS
    updates = rows.of("update", by="version")
    changed, swapped = (updates.filter(pc.equal(updates["version"], number)).sort_by("id") for number in (1, 2))
    assert_same_values(changed, snapshot, names)
    assert_same_values(old_values(changed), snapshot, ["id", "version", *names])
    assert_same_values(swapped, mirrored, names)
    assert_same_values(old_values(swapped), snapshot, ["id", *names])
    moved = rows.of("insert")
    assert_same_values(moved, mirrored, names)
    assert one_array(moved[BEFORE]).null_count == ROWS
    deleted = rows.of("delete")
    for half in (deleted.slice(0, ROWS), deleted.slice(ROWS)):
        assert_same_values(half, mirrored, names)
        assert_same_values(old_values(half), half, ["id", "version", *names])
    for table in (updates, moved, deleted):
        assert table["_unchanged"].to_pylist() == [[]] * len(table)


# --- keys -----------------------------------------------------------------------------------------------------------


def test_an_update_with_a_toasted_key_is_an_update(db: str, pg: Session, spark: SparkSession, tmp_path: Path) -> None:
    """PostgreSQL sends the old key with it, as it does when the key changes, and leaves it out of the new row."""
    rows = Rows()
    with pg.cursor() as cursor:
        cursor.execute("CREATE TABLE t (id int, k text, version int, big text, PRIMARY KEY (id, k))")
        cursor.execute("ALTER TABLE t ALTER k SET STORAGE EXTERNAL, ALTER big SET STORAGE EXTERNAL")
        with streaming(spark, pg, tmp_path, rows, url=db, dbtable="t", startFrom="now", beforeImage="true") as wait:
            # One that is being created is active as well, and begins later.
            wait_until(lambda: session_names(pg, "pgcdc:values:changes"))
            cursor.execute(
                "INSERT INTO t SELECT g, (SELECT string_agg(md5((g + i)::text), '') FROM generate_series(1, 70) AS i),"
                " 0, repeat('x', 5000) FROM generate_series(1, 3) AS g"
            )
            cursor.execute("SELECT k FROM t ORDER BY id")
            keys = [k for (k,) in cursor]
            cursor.execute("UPDATE t SET version = 1")
            cursor.execute("UPDATE t SET id = 10 WHERE id = 1")
            cursor.execute("UPDATE t SET k = 'short' WHERE id = 2")
            wait("delete", 2)
    big = "x" * 5000
    found = [
        (row["_change_type"], row["id"], row["k"], row["version"], row["big"], row["_unchanged"])
        for row in pa.concat_tables([rows.of(kind) for kind in ("insert", "update", "delete")]).to_pylist()
    ]
    assert found == [
        *(("insert", i + 1, key, 0, big, []) for i, key in enumerate(keys[:2])),
        ("insert", 2, "short", 1, None, ["big"]),
        ("insert", 3, keys[2], 0, big, []),
        ("insert", 10, keys[0], 1, None, ["big"]),
        *(("update", i + 1, key, 1, None, ["big"]) for i, key in enumerate(keys)),
        *(("delete", i + 1, key, None, None, []) for i, key in enumerate(keys[:2])),
    ]
    assert [row[BEFORE]["k"] for row in rows.of("update").to_pylist()] == keys


@pytest.mark.corner
def test_partitions_that_send_whole_old_rows_update_under_their_roots_key(
    db: str, pg: Session, spark: SparkSession, tmp_path: Path
) -> None:
    rows = Rows()
    with pg.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE t (id int PRIMARY KEY, a text, big text STORAGE EXTERNAL) PARTITION BY RANGE (id);"
            " CREATE TABLE p PARTITION OF t FOR VALUES FROM (0) TO (100); ALTER TABLE p REPLICA IDENTITY FULL"
            if pg.server_version >= 160000
            else "CREATE TABLE t (id int PRIMARY KEY, a text, big text) PARTITION BY RANGE (id);"
            " CREATE TABLE p PARTITION OF t FOR VALUES FROM (0) TO (100); ALTER TABLE p REPLICA IDENTITY FULL;"
            " ALTER TABLE p ALTER big SET STORAGE EXTERNAL"
        )
        cursor.execute("INSERT INTO t VALUES (1, 'x', repeat('y', 5000))")
        with streaming(spark, pg, tmp_path, rows, url=db, dbtable="t") as wait:
            wait("snapshot", 1)
            cursor.execute("UPDATE t SET a = 'z'")
            cursor.execute("UPDATE t SET id = 2")
            wait("delete", 1)
    big = "y" * 5000
    found = [
        tuple(row[name] for name in ("_change_type", "id", "a", "big", "_unchanged"))
        for row in pa.concat_tables([rows.of(kind) for kind in ("update", "delete", "insert")]).to_pylist()
    ]
    assert found == [("update", 1, "z", big, []), ("delete", 1, "z", big, []), ("insert", 2, "z", big, [])]


# --- encodings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["LATIN1", "EUC_JP"])
def test_names_and_values_of_other_encodings_arrive(
    encoding: str, server: str, spark: SparkSession, tmp_path: Path
) -> None:
    name = f"pg_cdc_test_{secrets.token_hex(4)}"
    word = {"LATIN1": "größe", "EUC_JP": "日本語"}[encoding]
    rows = Rows()
    with connect(server) as session, session.cursor() as admin:
        admin.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE template0 ENCODING {} LC_COLLATE 'C' LC_CTYPE 'C'").format(
                sql.Identifier(name), sql.Literal(encoding)
            )
        )
        url = make_dsn(**{**parse_dsn(server), "dbname": name})
        try:
            with connect(url) as pg, pg.cursor() as cursor:
                pg.set_client_encoding("UTF8")
                cursor.execute(f'CREATE TABLE "{word}" (id int PRIMARY KEY, "{word}" text)')
                cursor.execute(f"INSERT INTO \"{word}\" VALUES (1, '{word}')")
                with streaming(spark, pg, tmp_path, rows, url=url, dbtable=f'"{word}"') as wait:
                    wait("snapshot", 1)
                    cursor.execute(f"INSERT INTO \"{word}\" VALUES (2, '{word}')")
                    wait("insert", 1)
        finally:
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
    assert rows.of("snapshot")[word].to_pylist() == rows.of("insert")[word].to_pylist() == [word]
