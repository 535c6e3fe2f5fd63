"""Spark's files of a query that does not run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pg_cdc_source.errors import DefiniteError
from pg_cdc_source.offsets import INITIAL, Lsn, Position, SlotIdentity, StreamOffset
from pg_cdc_source.spark.checkpoint import Checkpoint

OFFSET = StreamOffset(SlotIdentity("1", 1, "shop", "s"), Lsn(10), (), 0, Position(Lsn(20)), members=())
OTHER = replace(OFFSET, identity=replace(OFFSET.identity, slot="other"))


def write(home: Path, *sources: Any, batch: int = 3, done: int | None = None, version: str = "v1") -> None:
    for log in ("offsets", "commits"):
        (home / log).mkdir(exist_ok=True)
    lines = [
        version,
        '{"batchWatermarkMs":0}',
        *(source if isinstance(source, str) else dump(source) for source in sources),
    ]
    (home / "offsets" / str(batch)).write_text("\n".join(lines))
    (home / "offsets" / f".{batch}.crc").write_bytes(b"crc")
    (home / "commits" / str(batch if done is None else done)).write_text("v1\n{}")


def dump(offset: StreamOffset) -> str:
    return json.dumps(offset.to_json())


def refusal(home: Path, slot: str = "s") -> str:
    with pytest.raises(DefiniteError) as raised:
        Checkpoint(str(home), slot)
    return str(raised.value)


def test_the_offset_of_one_stream_is_replaced_and_all_else_stays(tmp_path: Path) -> None:
    write(tmp_path, '{"logOffset":4}', OTHER, OFFSET, "-", batch=9)
    write(tmp_path, OTHER, batch=8)
    found = Checkpoint(f"file:{tmp_path}", "s")
    assert (found.batch, found.offset) == (9, OFFSET)
    moved = replace(OFFSET, position=Position(Lsn(30)))
    found.replace(moved)
    lines = (tmp_path / "offsets" / "9").read_text().split("\n")
    assert lines == ["v1", '{"batchWatermarkMs":0}', '{"logOffset":4}', dump(OTHER), dump(moved), "-"]
    # Hadoop would take it for a broken file.
    assert sorted(file.name for file in (tmp_path / "offsets").iterdir()) == [".8.crc", "8", "9"]
    assert Checkpoint(str(tmp_path), "s").offset == moved


def test_a_batch_that_is_not_done_is_refused_and_forgotten(tmp_path: Path) -> None:
    end = replace(OFFSET, position=Position(Lsn(30)))
    write(tmp_path, OFFSET, batch=2)
    write(tmp_path, end, batch=3, done=2)
    found = Checkpoint(str(tmp_path), "s")
    assert (found.batch, found.offset, found.unfinished) == (2, OFFSET, end)
    with pytest.raises(DefiniteError, match="batch 3 of the checkpoint was planned, and is not done"):
        found.require_done()
    found.replace(end)
    found = Checkpoint(str(tmp_path), "s")
    found.require_done()
    assert (found.batch, found.offset) == (2, end)
    assert [file.name for file in (tmp_path / "offsets").iterdir()] == ["2"]


@pytest.mark.parametrize("sources", [(), (OTHER,), (OFFSET, OFFSET), ("-", json.dumps(INITIAL))])
def test_the_slot_has_to_be_that_of_one_stream(tmp_path: Path, sources: tuple[Any, ...]) -> None:
    write(tmp_path, *sources)
    assert "streams of slot s" in refusal(tmp_path)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    assert "is no checkpoint of a query that has done a batch" in refusal(tmp_path / "nowhere")
    assert "is no checkpoint of a query that has done a batch" in refusal(tmp_path)
    write(tmp_path, OFFSET, version="v2")
    assert "offsets have version 'v2'" in refusal(tmp_path)


def test_errors_of_the_storage_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "dbfs:/c is no place that Arrow, delta-rs and Spark all reach" in refusal(Path("dbfs:/c"))
    write(tmp_path, OFFSET)
    found = Checkpoint(str(tmp_path), "s")

    def refuse(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Checkpoint, "_write", refuse)
    with pytest.raises(DefiniteError, match=r"could not be changed: no space left"):
        found.replace(OFFSET)
    assert Checkpoint(str(tmp_path), "s").offset == OFFSET
