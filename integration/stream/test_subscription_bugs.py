"""Defects that PostgreSQL's subscriptions once had, after its src/test/subscription/t/100_bugs.pl."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from corners import cases
from databases import connect
from driving import run
from obedient import HOW, WAYS, Obedient
from psycopg2.extensions import connection as Session

Begin = Callable[..., Obedient]
ALL_TABLES = "CREATE PUBLICATION s FOR ALL TABLES"


def test_an_index_with_a_predicate_does_no_harm(pg: Session, obedient: Begin) -> None:
    run(pg, "CREATE TABLE tab1 (a int PRIMARY KEY, b int)",
        "CREATE FUNCTION double(x int) RETURNS int IMMUTABLE LANGUAGE SQL AS 'SELECT x * 2'",
        "CREATE INDEX ON tab1 (b) WHERE a > double(1)", ALL_TABLES)  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange="emit")
    sink.run("unseen", "INSERT INTO tab1 VALUES (1, 2), (3, 4)", "UPDATE tab1 SET a = a + 1, b = 0")
    sink.equals("tab1")
    sink.was_told()


@pytest.mark.parametrize(("mode", "how"), WAYS)
def test_temporary_and_unlogged_tables_are_none_of_the_publications(
    mode: str, how: str, pg: Session, obedient: Begin
) -> None:
    run(pg, "CREATE TABLE tab1 (a int PRIMARY KEY)", ALL_TABLES)
    sink = obedient(tables="public.*", onSchemaChange=mode)
    sink.equals("tab1")
    sink.run(how, "CREATE TEMPORARY TABLE tt1 AS SELECT 1 AS a", "UPDATE tt1 SET a = 2",
             "CREATE UNLOGGED TABLE tu1 AS SELECT 1 AS a", "UPDATE tu1 SET a = 2",
             "INSERT INTO tab1 VALUES (1)")  # fmt: skip
    sink.equals("tab1")
    # It becomes one, with what it has by then.
    sink.run(how, "ALTER TABLE tu1 SET LOGGED", "INSERT INTO tu1 VALUES (3)")
    sink.equals("tab1", "tu1")
    # And is none any more.
    sink.run(how, "INSERT INTO tu1 VALUES (4)", "ALTER TABLE tu1 SET UNLOGGED", "INSERT INTO tu1 VALUES (5)")
    sink.equals("tab1")
    sink.run(how, "ALTER TABLE tu1 SET LOGGED", "INSERT INTO tab1 VALUES (2)")
    sink.equals("tab1", "tu1")
    sink.was_told(*([] if mode == "emit" else ["has lost public.tu1; "]))


@pytest.mark.parametrize("how", HOW)
def test_a_second_table_joins_with_all_its_rows(how: str, pg: Session, obedient: Begin) -> None:
    run(pg, "CREATE TABLE t (f int)", "CREATE TABLE t2 (f int)", "CREATE PUBLICATION s FOR TABLE t",
        *(f"INSERT INTO {table} SELECT generate_series(1, 3000)" for table in ("t", "t2")))  # fmt: skip
    sink = obedient(tables="public.*", maxRowsPerBatch="2000")
    sink.run(how, *(f"INSERT INTO {table} SELECT generate_series(1, 3000)" for table in ("t", "t2")),
             "ALTER PUBLICATION s ADD TABLE t2", "INSERT INTO t2 VALUES (0)")  # fmt: skip
    sink.equals("t", "t2")
    sink.was_told()


@pytest.mark.parametrize(("mode", "how"), WAYS)
def test_another_index_becomes_the_identity(mode: str, how: str, pg: Session, obedient: Begin) -> None:
    run(pg, "CREATE TABLE t (a int NOT NULL, b int NOT NULL)", "CREATE UNIQUE INDEX t_a ON t (a)",
        "CREATE UNIQUE INDEX t_b ON t (b)", "ALTER TABLE t REPLICA IDENTITY USING INDEX t_a",
        "INSERT INTO t VALUES (1, 1), (2, 2)", "CREATE PUBLICATION s FOR TABLE t")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange=mode)
    sink.equals("t")
    sink.run(how, "ALTER TABLE t REPLICA IDENTITY USING INDEX t_b", "UPDATE t SET a = -a WHERE a = 1",
             "DELETE FROM t WHERE a = 2")  # fmt: skip
    sink.equals("t")
    sink.run(how, "INSERT INTO t VALUES (3, 3)", "ALTER TABLE t REPLICA IDENTITY FULL",
             "UPDATE t SET a = 4, b = 4 WHERE a = 3",
             "ALTER TABLE t REPLICA IDENTITY USING INDEX t_a", "UPDATE t SET b = b + 10, a = a + 10",
             "DELETE FROM t WHERE a = 9")  # fmt: skip
    sink.equals("t")
    assert sink.started_over == 0, sink.refusals
    assert all("public.t: the replica identity was changed" in refusal for refusal in sink.refusals), sink.refusals
    assert mode == "fail" or not sink.refusals


@pytest.mark.parametrize(("mode", "how"), [*(("emit", how) for how in HOW), ("fail", "unseen"), ("fail", "seen")])
def test_a_schema_is_renamed_and_created_again_in_one_transaction(
    mode: str, how: str, pg: Session, obedient: Begin
) -> None:
    """Where nothing says the columns, nothing says either that a table was renamed while the query was down."""
    if mode == "emit" and pg.server_version < 160000:
        pytest.skip("before PostgreSQL 16 a session goes on with the old name of the schema")
    run(pg, "CREATE SCHEMA sch1", "CREATE TABLE sch1.t1 (c1 int PRIMARY KEY)", ALL_TABLES,
        "INSERT INTO sch1.t1 VALUES (0)")  # fmt: skip
    sink = obedient(tables="*", onSchemaChange=mode)
    sink.equals("sch1.t1")
    sink.run(how, "BEGIN; INSERT INTO sch1.t1 VALUES (1); ALTER SCHEMA sch1 RENAME TO sch2; CREATE SCHEMA sch1;"
                  " CREATE TABLE sch1.t1 (c1 int PRIMARY KEY); INSERT INTO sch1.t1 VALUES (2);"
                  " INSERT INTO sch2.t1 VALUES (3); COMMIT", "INSERT INTO sch1.t1 VALUES (4)",
             "UPDATE sch2.t1 SET c1 = c1 + 10")  # fmt: skip
    sink.equals("sch1.t1", "sch2.t1")
    sink.was_told(*(["sch1.t1 was renamed to sch2.t1"] if mode == "fail" else []))


@pytest.mark.parametrize("how", HOW)
def test_whole_rows_tell_in_a_table_with_dropped_columns(how: str, pg: Session, obedient: Begin) -> None:
    run(pg, "CREATE TABLE dropped_cols (a int, b_drop int, c int)", "ALTER TABLE dropped_cols REPLICA IDENTITY FULL",
        "CREATE PUBLICATION s FOR TABLE dropped_cols",
        "INSERT INTO dropped_cols VALUES (1, 1, 1), (2, 2, 2)")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange="emit")
    sink.equals("dropped_cols")
    sink.run(how, "ALTER TABLE dropped_cols DROP COLUMN b_drop", "UPDATE dropped_cols SET a = 100 WHERE a = 1",
             "DELETE FROM dropped_cols WHERE a = 2")  # fmt: skip
    sink.equals("dropped_cols")
    sink.was_told()


@pytest.mark.parametrize("how", HOW)
def test_whole_rows_tell_where_a_value_is_missing_in_the_heap(how: str, pg: Session, obedient: Begin) -> None:
    """Rows from before ADD COLUMN … DEFAULT have the value only in the catalog."""
    run(pg, "CREATE TABLE tab_default (a int)", "ALTER TABLE tab_default REPLICA IDENTITY FULL",
        "INSERT INTO tab_default VALUES (1)", "ALTER TABLE tab_default ADD COLUMN b bool DEFAULT false NOT NULL",
        "INSERT INTO tab_default VALUES (2, true)", "CREATE PUBLICATION s FOR TABLE tab_default")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange="emit")
    sink.equals("tab_default")
    sink.run(how, "UPDATE tab_default SET a = a + 1")
    sink.equals("tab_default")
    sink.run(how, "INSERT INTO tab_default VALUES (9, false)", "ALTER TABLE tab_default ADD COLUMN c text DEFAULT 'c'",
             "UPDATE tab_default SET a = a + 1 WHERE a > 2", "DELETE FROM tab_default WHERE a = 2")  # fmt: skip
    sink.equals("tab_default")
    sink.was_told()


@pytest.mark.parametrize(("mode", "how"), cases(WAYS, ("emit", "unseen"), ("fail", "down")))
def test_a_publication_changes_while_transactions_are_open(
    mode: str, how: str, db: str, pg: Session, obedient: Begin
) -> None:
    run(pg, "CREATE TABLE kept (a int PRIMARY KEY)", "CREATE TABLE conc (a int PRIMARY KEY)",
        "CREATE PUBLICATION s FOR TABLE kept", "INSERT INTO conc VALUES (0)")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange=mode)
    sink.equals("kept")
    with connect(db) as other:
        run(other, "BEGIN", "INSERT INTO conc VALUES (1)", "INSERT INTO kept VALUES (1)")
        sink.run(how, "ALTER PUBLICATION s ADD TABLE conc", "INSERT INTO conc VALUES (2)")
        run(other, "INSERT INTO conc VALUES (3)", "UPDATE conc SET a = -1 WHERE a = 1", "COMMIT")
        sink.run(how, "INSERT INTO conc VALUES (4)", "DELETE FROM conc WHERE a = 2")
        sink.equals("kept", "conc")
        run(other, "BEGIN", "INSERT INTO conc VALUES (5)", "INSERT INTO kept VALUES (5)")
        sink.run(how, "ALTER PUBLICATION s DROP TABLE conc", "INSERT INTO conc VALUES (6)")
        run(other, "INSERT INTO conc VALUES (7)", "COMMIT", "BEGIN", "DELETE FROM conc WHERE a = 7",
            "UPDATE kept SET a = -a")  # fmt: skip
        sink.run(how, "ALTER PUBLICATION s ADD TABLE conc", "INSERT INTO conc VALUES (8)")
        run(other, "INSERT INTO conc VALUES (9)", "COMMIT")
        sink.equals("kept", "conc")
    lost = ["publication s has lost public.conc; "] if (mode, how) == ("fail", "seen") else []
    sink.was_told(*lost, gaps=["conc"])
