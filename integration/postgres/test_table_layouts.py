"""What the catalog says of a table: the columns' numbers, what old rows have in them, whether it was rewritten."""

from __future__ import annotations

import contextlib

import psycopg2
import pytest
from databases import connect
from driving import run
from psycopg2.extensions import connection as Session

from pg_cdc_source.options.names import QualifiedName
from pg_cdc_source.options.stream_options import Publications
from pg_cdc_source.postgres.catalog import find_relation
from pg_cdc_source.postgres.columns import read_typed_attributes
from pg_cdc_source.postgres.table_layouts import read_layouts, read_type_facts
from pg_cdc_source.protocol.table_layout import CatalogLayout

TABLE = "CREATE TABLE t (id int PRIMARY KEY, a text NOT NULL)", "INSERT INTO t VALUES (1, 'x')"


def layout(pg: Session, table: str = "t") -> CatalogLayout:
    ((oid,),) = run(pg, f"SELECT '{table}'::regclass::oid::bigint")
    return read_layouts(pg, Publications("p"), [oid])[oid]


def test_columns_keep_their_numbers(pg: Session) -> None:
    run(pg, *TABLE, "ALTER TABLE t ADD b int", "ALTER TABLE t DROP a", "ALTER TABLE t RENAME b TO c")
    found = layout(pg)
    assert [(c.attnum, c.name, c.nullable) for c in found.columns] == [(1, "id", False), (3, "c", True)]
    assert (found.identity, found.key, found.last) == ("d", ("id",), 3)
    assert read_layouts(pg, Publications("p"), [1]) == {}


def test_a_column_whose_old_rows_may_have_null_may_have_it(pg: Session) -> None:
    if pg.server_version < 180000:
        pytest.skip("PostgreSQL 18 has NOT NULL constraints that are not validated")
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, a int, b int)", "INSERT INTO t VALUES (1, NULL, 2)",
        "ALTER TABLE t ADD CONSTRAINT c NOT NULL a NOT VALID, ALTER b SET NOT NULL")  # fmt: skip

    def nullable() -> list[tuple[bool, ...]]:
        (typed,) = read_typed_attributes(pg, [find_relation(pg, QualifiedName.parse("public.t"))]).values()
        return [tuple(c.nullable for c in layout(pg).columns), tuple(not a.attribute.not_null for a in typed)]

    assert nullable() == [(False, True, False)] * 2
    run(pg, "UPDATE t SET a = 1", "ALTER TABLE t VALIDATE CONSTRAINT c")
    assert nullable() == [(False, False, False)] * 2


def test_a_snapshot_has_the_file_of_its_columns(pg: Session, db: str) -> None:
    """With the file of later on, a table that is rewritten behind the snapshot would count as not rewritten."""
    run(pg, *TABLE)
    before = layout(pg)
    with connect(db) as older:
        run(older, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", "SELECT 1")
        run(pg, "ALTER TABLE t ALTER a TYPE int USING length(a)")
        found = layout(older)
    assert found == before
    assert layout(pg).files != before.files


FILLS = {
    "int DEFAULT 7": "7",
    "text DEFAULT ''": "",
    "text DEFAULT 'NULL'": "NULL",
    r"""text DEFAULT E'a "quoted" \\ {braced}, text\n'""": 'a "quoted" \\ {braced}, text\n',
    "int[] DEFAULT '{1,NULL}'": "{1,NULL}",
    "text[] DEFAULT ARRAY['a b', '\"']": r'{"a b","\""}',
    "box DEFAULT '(1,2),(3,4)'": "(3,4),(1,2)",
    "timestamptz DEFAULT '2024-02-29 12:00+02'": "2024-02-29 10:00:00+00",
    "bytea DEFAULT '\\x00ff'": "\\x00ff",
    "numeric(8, 2) DEFAULT 1.5": "1.50",
    "bool DEFAULT true": "t",
    "jsonb DEFAULT '{\"a\": [1]}'": '{"a": [1]}',
    "timestamptz DEFAULT now()": None,  # the time of the statement
    "int": None,
    "int DEFAULT NULL": None,
}


@pytest.mark.parametrize("column", FILLS)
def test_what_old_rows_have_in_a_column_that_was_added(column: str, pg: Session) -> None:
    run(pg, *TABLE)
    before = layout(pg)
    run(pg, f"ALTER TABLE t ADD b {column}")
    found = layout(pg)
    if "now()" not in column:
        assert found.columns[-1].fill == FILLS[column]
    # format() prints as the stream does, a cast does not always.
    assert run(pg, "SELECT CASE WHEN b IS NOT NULL THEN format('%s', b) END FROM t") == [(found.columns[-1].fill,)]
    assert (found.files == before.files, found.altered == before.altered) == (True, False)
    # Another default for new rows says nothing of the old ones.
    run(pg, "ALTER TABLE t ALTER b DROP DEFAULT")
    assert layout(pg).columns[-1].fill == found.columns[-1].fill


@pytest.mark.parametrize(
    ("statement", "is_rewritten", "is_altered"),
    [
        ("ALTER TABLE t ADD b float8 DEFAULT random()", True, True),
        ("ALTER TABLE t ADD b int GENERATED ALWAYS AS (id * 2) STORED", True, True),
        ("ALTER TABLE t ADD b bigserial", True, True),
        ("ALTER TABLE t ALTER id TYPE bigint", True, True),
        ("ALTER TABLE t ALTER id TYPE int USING id * 2", True, True),
        ("ALTER TABLE t ALTER a TYPE varchar", False, True),
        ("ALTER TABLE t DROP a", False, True),
        ("ALTER TABLE t ALTER a SET DEFAULT 'y'", False, True),
        ("TRUNCATE t", True, False),
        ("VACUUM FULL t", True, False),
        ("ANALYZE t", False, False),
        ("CREATE INDEX ON t (a)", False, False),
    ],
)
def test_a_rewrite_by_ddl_is_told_from_others(
    statement: str, is_rewritten: bool, is_altered: bool, pg: Session
) -> None:
    run(pg, *TABLE)
    before = layout(pg)
    run(pg, statement)
    after = layout(pg)
    assert (after.files != before.files, after.altered != before.altered) == (is_rewritten, is_altered)


ADDED = "ALTER TABLE t ADD b int DEFAULT 5"


@pytest.mark.parametrize(
    ("before", "statement", "is_altered"),
    [
        ([ADDED], "VACUUM FULL t", False),
        ([ADDED], "CLUSTER t USING t_pkey", False),
        ([ADDED], "ALTER TABLE t ALTER b TYPE int USING b * 2", True),
        ([ADDED, "VACUUM FULL t"], "ALTER TABLE t ALTER b TYPE int USING b * 2", True),
        ([ADDED, "ALTER TABLE t ALTER b DROP DEFAULT"], "ALTER TABLE t ALTER b TYPE int USING b * 2", True),
        # Nothing in the catalog tells it from ALTER TYPE.
        ([ADDED, "ALTER TABLE t ALTER b DROP DEFAULT"], "VACUUM FULL t", True),
        (
            ["ALTER TABLE t ADD b int GENERATED ALWAYS AS (id * 2) STORED"],
            "ALTER TABLE t ALTER b SET EXPRESSION AS (id)",
            True,
        ),
    ],
)
def test_a_default_that_is_written_into_the_rows_is_no_ddl(
    before: list[str], statement: str, is_altered: bool, pg: Session
) -> None:
    if "SET EXPRESSION" in statement and pg.server_version < 170000:
        pytest.skip("SET EXPRESSION came with 17")
    run(pg, *TABLE, *before)
    known = layout(pg)
    run(pg, statement)
    after = layout(pg)
    assert (after.files != known.files, after.altered != known.altered) == (True, is_altered)


def test_partitions_know_what_old_rows_have(pg: Session) -> None:
    run(pg, "CREATE TABLE r (id int PRIMARY KEY, a text) PARTITION BY RANGE (id)",
        "CREATE TABLE r_1 PARTITION OF r DEFAULT", "INSERT INTO r VALUES (1, 'x')")  # fmt: skip
    before = layout(pg, "r")
    run(pg, "ALTER TABLE r ADD b int DEFAULT 5")
    found = layout(pg, "r")
    assert [c.fill for c in found.columns] == [None, None, "5"]
    assert found.files == before.files
    run(pg, "ALTER TABLE r ALTER b TYPE bigint")
    assert layout(pg, "r").files != before.files


def test_partitions_that_come_and_go_are_no_rewrite(pg: Session) -> None:
    run(pg, "CREATE TABLE r (id int PRIMARY KEY, a text) PARTITION BY RANGE (id)",
        "CREATE TABLE r_1 PARTITION OF r FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE r_2 PARTITION OF r FOR VALUES FROM (10) TO (20)")  # fmt: skip
    before = layout(pg, "r")
    run(pg, "CREATE TABLE r_3 PARTITION OF r FOR VALUES FROM (20) TO (30)", "DROP TABLE r_2",
        "ALTER TABLE r ADD b int DEFAULT 5")  # fmt: skip
    assert layout(pg, "r").files == before.files
    # What rows of before the column have in it is not the same in all of them.
    run(pg, "CREATE TABLE r_4 (LIKE r INCLUDING ALL)", "ALTER TABLE r_4 DROP b, ADD b int DEFAULT 10",
        "ALTER TABLE r ATTACH PARTITION r_4 FOR VALUES FROM (30) TO (40)")  # fmt: skip
    assert layout(pg, "r").files != before.files


def test_a_default_that_only_an_attached_partition_had_is_not_that_of_older_rows(pg: Session) -> None:
    run(pg, "CREATE TABLE r (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE r_1 PARTITION OF r FOR VALUES FROM (0) TO (10)", "INSERT INTO r VALUES (1)")  # fmt: skip
    before = layout(pg, "r")
    run(pg, "ALTER TABLE r ADD b int", "CREATE TABLE r_2 (id int PRIMARY KEY)", "ALTER TABLE r_2 ADD b int DEFAULT 10",
        "ALTER TABLE r ATTACH PARTITION r_2 FOR VALUES FROM (10) TO (20)")  # fmt: skip
    assert layout(pg, "r").files != before.files


def test_a_partition_that_is_created_with_a_column_has_no_older_rows(pg: Session) -> None:
    run(pg, "CREATE TABLE r (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE r_1 PARTITION OF r FOR VALUES FROM (0) TO (10)")  # fmt: skip
    before = layout(pg, "r")
    run(pg, "ALTER TABLE r ADD b int DEFAULT 5", "CREATE TABLE r_2 PARTITION OF r FOR VALUES FROM (10) TO (20)")
    assert layout(pg, "r").files == before.files
    run(pg, "DROP TABLE r_1")
    assert layout(pg, "r").files == before.files


def test_nobody_waits_for_ddl_that_goes_on(pg: Session, db: str) -> None:
    run(pg, "CREATE TABLE r (id int PRIMARY KEY) PARTITION BY RANGE (id)", "CREATE TABLE r_1 PARTITION OF r DEFAULT")
    with contextlib.closing(psycopg2.connect(db)) as other, other.cursor() as cursor:
        cursor.execute("ALTER TABLE r ADD b int")
        run(pg, "SET lock_timeout = '1s'")
        assert [c.name for c in layout(pg, "r").columns] == ["id"]


def test_what_a_publication_sends(pg: Session) -> None:
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id) STORED, a text, b text)")
    lists = pg.server_version >= 150000
    run(pg, "CREATE PUBLICATION p FOR TABLE t" + (" (id, b)" if lists else ""))
    assert [c.name for c in layout(pg).columns if c.published] == (["id", "b"] if lists else ["id", "a", "b"])
    if pg.server_version >= 180000:
        run(pg, "DROP PUBLICATION p", "CREATE PUBLICATION p FOR TABLE t WITH (publish_generated_columns = stored)")
        assert [c.name for c in layout(pg).columns if c.published] == ["id", "g", "a", "b"]


@pytest.mark.parametrize(
    ("identity", "key"), [("DEFAULT", ("id",)), ("FULL", ("id",)), ("USING INDEX t_a_key", ("a",)), ("NOTHING", ())]
)
def test_the_key_is_that_of_the_identity(identity: str, key: tuple[str, ...], pg: Session) -> None:
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, a text NOT NULL UNIQUE)", f"ALTER TABLE t REPLICA IDENTITY {identity}")
    assert layout(pg).key == key


def test_types_by_their_numbers(pg: Session) -> None:
    run(pg, "CREATE DOMAIN d AS int", "CREATE TABLE t (a d, b numeric(8, 2), c int[], e timestamptz, f bpchar)")
    raw = run(pg, "SELECT atttypid::bigint, atttypmod FROM pg_attribute WHERE attrelid = 't'::regclass AND attnum > 0"
                  " ORDER BY attnum")  # fmt: skip
    types = [(oid, typmod) for oid, typmod in raw]
    found = read_type_facts(pg, [*types, (4_000_000, -1)])
    assert [(found[key].name, found[key].spark) for key in types] == [
        ("d", "int"),
        ("numeric(8,2)", "decimal(8,2)"),
        ("integer[]", "array<int>"),
        ("timestamp with time zone", "timestamp"),
        # Not "character", which is of one.
        ("bpchar", "string"),
    ]
    assert found[types[0]].type.oid == 23
    assert (found[4_000_000, -1].type.oid, found[4_000_000, -1].spark) == (4_000_000, "string")


def test_the_second_publication_has_a_list_of_columns_too(pg: Session) -> None:
    if pg.server_version < 150000:
        pytest.skip("PostgreSQL 15 has lists of columns")
    run(pg, *TABLE, "CREATE TABLE log (id int, a text, secret text)", "CREATE PUBLICATION p FOR TABLE t",
        "CREATE PUBLICATION p_inserts FOR TABLE log (id, a)")  # fmt: skip
    ((oid,),) = run(pg, "SELECT 'log'::regclass::oid::bigint")
    found = read_layouts(pg, Publications("p", "p_inserts"), [oid])[oid]
    assert [column.name for column in found.columns if column.published] == ["id", "a"]


def test_a_partition_with_another_expression_alone_was_altered(pg: Session) -> None:
    if pg.server_version < 170000:
        pytest.skip("PostgreSQL 17 has SET EXPRESSION")
    run(pg, "CREATE TABLE t (id int, g int GENERATED ALWAYS AS (id * 2) STORED) PARTITION BY LIST (id)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1)", "INSERT INTO t VALUES (1)")  # fmt: skip
    before = layout(pg)
    run(pg, "CREATE TABLE t2 PARTITION OF t FOR VALUES IN (2)")
    # One that comes is none.
    assert layout(pg).altered == before.altered
    run(pg, "ALTER TABLE t1 ALTER g SET EXPRESSION AS (id * 3)")
    assert layout(pg).altered != before.altered
