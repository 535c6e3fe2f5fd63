"""Column lists of a publication, after PostgreSQL's src/test/subscription/t/031_column_list.pl."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from corners import cases
from driving import run
from obedient import HOW, WAYS, Obedient
from psycopg2.extensions import connection as Session

Begin = Callable[..., Obedient]
MODES = ("emit", "fail")


@pytest.fixture(autouse=True)
def _lists(pg: Session) -> None:
    if pg.server_version < 150000:
        pytest.skip("column lists came with PostgreSQL 15")


LISTED = {
    "tab1": 'SELECT a, "B" FROM tab1',
    "tab3": 'SELECT "a\'", "c\'" FROM tab3',
    "tab4": "SELECT a, b, d FROM tab4",
    "test_part": "SELECT a, b FROM test_part",
}


@pytest.mark.parametrize("mode", cases(MODES, "emit"))
def test_columns_that_are_not_listed_do_not_come(mode: str, pg: Session, obedient: Begin) -> None:
    run(pg, 'CREATE TABLE tab1 (a int PRIMARY KEY, "B" int, c int)',
        "CREATE TABLE tab2 (a int PRIMARY KEY, b varchar, c int)",
        """CREATE TABLE tab3 ("a'" int PRIMARY KEY, "B" varchar, "c'" int)""",
        "CREATE TYPE test_typ AS ENUM ('blue', 'red')",
        "CREATE TABLE tab4 (a int PRIMARY KEY, b test_typ, c int, d text)",
        "CREATE TABLE test_part (a int PRIMARY KEY, b text, c timestamptz) PARTITION BY LIST (a)",
        "CREATE TABLE test_part_1_1 PARTITION OF test_part FOR VALUES IN (1, 2, 3, 4, 5, 6)",
        "CREATE TABLE test_part_2_1 PARTITION OF test_part FOR VALUES IN (7, 8, 9, 10, 11, 12) PARTITION BY LIST (a)",
        "CREATE TABLE test_part_2_2 PARTITION OF test_part_2_1 FOR VALUES IN (7, 8, 9, 10)",
        """CREATE PUBLICATION s FOR TABLE tab1 (a, "B"), tab3 ("a'", "c'"), test_part (a, b), tab4 (a, b, d)"""
        " WITH (publish_via_partition_root = true)",
        "INSERT INTO tab1 VALUES (1, 2, 3), (4, 5, 6)", "INSERT INTO tab3 VALUES (1, 2, 3), (4, 5, 6)",
        "INSERT INTO tab4 VALUES (1, 'red', 3, 'oh my'), (2, 'blue', 4, 'hello')",
        "INSERT INTO test_part VALUES (1, 'abc', now()), (7, 'abc', now())")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange=mode)
    sink.equals(**LISTED)
    sink.run("unseen", "INSERT INTO tab1 VALUES (2, 3, 4), (5, 6, 7)", "INSERT INTO tab3 VALUES (2, 3, 4), (5, 6, 7)",
             "INSERT INTO tab4 VALUES (3, 'red', 5, 'foo')",
             "INSERT INTO test_part VALUES (3, 'xxx', now()), (9, 'zzz', now())")  # fmt: skip
    sink.equals(**LISTED)
    sink.run("unseen", 'UPDATE tab1 SET "B" = 2 * "B" WHERE a = 1', "UPDATE tab1 SET c = 2 * c WHERE a = 4",
             """UPDATE tab3 SET "B" = "B" || ' updated' WHERE "a'" = 4""",
             """UPDATE tab3 SET "c'" = 2 * "c'" WHERE "a'" = 1""",
             "UPDATE tab4 SET b = 'blue', c = c * 2, d = d || ' updated' WHERE a = 1",
             "UPDATE test_part SET a = 10, c = NULL WHERE a = 1")  # fmt: skip
    sink.equals(**LISTED)
    sink.run("down", "INSERT INTO tab2 VALUES (1, 'abc', 3)", "ALTER PUBLICATION s ADD TABLE tab2 (a, b)",
             "INSERT INTO tab2 VALUES (2, 'def', 6)", "UPDATE tab2 SET c = 5 WHERE a = 1",
             "UPDATE tab2 SET b = 'xyz' WHERE a = 2", "DELETE FROM tab1 WHERE a = 2")  # fmt: skip
    sink.equals(tab2="SELECT a, b FROM tab2", **LISTED)
    sink.was_told()


@pytest.mark.parametrize(("mode", "how"), WAYS)
def test_another_list_brings_the_rows_anew(mode: str, how: str, pg: Session, obedient: Begin) -> None:
    run(pg, "CREATE TABLE tab5 (a int PRIMARY KEY, b int, c int, d int)",
        "INSERT INTO tab5 VALUES (1, 11, 111, 1111), (2, 22, 222, 2222)",
        "CREATE TABLE beside (a int PRIMARY KEY)", "CREATE PUBLICATION s FOR TABLE tab5 (a, b), beside")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange=mode)
    sink.equals("beside", tab5="SELECT a, b FROM tab5")
    sink.run(how, "INSERT INTO tab5 VALUES (3, 33, 333, 3333)", "ALTER PUBLICATION s SET TABLE tab5 (a, c), beside",
             "INSERT INTO tab5 VALUES (4, 44, 444, 4444)", "UPDATE tab5 SET b = -b WHERE a = 1",
             "UPDATE tab5 SET c = -c WHERE a = 2", "INSERT INTO beside VALUES (1)")  # fmt: skip
    sink.equals("beside", tab5="SELECT a, c FROM tab5")
    sink.run(how, "DELETE FROM tab5 WHERE a = 1", "ALTER PUBLICATION s SET TABLE tab5, beside",
             "UPDATE tab5 SET d = -d WHERE a = 2", "INSERT INTO beside VALUES (2)")  # fmt: skip
    sink.equals("beside", "tab5")
    sink.run(how, "UPDATE tab5 SET b = 0", "ALTER PUBLICATION s SET TABLE tab5 (a, d), beside",
             "UPDATE tab5 SET a = a + 1 WHERE a = 4")  # fmt: skip
    sink.equals("beside", tab5="SELECT a, d FROM tab5")
    assert sink.started_over == 0, sink.refusals
    assert mode == "fail" or sink.refusals == []


# What another primary key is called where it is noticed.
REKEYED = "the replica identity was changed before the commit at "


@pytest.mark.parametrize(("mode", "how"), WAYS)
def test_the_key_moves_to_other_columns_of_the_list(mode: str, how: str, pg: Session, obedient: Begin) -> None:
    run(pg, "CREATE TABLE tab7 (a int PRIMARY KEY, b int NOT NULL, c int, d int)",
        "INSERT INTO tab7 VALUES (1, 22, 333, 4444)", "CREATE PUBLICATION s FOR TABLE tab7 (a, b)")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange=mode)
    tab7 = "SELECT a, b FROM tab7"
    update = "UPDATE tab7 SET b = b * 2, c = c * 3, d = d * 4"
    sink.run(how, "INSERT INTO tab7 VALUES (2, 33, 444, 5555)", update)
    sink.equals(tab7=tab7)
    sink.run(how, "ALTER TABLE tab7 DROP CONSTRAINT tab7_pkey, ADD PRIMARY KEY (b)",
             "INSERT INTO tab7 VALUES (3, 55, 666, 8888)", update)  # fmt: skip
    sink.equals(tab7=tab7)
    sink.run(how, "ALTER TABLE tab7 DROP CONSTRAINT tab7_pkey", "INSERT INTO tab7 VALUES (4, 77, 888, 9999)",
             # Without an identity there are no updates until it has one.
             "ALTER TABLE tab7 ADD PRIMARY KEY (b, a)", update, "DELETE FROM tab7 WHERE a = 1")  # fmt: skip
    sink.equals(tab7=tab7)
    assert sink.started_over == 0, sink.refusals
    assert all(REKEYED in refusal for refusal in sink.refusals), sink.refusals
    assert mode == "fail" or not sink.refusals


@pytest.mark.parametrize(("mode", "how"), WAYS)
def test_partitions_have_lists_of_their_own(mode: str, how: str, pg: Session, obedient: Begin) -> None:
    run(pg, "CREATE TABLE part_c (a int, b int, c int) PARTITION BY LIST (a)",
        "CREATE TABLE part_c_1 PARTITION OF part_c (PRIMARY KEY (a)) FOR VALUES IN (1, 3)",
        "CREATE TABLE part_c_2 PARTITION OF part_c (PRIMARY KEY (b)) FOR VALUES IN (2, 4)",
        "INSERT INTO part_c VALUES (1, 3, 5), (2, 4, 6)",
        "CREATE PUBLICATION s FOR TABLE part_c, part_c_1 (a, c), part_c_2 (a, b)")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange=mode)
    second = "SELECT a, b FROM part_c_2"
    sink.equals(part_c_1="SELECT a, c FROM part_c_1", part_c_2=second)
    sink.run("unseen", "INSERT INTO part_c VALUES (3, 7, 8), (4, 9, 10)", "UPDATE part_c SET c = -c, b = -b")
    sink.equals(part_c_1="SELECT a, c FROM part_c_1", part_c_2=second)
    sink.run(how, "ALTER PUBLICATION s SET TABLE part_c, part_c_1 (a), part_c_2 (a, b)", "TRUNCATE part_c",
             "INSERT INTO part_c VALUES (1, 3, 5), (2, 4, 6)")  # fmt: skip
    sink.equals(part_c_1="SELECT a FROM part_c_1", part_c_2=second)
    assert sink.started_over == 0, sink.refusals
    assert mode == "fail" or sink.refusals == []


@pytest.mark.parametrize("lists", ["t_1 (a), t_2", "t_1 (a), t_2 (b)"])
def test_under_the_root_its_list_holds_and_not_a_partitions(lists: str, pg: Session, obedient: Begin) -> None:
    run(pg, "CREATE TABLE t (a int, b int, c int) PARTITION BY RANGE (a)",
        "CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (1) TO (10) PARTITION BY RANGE (a)",
        "CREATE TABLE t_2 PARTITION OF t_1 FOR VALUES FROM (1) TO (10)",
        "CREATE TABLE root (a int PRIMARY KEY, b int, c int) PARTITION BY RANGE (a)",
        "CREATE TABLE root_1 PARTITION OF root FOR VALUES FROM (1) TO (10)",
        "CREATE TABLE root_2 PARTITION OF root FOR VALUES FROM (10) TO (20)",
        f"CREATE PUBLICATION s FOR TABLE root (a), root_1 (a, b), {lists} WITH (publish_via_partition_root = true)",
        "INSERT INTO t VALUES (1, 2, 3)", "INSERT INTO root VALUES (1, 2, 3), (10, 20, 30)")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange="emit")
    listed = {"root": "SELECT a FROM root", "t_1": "SELECT a FROM t_1"}
    sink.equals(**listed)
    sink.run("unseen", "INSERT INTO t VALUES (4, 5, 6)", "INSERT INTO root VALUES (2, 3, 4), (11, 21, 31)",
             "UPDATE root SET a = 12, b = 0 WHERE a = 1")  # fmt: skip
    sink.equals(**listed)
    sink.run("down", "ALTER PUBLICATION s DROP TABLE root", "UPDATE root SET b = 1 WHERE a = 2",
             "INSERT INTO root VALUES (3, 4, 5)")  # fmt: skip
    sink.equals(root_1="SELECT a, b FROM root_1", t_1=listed["t_1"])
    sink.was_told()


def test_of_old_rows_only_listed_columns_come(pg: Session, obedient: Begin) -> None:
    run(pg, "CREATE TABLE oldtuple (a int PRIMARY KEY, b int, c int)", "CREATE PUBLICATION s FOR TABLE oldtuple (a, b)",
        "INSERT INTO oldtuple VALUES (1, 2, 3)")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange="emit")
    sink.equals(oldtuple="SELECT a, b FROM oldtuple")
    sink.run("unseen", "UPDATE oldtuple SET a = 2", "INSERT INTO oldtuple VALUES (5, 6, 7)",
             "DELETE FROM oldtuple WHERE a = 2")  # fmt: skip
    sink.equals(oldtuple="SELECT a, b FROM oldtuple")
    sink.was_told()


@pytest.mark.parametrize(("mode", "how"), WAYS)
def test_columns_that_are_not_listed_may_change(mode: str, how: str, pg: Session, obedient: Begin) -> None:
    """Neither generated nor dropped columns count."""
    run(pg, "CREATE TABLE mix (a int PRIMARY KEY, b int, c int, d int GENERATED ALWAYS AS (a + 1) STORED)",
        "ALTER TABLE mix DROP COLUMN c", "CREATE PUBLICATION s FOR TABLE mix (a, b)",
        "INSERT INTO mix VALUES (1, 2)")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange=mode)
    sink.equals(mix="SELECT a, b FROM mix")
    sink.run(how, "ALTER TABLE mix DROP COLUMN d", "INSERT INTO mix VALUES (3, 4)",
             "ALTER TABLE mix ADD COLUMN e text DEFAULT 'e'", "INSERT INTO mix VALUES (5, 6, 'f')",
             "UPDATE mix SET e = 'g' WHERE a = 1", "ALTER TABLE mix RENAME e TO f", "UPDATE mix SET b = 0")  # fmt: skip
    sink.equals(mix="SELECT a, b FROM mix")
    sink.was_told()


@pytest.mark.parametrize("how", HOW)
def test_listed_columns_may_change(how: str, pg: Session, obedient: Begin) -> None:
    run(pg, "CREATE TABLE t (a int PRIMARY KEY, b int, c int)", "CREATE TABLE beside (a int PRIMARY KEY)",
        "CREATE PUBLICATION s FOR TABLE t (a, b), beside", "INSERT INTO t VALUES (1, 2, 3)")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange="emit")
    sink.equals("beside", t="SELECT a, b FROM t")
    sink.run(how, "INSERT INTO t VALUES (2, 3, 4)", "ALTER TABLE t RENAME b TO x", "INSERT INTO t VALUES (3, 4, 5)",
             "ALTER TABLE t ADD d text DEFAULT 'd'", "INSERT INTO t VALUES (4, 5, 6, 'e')")  # fmt: skip
    sink.equals("beside", t="SELECT a, x FROM t")
    # A list that lacks a column is no list any more: PostgreSQL takes the table out of the publication.
    sink.run(how, "INSERT INTO t VALUES (5, 6, 7)", "ALTER TABLE t DROP COLUMN x CASCADE",
             "INSERT INTO t VALUES (6, 7)",
             "INSERT INTO beside VALUES (1)")  # fmt: skip
    sink.equals("beside")
    assert sink.replica.left == ["public.t"]
    sink.was_told()
