"""``format("bench_ready")``: hands Spark batches that are ready, to measure what Spark itself needs for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType


@dataclass
class Repeated(InputPartition):
    """A partition: the file's batch, ``times`` times."""

    times: int


class ReadySource(DataSource):
    """Yields the one batch of an Arrow file (``path``) ``batches`` times over ``partitions``, as table or as stream."""

    @classmethod
    def name(cls) -> str:
        return "bench_ready"

    def schema(self) -> StructType:
        return from_arrow_schema(_read(self.options["path"]).schema, prefer_timestamp_ntz=True)

    def reader(self, schema: StructType) -> DataSourceReader:
        return ReadyReader(self.options["path"], int(self.options["batches"]), int(self.options["partitions"]))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        return ReadyStreamReader(self.options["path"], int(self.options["batches"]), int(self.options["partitions"]))


class _Ready:
    """Maps the file in each task, which costs next to nothing."""

    def __init__(self, path: str, batches: int, partitions: int) -> None:
        self._path, self._batches, self._partitions = path, batches, partitions

    def _cut(self) -> list[InputPartition]:
        bounds = [self._batches * i // self._partitions for i in range(self._partitions + 1)]
        return [Repeated(after - first) for first, after in itertools.pairwise(bounds)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Repeated)
        batch = _read(self._path)
        for _ in range(partition.times):
            yield batch


class ReadyReader(_Ready, DataSourceReader):
    """All of it as a table."""

    def partitions(self) -> list[InputPartition]:
        return self._cut()


class ReadyStreamReader(_Ready, DataSourceStreamReader):
    """All of it as one micro-batch of a stream."""

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        return {"given": 0}

    def latestOffset(self, start: object = None, limit: object = None) -> dict[str, int]:  # noqa: N802 - Spark's name
        return {"given": 1}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return self._cut() if start != end else []


def write_batch(batch: pa.RecordBatch, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def _read(path: str) -> pa.RecordBatch:
    return pa.ipc.open_file(pa.memory_map(path)).get_batch(0)
