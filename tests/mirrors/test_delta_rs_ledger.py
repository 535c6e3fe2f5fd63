"""A ledger of delta-rs is read quickly, however many batches there were."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable

from pg_cdc_source.lake.ledger import TEMPLATE, LedgerRow
from pg_cdc_source.mirrors.delta_rs_ledger import DeltaRsLedger


def test_a_ledger_has_a_checkpoint_after_ten_commits(tmp_path: Path) -> None:
    ledger = DeltaRsLedger(str(tmp_path / "_pgcdc"))
    ledger.create({TEMPLATE: "lake/{table}"})
    now = datetime.now(timezone.utc)
    rows = [LedgerRow("q", batch_id, batch_id, None, now, {}, {}, True) for batch_id in range(11)]
    for row in rows:
        ledger.append(row)
    assert json.loads((tmp_path / "_pgcdc/_delta_log/_last_checkpoint").read_text())["version"] >= 9
    assert ledger.last() == rows[-1]
    assert ledger.last(4) == rows[4]


def test_a_ledger_whose_files_were_written_together_is_read(tmp_path: Path) -> None:
    ledger = DeltaRsLedger(str(tmp_path / "_pgcdc"), compacts=True)
    ledger.create({TEMPLATE: "lake/{table}"})
    now = datetime.now(timezone.utc)
    rows = [LedgerRow("q", batch, batch, None, now, {"public.t": batch}) for batch in range(53)]
    for row in rows:
        ledger.append(row)
    assert len(DeltaTable(ledger.path).file_uris()) < 10
    assert ledger.last(query="q") == rows[-1]
    assert ledger.last(7) == rows[7]
    assert ledger.queries() == {"q"}


class Watched:
    """A dataset, and which columns of how many rows it has given."""

    def __init__(self, whole: ds.Dataset, given: list[tuple[Sequence[str] | None, int]]) -> None:
        self._whole = whole
        self._given = given

    def to_table(self, columns: Sequence[str] | None = None, **how: Any) -> pa.Table:
        found = self._whole.to_table(columns=columns, **how)
        self._given.append((columns, found.num_rows))
        return found

    def scanner(self, columns: Sequence[str], **how: Any) -> ds.Scanner:
        self._given.append((columns, 0))
        return self._whole.scanner(columns, **how)


def test_the_tables_of_one_row_alone_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = DeltaRsLedger(str(tmp_path / "_pgcdc"))
    ledger.create({TEMPLATE: "lake/{table}"})
    now = datetime.now(timezone.utc)
    rows = [
        LedgerRow(query, batch, 10 * batch, None, now, {"public.t": batch}, {"public.u": "gone"}, batch != 2)
        for batch in range(3)
        for query in ("q", "other")
    ]
    for row in rows:
        ledger.append(row)
    assert ledger.queries() == {"q", "other"}
    given: list[tuple[Sequence[str] | None, int]] = []
    whole = DeltaTable.to_pyarrow_dataset
    monkeypatch.setattr(DeltaTable, "to_pyarrow_dataset", lambda self, *args, **how: Watched(whole(self, *args), given))
    assert ledger.last(query="q") == rows[4]
    assert ledger.last(query="other") == rows[5]
    assert ledger.last(9) in rows[:2]
    assert [count for columns, count in given if columns is None or "tables" in columns] == [1, 1, 1]
