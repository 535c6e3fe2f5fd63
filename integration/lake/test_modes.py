"""What tables of a lake keep of rows that PostgreSQL has changed or given up, against what its triggers have seen."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from audit import TRIGGERS, lsns_of, noted
from breaking import breaking, wait_for
from driving import run
from kept_rows import Expected, deleted, expect_rows, logged, stated
from lake import Begin, Lake
from psycopg2.extensions import connection as Session
from watch import wait_until

from pg_cdc_source.lake.shape import Shapes
from pg_cdc_source.stream.joining import Joining

# Values that do not travel with every update.
LARGE = "(SELECT string_agg(md5((id * i)::text), '') FROM generate_series(1, 100) AS i)"
FIRST = (
    "CREATE TABLE t (id int PRIMARY KEY, n int, v text)",
    "ALTER TABLE t ALTER v SET STORAGE EXTERNAL",
    f"INSERT INTO t SELECT id, 0, {LARGE} FROM generate_series(1, 4) AS id",
)
# Each is done while the mirror does not run, so that it comes in few batches.
SCENES = (
    ("INSERT INTO t VALUES (5, 5, 'five')", "UPDATE t SET n = 1 WHERE id = 1", "UPDATE t SET n = 11 WHERE id = 1",
     "DELETE FROM t WHERE id = 2"),
    ("BEGIN; UPDATE t SET n = 3 WHERE id = 3; UPDATE t SET id = 30 WHERE id = 3; UPDATE t SET n = 33 WHERE id = 30;"
     " COMMIT",
     "BEGIN; INSERT INTO t VALUES (6, 6, 'six'); UPDATE t SET n = 66 WHERE id = 6; DELETE FROM t WHERE id = 6; COMMIT",
     "INSERT INTO t VALUES (7, 7, 'seven')", "DELETE FROM t WHERE id = 7",
     "BEGIN; DELETE FROM t WHERE id = 5; INSERT INTO t VALUES (5, 55, 'again'); COMMIT"),
    ("INSERT INTO t VALUES (2, 22, NULL), (7, 77, 'once more')", "UPDATE t SET id = 40 WHERE id = 4",
     "DELETE FROM t WHERE id = 1"),
    ("UPDATE t SET n = n + 100", "BEGIN; INSERT INTO t VALUES (8, 8, 'eight'); UPDATE t SET n = 8 WHERE id = 2;"
     " TRUNCATE t; INSERT INTO t VALUES (8, 88, 'behind'); COMMIT", "UPDATE t SET n = 888 WHERE id = 8"),
    ("TRUNCATE t",),
    # The first of these changes no row.
    ("TRUNCATE t", "INSERT INTO t VALUES (21, 21, 'one')", "TRUNCATE t", "INSERT INTO t VALUES (22, 22, 'two')"),
    (f"INSERT INTO t SELECT id, 1, {LARGE} FROM generate_series(1, 3) AS id",),
)  # fmt: skip


MODES = {
    "soft": ("merge", "soft", deleted),
    "append": ("append", "hard", logged),
    "history": ("history", "hard", stated),
}


def modes(*corner: str) -> list[Any]:
    """All modes. Of those in ``corner`` each takes a minute with Spark's merges."""
    marks = {name: [pytest.mark.corner] for name in corner}
    return [pytest.param(*given, id=name, marks=marks.get(name, [])) for name, given in MODES.items()]


@pytest.mark.parametrize(("mode", "deletes", "expected"), modes("soft", "history"))
def test_tables_have_what_triggers_have_seen(
    mode: str, deletes: str, expected: Expected, pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = begin(*FIRST, mode=mode, deletes=deletes)
    first = lake.ledger.last()
    assert first is not None
    rows = [{"id": i, "n": 0, "v": v} for i, v in run(pg, "SELECT id, v FROM t")]
    run(pg, *TRIGGERS)
    step = breaking(lake, monkeypatch)
    for scene in SCENES:
        run(pg, *scene)
        wait_for(lake, pg, step)
    wanted = list(expected(noted(pg, lsns_of(lake.driver.rows)), rows, first.lsn))
    found = lake.found("t")
    assert mode != "append" or any(row["_unchanged"] for row in found)
    expect_rows(mode, found, wanted)


@pytest.mark.corner
def test_a_deleted_row_makes_room_for_others_where_the_table_gets_another_key(
    pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = begin("CREATE TABLE t (id int PRIMARY KEY, code text, v text)",
                 "INSERT INTO t VALUES (1, 'a', 'x'), (2, 'b', 'x'), (3, 'c', 'x'), (7, 'd', 'x'), (8, NULL, 'x')",
                 deletes="soft")  # fmt: skip
    step = breaking(lake, monkeypatch)
    # A deleted row has a present one's code, two of them have one, and one has none.
    run(pg, "DELETE FROM t WHERE id = 1", "INSERT INTO t VALUES (4, 'a', 'y')", "DELETE FROM t WHERE id = 2",
        "INSERT INTO t VALUES (5, 'b', 'y')", "DELETE FROM t WHERE id IN (5, 7, 8)")  # fmt: skip
    wait_for(lake, pg, step)
    run(pg, "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (code)", "UPDATE t SET v = 'z' WHERE code = 'a'",
        "INSERT INTO t VALUES (6, 'b', 'z')")  # fmt: skip
    wait_for(lake, pg, step)
    run(pg, "ALTER TABLE t RENAME v TO w", "UPDATE t SET id = 9 WHERE code = 'c'")
    wait_for(lake, pg, step)
    assert sorted(row["id"] for row in lake.found("t")) == [4, 6, 7, 8, 9]
    # Two of them have one id. Rows that a TRUNCATE removes stay as well, and the new key is that of no row before it.
    run(pg, "DELETE FROM t WHERE code = 'c'", "INSERT INTO t VALUES (9, 'e', 'x')", "DELETE FROM t WHERE code = 'e'")
    wait_for(lake, pg, step)
    run(pg, "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id)", "TRUNCATE t",
        "INSERT INTO t VALUES (9, 'f', 'x')")  # fmt: skip
    wait_for(lake, pg, step)
    assert sorted((row["id"], row["_deleted"]) for row in lake.found("t")) == [
        *((4, True), (6, True), (7, True), (8, True)),
        (9, False),
    ]


def test_a_deleted_row_stays_as_it_was_where_another_one_with_its_key_is_deleted_unseen(
    pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = begin("CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'a'), (2, 'b')",
                 deletes="soft")  # fmt: skip
    run(pg, "DELETE FROM t WHERE id = 1")
    wait_for(lake, pg, lake.step)
    before = of(lake.found("t"), 1)
    with monkeypatch.context() as patch:
        # As where rows are read again after a crash, and one of them is gone by then.
        patch.setattr(lake.kind, "apply", lambda *_: None)
        run(pg, "INSERT INTO t VALUES (1, 'unseen')")
        wait_until(lambda: lake.step() is not None)
    run(pg, "BEGIN; DELETE FROM t WHERE id = 1; INSERT INTO t VALUES (3, 'c'); COMMIT")
    wait_for(lake, pg, lake.step)
    assert of(lake.found("t"), 1) == before


@pytest.mark.parametrize(("mode", "deletes", "expected"), modes("append"))
def test_columns_change_and_rows_come_again(
    mode: str, deletes: str, expected: Expected, pg: Session, begin: Begin
) -> None:
    lake = begin(*FIRST, mode=mode, deletes=deletes)
    # A log has no values that rows got without a change.
    filled = "ADD f text NOT NULL DEFAULT 'f'" if mode != "append" else "ADD f text"
    again = "n" if deletes == "soft" else "k"
    for scene in (
        ("ALTER TABLE t ADD m int", "UPDATE t SET m = 1 WHERE id = 1", "DELETE FROM t WHERE id = 2"),
        ("ALTER TABLE t RENAME v TO w", f"ALTER TABLE t {filled}", "INSERT INTO t VALUES (9, 9)"),
        ("UPDATE t SET n = 6 WHERE id = 9", "ALTER TABLE t DROP n", "UPDATE t SET m = 2, id = 10 WHERE id = 1",
         f"ALTER TABLE t ADD {again} int", f"UPDATE t SET {again} = 7 WHERE id = 9"),
    ):  # fmt: skip
        run(pg, *scene)
        wait_for(lake, pg, lake.step)
    before = lake.found("t")
    if mode == "append":
        rows = sorted((row["_commit_lsn"], row["n"], row["k"]) for row in before if row["id"] == 9)
        assert [row[1:] for row in rows] == [(9, None), (6, None), (None, 7)]
    if pg.server_version < 140000:
        return
    lake.write_as_somebody_else("t")
    run(pg, "DELETE FROM t WHERE id = 3")
    wait_until(lambda: lake.step() is not None and "changed by somebody else" in str(lake.ledger.last()))
    run(pg, """SELECT pg_logical_emit_message(true, 'pgcdc', '{"snapshot": ["public.t"]}')""")
    wait_for(lake, pg, lake.step)
    after = lake.found("t")
    if deletes == "soft":
        ((row, was), (gone, gone_before)) = ([of(rows, i) for rows in (after, before)] for i in (3, 2))
        assert row == was | {"_deleted": True, "_deleted_lsn": row["_deleted_lsn"]}
        assert gone == gone_before
        assert gone["_deleted_lsn"] < row["_deleted_lsn"]
    if mode == "history":
        assert all((row["_valid_to_ts"] is None) == (row["_valid_to"] is None) for row in before)
        # Somebody else has added one of the rows again.
        states = {(row["_valid_from"], row["n"], row["k"]) for row in after if row["id"] == 9}
        assert [state[1:] for state in sorted(states)] == [(9, None), (6, None), (None, 7), (None, 7)]
        opened = {row["_valid_from"] for row in after if row["_valid_to"] is None}
        assert len(opened) == 1
        assert {row["_valid_to"] for row in after if row["id"] == 3} == {*opened}
    if mode == "append":
        done = max(row["_commit_lsn"] for row in before)
        kinds = Counter(row["_change_type"] for row in after if row["_commit_lsn"] > done)
        assert kinds == {"truncate": 1, "snapshot": 3}


@pytest.mark.corner
def test_a_column_of_a_log_that_came_again_is_followed_when_it_is_renamed(pg: Session, begin: Begin) -> None:
    lake = begin("CREATE TABLE t (id int PRIMARY KEY, a text)", "INSERT INTO t VALUES (1, 'first')", mode="append")
    for scene in (
        ("ALTER TABLE t DROP a", "ALTER TABLE t ADD a text", "INSERT INTO t VALUES (2, 'again')"),
        ("ALTER TABLE t RENAME a TO b", "INSERT INTO t VALUES (3, 'renamed')"),
        ("ALTER TABLE t ADD a text", "INSERT INTO t VALUES (4, 'renamed', 'another')"),
    ):
        run(pg, *scene)
        wait_for(lake, pg, lake.step)
    # The rows may come again where a column was replaced.
    found = {(row["id"], row["b"], row["a"]) for row in lake.found("t") if row["_change_type"] == "insert"}
    assert found == {(2, "again", None), (3, "renamed", None), (4, "renamed", "another")}
    assert (1, "first", None) in [(row["id"], row["b"], row["a"]) for row in lake.found("t")]


@pytest.mark.corner
@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize(("mode", "deletes"), [("merge", "soft"), ("history", "hard")])
def test_rows_that_stay_have_what_a_new_column_gave_them_where_all_rows_come_again(
    mode: str, deletes: str, down: bool, pg: Session, begin: Begin
) -> None:
    if pg.server_version < 140000:
        pytest.skip("PostgreSQL 14 has messages, by which rows are asked for")
    lake = begin(*FIRST, mode=mode, deletes=deletes)
    run(pg, "DELETE FROM t WHERE id = 2")
    wait_for(lake, pg, lake.step)
    if down:
        lake.driver.stop()
    # No change of a row has said the column before.
    run(pg, "ALTER TABLE t ADD f int DEFAULT 5",
        """SELECT pg_logical_emit_message(true, 'pgcdc', '{"snapshot": ["public.t"]}')""")  # fmt: skip
    if down:
        lake.driver.start()
    # Without the rows that come again, the lake has what PostgreSQL has as well.
    expected = 4 if mode == "merge" else 7
    wait_until(lambda: lake.step() is None and len(lake.found("t")) == expected)
    wait_for(lake, pg, lake.step)
    assert [row["f"] for row in lake.found("t")] == [5] * expected


@pytest.mark.corner
@pytest.mark.parametrize("is_said_by_a_row", [True, False])
@pytest.mark.parametrize(("mode", "deletes"), [("merge", "soft"), ("history", "hard")])
def test_what_precedes_ddl_that_rewrites_a_table_is_kept(
    mode: str, deletes: str, is_said_by_a_row: bool, pg: Session, begin: Begin
) -> None:
    lake = begin("CREATE TABLE other (id int PRIMARY KEY)", *FIRST, mode=mode, deletes=deletes)
    # All of it is there when the next batch begins. Nothing precedes the first table that is rewritten.
    lake.driver.stop()
    run(pg, "ALTER TABLE other ALTER id TYPE bigint", "INSERT INTO other VALUES (1)",
        "UPDATE t SET n = 5 WHERE id = 1", "DELETE FROM t WHERE id = 1", "INSERT INTO t VALUES (5, 5, 'five')",
        "DELETE FROM t WHERE id = 5", "UPDATE t SET n = 6 WHERE id = 2",
        "ALTER TABLE t ALTER n TYPE bigint USING n * 10")  # fmt: skip
    if is_said_by_a_row:
        run(pg, "UPDATE t SET n = 7 WHERE id = 3")
    lake.driver.start()
    wait_for(lake, pg, lake.step)
    states = sorted((row["id"], row["n"]) for row in lake.found("t") if row["id"] in (1, 2, 5))
    assert states == (
        [(1, 5), (2, 60), (5, 5)] if deletes == "soft" else [(1, 0), (1, 5), (2, 0), (2, 6), (2, 60), (5, 5)]
    )


@pytest.mark.parametrize("mode", ["append", "history"])
def test_changes_that_come_again_with_a_tables_rows_are_there_once(
    mode: str, pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pg.server_version < 140000:
        pytest.skip("PostgreSQL 14 has messages, by which rows are asked for")
    lake = begin(*FIRST, mode=mode)
    take, late = Joining.take, threading.Event()
    monkeypatch.setattr(Joining, "take", lambda self, *patience: take(self, *patience) if late.is_set() else None)
    run(pg, """SELECT pg_logical_emit_message(true, 'pgcdc', '{"snapshot": ["public.t"]}')""")
    holding = "SELECT 1 FROM pg_stat_activity WHERE application_name ~ ':snapshot' AND state = 'idle in transaction'"

    def is_held() -> bool:
        lake.step()
        return bool(run(pg, holding))

    wait_until(is_held)
    for scene in (
        ("UPDATE t SET n = 7 WHERE id = 1", "INSERT INTO t VALUES (8, 8, 'behind the point')"),
        ("DELETE FROM t WHERE id = 2", "UPDATE t SET n = 9 WHERE id = 8", "DELETE FROM t WHERE id = 8"),
    ):
        run(pg, *scene)
        wait_until(is_same_state(lake, pg, mode))
    late.set()
    run(pg, "UPDATE t SET n = 10 WHERE id = 1")
    wait_until(lambda: lake.step() and lake.driver.offset.at is not None)
    wait_until(is_same_state(lake, pg, mode))
    found = lake.found("t")
    if mode == "append":
        assert Counter(row["_change_type"] for row in found if row["_seq"]) == {"insert": 1, "update": 3, "delete": 2}
        assert Counter(row["_change_type"] for row in found if not row["_seq"]) == {"truncate": 1, "snapshot": 8}
    else:
        for row in found:
            others = [other for other in found if other["id"] == row["id"] and other is not row]
            assert not any(overlap(row, other) for other in others), (row, others)


def is_same_state(lake: Lake, pg: Session, mode: str) -> Callable[[], bool]:
    """Whether the lake's rows are PostgreSQL's in the end, by what the log or the states say."""

    def state() -> dict[int, int]:
        if mode == "history":
            return {row["id"]: row["n"] for row in lake.found("t") if row["_valid_to"] is None}
        rows: dict[int, int] = {}
        for row in sorted(lake.found("t"), key=lambda row: (row["_commit_lsn"], row["_seq"])):
            if row["_change_type"] == "truncate":
                rows.clear()
            elif row["_change_type"] == "delete":
                del rows[row["id"]]
            else:
                rows[row["id"]] = row["n"]
        return rows

    def look() -> bool:
        lake.step()
        return state() == dict(run(pg, "SELECT id, n FROM t"))

    return look


def overlap(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return bool(a["_valid_from"] < (b["_valid_to"] or math.inf) and b["_valid_from"] < (a["_valid_to"] or math.inf))


def of(rows: list[dict[str, Any]], key: int) -> dict[str, Any]:
    (row,) = (row for row in rows if row["id"] == key)
    return row


def test_columns_are_added_and_nothing_else(pg: Session, begin: Begin) -> None:
    lake = begin(*FIRST, changes="additive")
    run(pg, "ALTER TABLE t ADD m int DEFAULT 5", "ALTER TABLE t DROP n", "UPDATE t SET v = 'x' WHERE id = 1",
        "TRUNCATE t", "INSERT INTO t VALUES (7, 'seven', 7)", "INSERT INTO t VALUES (8, 'eight', 8)")  # fmt: skip
    wait_for(lake, pg, lake.step)
    assert {row["n"] for row in lake.found("t")} == {None}
    run(pg, "ALTER TABLE t RENAME v TO w", "UPDATE t SET w = 'y' WHERE id = 7")
    wait_until(lambda: lake.step() is not None and "v is called w" in str(lake.ledger.last()))
    assert {"m", "n", "v"} <= lake.found("t")[0].keys()


@pytest.mark.parametrize("is_cut", [
    pytest.param(False, id="one_batch", marks=pytest.mark.corner),
    pytest.param(True, id="many_batches"),
])  # fmt: skip
@pytest.mark.parametrize("deletes", ["hard", "soft"])
def test_a_dropped_column_has_the_values_of_its_own_rows(pg: Session, begin: Begin, deletes: str, is_cut: bool) -> None:
    """Whichever changes come in one batch."""
    lake = begin(
        "CREATE TABLE t (id int PRIMARY KEY, n int, v text)",
        "INSERT INTO t SELECT id, 10 * id, 'v' FROM generate_series(1, 6) AS id",
        changes="additive",
        deletes=deletes,
    )

    def take(*statements: str) -> None:
        for statement in statements:
            run(pg, statement)
            if is_cut:
                lake.step()
        wait_for(lake, pg, lake.step)

    def n() -> tuple[dict[int, int | None], dict[int, int | None]]:
        """Of the rows that are there, and of the deleted ones."""
        found = lake.found("t")
        gone = {row["id"] for row in found if row.get("_deleted")}
        present = {row["id"]: row["n"] for row in found if row["id"] not in gone}
        return present, {row["id"]: row["n"] for row in found if row["id"] in gone}

    is_soft = deletes == "soft"
    take(
        "UPDATE t SET n = 11 WHERE id = 1", "INSERT INTO t VALUES (7, 70, 'seven'), (8, 80, 'eight')",
        "DELETE FROM t WHERE id = 3", "DELETE FROM t WHERE id = 8", "ALTER TABLE t DROP n",
        "INSERT INTO t VALUES (3, 'again'), (9, 'nine')", "UPDATE t SET v = 'x' WHERE id = 1",
        "UPDATE t SET id = 17 WHERE id = 7",
    )  # fmt: skip
    kept = {1: 11, 2: 20, 3: None, 4: 40, 5: 50, 6: 60, 9: None, 17: 70}
    assert n() == (kept, {7: 70, 8: 80} if is_soft else {})
    take(
        "BEGIN; DELETE FROM t WHERE id = 1; INSERT INTO t VALUES (1, 'again'); COMMIT",
        "UPDATE t SET id = 12 WHERE id = 2", "DELETE FROM t WHERE id = 4", "UPDATE t SET id = 4 WHERE id = 5",
        "UPDATE t SET v = 'x' WHERE id = 6", "INSERT INTO t VALUES (5, 'again')", "DELETE FROM t WHERE id = 17",
        "INSERT INTO t VALUES (8, 'again')", "DELETE FROM t WHERE id = 8",
    )  # fmt: skip
    kept = {1: None, 3: None, 4: 50, 5: None, 6: 60, 9: None, 12: 20}
    assert n() == (kept, {2: 20, 7: 70, 8: None, 17: 70} if is_soft else {})
    take("INSERT INTO t VALUES (17, 'again')", "UPDATE t SET v = 'x' WHERE id = 17")
    assert n()[0] == {**kept, 17: None}


def test_a_table_does_not_become_one_of_another_mode(pg: Session, begin: Begin) -> None:
    lake = begin(*FIRST, deletes="soft")
    lake.begin_as(Shapes())
    run(pg, "DELETE FROM t")
    wait_until(lambda: lake.step() is not None and "merge, soft deletes, and cannot go on" in str(lake.ledger.last()))
