"""What tables of a lake keep of rows that PostgreSQL has changed or given up, against what its triggers have seen."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from audit import TRIGGERS, Noted, last_of_each, noted
from driving import run
from lake import Begin, Lake, rows_of
from psycopg2.extensions import connection as Session
from watch import wait_until

from pg_cdc_source.lake.shape import Shapes

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
    (f"INSERT INTO t SELECT id, 1, {LARGE} FROM generate_series(1, 3) AS id",),
)  # fmt: skip


class _Killed(BaseException):
    """Ends a batch as a killed process does."""


def breaking(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """Have each commit broken before it is made and behind it; a look that runs a batch again until it is done."""
    tried: Counter[Any] = Counter()
    for name in ("apply", "empty", "add_files"):
        whole = getattr(lake.kind, name)

        def broken(self: Any, step: Any, part: Any, whole: Any = whole) -> None:
            tried[self._mark, step] += 1
            assert tried[self._mark, step] <= 2, "a step is done that was done"
            if tried[self._mark, step] == 1:
                raise _Killed
            whole(self, step, part)
            raise _Killed

        monkeypatch.setattr(lake.kind, name, broken)

    def step() -> object:
        try:
            return lake.step()
        except _Killed:
            lake.restart()
            return step()

    return step


def wait_for(lake: Lake, pg: Session, step: Callable[[], object]) -> None:
    """Run batches until the table has PostgreSQL's rows."""
    wait_until(lambda: [step(), lake.rows("t") == rows_of(pg, "t")][1])
    last = lake.ledger.last()
    assert last is not None
    assert last.set_aside == {}


Expected = Callable[[list[Noted], list[dict[str, Any]], int], Iterable[dict[str, Any]]]


def deleted(changes: list[Noted], first: list[dict[str, Any]], lsn: int) -> Iterable[dict[str, Any]]:
    for values, gone in last_of_each(changes, first):
        yield {**values, "_deleted": gone is not None, "_deleted_lsn": gone}


@pytest.mark.corner
@pytest.mark.parametrize(("mode", "deletes", "expected"), [("merge", "soft", deleted)], ids=["soft"])
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
    wanted = expected(noted(pg, lake.driver.rows), rows, first.lsn)
    assert sorted(map(shown, lake.found("t"))) == sorted(map(shown, wanted))


def shown(row: dict[str, Any]) -> str:
    return json.dumps({name: row[name] for name in sorted(row)}, default=str)


@pytest.mark.corner
@pytest.mark.parametrize(("mode", "deletes"), [("merge", "soft")], ids=["soft"])
def test_rows_come_again_and_columns_change(mode: str, deletes: str, pg: Session, begin: Begin) -> None:
    lake = begin(*FIRST, mode=mode, deletes=deletes)
    for scene in (
        ("ALTER TABLE t ADD m int", "UPDATE t SET m = 1 WHERE id = 1", "DELETE FROM t WHERE id = 2"),
        ("ALTER TABLE t RENAME v TO w", "ALTER TABLE t ADD f text NOT NULL DEFAULT 'f'", "INSERT INTO t VALUES (9, 9)"),
        ("ALTER TABLE t DROP n", "UPDATE t SET m = 2, id = 10 WHERE id = 1"),
    ):
        run(pg, *scene)
        wait_for(lake, pg, lake.step)
    before = {row["id"]: row for row in lake.found("t")}
    if pg.server_version < 140000:
        return
    lake.write_as_somebody_else("t")
    run(pg, "DELETE FROM t WHERE id = 3")
    wait_until(lambda: lake.step() is not None and "changed by somebody else" in str(lake.ledger.last()))
    run(pg, """SELECT pg_logical_emit_message(true, 'pgcdc', '{"snapshot": ["public.t"]}')""")
    wait_for(lake, pg, lake.step)
    after = {row["id"]: row for row in lake.found("t")}
    if deletes == "soft":
        assert after[3] == before[3] | {"_deleted": True, "_deleted_lsn": after[3]["_deleted_lsn"]}
        assert after[2] == before[2]
        assert before[2]["_deleted_lsn"] < after[3]["_deleted_lsn"]


def test_a_table_does_not_become_one_of_another_mode(pg: Session, begin: Begin) -> None:
    lake = begin(*FIRST, deletes="soft")
    lake.begin_as(Shapes())
    run(pg, "DELETE FROM t")
    wait_until(lambda: lake.step() is not None and "merge, soft deletes, and cannot go on" in str(lake.ledger.last()))


def test_a_table_that_has_a_column_of_the_mirrors_own_is_set_aside(pg: Session, begin: Begin) -> None:
    lake = begin(*FIRST, deletes="soft")
    run(pg, "ALTER TABLE t ADD _deleted_lsn int", "UPDATE t SET n = 1")
    wait_until(lambda: lake.step() is not None and "which the mirror itself adds" in str(lake.ledger.last()))
