"""What a task says of tables whose rows raise errors: which of them are set aside alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from runs import Change, changed, layout

from pg_cdc_source.lake.bring import Mark, Patience, Work
from pg_cdc_source.lake.segment import Segment
from pg_cdc_source.lake.shape import Shapes
from pg_cdc_source.lake.targets import Targets
from pg_cdc_source.lake.tasks import Start, Task
from pg_cdc_source.mirrors import delta_rs

T, U = (layout([(1, "id", "int4")], name=name) for name in ("public.t", "public.u"))


@dataclass(frozen=True, slots=True)
class Raising(Task):
    """A task whose tables take everything, or none of them anything."""

    error: BaseException | None = None

    def _do(self, table: str, work: Work[Segment]) -> Mapping[str, Any]:
        if self.error is not None:
            raise self.error
        return {"version": 7}


def outcomes(
    error: BaseException | None = None, *, damaged: str | None = None
) -> dict[str, tuple[int | None, str | None]]:
    """Of each table, its version and its error. ``damaged`` is one whose changes nobody can read."""
    rows = [row for table in (T, U) for row in changed(table, Change("insert", (10, 1), ["1"]))]
    rows = [{**row, "data": b""} if row["_table"] == damaged else row for row in rows]
    task = Raising(Targets.of("/lake/{table}", None), Start(Mark("q", 0), {}, {}), Shapes(), error)
    return {found["table"]: (found["version"], found["error"]) for found in task.outcomes(rows)}


def test_rows_that_raise_what_nobody_foresaw_set_their_table_aside_alone(caplog: pytest.LogCaptureFixture) -> None:
    found = outcomes(damaged="public.t")
    (version, error) = found.pop("public.t")
    assert version is None
    assert error is not None
    assert error.startswith("[DEFINITE] public.t could not be written: ArrowInvalid\n")
    assert found == {"public.u": (7, None)}
    assert "table_batch.py" in caplog.text


@pytest.mark.parametrize(
    "error", [OSError, MemoryError, pa.ArrowMemoryError, ImportError, TypeError, KeyboardInterrupt]
)
def test_what_may_strike_any_table_ends_the_query(error: type[BaseException]) -> None:
    with pytest.raises(error):
        outcomes(error("gone tomorrow"))


@pytest.mark.parametrize(("error", "ends"), [(pa.ArrowMemoryError, True), (pa.ArrowInvalid, False)])
def test_of_arrows_errors_one_for_want_of_memory_ends_the_query(
    error: type[Exception], ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise error("malloc of size 64 failed")

    monkeypatch.setattr(delta_rs, "bring", fail)
    monkeypatch.setattr(Patience, "retrying", lambda _, write: write())
    task = delta_rs.DeltaRsTask(Targets.of("/lake/{table}", None), Start(Mark("q", 0), {}, {}), Shapes(), False)
    rows = list(changed(T, Change("insert", (10, 1), ["1"])))
    if ends:
        with pytest.raises(MemoryError):
            list(task.outcomes(rows))
    else:
        [found] = task.outcomes(rows)
        assert found["error"].startswith("[TRANSIENT] public.t could not be written: ArrowInvalid")
