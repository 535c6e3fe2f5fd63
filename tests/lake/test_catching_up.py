"""Tables whose first rows are not all as of one point: what the ledger says of them, and what they cannot take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from ledgers import Rows
from runs import Change, Row, changed, layout, truncated, written

from pg_cdc_source.lake.bring import Work
from pg_cdc_source.lake.segment import Segment
from pg_cdc_source.lake.shape import Shape, Shapes
from pg_cdc_source.lake.sink import Sink
from pg_cdc_source.lake.standing import catching_up
from pg_cdc_source.lake.targets import Targets
from pg_cdc_source.lake.tasks import Start, Task

NAME = "public.t"
T = layout([(1, "id", "int4"), (2, "v", "text")], name=NAME)
TARGETS = Targets.of("/lake/{table}", None)
READ_AGAIN = [truncated(T, (10, 0)), written(T, (10, 1), through=100)]
ALL_BEHIND = {NAME: catching_up(100)}


def moved(lsn: int) -> list[Row]:
    """A row whose key was changed, with a value that did not travel."""
    return changed(T, Change("delete", (lsn, 1), ["1", None]), Change("insert", (lsn, 2), ["2", None], ["v"]))


class Writing(Task):
    """A task whose tables take everything."""

    def _do(self, table: str, work: Work[Segment]) -> Mapping[str, Any]:
        return {"version": 7}


def set_aside(*batches: list[Row], shape: Shape) -> list[Mapping[str, str]]:
    """What the ledger's rows say is set aside."""
    ledger = Rows(TARGETS.template)
    sink = Sink(TARGETS, ledger)

    for number, rows in enumerate(batches):

        def run(start: Start, rows: list[Row] = rows) -> list[dict[str, Any]]:
            return Writing(TARGETS, start, Shapes(shape)).outcomes(rows)

        sink.apply("q", number, run, lambda lsn: False)
    return [row.set_aside for row in ledger.rows]


MERGED = [Shape(), Shape(is_soft=True), Shape("history")]


@pytest.mark.parametrize("shape", MERGED, ids=lambda shape: shape.text)
@pytest.mark.parametrize("batches", [(READ_AGAIN, moved(50)), ([*READ_AGAIN, *moved(50)],)], ids=["later", "at once"])
def test_a_value_of_the_row_of_an_old_key_is_not_taken_from_a_row_that_may_be_another(
    batches: tuple[list[Row], ...], shape: Shape
) -> None:
    (why,) = set_aside(*batches, shape=shape)[-1].values()
    assert "public.t: its first rows were read again after a crash" in why
    assert "pg-cdc resnapshot" in why
    # It stays so when the position has passed.
    assert set_aside(*batches, changed(T, Change("delete", (200, 1), ["1", None])), shape=shape)[-1] == {NAME: why}


@pytest.mark.parametrize("shape", MERGED, ids=lambda shape: shape.text)
def test_it_is_taken_once_the_position_has_passed(shape: Shape) -> None:
    passed = changed(T, Change("delete", (100, 1), ["5", None]))
    assert set_aside(READ_AGAIN, passed, moved(101), shape=shape) == [ALL_BEHIND, {}, {}]


@pytest.mark.parametrize("shape", MERGED, ids=lambda shape: shape.text)
def test_it_is_taken_from_rows_that_came_anew_of_one_point(shape: Shape) -> None:
    anew = [truncated(T, (140, 0)), written(T, (140, 1)), *moved(150)]
    assert NAME not in set_aside(READ_AGAIN, anew, shape=shape)[-1]


def test_a_row_that_may_be_gone_is_not_kept_without_its_values() -> None:
    changed_row = changed(T, Change("update", (50, 1), ["5", None], ["v"]))
    (why,) = set_aside(READ_AGAIN, changed_row, shape=Shape(is_soft=True))[-1].values()
    assert "public.t: its first rows were read again after a crash, DDL or a lost session, and" in why
    assert "all values of a row that was changed meanwhile" in why
    assert set_aside(READ_AGAIN, changed_row, shape=Shape())[-1] == ALL_BEHIND


def test_a_log_takes_a_change_as_it_came() -> None:
    assert set_aside(READ_AGAIN, moved(50), shape=Shape("append")) == [ALL_BEHIND, ALL_BEHIND]
