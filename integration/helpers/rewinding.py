"""Interrupt an initial snapshot, and count the rows that come again."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from pg_cdc_source.offsets import StreamOffset
from pg_cdc_source.options.stream_options import parse_stream_options
from pg_cdc_source.protocol.layout import ENVELOPE_SCHEMA
from pg_cdc_source.spark import pgcdc
from pg_cdc_source.stream.capture import Capture
from pg_cdc_source.stream.tables.stream_plan import read_typed_schema

SLOT = "rewound"


Rows = list[dict[str, Any]]


class Source:
    """What Spark's source process is to the stream: closed without a word, as if it were killed."""

    def __init__(self, db: str, **options: str) -> None:
        self._options = parse_stream_options({"url": db, "slot": SLOT, **options})
        self._schema = read_typed_schema(self._options) if "dbtable" in options else ENVELOPE_SCHEMA
        self.capture = Capture(self._options, self._schema)

    def rows(self, start: StreamOffset | None, end: StreamOffset) -> Rows:
        """The rows of a batch, by way of what Spark sends to tasks."""
        tasks = pgcdc.PgCdcReader(self._options, self._schema)
        partitions = pickle.loads(pickle.dumps(list(pgcdc._partitions(self.capture.batch(start, end)))))  # noqa: S301
        return [row for partition in partitions for batch in tasks.read(partition) for row in batch.to_pylist()]

    def next(self, start: StreamOffset | None) -> StreamOffset:
        return self.capture.newest(start, limited=True)

    def changes_until(self, end: StreamOffset, marker: str) -> Iterator[Rows]:
        """The batches after ``end`` up to the one that has the marker."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            start, end = end, self.next(end)
            rows = self.rows(start, end)
            yield rows
            if any(marker in str(row) for row in rows):
                return
        pytest.fail("the marker did not come within 120 s")


@contextlib.contextmanager
def source(db: str, **options: str) -> Iterator[Source]:
    opened = Source(db, **{"partitionBytes": "64kB", **options})
    try:
        yield opened
    finally:
        opened.capture.close()


def counted(rows: Rows) -> Counter[str]:
    """Rows as a multiset, whatever types they have."""
    return Counter(repr(sorted(row.items())) for row in rows)


class Sink:
    """Keeps the rows of each batch that it is given, and fails at one."""

    def __init__(self, failing: int | None, until: str = "") -> None:
        self.batches: dict[int, Rows] = {}
        self._failing = failing
        self._until = until
        self.done = False

    def __call__(self, df: DataFrame, batch: int) -> None:
        self.batches[batch] = [row.asDict(recursive=True) for row in df.collect()]
        if batch == self._failing:
            raise RuntimeError("the sink fails here")
        self.done |= bool(self._until) and any(self._until in str(row) for row in self.batches[batch])


Start = Callable[[Sink, str], StreamingQuery]
