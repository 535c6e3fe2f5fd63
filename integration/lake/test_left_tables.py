"""Tables that cannot be streamed rightly any more: the others go on, and their rows come again once it is mended."""

from __future__ import annotations

import pytest
from databases import connect
from driving import Driver, drop_slots, run
from lake import Begin, Lake, is_same, rows_of, set_aside
from psycopg2.extensions import connection as Session
from watch import wait_until

from pg_cdc_source.errors import ServerSetupError
from pg_cdc_source.spark.pgcdc import HAS_LIMITS

T = ("CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'a'), (2, 'b')")
PARTITIONED = (
    "CREATE TABLE p (id int PRIMARY KEY, code int NOT NULL, v text) PARTITION BY RANGE (id)",
    "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (100)",
    "INSERT INTO p SELECT i, i + 10, 'v' FROM generate_series(1, 5) AS i",
    "ALTER TABLE p REPLICA IDENTITY FULL",
    "ALTER TABLE p1 REPLICA IDENTITY FULL",
)
# Each with what mends it.
LESSER = {
    "altered": ("ALTER TABLE p1 REPLICA IDENTITY DEFAULT", "ALTER TABLE p1 REPLICA IDENTITY FULL"),
    "attached": (
        "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (100) TO (200)",
        "ALTER TABLE p2 REPLICA IDENTITY FULL",
    ),
}


@pytest.mark.parametrize(
    ("lesser", "when"),
    [
        ("altered", "running"),
        ("altered", "between two starts"),
        ("altered", "while another table joins"),
        # It is found as the other one is.
        ("attached", "running"),
    ],
)
def test_a_partition_with_another_replica_identity_does_not_stop_the_others(
    lesser: str, when: str, pg: Session, begin: Begin
) -> None:
    run(pg, *PARTITIONED)
    lake = begin(*T)
    wait_until(is_same(lake, pg, "t", "p"))
    driver: Driver = lake.driver
    if when == "between two starts":
        driver.stop()
    run(pg, LESSER[lesser][0], "UPDATE p SET v = 'x' WHERE id = 1", "DELETE FROM p WHERE id = 2")
    if when == "between two starts":
        driver.start()
    others = ["t"]
    if when == "while another table joins":
        run(pg, "CREATE TABLE j (id int PRIMARY KEY)", "INSERT INTO j VALUES (1)", "ALTER PUBLICATION s ADD TABLE j")
        others.append("j")
    wait_until(lambda: "another replica identity" in set_aside(lake).get("public.p", ""))
    run(pg, "INSERT INTO t VALUES (3, 'c')", "UPDATE p SET v = 'y' WHERE id = 3", "INSERT INTO p VALUES (50, 50, '')")
    wait_until(is_same(lake, pg, *others))
    assert lake.rows("p") != rows_of(pg, "p")
    assert set_aside(lake).keys() == {"public.p"}
    # It stays so over a start.
    driver.restart()
    run(pg, "INSERT INTO t VALUES (4, 'd')")
    wait_until(is_same(lake, pg, *others))
    assert set_aside(lake).keys() == {"public.p"}
    run(pg, LESSER[lesser][1])
    wait_until(is_same(lake, pg, *others, "p"))
    assert set_aside(lake) == {}
    run(pg, "DELETE FROM p WHERE id = 3")
    wait_until(is_same(lake, pg, *others, "p"))


@pytest.mark.parametrize("when", ["running", "between two starts"])
def test_tables_of_which_changes_are_not_sent_are_left_out_until_they_are(when: str, pg: Session, begin: Begin) -> None:
    lake = begin(*T, "CREATE TABLE u (id int PRIMARY KEY, v text)", mode={"public.u": "append"})
    wait_until(is_same(lake, pg, "t"))
    driver: Driver = lake.driver
    if when == "between two starts":
        driver.stop()
    run(pg, "ALTER PUBLICATION s SET (publish = 'insert, update')", "DELETE FROM t WHERE id = 1")
    if when == "between two starts":
        driver.start()
    wait_until(lambda: "does not send its deletes and truncates" in set_aside(lake).get("public.t", ""))
    # A log has what is published.
    run(pg, "INSERT INTO u VALUES (7, 'g')")
    wait_until(lambda: lake.step() is not None and 7 in {row["id"] for row in lake.found("u")})
    assert set_aside(lake).keys() == {"public.t"}
    run(pg, "ALTER PUBLICATION s SET (publish = 'insert, update, delete, truncate')", "DELETE FROM t WHERE id = 2")
    wait_until(is_same(lake, pg, "t"))
    assert set_aside(lake) == {}


def test_a_mirror_does_not_begin_with_a_publication_that_leaves_out_changes(pg: Session, begin: Begin) -> None:
    run(pg, *T, "CREATE PUBLICATION s FOR TABLE t WITH (publish = 'insert, update')")
    with pytest.raises(ServerSetupError, match=r"public\.t: publication s does not send its deletes and truncates"):
        begin().step()
    run(pg, "ALTER PUBLICATION s SET (publish = 'insert, update, delete, truncate')")
    wait_until(is_same(begin(), pg, "t"))


def tables_of(lake: Lake) -> set[str]:
    lake.step()
    last = lake.ledger.last()
    assert last is not None
    return {*last.tables, *last.set_aside}


@pytest.mark.parametrize("leave", ["ALTER PUBLICATION s DROP TABLE u", "DROP TABLE u"])
def test_a_table_that_has_left_is_no_part_of_later_points(leave: str, pg: Session, begin: Begin) -> None:
    lake = begin(*T, "CREATE TABLE u (id int PRIMARY KEY)", "INSERT INTO u VALUES (1)")
    wait_until(is_same(lake, pg, "t", "u"))
    before, rows = lake.ledger.last(), rows_of(pg, "u")
    assert before is not None
    run(pg, leave, "INSERT INTO t VALUES (3, 'c')")
    wait_until(lambda: tables_of(lake) == {"public.t"})
    wait_until(is_same(lake, pg, "t"))
    assert lake.rows("u", before.tables["public.u"]) == lake.rows("u") == rows
    lake.restart()
    if leave.startswith("DROP"):
        run(pg, "CREATE TABLE u (id int PRIMARY KEY)")
    run(pg, "INSERT INTO u VALUES (9)", "ALTER PUBLICATION s ADD TABLE u")
    wait_until(is_same(lake, pg, "t", "u"))
    assert tables_of(lake) == {"public.t", "public.u"}
    assert set_aside(lake) == {}


GAPS = {
    "created again": (
        "DROP TABLE u",
        "CREATE TABLE u (id int PRIMARY KEY, v text)",
        "INSERT INTO u VALUES (7, 'new')",
        "ALTER PUBLICATION s ADD TABLE u",
    ),
    "not published for a while": (
        "ALTER PUBLICATION s DROP TABLE u",
        "INSERT INTO u VALUES (2, 'not published')",
        "ALTER PUBLICATION s ADD TABLE u",
        "INSERT INTO u VALUES (3, 'published')",
    ),
    "truncated before": (
        "TRUNCATE u",
        "ALTER PUBLICATION s DROP TABLE u",
        "INSERT INTO u VALUES (2, 'not published')",
        "ALTER PUBLICATION s ADD TABLE u",
        "INSERT INTO u VALUES (3, 'published')",
    ),
    "a partition had rows": (
        "CREATE TABLE p (id int PRIMARY KEY, v text)",
        "INSERT INTO p VALUES (11, 'before')",
        "ALTER TABLE u ATTACH PARTITION p FOR VALUES FROM (10) TO (20)",
        "INSERT INTO u VALUES (12, 'since')",
    ),
}


@pytest.mark.parametrize(
    ("gap", "when"),
    [
        ("created again", "running"),
        ("created again", "between two starts"),
        # How a stream gets to know of a gap does not depend on what has made it.
        ("not published for a while", "running"),
        ("truncated before", "between two starts"),
        ("a partition had rows", "running"),
    ],
)
def test_a_table_whose_changes_are_missing_is_no_part_of_a_point_until_its_rows_are_there(
    gap: str, when: str, pg: Session, db: str, begin: Begin
) -> None:
    create = "CREATE TABLE u (id int PRIMARY KEY, v text)"
    parts: tuple[str, ...] = ()
    if "partition" in gap:
        if pg.server_version < 150000:
            pytest.skip("before PostgreSQL 15 every ATTACH without ALTER PUBLICATION is a gap")
        create += " PARTITION BY RANGE (id)"
        parts = ("CREATE TABLE u_1 PARTITION OF u FOR VALUES FROM (0) TO (10)",)
    run(pg, create, *parts)
    lake = begin(*T, "INSERT INTO u VALUES (1, 'x')")
    wait_until(is_same(lake, pg, "t", "u"))
    driver: Driver = lake.driver
    if when == "between two starts":
        if not HAS_LIMITS:
            pytest.skip("the first batch of a start has the rows, and waits for the transaction")
        driver.stop()
    with connect(db) as other:
        # The consistent point of the rows waits for a transaction that has written.
        other.autocommit = False
        run(other, "CREATE TABLE unseen (id int)")
        run(pg, *GAPS[gap], "INSERT INTO t VALUES (3, 'c')")
        if when == "between two starts":
            driver.start()
        wait_until(lambda: "changes of it may be missing" in set_aside(lake).get("public.u", ""))
        for _ in range(2):
            run(pg, "INSERT INTO t SELECT max(id) + 1, 'd' FROM t")
            wait_until(is_same(lake, pg, "t"))
            assert set_aside(lake).keys() == {"public.u"}
            if HAS_LIMITS:
                driver.restart()
    wait_until(is_same(lake, pg, "t", "u"))
    assert set_aside(lake) == {}
    assert driver.offset.gaps == ()


def test_the_old_name_of_a_renamed_table_is_no_part_of_later_points(pg: Session, begin: Begin) -> None:
    lake = begin(*T)
    run(pg, "INSERT INTO t VALUES (3, 'c')", "ALTER TABLE t RENAME TO u", "INSERT INTO u VALUES (4, 'd')")
    wait_until(lambda: tables_of(lake) == {"public.u"})
    assert "was called public.t before" in set_aside(lake)["public.u"]


def test_the_old_name_of_a_table_whose_rows_come_again_is_no_part_of_later_points(pg: Session, begin: Begin) -> None:
    if pg.server_version < 140000:
        pytest.skip("PostgreSQL 14 has messages")
    lake = begin(*T)
    run(pg, "ALTER TABLE t RENAME TO u",
        """SELECT pg_logical_emit_message(true, 'pgcdc', '{"snapshot": ["public.u"]}')""")  # fmt: skip
    wait_until(lambda: lake.step() and "public.u" in tables_of(lake))
    assert (tables_of(lake), set_aside(lake)) == ({"public.u"}, {})
    assert lake.rows("u") == rows_of(pg, "u")


def test_rows_that_come_again_in_several_batches_are_one_point_behind_the_last(pg: Session, begin: Begin) -> None:
    """A slot was lost, and with it changes of all tables."""
    fill = "INSERT INTO {} SELECT i, repeat('x', 500) FROM generate_series(10, 300) AS i"
    u = "CREATE TABLE u (id int PRIMARY KEY, v text)"
    lake = begin(*T, u, fill.format("t"), fill.format("u"), maxBytesPerBatch="64kB", onSlotLost="resnapshot")
    wait_until(is_same(lake, pg, "t", "u"))
    before = lake.ledger.last()
    assert before is not None
    lake.driver.stop()
    drop_slots(pg)
    run(pg, "DELETE FROM t WHERE id = 1", "UPDATE u SET v = 'y' WHERE id = 10")
    lake.driver.start()
    seen = []

    def is_whole() -> bool:
        if (row := lake.step()) is not None:
            seen.append(row.is_whole)
            if not row.is_whole:
                assert lake.ledger.last() == before
        return seen[-1:] == [True]

    wait_until(is_whole)
    assert is_same(lake, pg, "t", "u")()
    if HAS_LIMITS:
        assert seen == [False, True]


def test_a_batch_whose_changes_were_lost_with_the_slot_is_no_point(pg: Session, begin: Begin) -> None:
    lake = begin(*T, onSlotLost="resnapshot")
    before = lake.ledger.last()
    run(pg, "INSERT INTO t VALUES (3, 'c')")
    wait_until(lambda: lake.driver.attempt(read=False) is not None)
    lake.driver.stop()
    drop_slots(pg)
    run(pg, "DELETE FROM t WHERE id = 1")
    lake.driver.start()
    row = lake.step()
    assert row is not None
    assert not row.is_whole
    assert lake.ledger.last() == before
    wait_until(is_same(lake, pg, "t"))
    assert lake.ledger.last() != before
