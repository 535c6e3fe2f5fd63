"""What tasks prepare for Spark's own merges: a batch's final rows as Parquet files, one for each table and key.

They lie beside the checkpoint until the batch is done. Nothing of them passes through the driver. Where final rows need
values of the lake's table, a segment's changes are staged as they are, until all that stands before them is done.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from pg_cdc_source.errors import PgCdcError
from pg_cdc_source.lake.bring import Work
from pg_cdc_source.lake.columns import read_layout
from pg_cdc_source.lake.directories import open_directory
from pg_cdc_source.lake.final_rows import final_rows
from pg_cdc_source.lake.key_bounds import KeyBounds, bounds_of
from pg_cdc_source.lake.parts import Emptied, Files, Rekeyed
from pg_cdc_source.lake.segment import Segment
from pg_cdc_source.lake.shape import Shape
from pg_cdc_source.lake.states import Key, States
from pg_cdc_source.lake.tasks import Task
from pg_cdc_source.spark.edge import spark_schema


@dataclass(frozen=True, slots=True)
class StagedSegment:
    """Final rows by key in a Parquet file at ``path``; see :class:`States`.

    ``name`` is the segment's. ``asks``: where the keys are whose rows of the lake's table are needed; the file has the
    segment's changes then. ``schema``: Spark's, as JSON, of the file that Spark reads, which is that of the keys if
    there is one.
    """

    name: str
    path: str
    schema: str
    rows: int
    key: tuple[str, ...]
    emptied: bool
    kept: tuple[int, ...] = ()
    bounds: tuple[KeyBounds, ...] = ()
    asks: str | None = None

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> StagedSegment:
        """Read what ``asdict`` and JSON have made of one."""
        return cls(
            said["name"],
            said["path"],
            said["schema"],
            said["rows"],
            tuple(said["key"]),
            said["emptied"],
            tuple(said["kept"]),
            tuple(KeyBounds.read(bounds) for bounds in said["bounds"]),
            said["asks"],
        )


class _Asked(Exception):  # noqa: N818 - ends a search, and is no error
    def __init__(self, keys: Sequence[Key]) -> None:
        super().__init__()
        self.keys = keys


@dataclass(frozen=True, slots=True)
class StagingTask(Task):
    """Stages the batch below ``directory``."""

    directory: str

    def _do(self, table: str, work: Work[Segment]) -> Mapping[str, Any]:
        shape = self.shapes[table]
        parts = [self._staged(part, shape) if isinstance(part, Segment) else part for part in work.parts]
        return {"staged": write_work(Work(work.layout, work.fills, parts, work.is_replaced))}

    def _staged(self, segment: Segment, shape: Shape) -> StagedSegment:
        def ask(keys: Sequence[Key]) -> pa.Table:
            raise _Asked(keys)

        try:
            return _final(segment, final_rows(segment, ask, shape), self.directory)
        except _Asked as asked:
            columns = [
                pa.array(values, segment.rows[name].type)
                for name, values in zip(segment.key, zip(*asked.keys, strict=True), strict=True)
            ]
            keys = pa.table(columns, names=list(segment.key))
            path, asks = _write(segment.rows, self.directory), _write(keys, self.directory)
            rows, schema = segment.rows.num_rows, _schema_of(keys)
            return StagedSegment(segment.name, path, schema, rows, segment.key, segment.is_emptied, asks=asks)


def with_fetched_rows(text: str) -> str:
    """Stage the final rows of a segment that asks for rows of the lake's table, in a task.

    ``text`` is what :func:`ask_for_rows` returned. Returns the staged segment as JSON, or what the error says.
    """
    said = json.loads(text)
    staged, shape = StagedSegment.read(said["segment"]), Shape.of(said["shape"])
    filesystem, path = open_directory(said["directory"])
    rows = pq.read_table(f"{path}/{staged.path.rpartition('/')[2]}", filesystem=filesystem)
    _, fetched = open_directory(said["fetched"])
    found = ds.dataset(fetched, filesystem=filesystem, format="parquet")
    segment = Segment(staged.key, rows, staged.emptied)
    try:
        states = final_rows(segment, lambda _: found.to_table(), shape)
        return json.dumps({"segment": asdict(_final(segment, states, said["directory"]))})
    except PgCdcError as error:
        return json.dumps({"error": [error.code, error.what, error.remedy]})


def ask_for_rows(segment: StagedSegment, fetched: str, shape: Shape) -> str:
    """Return what :func:`with_fetched_rows` reads; ``fetched`` is where the rows of the lake's table are."""
    directory = segment.path.rpartition("/")[0]
    return json.dumps({"segment": asdict(segment), "directory": directory, "fetched": fetched, "shape": asdict(shape)})


def _final(segment: Segment, states: States, directory: str) -> StagedSegment:
    path = _write(states.rows, directory)
    # Literals of these have the same order in SQL and in the statistics of files.
    bounds = tuple(bounds_of(states, lambda type: pa.types.is_integer(type) or pa.types.is_string(type)))
    rows, schema = states.rows.num_rows, _schema_of(states.rows)
    return StagedSegment(segment.name, path, schema, rows, states.key, states.emptied, states.kept, bounds)


def _schema_of(rows: pa.Table) -> str:
    # To find it in the file takes Spark a job, and the settings of a session may make other types of it.
    return spark_schema(rows.schema).json()


def _write(rows: pa.Table, directory: str) -> str:
    filesystem, root = open_directory(directory)
    name = f"rows-{uuid.uuid4()}.parquet"
    pq.write_table(rows, f"{root}/{name}", filesystem=filesystem, compression="zstd")
    return f"{directory}/{name}"


def write_work(work: Work[StagedSegment]) -> str:
    """Return staged work as JSON. It goes to the driver, so what thousands of files have in common is in it once."""
    parts: list[Mapping[str, Any]] = []
    layouts: dict[str, int] = {}
    for part in work.parts:
        if isinstance(part, Files):
            files = [{**file, "layout": layouts.setdefault(file["layout"], len(layouts))} for file in part.files]
            parts.append({"files": files, "again": part.again})
        elif isinstance(part, Emptied):
            parts.append({"emptied": part.lsn, "at": None if part.at is None else part.at.isoformat()})
        elif isinstance(part, Rekeyed):
            parts.append({"rekeyed": part.key})
        else:
            parts.append({"segment": asdict(part)})
    return json.dumps(
        {
            "layout": None if work.layout is None else work.layout.text,
            "fills": list(work.fills.items()),
            "parts": parts,
            "layouts": list(layouts),
            "is_replaced": work.is_replaced,
        }
    )


def read_work(text: str) -> Work[StagedSegment]:
    """Read what :func:`write_work` wrote."""
    said = json.loads(text)
    parts: list[Files | Emptied | Rekeyed | StagedSegment] = []
    for part in said["parts"]:
        if "files" in part:
            files = [{**file, "layout": said["layouts"][file["layout"]]} for file in part["files"]]
            parts.append(Files(files, part["again"]))
        elif "emptied" in part:
            parts.append(Emptied(part["emptied"], None if part["at"] is None else datetime.fromisoformat(part["at"])))
        elif "rekeyed" in part:
            parts.append(Rekeyed(tuple(part["rekeyed"])))
        else:
            parts.append(StagedSegment.read(part["segment"]))
    layout = None if said["layout"] is None else read_layout(said["layout"])
    return Work(layout, dict(said["fills"]), parts, said["is_replaced"])
