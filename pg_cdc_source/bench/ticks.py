"""``format("bench_ticks")``: a stream that always has its rows ready: what Spark itself needs for a batch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

_SECOND = 1_000_000
_TIMESTAMP = pa.timestamp("us", tz="UTC")


@dataclass
class Span(InputPartition):
    """The rows between two times, in microseconds since 1970."""

    after: int
    until: int


class TicksSource(DataSource):
    """Has a row with its time (``_commit_ts``) ``rate`` times a second, and nobody to ask for it."""

    @classmethod
    def name(cls) -> str:
        return "bench_ticks"

    def schema(self) -> str:
        return "_commit_ts timestamp"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        return TicksReader(int(self.options["rate"]))


class TicksReader(DataSourceStreamReader):
    """Answers at once: the offset is the time."""

    def __init__(self, rate: int) -> None:
        self._step = _SECOND // rate

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        return {"at": _now()}

    def latestOffset(self, start: object = None, limit: object = None) -> dict[str, int]:  # noqa: N802 - Spark's name
        return {"at": _now()}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [Span(start["at"], end["at"])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Span)
        first = -(-(partition.after + 1) // self._step) * self._step
        times = numpy.arange(first, partition.until + 1, self._step, dtype=numpy.int64)
        yield pa.record_batch([pa.array(times).cast(_TIMESTAMP)], ["_commit_ts"])


def _now() -> int:
    return time.time_ns() // 1_000
