"""A batch that comes again after a kill does what is left of it, also where it has other files than before."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import DeltaError
from runs import Change, Row, announced, batch_of, changed, layout, truncated

from pg_cdc_source.lake.bring import Mark, Step, steps_of
from pg_cdc_source.lake.files import FileWriter
from pg_cdc_source.lake.first_files import FirstFiles
from pg_cdc_source.lake.parts import Emptied, parts_of
from pg_cdc_source.lake.segment import Segment
from pg_cdc_source.lake.shape import Shape, Shapes
from pg_cdc_source.lake.sink import Sink
from pg_cdc_source.lake.targets import Targets
from pg_cdc_source.lake.tasks import Start
from pg_cdc_source.mirrors import delta_rs
from pg_cdc_source.mirrors.delta_rs import DeltaRsTable, DeltaRsTask
from pg_cdc_source.mirrors.delta_rs_ledger import DeltaRsLedger
from pg_cdc_source.protocol.layout import RUNS_SCHEMA, StreamedTable

T = layout([(1, "id", "int4"), (2, "v", "text")], name="public.t")


class Killed(BaseException):
    """Ends the process."""


class Lake:
    """The lake of one table. A new one goes on where the one before has ended."""

    def __init__(self, home: Path, shape: Shape) -> None:
        self._targets = Targets.of(f"{home}/{{table}}", None)
        self._shapes = Shapes(shape)
        self._ledger = DeltaRsLedger(self._targets.ledger)
        self._sink = Sink(self._targets, self._ledger)

    def apply(self, number: int, rows: Sequence[Row]) -> None:
        given = pa.Table.from_pylist(list(rows), schema=RUNS_SCHEMA)
        writer = FileWriter(FirstFiles(targets=self._targets, shapes=self._shapes))
        written = [row for batch in writer.take(iter(given.to_batches())) for row in batch.to_pylist()]

        def run(start: Start) -> list[dict[str, Any]]:
            return DeltaRsTask(self._targets, start, self._shapes, compacts=False).outcomes(written)

        self._sink.apply("q", number, run, lambda lsn: any(row["_commit_lsn"] > lsn for row in rows))

    def set_aside(self) -> Mapping[str, str]:
        last = self._ledger.last()
        return {} if last is None else last.set_aside

    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = DeltaTable(self._targets["public.t"]).to_pyarrow_table().to_pylist()
        return found


@contextmanager
def killed_before(number: int) -> Iterator[None]:
    """Kill the process before the step of this number, of all that a batch has."""
    left = number

    def killing(whole: Callable[..., None]) -> Callable[..., None]:
        def step(*args: Any) -> None:
            nonlocal left
            if not left:
                raise Killed
            left -= 1
            whole(*args)

        return step

    with pytest.MonkeyPatch.context() as patch:
        for name in ("add_files", "empty", "apply"):
            patch.setattr(DeltaRsTable, name, killing(getattr(DeltaRsTable, name)))
        yield


def expect_same_behind_a_kill(
    home: Path, shape: Shape, before: Sequence[Sequence[Row]], rows: Sequence[Row], steps: int
) -> list[dict[str, Any]]:
    """Kill a batch before each of its steps, and run it again: what it leaves is what it leaves at once."""
    batches = [*before, rows]
    lake = Lake(home / "at once", shape)
    for number, batch in enumerate(batches):
        lake.apply(number, batch)
    wanted = sorted(lake.rows(), key=str)
    for killed in range(steps):
        place = home / f"killed before step {killed}"
        lake = Lake(place, shape)
        for number, batch in enumerate(before):
            lake.apply(number, batch)
        with killed_before(killed), pytest.raises(Killed):
            lake.apply(len(before), rows)
        lake = Lake(place, shape)
        lake.apply(len(before), rows)
        assert lake.set_aside() == {}
        assert sorted(lake.rows(), key=str) == wanted, f"killed before step {killed}"
    return wanted


def snapshot(lsn: int, *rows: list[str | None], table: StreamedTable = T) -> list[Row]:
    return [{**row, "after": None} for row in changed(table, *(Change("snapshot", (lsn, 0), row) for row in rows))]


def test_values_of_a_dropped_column_do_not_come_back(tmp_path: Path) -> None:
    lake = Lake(tmp_path, Shape())
    lake.apply(0, snapshot(5, ["1", "a"]))
    without = layout([(1, "id", "int4")], name="public.t")
    dropped = announced(without, (50, 1), {"change": "dropped", "attnum": 2, "name": "v"})
    emptied = {**truncated(T, (38, 0)), "_xid": None}
    lake.apply(1, [emptied, *snapshot(39, ["1", "old"]), dropped])
    [why] = lake.set_aside().values()
    assert "public.t: column v was dropped right behind the rows that came anew" in why


@pytest.mark.parametrize("shape", [Shape(), Shape(is_soft=True), Shape("history")], ids=lambda shape: shape.text)
def test_no_change_is_taken_for_files_that_do_not_come_again(
    shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(tmp_path, shape)
    lake.apply(0, snapshot(5, ["1", "a"], ["2", "b"]))
    emptied = {**truncated(T, (38, 0)), "_xid": None}
    changes = changed(T, Change("delete", (50, 1), ["1", None]))

    def killed(self: DeltaRsTable, *args: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(DeltaRsTable, "apply", killed)
        with pytest.raises(Killed):
            lake.apply(1, [emptied, *snapshot(39, ["1", "a"], ["2", "b"]), *changes])
    # The rows are read again at a later point, where there is none.
    lake = Lake(tmp_path, shape)
    lake.apply(1, [emptied, *changes])
    lake.apply(2, changed(T, Change("delete", (80, 1), ["2", None])))
    there = [row for row in lake.rows() if not row.get("_deleted") and row.get("_valid_to") is None]
    assert there == []


SHAPES = pytest.mark.parametrize(
    "shape", [Shape(), Shape(is_soft=True), Shape("history")], ids=lambda shape: str(shape.text)
)


@SHAPES
def test_first_rows_behind_a_step_that_changes_nothing_stay_where_the_batch_comes_again(
    shape: Shape, tmp_path: Path
) -> None:
    emptied = {**truncated(T, (38, 0)), "_xid": None}
    insert = changed(T, Change("insert", (50, 1), ["3", "c"]))
    rows = [emptied, *snapshot(39, ["1", "a"], ["2", "b"]), *insert]
    steps = 3 if shape.keeps else 2
    found = expect_same_behind_a_kill(tmp_path, shape, [], rows, steps)
    assert sorted(row["id"] for row in found if not row.get("_deleted")) == [1, 2, 3]


@SHAPES
def test_an_empty_table_is_emptied_again_and_again_in_one_batch(shape: Shape, tmp_path: Path) -> None:
    rows = [
        truncated(T, (20, 1)),
        *changed(T, Change("insert", (20, 2), ["1", "a"])),
        truncated(T, (20, 3)),
        *changed(T, Change("insert", (20, 4), ["2", "b"])),
        truncated(T, (30, 1)),
        *changed(T, Change("insert", (30, 2), ["3", "c"]), Change("delete", (40, 1), ["9", None])),
    ]
    before = [snapshot(5, ["1", "z"]), [truncated(T, (10, 1))]]
    found = expect_same_behind_a_kill(tmp_path, shape, before, rows, 6 if shape.keeps else 1)
    there = [row["id"] for row in found if not row.get("_deleted") and row.get("_valid_to") is None]
    assert there == [3]


@SHAPES
def test_a_batch_whose_changes_touch_no_row_is_done(shape: Shape, tmp_path: Path) -> None:
    lake = Lake(tmp_path, shape)
    lake.apply(0, snapshot(5, ["1", "a"]))
    lake.apply(1, changed(T, Change("delete", (50, 1), ["9", None])))
    done = DeltaRsTable(f"{tmp_path}/t", "public.t", Mark("q", 1), shape)
    assert done.is_done()
    assert done.version == 2


def test_rows_of_a_table_without_a_key_come_again(tmp_path: Path) -> None:
    keyless = layout([(1, "id", "int4"), (2, "v", "text")], key=(), name="public.t", identity="f")
    emptied = {**truncated(keyless, (38, 0)), "_xid": None}
    for shape in (Shape(), Shape(is_soft=True), Shape("history")):
        lake = Lake(tmp_path / shape.text, shape)
        lake.apply(0, snapshot(5, ["1", "a"], table=keyless))
        lake.apply(1, [emptied, *snapshot(39, ["1", "a"], ["2", "b"], table=keyless)])
        if shape.is_soft:
            # Nobody could tell which of the rows that are deleted are there again.
            [why] = lake.set_aside().values()
            assert "public.t has no key" in why
        else:
            assert lake.set_aside() == {}
            assert [row["id"] for row in lake.rows() if row.get("_valid_to") is None] == [1, 2]


# --- what commits say of a batch --------------------------------------------------------------------------------------


def actions(home: Path, kind: str) -> list[dict[str, Any]]:
    """All actions of a kind that the log of the table has."""
    logs = sorted((home / "t/_delta_log").glob("*.json"))
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    return [line[kind] for line in lines if kind in line]


@SHAPES
def test_a_tables_log_does_not_get_an_application_with_each_batch(shape: Shape, tmp_path: Path) -> None:
    lake = Lake(tmp_path, shape)
    lake.apply(0, snapshot(5, ["1", "a"]))
    for number in range(1, 12):
        insert = changed(T, Change("insert", (10 * number, 2), [str(number), "b"]))
        lake.apply(number, [truncated(T, (10 * number, 1)), *insert])
    assert {found["appId"] for found in actions(tmp_path, "txn")} == {"q", "q/steps"}


BATCH = [
    truncated(T, (20, 1)),
    *changed(T, Change("insert", (20, 2), ["2", "b"]), Change("insert", (20, 3), ["3", "c"])),
    truncated(T, (30, 1)),
    *changed(T, Change("insert", (30, 2), ["4", "d"])),
]
STEPS = 4


def killed_at(home: Path, shape: Shape, step: int) -> None:
    """Begin a lake whose second batch is killed before a step."""
    lake = Lake(home, shape)
    lake.apply(0, snapshot(5, ["1", "a"]))
    with killed_before(step), pytest.raises(Killed):
        lake.apply(1, BATCH)


@pytest.mark.parametrize("step", range(1, STEPS))
def test_a_batch_that_was_begun_with_a_transaction_for_each_step_is_ended(step: int, tmp_path: Path) -> None:
    def one_for_each(mark: Mark, step: Step | None = None, **_: Any) -> CommitProperties:
        done = [] if step is None else [Transaction(f"{mark.query}/{step.name}", mark.batch)]
        if step is not None and step.is_last:
            done.append(Transaction(mark.query, mark.batch))
        metadata = {"pgcdc_query": mark.query, "pgcdc_batch": str(mark.batch)}
        return CommitProperties(custom_metadata=metadata, app_transactions=done)

    shape = Shape("history")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pg_cdc_source.mirrors.delta_rs_commits.commit_of", one_for_each)
        killed_at(tmp_path, shape, step)
    before = len(actions(tmp_path, "commitInfo"))
    lake = Lake(tmp_path, shape)
    lake.apply(1, BATCH)
    lake.apply(2, changed(T, Change("insert", (50, 1), ["5", "e"])))
    assert lake.set_aside() == {}
    expected = {(1, 5, 20), (2, 20, 30), (3, 20, 30), (4, 30, None), (5, 50, None)}
    found = [(row["id"], row["_valid_from"], row["_valid_to"]) for row in lake.rows()]
    assert sorted(found) == sorted(expected)
    assert len(actions(tmp_path, "commitInfo")) - before == STEPS - step + 1


def test_a_batch_whose_commits_have_expired_is_not_guessed_at(tmp_path: Path) -> None:
    killed_at(tmp_path, Shape("history"), 2)
    table = DeltaTable(str(tmp_path / "t"))
    table.create_checkpoint()
    logs = sorted((tmp_path / "t/_delta_log").glob("*.json"))
    for log in logs[:-1]:
        log.unlink()
    lake = Lake(tmp_path, Shape("history"))
    lake.apply(1, BATCH)
    [why] = lake.set_aside().values()
    assert "the log has lost commits from before version 3" in why
    assert DeltaTable(str(tmp_path / "t")).version() == table.version()


def test_a_new_tables_commits_that_have_expired_are_not_guessed_at(tmp_path: Path) -> None:
    with killed_before(2), pytest.raises(Killed):
        Lake(tmp_path, Shape("history")).apply(0, BATCH)
    DeltaTable(str(tmp_path / "t")).create_checkpoint()
    for log in sorted((tmp_path / "t/_delta_log").glob("*.json"))[:-1]:
        log.unlink()
    lake = Lake(tmp_path, Shape("history"))
    lake.apply(0, BATCH)
    [why] = lake.set_aside().values()
    assert "does not say any more which steps of batch 0 are done" in why


@pytest.mark.parametrize("shape", [Shape(), Shape(is_soft=True), Shape("history")], ids=lambda shape: shape.text)
@pytest.mark.parametrize("partitions", [["v"], ["id"], []])
def test_a_table_that_somebody_else_has_partitioned_takes_rows_that_come_again(
    tmp_path: Path, shape: Shape, partitions: list[str]
) -> None:
    """So does one whose columns take no NULL any more. Its own metadata stay, so it looks like the mirror's."""
    lake = Lake(tmp_path, shape)
    lake.apply(0, snapshot(5, ["1", "a"], ["2", "b"], ["3", "c"]))
    table = DeltaTable(str(tmp_path / "t"))
    rows = table.to_pyarrow_table().select(["id", "v"])
    others = table.to_pyarrow_table().drop_columns(["id", "v"])
    for name in rows.column_names:
        others = others.append_column(rows.schema.field(name).with_nullable(bool(partitions)), rows.column(name))
    write_deltalake(table, others, mode="overwrite", schema_mode="overwrite", partition_by=partitions)
    lake.apply(1, changed(T, Change("update", (50, 1), ["1", "x"])))
    assert "changed by somebody else" in lake.set_aside()["public.t"]
    again = {**truncated(T, (60, 0)), "_xid": None, "_commit_ts": None}
    lake.apply(2, [again, *snapshot(61, ["1", None], ["2", "b"], ["3", "c"])])
    lake.apply(3, changed(T, Change("update", (70, 1), ["2", "y"])))
    assert lake.set_aside() == {}
    found = [(row["id"], row["v"]) for row in lake.rows() if row.get("_valid_to") is None]
    assert sorted(found, key=str) == [(1, None), (2, "y"), (3, "c")]


def test_files_that_a_vacuum_has_removed_before_their_commit_are_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(tmp_path, Shape())
    lake.apply(0, snapshot(5, ["1", "a"]))
    whole = DeltaRsTable.prepare

    def removing(self: DeltaRsTable, *args: Any, **options: Any) -> None:
        known = {unquote(uri).rsplit("/", 1)[-1] for uri in DeltaTable(str(tmp_path / "t")).file_uris()}
        for file in (tmp_path / "t").glob("*.parquet"):
            if file.name not in known:
                file.unlink()
        whole(self, *args, **options)

    monkeypatch.setattr(DeltaRsTable, "prepare", removing)
    again = {**truncated(T, (60, 0)), "_xid": None, "_commit_ts": None}
    lake.apply(1, [again, *snapshot(61, ["1", "x"])])
    assert "files of rows that" in lake.set_aside()["public.t"]
    assert lake.rows() == [{"id": 1, "v": "a"}]


def test_foreign_commits_that_the_log_has_lost_are_missed(tmp_path: Path) -> None:
    lake = Lake(tmp_path, Shape("append"))
    lake.apply(0, snapshot(5, ["1", "a"]))
    table = DeltaTable(str(tmp_path / "t"))
    table.delete()
    table.alter.set_table_properties({"delta.logRetentionDuration": "interval 31 days"})
    table.create_checkpoint()
    *lost, _ = sorted((tmp_path / "t/_delta_log").glob("*.json"))
    for log in lost:
        log.unlink()
    lake.apply(1, changed(T, Change("insert", (50, 1), ["5", "e"])))
    [why] = lake.set_aside().values()
    assert "does not say any more who has changed it since version" in why


def test_a_step_that_another_task_has_done_meanwhile_is_found(tmp_path: Path) -> None:
    shape = Shape("history")
    killed_at(tmp_path, shape, 1)
    slow, fast = (DeltaRsTable(str(tmp_path / "t"), "public.t", Mark("q", 1), shape) for _ in range(2))
    batch = batch_of(BATCH, shape)
    parts = parts_of(batch)
    steps = steps_of(parts)
    for table in (slow, fast):
        table.require_ours(0, again=False)
    assert [slow.has(step) for step in steps] == [True, False, False, False]
    for step, part in list(zip(steps, parts, strict=True))[1:3]:
        if isinstance(part, Segment):
            fast.apply(step, part)
        elif isinstance(part, Emptied):
            fast.empty(step, part)
    assert [slow.has(step) for step in steps] == [True, True, True, False]


def test_two_tasks_do_not_both_do_a_step(tmp_path: Path) -> None:
    lake = Lake(tmp_path, Shape("append"))
    lake.apply(0, snapshot(5, ["1", "a"]))
    (segment,) = batch_of(changed(T, Change("insert", (50, 1), ["2", "b"])), Shape("append")).segments
    tasks = [DeltaRsTable(str(tmp_path / "t"), "public.t", Mark("q", 1), Shape("append")) for _ in range(2)]
    for is_last, task in enumerate(tasks):
        step = Step(segment.name, is_last=bool(is_last))
        assert not task.has(step)
        if not is_last:
            task.apply(step, segment)
        else:
            with pytest.raises(DeltaError):
                task.apply(step, segment)
    assert sorted(row["id"] for row in lake.rows()) == [1, 2]


def test_a_truncate_of_a_log_has_no_value_in_columns_that_are_called_like_the_streams_own(tmp_path: Path) -> None:
    named = ["layout", "after", "key", "data", "_table"]
    table = layout([(1, "id", "int4"), (2, "rows", "int4"), *((i, name, "text") for i, name in enumerate(named, 3))])
    lake = Lake(tmp_path, Shape("append"))
    lake.apply(0, [*changed(table, Change("insert", (50, 1), ["1", "2", *named])), truncated(table, (60, 1))])
    lake.apply(1, [truncated(table, (70, 1))])
    assert not lake.set_aside()
    rows = sorted(lake.rows(), key=lambda row: int(row["_commit_lsn"]))
    assert [row["rows"] for row in rows] == [2, None, None]
    assert {row[name] for row in rows[1:] for name in ("id", *named)} == {None}


@pytest.mark.parametrize("is_one", [True, False], ids=["one batch", "a batch each"])
def test_a_column_of_a_log_that_came_again_is_followed_when_it_is_renamed(is_one: bool, tmp_path: Path) -> None:
    def table(*columns: tuple[int, str]) -> StreamedTable:
        return layout([(1, "id", "int4"), *((number, name, "text") for number, name in columns)])

    def row(of: StreamedTable, i: int, *values: str) -> list[Row]:
        return changed(of, Change("insert", (50 + i, 1), [str(i), *values]))

    batches = [
        row(table((2, "a")), 1, "first"),
        row(table((3, "a")), 2, "again"),
        row(table((3, "b")), 3, "renamed"),
        row(table((3, "b"), (4, "a")), 4, "renamed", "another"),
    ]
    lake = Lake(tmp_path, Shape("append"))
    for number, rows in enumerate([list(chain(*batches))] if is_one else batches):
        lake.apply(number, rows)
    found = {row["id"]: (row["b"], row["a"]) for row in lake.rows()}
    # A batch each: the lake's column was both of them when it was renamed.
    first = (None, "first") if is_one else ("first", None)
    assert found == {1: first, 2: ("again", None), 3: ("renamed", None), 4: ("renamed", "another")}


def test_what_a_log_says_of_values_that_were_not_sent_keeps_the_names_of_then(tmp_path: Path) -> None:
    lake = Lake(tmp_path, Shape("append"))
    renamed = layout([(1, "id", "int4"), (2, "w", "text")], name="public.t")
    update = Change("update", (50, 1), ["1", None], ["v"])
    lake.apply(0, [*changed(T, update), *changed(renamed, Change("insert", (60, 1), ["2", "b"]))])
    assert {row["id"]: row["_unchanged"] for row in lake.rows()} == {1: ["v"], 2: []}


# --- others that keep house meanwhile ---------------------------------------------------------------------------------

WIDE = layout([(1, "id", "int4"), (2, "v", "text"), (3, "n", "int4")], name="public.t")
ADDED = announced(WIDE, (50, 1), {"change": "added", "attnum": 3, "name": "n", "fill": "7"})
REKEYED = layout([(1, "id", "int4"), (2, "v", "text")], key=("v",), name="public.t")
AGAIN = {**truncated(T, (60, 0)), "_xid": None, "_commit_ts": None}
# What writes a table anew, and what is in it then.
OVERWRITTEN: dict[str, tuple[Shape, list[Row], list[tuple[int, str, int | None]]]] = {
    "emptied": (Shape(), [truncated(T, (50, 1))], []),
    "emptied and filled": (
        Shape(),
        [truncated(T, (50, 1)), *changed(T, Change("insert", (50, 2), ["9", "i"]))],
        [(9, "i", None)],
    ),
    "added with a default": (Shape(), [ADDED], [(1, "a", 7), (2, "b", 7), (3, "c", 7)]),
    "come again": (Shape(), [AGAIN, *snapshot(61, ["9", "i"])], [(9, "i", None)]),
    "another key": (
        Shape(is_soft=True),
        [
            announced(REKEYED, (50, 1), {"change": "rekeyed", "name": "v", "was": "id"}),
            *changed(REKEYED, Change("insert", (51, 1), ["9", "i"])),
        ],
        [(2, "b", None), (3, "c", None), (4, "a", None), (9, "i", None)],
    ),
}


@pytest.mark.parametrize("what", OVERWRITTEN)
def test_a_table_that_is_written_anew_has_nothing_of_before_where_somebody_optimizes_it_meanwhile(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, rows, expected = OVERWRITTEN[what]
    lake = Lake(tmp_path, shape)
    lake.apply(0, snapshot(5, ["1", "a"]))
    lake.apply(1, changed(T, Change("insert", (20, 1), ["2", "b"])))
    lake.apply(2, changed(T, Change("insert", (30, 1), ["3", "c"])))
    if shape.is_soft:
        # A deleted row, and one that has what will be its key.
        lake.apply(3, changed(T, Change("delete", (40, 1), ["1", None]), Change("insert", (40, 2), ["4", "a"])))
    optimized: list[int] = []

    def behind_optimize(write: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            if not optimized and "overwrite" in (*args, options.get("mode")):
                optimized.append(DeltaTable(f"{tmp_path}/t").optimize.compact()["numFilesRemoved"])
            return write(*args, **options)

        return wrapped

    monkeypatch.setattr(delta_rs, "write_deltalake", behind_optimize(write_deltalake))
    monkeypatch.setattr(DeltaTable, "create_write_transaction", behind_optimize(DeltaTable.create_write_transaction))
    lake.apply(4, rows)
    assert optimized
    assert optimized[0] > 1
    assert lake.set_aside() == {}
    assert sorted((row["id"], row["v"], row.get("n")) for row in lake.rows()) == expected


@pytest.mark.parametrize(
    "shape", [*map(Shape, ("merge", "append", "history")), Shape(is_soft=True)], ids=lambda s: s.text
)
def test_no_file_says_the_greatest_of_floats(shape: Shape, tmp_path: Path) -> None:
    """It would be that of all but NaN, which is greater, and a query would leave the file out."""
    floats = layout([(1, "id", "int4"), (2, "v", "float8"), (3, "w", "float4")], name="public.t")
    wide = layout([(1, "id", "int4"), (2, "v", "float8"), (3, "w", "float4"), (4, "n", "int4")], name="public.t")
    lake = Lake(tmp_path, shape)
    lake.apply(0, snapshot(5, ["1", "1", "NaN"], ["2", "NaN", "3"], table=floats))
    lake.apply(
        1, changed(floats, Change("update", (20, 1), ["1", "NaN", "4"]), Change("insert", (21, 1), ["4", "5", "6"]))
    )
    lake.apply(2, changed(floats, Change("delete", (30, 1), ["2", None, None])))
    DeltaRsTable(f"{tmp_path}/t", "public.t", Mark("q", 2), shape).compact()
    added = announced(wide, (40, 1), {"change": "added", "attnum": 4, "name": "n", "fill": "7"})
    lake.apply(3, [added, *changed(wide, Change("insert", (40, 2), ["5", "7", "8", "9"]))])
    lake.apply(4, [truncated(wide, (50, 1)), *changed(wide, Change("insert", (50, 2), ["6", "NaN", "1", "1"]))])
    lake.apply(5, [{**truncated(wide, (60, 0)), "_xid": None}, *snapshot(61, ["1", "NaN", "2", "3"], table=wide)])
    assert lake.set_aside() == {}
    bounded = set()
    for path in (tmp_path / "t").glob("*.parquet"):
        footer = pq.read_metadata(path)
        for column in (footer.row_group(0).column(i) for i in range(footer.num_columns)):
            if column.statistics is not None and column.statistics.has_min_max:
                bounded.add(column.path_in_schema)
    for action in actions(tmp_path, "add"):
        bounded |= json.loads(action["stats"]).get("maxValues", {}).keys()
    assert "id" in bounded
    assert bounded.isdisjoint({"v", "w"})


def test_transactions_have_the_time_by_which_delta_lets_them_expire(tmp_path: Path) -> None:
    lake = Lake(tmp_path, Shape())
    lake.apply(0, snapshot(5, ["1", "a"]))
    now = time.time() * 1000
    assert all(now - 600_000 < found["lastUpdated"] <= now for found in actions(tmp_path, "txn"))
