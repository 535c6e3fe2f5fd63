"""``spark.readStream.format("pgcdc")``: the edge to Spark's Python data source interface."""

from __future__ import annotations

import pickle
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from pg_cdc_source.errors import OptionError
from pg_cdc_source.lake.first_files import FIRST_FILES, FirstFiles
from pg_cdc_source.lake.first_rows import written
from pg_cdc_source.offsets import INITIAL, Lsn, StreamOffset
from pg_cdc_source.options.stream_options import StreamOptions, parse_stream_options
from pg_cdc_source.protocol.changelog import changelog_rows, changelog_schema
from pg_cdc_source.protocol.ipc import from_ipc
from pg_cdc_source.protocol.layout import RUNS_SCHEMA
from pg_cdc_source.protocol.packed import runs_of
from pg_cdc_source.protocol.stream_rows import position_row, snapshot_rows, with_unsent
from pg_cdc_source.snapshot.reader import read_range
from pg_cdc_source.spark.copies import Sealed, SealedClass, SealedPartition
from pg_cdc_source.spark.edge import execution, short_errors, spark_schema
from pg_cdc_source.spark.own_trigger import OWN_TRIGGER, OwnTrigger
from pg_cdc_source.spark.shipped_modules import find_shipped_modules
from pg_cdc_source.spark.worker_tuning import small_task
from pg_cdc_source.stream.batch_log import described, log_batch
from pg_cdc_source.stream.batch_reading import Batch
from pg_cdc_source.stream.capture import Capture
from pg_cdc_source.stream.first_rows.held_snapshot import SnapshotPart
from pg_cdc_source.stream.received.chunks import Chunk
from pg_cdc_source.stream.tables.stream_plan import layout_of, read_typed_schema
from pg_cdc_source.values.arrow import one_batch

try:
    # Spark 4.2 and later say where a batch starts and how much it may hold.
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )

    HAS_LIMITS = True
except ImportError:
    HAS_LIMITS = False

# A task's share of a batch's changes, uncompressed: large enough to be worth a task, small enough to share the work.
BYTES_PER_TASK = 16 << 20

# Several chunks, as a rule; what is joined is copied, and has to stay small beside a task's other memory.
_ROWS_PER_JOINED_BATCH = 32_768
_OF_MIRRORS = {FIRST_FILES, OWN_TRIGGER}


class SnapshotPartition(SealedPartition):
    """Ranges of tables of the initial snapshot: one of a large table, or several of small ones.

    The task reads them from PostgreSQL.
    """

    def __init__(self, parts: Sequence[SnapshotPart]) -> None:
        self.parts = parts

    def __getstate__(self) -> bytes:
        # The driver keeps all of them, and each has the table's columns: 32 kB for 300, and 6 kB like this.
        return zlib.compress(pickle.dumps(self.parts), level=1)

    def __setstate__(self, packed: bytes) -> None:
        self.parts = pickle.loads(zlib.decompress(packed))  # noqa: S301 - as the partition itself


class ChangesPartition(SealedPartition):
    """Changes that the driver has received, as Arrow IPC; read from the reader's file when Spark pickles this."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = chunks

    def __getstate__(self) -> list[bytes]:
        return [chunk.data() for chunk in self.chunks]

    def __setstate__(self, payloads: list[bytes]) -> None:
        self.payloads = payloads


class PgCdcDataSource(Sealed, DataSource, metaclass=SealedClass):
    """Read the rows of PostgreSQL tables, and then their changes, as a stream."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        with short_errors():
            self._files, self._trigger = FirstFiles.of(options), OwnTrigger.of(options)
            self._options = parse_stream_options({k: text for k, text in options.items() if k not in _OF_MIRRORS})
            if self._files is not None:
                self._options = replace(self._options, may_lack_changes=self._files.may_lack_changes)
        self._schema: pa.Schema | None = None

    @classmethod
    def name(cls) -> str:
        return "pgcdc"

    def schema(self) -> StructType:
        rows = self._arrow_schema()
        if self._options.envelope == "arrow":
            rows = RUNS_SCHEMA
        if self._options.change_format == "changelog":
            with short_errors():
                rows = changelog_schema(str(self._options.dbtable), rows)
        return spark_schema(rows)

    def reader(self, schema: StructType) -> DataSourceReader:
        raise OptionError(
            "pgcdc is a stream, and spark.read asked for a batch",
            remedy="use spark.readStream; for a table as it is now: spark.read.format('pgsnapshot')",
        )

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        find_shipped_modules()
        own = self.schema()
        if schema != own:
            raise OptionError(
                f"the schema given to spark.readStream.schema() is not the stream's: {own.simpleString()}",
                remedy="leave .schema() out; use the options asString and numericAs, and cast in Spark",
            )
        return READER(self._options, self._arrow_schema(), self._files, self._trigger)

    def _arrow_schema(self) -> pa.Schema:
        """The schema of the stream's rows, whatever shape tasks give them."""
        if self._schema is None:
            if self._options.dbtable is None:
                self._schema = layout_of(self._options).schema([])
            else:
                with short_errors():
                    self._schema = read_typed_schema(self._options)
        return self._schema


class PgCdcReader(Sealed, DataSourceStreamReader):
    """Answers Spark in the driver's source process, and reads partitions in tasks.

    ``files``: where tasks write rows of a snapshot, instead of handing them to Spark. ``trigger``: what is known of the
    query's trigger.
    """

    def __init__(
        self,
        options: StreamOptions,
        schema: pa.Schema,
        files: FirstFiles | None = None,
        trigger: OwnTrigger | None = None,
    ) -> None:
        self._options = options
        self._files = files
        self._trigger = trigger
        self._schema = schema
        self._capture: Capture | None = None
        self._newest: StreamOffset | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Tasks read what their partitions bring, and need no capture.
        return {**self.__dict__, "_capture": None}

    def _running(self) -> Capture:
        # Not in __init__: Spark also makes readers that it never uses.
        if self._capture is None:
            interval = 0.0 if self._trigger is None else self._trigger.interval
            self._capture = Capture(self._options, self._schema, interval)
        return self._capture

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return INITIAL

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        with short_errors():
            first, last = StreamOffset.from_json(start), StreamOffset.from_json(end)
            if last is None or start == end:
                return []
            began = time.monotonic()
            batch = self._running().batch(first, last)
            log_batch(self._options, first, last, batch, time.monotonic() - began, self._running().standing)
            parts = list(_partitions(batch))
            at = batch.at
            # A batch that ends within a commit says so: its tables are of no one point.
            if self._options.envelope == "arrow" and not (parts and at.is_whole):
                parts.append(ChangesPartition([Chunk.of(position_row(at, self._schema), at, at)]))
            return parts

    def commit(self, end: dict[str, Any]) -> None:
        with short_errors():
            self._running().commit(StreamOffset.from_json(end))

    def stop(self) -> None:
        if self._capture is not None:
            self._capture.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with small_task(), short_errors():
            if isinstance(partition, ChangesPartition):
                yield from self._shaped(_joined(partition.payloads), None)
                return
            assert isinstance(partition, SnapshotPartition)
            parts = partition.parts
            if self._files is not None:
                yield from written((part for part in parts if part.rewound is None), self._files, execution())
                # What is turned back is compared with changes, whose values are texts.
                parts = [part for part in parts if part.rewound is not None]
            for part in parts:
                yield from self._shaped(self._snapshot(part), part.through if part.through > part.lsn else None)

    def _shaped(self, rows: Iterator[pa.RecordBatch], through: Lsn | None) -> Iterator[pa.RecordBatch]:
        """The rows as the options want them; ``through`` is as ``runs_of`` takes it."""
        if self._options.change_format == "changelog":
            schema = changelog_schema(str(self._options.dbtable), self._schema)
            return (changelog_rows(batch, schema) for batch in rows)
        if self._options.envelope == "arrow":
            return (runs_of(batch, through) for batch in rows)
        return rows

    def _snapshot(self, part: SnapshotPart) -> Iterator[pa.RecordBatch]:
        layout = layout_of(self._options)
        batches = read_range(part.scan, part.source, part.range, execution())
        # What it is turned back by has the names that are said, and the table may have others by now.
        if part.table.unsent or part.rewound is not None:
            types = [codec.arrow_type for codec in part.table.codecs]
            batches = (with_unsent(batch, part.table, types) for batch in batches)
        if part.rewound is not None:
            batches = part.rewound.leave_out(batches)
        for batch in batches:
            columns = batch.columns[: len(part.table.codecs)]
            yield snapshot_rows(columns, batch.num_rows, part.lsn, layout, part.table, self._schema)


class ReaderWithoutLimits(PgCdcReader):
    """For Spark 4.0 and 4.1, which ask for the newest offset and name neither start nor limit.

    Where a checkpoint goes on, they first ask for the partitions from its last batch's end to that same end
    (``PythonMicroBatchStream.setLatestSeenOffset``).
    """

    def _running(self) -> Capture:
        is_new = self._capture is None
        capture = super()._running()
        if is_new and self._trigger is not None and self._trigger.once:
            capture.stop_at_present()
        return capture

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        if start == end and self._trigger is not None:
            with short_errors():
                self._running().go_on_from(StreamOffset.from_json(end))
        return super().partitions(start, end)

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # noqa: N802
        with short_errors():
            return self._running().newest_without_start(may_go_on=self._trigger is None).to_json()


READER: type[PgCdcReader] = ReaderWithoutLimits

if HAS_LIMITS:

    class ReaderWithLimits(PgCdcReader, SupportsTriggerAvailableNow):
        """For Spark 4.2 and later."""

        def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
            return ReadMaxRows(self._options.max_rows_per_batch)

        def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
            with short_errors():
                limited = not isinstance(limit, ReadAllAvailable)
                first = StreamOffset.from_json(start)
                newest = self._newest = self._running().newest(first, limited=limited)
                # Spark runs a batch when the text differs.
                return start if newest == first else newest.to_json()

        def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
            """What ``query.lastProgress`` shows as the source's latest offset: where the server is by now."""
            standing = None if self._newest is None else self._running().standing(self._newest)
            return None if standing is None else described(self._options, standing)

        def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
            with short_errors():
                self._running().stop_at_present()

    READER = ReaderWithLimits


def _partitions(batch: Batch) -> Iterator[InputPartition]:
    if batch.first:
        yield ChangesPartition(batch.first)
    yield from map(SnapshotPartition, _packed(batch.parts))
    chunks: list[Chunk] = []
    size = 0
    for chunk in batch.chunks:
        chunks.append(chunk)
        size += chunk.raw_bytes
        if size >= BYTES_PER_TASK:
            yield ChangesPartition(chunks)
            chunks, size = [], 0
    if chunks:
        yield ChangesPartition(chunks)


def _packed(parts: Iterable[SnapshotPart]) -> Iterator[list[SnapshotPart]]:
    """Let ranges of small tables share tasks, up to the size of one range of a large table."""
    shared: list[SnapshotPart] = []
    shared_bytes = 0
    for part in parts:
        most_bytes = part.scan.spec.range_bytes
        size_bytes = most_bytes if part.range.size_bytes is None else part.range.size_bytes
        if shared and shared_bytes + size_bytes > most_bytes:
            yield shared
            shared, shared_bytes = [], 0
        shared.append(part)
        shared_bytes += size_bytes
    if shared:
        yield shared


def _joined(payloads: Sequence[bytes]) -> Iterator[pa.RecordBatch]:
    """Join small batches, because Spark has a cost for each."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for payload in payloads:
        waiting.append(from_ipc(payload))
        rows += waiting[-1].num_rows
        if rows >= _ROWS_PER_JOINED_BATCH:
            yield one_batch(waiting)
            waiting, rows = [], 0
    if waiting:
        yield one_batch(waiting)
