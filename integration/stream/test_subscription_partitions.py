"""Partitioned tables, after PostgreSQL's src/test/subscription/t/013_partition.pl."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from corners import cases
from driving import run
from obedient import WAYS, Obedient
from psycopg2.extensions import connection as Session

Begin = Callable[..., Obedient]
MODES = ("emit", "fail")
LEAVES = ("tab1_1", "tab1_2", "tab1_def")


def tree(pg: Session, name: str, *more: str) -> tuple[str, ...]:
    """A table of keys and texts whose first partition has another layout than the root, where that can be streamed."""
    first = "(b text, a int NOT NULL)" if pg.server_version >= 150000 else f"(LIKE {name})"
    return (
        f"CREATE TABLE {name} (a int PRIMARY KEY, b text) PARTITION BY LIST (a)",
        f"CREATE TABLE {name}_1 {first}",
        f"ALTER TABLE {name} ATTACH PARTITION {name}_1 FOR VALUES IN (0, 1, 2, 3)",
        *more,
    )


def tab1(pg: Session) -> tuple[str, ...]:
    return tree(
        pg,
        "tab1",
        "CREATE TABLE tab1_2 PARTITION OF tab1 FOR VALUES IN (4, 5, 6)",
        "CREATE TABLE tab1_def PARTITION OF tab1 DEFAULT",
    )


# One after the other: within partitions, from one to another, and back.
WRITES = (
    ("INSERT INTO tab1 VALUES (1, 'one')", "INSERT INTO tab1_1 (a) VALUES (3)", "INSERT INTO tab1_2 VALUES (5)",
     "INSERT INTO tab1 VALUES (10, 'ten')"),
    ("UPDATE tab1 SET a = 2 WHERE a = 1", "UPDATE tab1 SET a = 6 WHERE a = 5", "UPDATE tab1 SET a = 4 WHERE a = 6",
     "UPDATE tab1 SET a = 6, b = 'six' WHERE a = 4"),
    ("UPDATE tab1 SET a = 1 WHERE a = 10", "UPDATE tab1 SET a = 4 WHERE a = 1", "UPDATE tab1 SET b = a"),
    ("DELETE FROM tab1 WHERE a IN (2, 3, 5)", "DELETE FROM tab1_2"),
)  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("publication", ["FOR ALL TABLES", "FOR TABLE tab1, tab1_1"])
def test_partitions_come_under_their_own_names(publication: str, mode: str, pg: Session, obedient: Begin) -> None:
    run(pg, *tab1(pg), f"CREATE PUBLICATION s {publication}")
    sink = obedient(tables="public.*", onSchemaChange=mode)
    for writes in WRITES:
        sink.run("unseen", *writes)
        sink.equals(*LEAVES)
    sink.run("unseen", "INSERT INTO tab1 VALUES (1, 'foo'), (4, 'bar'), (10, 'baz')", "TRUNCATE tab1_2")
    sink.equals(*LEAVES)
    sink.run("down", "TRUNCATE tab1", "INSERT INTO tab1 VALUES (1, 'foo'), (4, 'bar'), (10, 'baz')",
             "UPDATE tab1 SET b = 'quux' WHERE a = 4")  # fmt: skip
    sink.equals(*LEAVES)
    sink.was_told()


@pytest.mark.parametrize("mode", MODES)
def test_partitions_come_under_their_root(mode: str, pg: Session, obedient: Begin) -> None:
    run(pg, *tab1(pg), "CREATE PUBLICATION s FOR ALL TABLES WITH (publish_via_partition_root = true)",
        "INSERT INTO tab1 VALUES (0, 'zero'), (11, 'eleven')",
        "CREATE TABLE tab4 (a int PRIMARY KEY) PARTITION BY LIST (a)",
        "CREATE TABLE tab4_1 PARTITION OF tab4 FOR VALUES IN (-1, 0, 1) PARTITION BY LIST (a)",
        "CREATE TABLE tab4_1_1 PARTITION OF tab4_1 FOR VALUES IN (-1, 0)", "INSERT INTO tab4 VALUES (-1)")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange=mode)
    for writes in WRITES:
        sink.run("unseen", *writes)
        sink.equals("tab1", "tab4")
    sink.run("unseen", "INSERT INTO tab4 VALUES (0)",
             "CREATE TABLE tab4_1_2 PARTITION OF tab4_1 FOR VALUES IN (1)", "INSERT INTO tab4 VALUES (1)")  # fmt: skip
    sink.equals("tab1", "tab4")
    sink.run("down", "DELETE FROM tab4 WHERE a = 0", "UPDATE tab4 SET a = 0 WHERE a = 1", "INSERT INTO tab4 VALUES (1)")
    sink.equals("tab1", "tab4")
    sink.was_told()


@pytest.mark.parametrize("mode", MODES)
def test_a_truncate_of_a_partition_is_not_sent_under_its_root(mode: str, pg: Session, obedient: Begin) -> None:
    """tab3 is not published, so its partition comes under its own name; tab2_1 is, and comes only once."""
    run(pg, *tree(pg, "tab2", "CREATE TABLE tab2_2 PARTITION OF tab2 FOR VALUES IN (5, 6)"),
        "CREATE TABLE tab3 (a int PRIMARY KEY, b text) PARTITION BY LIST (a)",
        "CREATE TABLE tab3_1 PARTITION OF tab3 FOR VALUES IN (0, 1, 2, 3, 5, 6)",
        "CREATE PUBLICATION s FOR TABLE tab2, tab2_1, tab3_1 WITH (publish_via_partition_root = true)",
        "INSERT INTO tab2 VALUES (1)", "INSERT INTO tab3 VALUES (1)")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange=mode)
    for writes in (
        ("INSERT INTO tab2 VALUES (0), (3), (5)", "INSERT INTO tab3 VALUES (0), (3), (5)"),
        ("UPDATE tab2 SET a = 6 WHERE a = 5", "UPDATE tab3 SET a = 6 WHERE a = 5"),
        ("UPDATE tab2 SET a = 2 WHERE a = 6", "UPDATE tab3 SET a = 2 WHERE a = 6"),
        ("DELETE FROM tab2", "DELETE FROM tab3"),
        ("INSERT INTO tab2 VALUES (1), (2), (5)", "INSERT INTO tab3 VALUES (1), (2)"),
    ):
        sink.run("unseen", *writes)
        sink.equals("tab2", "tab3_1")
    sink.run("unseen", "TRUNCATE tab2_1, tab3_1")
    sink.equals("tab3_1", tab2="SELECT a, NULL AS b FROM (VALUES (1), (2), (5)) AS v (a)")
    sink.run("unseen", "TRUNCATE tab2, tab3")
    sink.equals("tab2", "tab3_1")
    # How rows of partitions are brought to the root's columns changes, too.
    sink.run("unseen", "ALTER TABLE tab2 DROP b, ADD COLUMN c text DEFAULT 'pub_tab2', ADD b text",
             "INSERT INTO tab2 (a, b) VALUES (1, 'xxx'), (3, 'yyy'), (5, 'zzz')",
             "INSERT INTO tab2 (a, b, c) VALUES (6, 'aaa', 'xxx_c')")  # fmt: skip
    sink.equals("tab2", "tab3_1")
    sink.run("unseen", "UPDATE tab2 SET b = 'quux' WHERE a = 5", "DELETE FROM tab2 WHERE a = 1")
    sink.equals("tab2", "tab3_1")
    sink.was_told(*([] if mode == "emit" else ["the names b went to other columns, "]))


@pytest.mark.parametrize(("mode", "how"), cases(WAYS, ("emit", "unseen"), ("fail", "down")))
def test_the_names_that_partitions_come_under_may_change(mode: str, how: str, pg: Session, obedient: Begin) -> None:
    run(pg, *tab1(pg), "CREATE PUBLICATION s FOR ALL TABLES", "INSERT INTO tab1 VALUES (1), (4), (9)",
        "CREATE TABLE other (a int PRIMARY KEY)", "INSERT INTO other VALUES (1)")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange=mode)
    sink.equals("other", *LEAVES)
    sink.run(how, "INSERT INTO tab1 VALUES (2), (5)", "ALTER PUBLICATION s SET (publish_via_partition_root = true)",
             "INSERT INTO tab1 VALUES (3), (6)", "INSERT INTO other VALUES (2)",
             "UPDATE tab1 SET a = 8 WHERE a = 1")  # fmt: skip
    sink.equals("other", "tab1")
    sink.run(how, "DELETE FROM tab1 WHERE a = 8", "ALTER PUBLICATION s SET (publish_via_partition_root = false)",
             "INSERT INTO tab1 VALUES (8)", "UPDATE other SET a = -a")  # fmt: skip
    sink.equals("other", *LEAVES)
    if mode == "emit":
        assert set(sink.replica.left) == {f"public.{name}" for name in ("tab1", *LEAVES)}
        sink.was_told()
    else:
        sink.was_told("has lost public.tab1_1; public.tab1_2; public.tab1_def; ", "has lost public.tab1; ")


@pytest.mark.parametrize(("mode", "how"), WAYS)
def test_a_partition_is_a_table_while_it_is_attached(mode: str, how: str, pg: Session, obedient: Begin) -> None:
    run(pg, *tab1(pg), "CREATE PUBLICATION s FOR TABLE tab1 WITH (publish_via_partition_root = false)",
        "INSERT INTO tab1 VALUES (1), (4)", "CREATE TABLE later (a int PRIMARY KEY, b text)",
        "INSERT INTO later VALUES (20, 'before')")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange=mode)
    sink.equals(*LEAVES)
    sink.run(how, "ALTER TABLE tab1 ATTACH PARTITION later FOR VALUES IN (20, 21)", "INSERT INTO tab1 VALUES (21)")
    sink.equals("later", *LEAVES)
    sink.run(how, "UPDATE tab1 SET b = 'last' WHERE a = 20", "ALTER TABLE tab1 DETACH PARTITION later",
             "INSERT INTO later VALUES (22)", "UPDATE tab1 SET a = 6 WHERE a = 4")  # fmt: skip
    sink.equals(*LEAVES)
    sink.run(how, "DELETE FROM later WHERE a = 22",
             "ALTER TABLE tab1 ATTACH PARTITION later FOR VALUES IN (20, 21)",
             "ALTER TABLE tab1 DETACH PARTITION tab1_1", "UPDATE tab1 SET b = 'again'")  # fmt: skip
    sink.equals("later", *LEAVES[1:])
    sink.was_told(*([] if mode == "emit" else ["has lost public.later; ", "has lost public.tab1_1; "]))


def test_a_publication_may_have_a_lower_level_of_a_tree(pg: Session, obedient: Begin) -> None:
    run(pg, "CREATE TABLE tab4 (a int PRIMARY KEY, b text) PARTITION BY LIST (a)",
        "CREATE TABLE tab4_1 PARTITION OF tab4 FOR VALUES IN (-1, 0, 1) PARTITION BY LIST (a)",
        "CREATE TABLE tab4_1_1 PARTITION OF tab4_1 FOR VALUES IN (-1, 0, 1)",
        "CREATE TABLE tab4_2 PARTITION OF tab4 DEFAULT", "INSERT INTO tab4 VALUES (-1, 'in'), (9, 'out')",
        "CREATE PUBLICATION s FOR TABLE tab4_1 WITH (publish_via_partition_root = true)")  # fmt: skip
    sink = obedient(tables="public.*", onSchemaChange="emit")
    sink.equals("tab4_1")
    sink.run("unseen", "INSERT INTO tab4 VALUES (0)", "UPDATE tab4 SET a = 1 WHERE a = 9",
             "UPDATE tab4 SET a = 8 WHERE a = -1")  # fmt: skip
    sink.equals("tab4_1")
    # With the root, nothing is published by this name.
    sink.run("unseen", "ALTER PUBLICATION s ADD TABLE tab4", "INSERT INTO tab4 VALUES (-1)")
    sink.equals("tab4")
    sink.run(
        "down", "ALTER PUBLICATION s DROP TABLE tab4", "INSERT INTO tab4 VALUES (7)", "DELETE FROM tab4 WHERE a = 0"
    )
    sink.equals("tab4_1")
    sink.was_told()
    assert sink.replica.left == ["public.tab4_1", "public.tab4"]


@pytest.mark.parametrize("mode", MODES)
def test_a_table_whose_identity_is_an_index_changes_its_columns(mode: str, pg: Session, obedient: Begin) -> None:
    run(pg, "CREATE TABLE tab5 (a int NOT NULL, b int)", "CREATE UNIQUE INDEX tab5_a_idx ON tab5 (a)",
        "ALTER TABLE tab5 REPLICA IDENTITY USING INDEX tab5_a_idx", "CREATE PUBLICATION s FOR TABLE tab5")  # fmt: skip
    sink = obedient(tables="tab5", onSchemaChange=mode)
    sink.run("unseen", "INSERT INTO tab5 VALUES (1, 1)", "UPDATE tab5 SET a = 2 WHERE a = 1")
    sink.equals("tab5")
    sink.run("unseen", "ALTER TABLE tab5 DROP COLUMN b, ADD COLUMN c int", "ALTER TABLE tab5 ADD COLUMN b int",
             "UPDATE tab5 SET c = 1 WHERE a = 2")  # fmt: skip
    sink.equals("tab5")
    sink.run("unseen", "UPDATE tab5 SET a = 3, b = 3")
    sink.equals("tab5")
    sink.was_told(*([] if mode == "emit" else ["the names b went to other columns, "]))
