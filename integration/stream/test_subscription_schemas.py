"""Tables and publications that change, after PostgreSQL's src/test/subscription: 001, 006, 008, 010, 011, 017, 025."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from corners import cases
from driving import run
from obedient import HOW, WAYS, Obedient
from psycopg2.extensions import connection as Session

Begin = Callable[..., Obedient]
MODES = ("emit", "fail")
ALL_TABLES = "CREATE PUBLICATION s FOR ALL TABLES"


@pytest.mark.parametrize("mode", cases(MODES, "emit"))
def test_a_stream_of_all_changes_and_of_inserts_alone(mode: str, pg: Session, obedient: Begin) -> None:
    """After 001_rep_changes.pl."""
    run(pg, "CREATE TABLE tab_ins AS SELECT generate_series(1, 1002) AS a",
        "CREATE TABLE tab_full AS SELECT generate_series(1, 10) AS a", "ALTER TABLE tab_full REPLICA IDENTITY FULL",
        "CREATE TABLE tab_rep (a int PRIMARY KEY)", "CREATE TABLE tab_full_pk (a int PRIMARY KEY, b text)",
        "ALTER TABLE tab_full_pk REPLICA IDENTITY FULL", "CREATE TABLE tab_nothing (a int)",
        "ALTER TABLE tab_nothing REPLICA IDENTITY NOTHING",
        "CREATE TABLE tab_include (a int, b text, CONSTRAINT c PRIMARY KEY (a) INCLUDE (b))")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange=mode, keyless="insertOnly")
    sink.equals("tab_ins", "tab_full")
    sink.run("unseen", "INSERT INTO tab_ins SELECT generate_series(1, 50)",
             "INSERT INTO tab_rep SELECT generate_series(1, 50)",
             "DELETE FROM tab_rep WHERE a > 20", "UPDATE tab_rep SET a = -a", "INSERT INTO tab_nothing VALUES (20)",
             "INSERT INTO tab_include SELECT generate_series(1, 50), 'x'", "DELETE FROM tab_include WHERE a > 20",
             "INSERT INTO tab_full_pk VALUES (1, 'foo'), (2, 'baz')",
             # The same rows twice.
             "INSERT INTO tab_full SELECT generate_series(1, 10)", "UPDATE tab_full SET a = a * a")  # fmt: skip
    tables = ("tab_ins", "tab_full", "tab_rep", "tab_full_pk", "tab_nothing", "tab_include")
    sink.equals(*tables)
    # Inserts alone are sent, and PostgreSQL takes the rest.
    sink.run("down", "UPDATE tab_full_pk SET b = 'bar' WHERE a = 1", "DELETE FROM tab_full_pk WHERE a = 2",
             "UPDATE tab_ins SET a = -a", "DELETE FROM tab_ins", "INSERT INTO tab_ins VALUES (7)")  # fmt: skip
    ins = "SELECT generate_series(1, 1002) AS a UNION ALL SELECT generate_series(1, 50) UNION ALL SELECT 7"
    sink.equals(*tables[1:], tab_ins=ins)
    sink.run(
        "unseen", "TRUNCATE tab_ins, tab_full", "INSERT INTO tab_ins VALUES (8)", "INSERT INTO tab_full VALUES (8)"
    )
    sink.equals(*tables)
    sink.was_told()


@pytest.mark.parametrize(("mode", "how"), WAYS)
def test_a_publication_sends_more_kinds_of_changes(mode: str, how: str, pg: Session, obedient: Begin) -> None:
    """After 001_rep_changes.pl and 010_truncate.pl."""
    run(pg, "CREATE TABLE tab2 (a int PRIMARY KEY)", "CREATE TABLE tab3 (a int PRIMARY KEY)",
        "CREATE TABLE tab4 (x int PRIMARY KEY, y int REFERENCES tab3)", "CREATE TABLE other (a int PRIMARY KEY)",
        "CREATE PUBLICATION s FOR TABLE tab2, tab3, tab4 WITH (publish = 'insert')")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange=mode)
    sink.equals()
    sink.run(how, "INSERT INTO tab2 VALUES (1), (2), (3)", "TRUNCATE tab2", "INSERT INTO tab3 VALUES (1), (2), (3)",
             "INSERT INTO tab4 VALUES (11, 1), (111, 1), (22, 2)", "DELETE FROM tab3 WHERE a = 3")  # fmt: skip
    three = "SELECT generate_series(1, 3) AS a"
    sink.equals("tab4", tab2=three, tab3=three)
    if pg.server_version < 150000:
        # There nothing shows that it was altered.
        return
    sink.run(how, "ALTER PUBLICATION s SET (publish = 'insert, update, delete, truncate')",
             "INSERT INTO tab2 VALUES (4)",
             "UPDATE tab4 SET x = -x", "TRUNCATE tab2, other", "INSERT INTO tab2 VALUES (5)")  # fmt: skip
    sink.equals("tab2", "tab3", "tab4")
    sink.run(how, "INSERT INTO tab2 VALUES (6)", "TRUNCATE tab3, tab4", "INSERT INTO tab3 VALUES (7)")
    sink.equals("tab2", "tab3")
    sink.was_told()


@pytest.mark.parametrize(("mode", "how"), WAYS)
def test_a_table_is_rewritten(mode: str, how: str, pg: Session, obedient: Begin) -> None:
    """After 006_rewrite.pl."""
    run(pg, "CREATE TABLE test1 (a int PRIMARY KEY, b text)", ALL_TABLES)
    sink = obedient(tables="public.*", onSchemaChange=mode)
    sink.run(how, "INSERT INTO test1 VALUES (1, 'one'), (2, 'two')")
    sink.equals("test1")
    sink.run(how, "ALTER TABLE test1 ADD c int NOT NULL DEFAULT 0", "INSERT INTO test1 VALUES (3, 'three', 33)",
             "UPDATE test1 SET c = c + 1")  # fmt: skip
    sink.equals("test1")
    sink.run(how, "VACUUM FULL test1", "UPDATE test1 SET c = c + 1 WHERE a < 3", "CLUSTER test1 USING test1_pkey",
             "INSERT INTO test1 VALUES (4, 'four', 44)")  # fmt: skip
    sink.equals("test1")
    if mode == "emit":
        sink.run(
            how, "ALTER TABLE test1 ALTER c TYPE text USING 'was ' || c", "INSERT INTO test1 VALUES (5, 'five', '')"
        )
        sink.equals("test1")
        sink.run(how, "INSERT INTO test1 VALUES (6, 'six', '')", "ALTER TABLE test1 ADD d float8 DEFAULT random()",
                 "DELETE FROM test1 WHERE a = 1")  # fmt: skip
        sink.equals("test1")
    assert sink.started_over == 0, sink.refusals
    assert mode == "fail" or sink.refusals == []


@pytest.mark.parametrize("how", cases(HOW, "unseen"))
def test_columns_change_again_and_again(how: str, pg: Session, obedient: Begin) -> None:
    """After 008_diff_schema.pl, with the differences in time."""
    run(pg, "CREATE TABLE test_tab (a int PRIMARY KEY, b varchar)",
        "INSERT INTO test_tab VALUES (1, 'foo'), (2, 'bar')",
        "CREATE TABLE test_tab2 (a int)", ALL_TABLES)  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange="emit")
    sink.equals("test_tab")
    sink.run(how, "UPDATE test_tab SET b = md5(b)", "ALTER TABLE test_tab ADD c timestamptz DEFAULT now()",
             "ALTER TABLE test_tab ADD d bigint DEFAULT 999", "INSERT INTO test_tab VALUES (3, 'baz')",
             "ALTER TABLE test_tab ADD e int GENERATED BY DEFAULT AS IDENTITY",
             "UPDATE test_tab SET d = -d WHERE a = 1")  # fmt: skip
    sink.equals("test_tab")
    sink.run(how, "ALTER TABLE test_tab RENAME b TO text_b", "ALTER TABLE test_tab RENAME d TO b",
             "INSERT INTO test_tab VALUES (4, 'four')", "ALTER TABLE test_tab DROP c, ADD c text DEFAULT 'new'",
             "ALTER TABLE test_tab RENAME TO tab", "INSERT INTO tab VALUES (5, 'five')",
             "ALTER TABLE tab ALTER b TYPE numeric", "UPDATE tab SET b = b / 2 WHERE a > 2")  # fmt: skip
    sink.equals("tab")
    # A table without a key gets one.
    sink.run(how, "INSERT INTO test_tab2 VALUES (1), (1)", "ALTER TABLE test_tab2 ADD COLUMN b serial PRIMARY KEY",
             "INSERT INTO test_tab2 VALUES (1)", "UPDATE test_tab2 SET a = b",
             "DELETE FROM test_tab2 WHERE b = 2")  # fmt: skip
    sink.equals("tab", "test_tab2")
    # What the rows from before have in the new key is not known until they come again.
    sink.was_told(gaps=["test_tab2"])


def test_columns_that_are_generated(pg: Session, obedient: Begin) -> None:
    """After 011_generated.pl. The stream's own publication sends them from 18 on."""
    run(pg, "CREATE TABLE tab1 (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 2) STORED)",
        "INSERT INTO tab1 (a) VALUES (1), (2), (3)")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange="emit")
    tab1 = "SELECT * FROM tab1" if pg.server_version >= 180000 else "SELECT a FROM tab1"
    sink.equals(tab1=tab1)
    sink.run("unseen", "INSERT INTO tab1 VALUES (4), (5)", "UPDATE tab1 SET a = 6 WHERE a = 5")
    sink.equals(tab1=tab1)
    sink.run("down", "ALTER TABLE tab1 ADD c int GENERATED ALWAYS AS (a * 22) STORED",
             "INSERT INTO tab1 (a) VALUES (7)",
             "ALTER TABLE tab1 ALTER b DROP EXPRESSION", "UPDATE tab1 SET b = 0 WHERE a = 1")  # fmt: skip
    sink.equals(tab1=tab1 if pg.server_version >= 180000 else "SELECT a, b FROM tab1")
    sink.was_told()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("limit", ["300", "100000"])
def test_columns_are_added_in_large_transactions(limit: str, mode: str, pg: Session, obedient: Begin) -> None:
    """After 017_stream_ddl.pl and 019_stream_subxact_ddl_abort.pl."""
    run(pg, "CREATE TABLE test_tab (a int PRIMARY KEY, b varchar)",
        "INSERT INTO test_tab VALUES (1, 'foo'), (2, 'bar')",
        "CREATE PUBLICATION s FOR TABLE test_tab")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange=mode, maxRowsPerBatch=limit)
    sink.equals("test_tab")
    sink.run("unseen",
             "BEGIN; INSERT INTO test_tab VALUES (3, md5('3')); ALTER TABLE test_tab ADD COLUMN c int; SAVEPOINT s1;"
             " INSERT INTO test_tab VALUES (4, md5('4'), -4); COMMIT",
             "BEGIN; INSERT INTO test_tab SELECT i, md5(i::text), -i FROM generate_series(5, 1000) AS i;"
             " ALTER TABLE test_tab ADD COLUMN d int; SAVEPOINT s1;"
             " INSERT INTO test_tab SELECT i, md5(i::text), -i, 2 * i FROM generate_series(1001, 2000) AS i;"
             " COMMIT")  # fmt: skip
    sink.equals("test_tab")
    sink.run("unseen",
             "BEGIN; INSERT INTO test_tab SELECT i, md5(i::text), -i FROM generate_series(2001, 2100) AS i;"
             " SAVEPOINT s1; ALTER TABLE test_tab ADD COLUMN x int;"
             " INSERT INTO test_tab SELECT i, '', 0, 0, i FROM generate_series(2101, 2200) AS i;"
             " ROLLBACK TO s1; INSERT INTO test_tab SELECT i, '' FROM generate_series(2101, 2200) AS i; COMMIT",
             "BEGIN; INSERT INTO test_tab SELECT i, '' FROM generate_series(2201, 3000) AS i;"
             " ALTER TABLE test_tab ADD COLUMN e int; COMMIT",
             "INSERT INTO test_tab SELECT i, '', 1, 1, i FROM generate_series(3001, 3005) AS i")  # fmt: skip
    sink.equals("test_tab")
    # A process that begins behind the DDL has all columns.
    assert all(re.match(r"public.test_tab: column [ce] was added before", told) for told in sink.refusals), (
        sink.refusals
    )
    assert mode == "fail" or not sink.refusals
    assert sink.started_over == 0


@pytest.mark.parametrize(("mode", "how"), WAYS)
def test_a_schema_is_published(mode: str, how: str, pg: Session, obedient: Begin) -> None:
    """After 025_rep_changes_for_schema.pl."""
    if pg.server_version < 150000:
        pytest.skip("FOR TABLES IN SCHEMA came with PostgreSQL 15")
    run(pg, "CREATE SCHEMA sch1", "CREATE TABLE sch1.tab1 AS SELECT generate_series(1, 10) AS a",
        "CREATE TABLE sch1.tab2 AS SELECT generate_series(1, 10) AS a",
        "CREATE TABLE sch1.parent (a int PRIMARY KEY, b text) PARTITION BY LIST (a)",
        "CREATE TABLE public.child1 PARTITION OF sch1.parent FOR VALUES IN (1, 2, 3)",
        "CREATE TABLE public.child2 PARTITION OF sch1.parent FOR VALUES IN (4, 5, 6)",
        "INSERT INTO sch1.parent VALUES (1), (4)", "CREATE PUBLICATION s FOR TABLES IN SCHEMA sch1")  # fmt: skip
    sink = obedient(tables="*", onSchemaChange=mode)
    sink.run(
        "unseen", "INSERT INTO sch1.tab1 SELECT generate_series(11, 20)", "INSERT INTO sch1.parent VALUES (2), (5)"
    )
    of_parent = ("child1", "child2")
    sink.equals("sch1.tab1", "sch1.tab2", *of_parent)
    sink.run(how, "CREATE TABLE sch1.tab3 AS SELECT generate_series(1, 10) AS a", "INSERT INTO sch1.tab3 VALUES (11)",
             "UPDATE sch1.parent SET a = 3 WHERE a = 4")  # fmt: skip
    sink.equals("sch1.tab1", "sch1.tab2", "sch1.tab3", *of_parent)
    # Out of the schema, and back under another name.
    sink.run(how, "ALTER TABLE sch1.tab3 SET SCHEMA public", "INSERT INTO public.tab3 VALUES (12)")
    sink.equals("sch1.tab1", "sch1.tab2", *of_parent)
    sink.run(how, "ALTER TABLE public.tab3 RENAME TO tab4", "ALTER TABLE public.tab4 SET SCHEMA sch1",
             "INSERT INTO sch1.tab4 VALUES (13)", "DROP TABLE sch1.tab2")  # fmt: skip
    sink.equals("sch1.tab1", "sch1.tab4", *of_parent)
    sink.run(how, "CREATE TABLE kept (a int PRIMARY KEY)", "ALTER PUBLICATION s ADD TABLE kept",
             "INSERT INTO sch1.tab1 VALUES (21)", "ALTER PUBLICATION s DROP TABLES IN SCHEMA sch1",
             "INSERT INTO sch1.tab1 VALUES (22)", "INSERT INTO kept VALUES (1)")  # fmt: skip
    sink.equals("kept")
    sink.run(how, "ALTER PUBLICATION s ADD TABLES IN SCHEMA sch1", "INSERT INTO sch1.tab1 VALUES (23)")
    sink.equals("kept", "sch1.tab1", "sch1.tab4", *of_parent)
    if mode == "emit":
        sink.run(how, "ALTER TABLE kept SET SCHEMA sch1", "INSERT INTO sch1.kept VALUES (2)")
        sink.equals("sch1.kept", "sch1.tab1", "sch1.tab4", *of_parent)
    assert sink.started_over == 0, sink.refusals
    assert mode == "fail" or sink.refusals == []
