"""What tasks prepare for Spark's own merges: a batch's final rows as Parquet files, one for each table and key.

They lie beside the checkpoint until the batch is done. Nothing of them passes through the driver.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from pg_cdc_source.lake.batch_of_table import Segment
from pg_cdc_source.lake.bring import Work
from pg_cdc_source.lake.columns import read_layout
from pg_cdc_source.lake.files import open_directory
from pg_cdc_source.lake.states import Key, States, states_of
from pg_cdc_source.lake.tasks import Task

# A range of these is a literal in SQL, and files have the like in their statistics.
_RANGED = (pa.types.is_integer, pa.types.is_string)


@dataclass(frozen=True, slots=True)
class StagedSegment:
    """Final rows by key in a Parquet file at ``path``; see :class:`States`.

    ``bounds`` are the key's columns with their least and greatest values. ``needs``: the file has only the keys whose
    rows are needed of the lake's table.
    """

    path: str
    rows: int
    key: tuple[str, ...]
    emptied: bool
    kept: tuple[int, ...] = ()
    bounds: tuple[tuple[str, Any, Any], ...] = ()
    needs: bool = False


@dataclass(frozen=True, slots=True)
class StagingTask(Task):
    """Stages the batch below ``directory``. ``fetched`` says where rows are that other segments have asked for."""

    directory: str
    fetched: Mapping[str, str] = field(default_factory=dict)

    def directory_of(self, table: str) -> str:
        """Where files of a table's rows go."""
        return self.directory

    def _do(self, table: str, work: Work[Segment]) -> Mapping[str, Any]:
        segments = []
        for number, segment in enumerate(work.segments):
            asked: list[Sequence[Key]] = []
            states = states_of(segment, partial(self._fetch, table if not number else None, segment, asked))
            segments.append(self._needed(segment, asked[0]) if asked else self._staged(states))
        return {"staged": write_work(work, segments)}

    def _fetch(self, table: str | None, segment: Segment, asked: list[Sequence[Key]], keys: Sequence[Key]) -> pa.Table:
        if table is not None and table in self.fetched:
            filesystem, root = open_directory(self.fetched[table])
            return ds.dataset(root, filesystem=filesystem).to_table()
        asked.append(keys)
        # Any rows will do, because none of this is used.
        names = [field.name for field in segment.rows.schema]
        columns = {name: pa.nulls(len(keys), segment.rows[name].type) for name in names}
        for name, values in zip(segment.key, zip(*keys, strict=True), strict=True):
            columns[name] = pa.array(values, segment.rows[name].type)
        return pa.table(columns)

    def _needed(self, segment: Segment, keys: Sequence[Key]) -> StagedSegment:
        columns = [
            pa.array(values, segment.rows[name].type)
            for name, values in zip(segment.key, zip(*keys, strict=True), strict=True)
        ]
        path = self._write(pa.table(columns, names=list(segment.key)))
        return StagedSegment(path, len(keys), segment.key, False, needs=True)

    def _staged(self, states: States) -> StagedSegment:
        path = self._write(states.rows)
        return StagedSegment(
            path, states.rows.num_rows, states.key, states.emptied, states.kept, tuple(_bounds(states))
        )

    def _write(self, rows: pa.Table) -> str:
        filesystem, root = open_directory(self.directory)
        name = f"rows-{uuid.uuid4()}.parquet"
        pq.write_table(rows, f"{root}/{name}", filesystem=filesystem, compression="zstd")
        return f"{self.directory}/{name}"


def _bounds(states: States) -> Iterator[tuple[str, Any, Any]]:
    for name in states.key:
        keys = states.rows[name]
        if len(keys) and any(is_type(keys.type) for is_type in _RANGED):
            found = pc.min_max(keys).as_py()
            yield name, found["min"], found["max"]


def write_work(work: Work[Segment], segments: Sequence[StagedSegment]) -> str:
    """Return staged work as JSON."""
    return json.dumps(
        {
            "layout": None if work.layout is None else work.layout.text,
            "fills": list(work.fills.items()),
            "files": work.files,
            "segments": [asdict(segment) for segment in segments],
            "is_emptied": work.is_emptied,
            "comes_whole": work.comes_whole,
        }
    )


def read_work(text: str) -> Work[StagedSegment]:
    """Read what :func:`write_work` wrote."""
    said = json.loads(text)
    segments = [
        StagedSegment(
            **{
                **segment,
                "key": tuple(segment["key"]),
                "kept": tuple(segment["kept"]),
                "bounds": tuple(map(tuple, segment["bounds"])),
            }
        )
        for segment in said["segments"]
    ]
    return Work(
        None if said["layout"] is None else read_layout(said["layout"]),
        dict(said["fills"]),
        said["files"],
        segments,
        said["is_emptied"],
        said["comes_whole"],
    )
