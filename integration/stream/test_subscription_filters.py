"""Row filters of a publication, after PostgreSQL's src/test/subscription/t/028_row_filter.pl."""

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
def _filters(pg: Session) -> None:
    if pg.server_version < 150000:
        pytest.skip("row filters came with PostgreSQL 15")


TAB_1 = "SELECT a, b FROM tab_1 WHERE a > 1000 AND b <> 'filtered'"


@pytest.mark.parametrize("mode", cases(MODES, "emit"))
def test_rows_come_and_go_under_a_filter(mode: str, pg: Session, obedient: Begin) -> None:
    run(pg, "CREATE TABLE tab_1 (a int PRIMARY KEY, b text)", "ALTER TABLE tab_1 REPLICA IDENTITY FULL",
        "INSERT INTO tab_1 VALUES (1, 'not replicated'), (1500, 'filtered'), (1980, 'not filtered')",
        "INSERT INTO tab_1 SELECT x, 'test ' || x FROM generate_series(990, 1002) AS x",
        "CREATE PUBLICATION s FOR TABLE tab_1 WHERE (a > 1000 AND b <> 'filtered')")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange=mode)
    sink.equals(tab_1=TAB_1)
    for writes in (
        ("INSERT INTO tab_1 VALUES (800, 'test 800'), (1600, 'test 1600'), (1601, 'test 1601')",
         "INSERT INTO tab_1 VALUES (1602, 'filtered'), (1700, 'test 1700')"),
        # NULL is not under the filter, and what comes under it is new.
        ("UPDATE tab_1 SET b = NULL WHERE a = 1600", "UPDATE tab_1 SET b = b || ' updated' WHERE a = 1601",
         "UPDATE tab_1 SET b = 'test 1602 updated' WHERE a = 1602", "DELETE FROM tab_1 WHERE a IN (800, 1700)"),
        ("BEGIN; UPDATE tab_1 SET b = 'filtered' WHERE a = 1601; UPDATE tab_1 SET b = 'back' WHERE a = 1601;"
         " UPDATE tab_1 SET a = -a WHERE a > 1600; UPDATE tab_1 SET a = -a WHERE a = -1980;"
         " DELETE FROM tab_1 WHERE a < 0; COMMIT",),
        ("UPDATE tab_1 SET a = a + 15 WHERE a < 1000",),
    ):  # fmt: skip
        sink.run("unseen", *writes)
        sink.equals(tab_1=TAB_1)
    # Rows outside of the filter are the sink's no less: TRUNCATE has no filter.
    sink.run(
        "down", "INSERT INTO tab_1 VALUES (3000, 'x')", "TRUNCATE tab_1", "INSERT INTO tab_1 VALUES (1, ''), (3000, '')"
    )
    sink.equals(tab_1=TAB_1)
    sink.was_told()


@pytest.mark.parametrize(("mode", "how"), WAYS)
def test_another_filter_brings_the_rows_anew(mode: str, how: str, pg: Session, obedient: Begin) -> None:
    run(pg, "CREATE TABLE tab_2 (c int PRIMARY KEY)", "INSERT INTO tab_2 SELECT generate_series(1, 20)",
        "CREATE TABLE tab_3 (a int PRIMARY KEY, b boolean)", "INSERT INTO tab_3 VALUES (1, true)",
        "CREATE PUBLICATION s FOR TABLE tab_3", "ALTER PUBLICATION s ADD TABLE tab_2 WHERE (c % 7 = 0)")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange=mode)
    sink.equals("tab_3", tab_2="SELECT c FROM tab_2 WHERE c % 7 = 0")
    sink.run(how, "INSERT INTO tab_2 VALUES (21), (22)",
             "ALTER PUBLICATION s SET TABLE tab_2 WHERE (c % 2 = 0), tab_3", "INSERT INTO tab_2 VALUES (28), (24)",
             "UPDATE tab_2 SET c = 30 WHERE c = 7", "INSERT INTO tab_3 VALUES (2, false)")  # fmt: skip
    sink.equals("tab_3", tab_2="SELECT c FROM tab_2 WHERE c % 2 = 0")
    sink.run(how, "DELETE FROM tab_2 WHERE c < 10", "ALTER PUBLICATION s SET TABLE tab_2, tab_3",
             "UPDATE tab_2 SET c = -c", "UPDATE tab_3 SET b = NOT b")  # fmt: skip
    sink.equals("tab_2", "tab_3")
    sink.run(how, "ALTER PUBLICATION s DROP TABLE tab_2", "DELETE FROM tab_2 WHERE c = -12",
             "ALTER PUBLICATION s ADD TABLE tab_2 WHERE (c > -20)", "INSERT INTO tab_2 VALUES (50), (-50)")  # fmt: skip
    sink.equals("tab_3", tab_2="SELECT c FROM tab_2 WHERE c > -20")
    # While it runs, the publication is looked at before the table is back.
    lost = ["publication s has lost public.tab_2; "] if (mode, how) == ("fail", "seen") else []
    sink.was_told(*lost, gaps=["tab_2"])


@pytest.mark.parametrize(("mode", "how"), WAYS)
def test_another_filter_of_a_partition_beside_its_root_brings_the_rows_anew(
    mode: str, how: str, pg: Session, obedient: Begin
) -> None:
    """The partition is published all the time, by its root."""
    run(pg, "CREATE TABLE r (x int PRIMARY KEY) PARTITION BY RANGE (x)",
        "CREATE TABLE p PARTITION OF r DEFAULT", "INSERT INTO r SELECT generate_series(1, 20)",
        "CREATE PUBLICATION s FOR TABLE r, p WHERE (x > 10)")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange=mode)
    sink.equals(p="SELECT x FROM p WHERE x > 10")
    sink.run(how, "ALTER PUBLICATION s SET TABLE r, p WHERE (x > 5)", "INSERT INTO r VALUES (4 + 20), (-1)")
    sink.equals(p="SELECT x FROM p WHERE x > 5")
    sink.was_told(gaps=["p"])


@pytest.mark.parametrize(("mode", "how"), WAYS)
def test_a_schema_that_is_published_has_no_filters(mode: str, how: str, pg: Session, obedient: Begin) -> None:
    """The filter of a partition in another schema holds, where it comes under its own name."""
    run(pg, "CREATE SCHEMA rf", "CREATE TABLE rf.tab (x int PRIMARY KEY)",
        "CREATE TABLE rf.parted (x int PRIMARY KEY) PARTITION BY RANGE (x)",
        "CREATE TABLE public.part (LIKE rf.parted)", "ALTER TABLE rf.parted ATTACH PARTITION public.part DEFAULT",
        "INSERT INTO rf.tab VALUES (0), (5), (10), (15), (20)", "INSERT INTO rf.parted VALUES (1), (20)",
        "CREATE PUBLICATION s FOR TABLES IN SCHEMA rf, TABLE rf.tab WHERE (x > 10)",
        "ALTER PUBLICATION s ADD TABLE public.part WHERE (x > 10)")  # fmt: skip
    sink = obedient(tables="rf.*,public.*", onSchemaChange=mode)
    part = "SELECT x FROM part WHERE x > 10"
    sink.equals("rf.tab", part=part)
    sink.run("unseen", "INSERT INTO rf.tab VALUES (-99), (99)", "INSERT INTO rf.parted VALUES (5), (25)")
    sink.equals("rf.tab", part=part)
    sink.run(how, "DELETE FROM rf.tab WHERE x = 5", "ALTER PUBLICATION s DROP TABLES IN SCHEMA rf",
             "INSERT INTO rf.tab VALUES (6), (16)", "INSERT INTO rf.parted VALUES (7), (17)")  # fmt: skip
    sink.equals(part=part, **{"rf.tab": "SELECT x FROM rf.tab WHERE x > 10"})
    sink.run(how, "DELETE FROM rf.tab WHERE x = 16", "ALTER PUBLICATION s ADD TABLES IN SCHEMA rf",
             "INSERT INTO rf.tab VALUES (8), (18)", "INSERT INTO rf.parted VALUES (9), (19)")  # fmt: skip
    sink.equals("rf.tab", part=part)
    sink.was_told(gaps=["rf.tab", "part"])


@pytest.mark.parametrize("how", HOW)
def test_under_the_root_its_filter_holds_and_not_a_partitions(how: str, pg: Session, obedient: Begin) -> None:
    run(pg, "CREATE TABLE parted (a int PRIMARY KEY, b int) PARTITION BY RANGE (a)",
        "CREATE TABLE less_10k (LIKE parted)", "CREATE TABLE greater_10k (LIKE parted)",
        "ALTER TABLE parted ATTACH PARTITION less_10k FOR VALUES FROM (MINVALUE) TO (10000)",
        "ALTER TABLE parted ATTACH PARTITION greater_10k FOR VALUES FROM (10000) TO (MAXVALUE)",
        "INSERT INTO parted VALUES (1, 100), (7000, 101), (15000, 102), (5500, 300)",
        "INSERT INTO less_10k VALUES (2, 200), (6005, 201)", "INSERT INTO greater_10k VALUES (16000, 103)",
        "CREATE PUBLICATION s FOR TABLE parted, less_10k WHERE (a < 6000)")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange="emit")
    less = "SELECT a, b FROM less_10k WHERE a < 6000"
    sink.equals("greater_10k", less_10k=less)
    sink.run("unseen", "UPDATE parted SET a = 5999 WHERE a = 7000", "UPDATE parted SET a = 20000 WHERE a = 1",
             "UPDATE parted SET a = 9000 WHERE a = 15000", "UPDATE parted SET a = 8000 WHERE a = 2")  # fmt: skip
    sink.equals("greater_10k", less_10k=less)
    sink.run(how, "INSERT INTO parted VALUES (3, 3), (6500, 6)",
             "ALTER PUBLICATION s SET (publish_via_partition_root = true)",
             "ALTER PUBLICATION s SET TABLE parted WHERE (a < 5000), less_10k WHERE (a < 6000)",
             "INSERT INTO parted VALUES (4000, 400), (4001, 401), (4002, 402)",
             "INSERT INTO less_10k VALUES (4500, 450), (5600, 123)", "INSERT INTO greater_10k VALUES (14000, 1950)",
             "UPDATE less_10k SET b = 30 WHERE a = 4001", "DELETE FROM less_10k WHERE a = 4002",
             "UPDATE parted SET a = 11000 WHERE a = 3", "UPDATE parted SET a = 4 WHERE a = 16000")  # fmt: skip
    sink.equals(parted="SELECT a, b FROM parted WHERE a < 5000")
    # Another filter of the partition is nothing to the root.
    sink.run(how, "ALTER PUBLICATION s SET TABLE parted WHERE (a < 5000), less_10k WHERE (a < 7000)",
             "INSERT INTO parted VALUES (5, 5), (6800, 6)", "UPDATE parted SET a = 4800 WHERE a = 6800")  # fmt: skip
    sink.equals(parted="SELECT a, b FROM parted WHERE a < 5000")
    sink.was_told()
    assert sorted(sink.replica.left) == ["public.greater_10k", "public.less_10k"]


def test_a_filter_sees_values_that_did_not_travel(pg: Session, obedient: Begin) -> None:
    run(pg, "CREATE TABLE toast (a text NOT NULL, b text NOT NULL)",
        "ALTER TABLE toast ALTER COLUMN a SET STORAGE EXTERNAL", "CREATE UNIQUE INDEX toast_ri ON toast (a, b)",
        "ALTER TABLE toast REPLICA IDENTITY USING INDEX toast_ri",
        "CREATE PUBLICATION s FOR TABLE toast WHERE (a = repeat('1234567890', 200) AND b < '10')",
        "INSERT INTO toast VALUES (repeat('1234567890', 200), '1234567890')")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange="emit")
    toast = "SELECT a, b FROM toast WHERE a = repeat('1234567890', 200) AND b < '10'"
    for write in ("UPDATE toast SET b = '1'", "UPDATE toast SET b = '09'", "UPDATE toast SET b = '2'",
                  "UPDATE toast SET b = '0'", "DELETE FROM toast"):  # fmt: skip
        sink.run("unseen", write)
        sink.equals(toast=toast)
    sink.was_told()


def test_a_filter_holds_for_the_tables_that_inherit(pg: Session, obedient: Begin) -> None:
    run(pg, "CREATE TABLE inherited (a int)", "CREATE TABLE child (b text) INHERITS (inherited)",
        "CREATE PUBLICATION s FOR TABLE inherited WHERE (a > 15)", "INSERT INTO inherited VALUES (10), (20)",
        "INSERT INTO child VALUES (0, '0'), (30, '30'), (40, '40')")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange="emit")
    both = {"inherited": "SELECT a FROM ONLY inherited WHERE a > 15", "child": "SELECT a, b FROM child WHERE a > 15"}
    sink.equals(**both)
    sink.run("unseen", "INSERT INTO inherited VALUES (14), (16)", "INSERT INTO child VALUES (13, '13'), (17, '17')")
    sink.equals(**both)
    # A child that is new is not in the publication.
    sink.run("down", "CREATE TABLE second () INHERITS (inherited)", "INSERT INTO second VALUES (50)",
             "INSERT INTO inherited VALUES (51)")  # fmt: skip
    sink.equals(**both)
    sink.was_told()


def test_only_the_roots_rows_under_its_filter_come(pg: Session, obedient: Begin) -> None:
    run(pg, "CREATE TABLE viaroot (a int PRIMARY KEY) PARTITION BY RANGE (a)",
        "CREATE TABLE viaroot_1 PARTITION OF viaroot FOR VALUES FROM (1) TO (20)",
        "CREATE PUBLICATION s FOR TABLE viaroot WHERE (a > 15), viaroot_1 WHERE (a < 15)"
        " WITH (publish_via_partition_root = true)",
        "INSERT INTO viaroot VALUES (13), (17)")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange="emit")
    sink.run("unseen", "INSERT INTO viaroot VALUES (14), (15), (16)")
    sink.equals(viaroot="SELECT a FROM viaroot WHERE a > 15")
    sink.run("unseen", "ALTER PUBLICATION s DROP TABLE viaroot", "INSERT INTO viaroot VALUES (1), (18)")
    sink.equals(viaroot_1="SELECT a FROM viaroot_1 WHERE a < 15")
    sink.run(
        "down", "ALTER PUBLICATION s ADD TABLE viaroot WHERE (a > 16)", "UPDATE viaroot SET a = a + 1 WHERE a = 18"
    )
    sink.equals(viaroot="SELECT a FROM viaroot WHERE a > 16")
    sink.was_told()
