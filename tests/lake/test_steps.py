"""A batch that comes again after a kill does what is left of it, also where it has other files than before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from runs import Change, Row, changed, layout, truncated

from pg_cdc_source.lake.files import FileWriter
from pg_cdc_source.lake.first_files import FirstFiles
from pg_cdc_source.lake.shape import Shape, Shapes
from pg_cdc_source.lake.sink import Sink
from pg_cdc_source.lake.targets import Targets
from pg_cdc_source.lake.tasks import Start
from pg_cdc_source.mirrors.delta_rs import DeltaRsTable, DeltaRsTask
from pg_cdc_source.mirrors.delta_rs_ledger import DeltaRsLedger
from pg_cdc_source.protocol.layout import RUNS_SCHEMA

T = layout([(1, "id", "int4"), (2, "v", "text")], name="public.t")


class Killed(BaseException):
    """Ends the process."""


class Lake:
    """The lake of one table. A new one goes on where the one before has ended."""

    def __init__(self, home: Path, shape: Shape) -> None:
        self._targets = Targets.of(f"{home}/{{table}}", None)
        self._shapes = Shapes(shape)
        self._sink = Sink(self._targets, DeltaRsLedger(self._targets.ledger))

    def apply(self, number: int, rows: Sequence[Row]) -> None:
        given = pa.Table.from_pylist(list(rows), schema=RUNS_SCHEMA)
        writer = FileWriter(FirstFiles(targets=self._targets, shapes=self._shapes))
        written = [row for batch in writer.take(iter(given.to_batches())) for row in batch.to_pylist()]

        def run(start: Start) -> list[dict[str, Any]]:
            return DeltaRsTask(self._targets, start, self._shapes, compacts=False).outcomes(written)

        self._sink.apply("q", number, run)

    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = DeltaTable(self._targets["public.t"]).to_pyarrow_table().to_pylist()
        return found


def snapshot(lsn: int, *rows: list[str]) -> list[Row]:
    return [{**row, "after": None} for row in changed(T, *(Change("snapshot", (lsn, 0), row) for row in rows))]


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
