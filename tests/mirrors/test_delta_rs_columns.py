"""Columns of a table that delta-rs writes."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from pg_cdc_source.lake.bring import Mark
from pg_cdc_source.lake.columns import MirroredLayout
from pg_cdc_source.lake.shape import Shape
from pg_cdc_source.mirrors import delta_rs
from pg_cdc_source.mirrors.delta_rs import DeltaRsTable
from pg_cdc_source.mirrors.delta_rs_columns import ATTNUM


def columns(*given: tuple[int, str]) -> pa.Schema:
    return pa.schema([pa.field(name, pa.int32()).with_metadata({ATTNUM: str(number)}) for number, name in given])


def test_columns_without_a_number_keep_each_its_own_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = ((1, "id"), (0, "a"), (0, "b"))
    DeltaTable.create(tmp_path, columns(*unknown))
    rows = pa.Table.from_pydict({"id": [1], "a": [10], "b": [20]}, columns(*unknown))
    write_deltalake(tmp_path, rows, mode="append")
    table = DeltaRsTable(str(tmp_path), "public.t", Mark("q", 1), Shape(is_soft=True))
    monkeypatch.setattr(delta_rs, "require_table", lambda *_: None)
    monkeypatch.setattr(delta_rs, "schema_of", lambda *_: columns((1, "key"), (0, "a"), (0, "b")))
    table.prepare(MirroredLayout(1, "d", ()), {}, anew=False)
    assert DeltaTable(tmp_path).to_pyarrow_table().to_pylist() == [{"key": 1, "a": 10, "b": 20}]
