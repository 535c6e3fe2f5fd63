"""Drive a stream from its source process's side, batch by batch, and look at the rows that come."""

from __future__ import annotations

import contextlib
import json
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from psycopg2.extensions import connection as Session
from psycopg2.extensions import parse_dsn
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from refusals import MOST_FRAMES
from watch import wait_until

from pg_cdc_source.errors import PgCdcError, SchemaChangedError
from pg_cdc_source.offsets import Member, StreamOffset
from pg_cdc_source.postgres import trees
from pg_cdc_source.spark import pgcdc
from pg_cdc_source.spark.pgcdc import HAS_LIMITS, PgCdcDataSource
from pg_cdc_source.stream import next_offset
from pg_cdc_source.stream.tables import looks

Row = dict[str, Any]


SLOT = "s"


def run(pg: Session, *statements: str) -> list[tuple[Any, ...]]:
    """Run statements, each a transaction of its own; the last one's rows."""
    with pg.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
        return cursor.fetchall() if cursor.description else []


def drop_slots(pg: Session) -> None:
    """Drop the slots of this database as soon as nobody reads them."""
    here = "FROM pg_replication_slots WHERE database = current_database()"
    wait_until(lambda: run(pg, f"SELECT count(*) {here} AND active") == [(0,)])
    run(pg, f"SELECT pg_drop_replication_slot(slot_name) {here}")


def copied(thing: Any) -> Any:
    """What arrives in another process."""
    return pickle.loads(pickle.dumps(thing))  # noqa: S301 - our own, from the line itself


class Driver:
    """What Spark does with a stream: a checkpoint, and a process that may end and start again."""

    def __init__(self, url: str, **options: str) -> None:
        self.options = {"url": url, "slot": SLOT, **options}
        self.rows: list[Row] = []  # of all batches, in order
        self.batches = 0
        self.names_commits = True  # with asynchronous progress tracking, Spark does not do so for most batches
        self._committed: dict[str, Any] | None = None  # the end of the last batch
        self._planned: dict[str, Any] | None = None  # the end of one that did not come to its end
        self._before: dict[str, Any] | None = None  # where the last batch began
        self._reader: Any = None

    def start(self, **changed: str) -> Driver:
        """Load the DataFrame and start the query."""
        self.options |= changed
        source = PgCdcDataSource(self.options)
        schema = source.schema()
        self._reader = copied(source).streamReader(schema)
        self._last_end: dict[str, Any] | None = None
        return self

    def start_available_now(self) -> Driver:
        """Start the query, which takes what is there now, and no more."""
        self.start()
        self._reader.prepareForTriggerAvailableNow()
        return self

    def stop(self) -> None:
        if self._reader is not None:
            self._reader.stop()
            self._reader = None

    def restart(self, **changed: str) -> Driver:
        self.stop()
        return self.start(**changed)

    @property
    def offset(self) -> StreamOffset:
        """Where the checkpoint ends."""
        found = StreamOffset.from_json(self._committed or {})
        assert found is not None
        return found

    @property
    def members(self) -> tuple[Member, ...]:
        """The stream's tables where the checkpoint ends."""
        found = self.offset.members
        assert found is not None
        return found

    def continue_from(self, offset: str) -> None:
        """Take over a checkpoint whose last batch ended at this offset."""
        self._committed = json.loads(offset)

    @property
    def planned_tables(self) -> tuple[str, ...]:
        """Of which tables the planned batch has all rows."""
        end = StreamOffset.from_json(self._planned or {"version": 1, "lsn": "initial"})
        return () if end is None else end.tables

    def plan(self, *, read: bool) -> bool:
        """Run a batch, unless it begins to read tables. That one is only planned; ``read``: with its partitions.

        Return whether it is planned.
        """
        if self.planned_tables:
            return True
        start = self._committed or self._reader.initialOffset()
        if self._plan(start) and not self.planned_tables:
            self.batch()
        elif self.planned_tables and read:
            copied(self._reader.partitions(start, self._planned))
        return bool(self.planned_tables)

    def _plan(self, start: dict[str, Any]) -> bool:
        """Ask for the end of the next batch; whether there is one."""
        reader = self._reader
        if self._planned is None:
            end = reader.latestOffset(start, reader.getDefaultReadLimit()) if HAS_LIMITS else reader.latestOffset()
            end = json.loads(json.dumps(end))
            if json.dumps(end) == json.dumps(start):
                return False
            self._planned = end
            if self._last_end is not None and self.names_commits:
                reader.commit(self._last_end)
        return True

    def partitions_of_nothing(self) -> list[object]:
        """Ask for the partitions from the end of the planned batch to there, as Spark 4.0 and 4.1 do at a start."""
        return list(self._reader.partitions(self._planned, self._planned))

    def plan_before_repeating(self, meanwhile: Callable[[], object] = lambda: None) -> list[Row]:
        """Ask for the newest offset, then repeat the batch that did not come to its end, and run one up to there."""
        newest = self._reader.latestOffset()
        meanwhile()
        self.batch()
        self._planned = newest
        return self.batch()

    def plan_and_ask_again(self, meanwhile: Callable[[], object]) -> tuple[object, object]:
        """Plan a batch, and ask for the newest offset once more before it is read; both answers."""
        self._planned = self._reader.latestOffset()
        meanwhile()
        return self._planned, self._reader.latestOffset()

    def batch(self) -> list[Row]:
        """Run one batch, if there is one; its rows."""
        rows = self.attempt()
        if rows is None:
            return []
        self._before, self._committed, self._last_end = self._committed, self._planned, self._planned
        self._planned = None
        self.rows += rows
        self.batches += 1
        return rows

    def again(self) -> list[Row]:
        """Run the last batch once more in a new process, as after a crash before Spark had committed it; its rows."""
        planned, self._committed = self._committed, self._before
        self.restart()
        self._planned, count = planned, len(self.rows)
        rows = self.batch()
        del self.rows[count:]
        return rows

    def attempt(self, *, read: bool = True, planned: Callable[[], object] = lambda: None) -> list[Row] | None:
        """Begin a batch, as a process does that ends before the batch is over; its rows, None where there is none.

        Without ``read``, the process ends as soon as the batch's end is known. ``planned`` runs before its tasks do.
        """
        reader = self._reader
        start = self._committed or reader.initialOffset()
        if not self._plan(start):
            return None
        rows: list[Row] = []
        partitions = copied(reader.partitions(start, self._planned)) if read else ()
        planned()
        for partition in partitions:
            for batch in copied(reader).read(partition):
                batch.validate(full=True)
                rows += batch.to_pylist()
        return rows

    def attempt_rows(self) -> list[Row]:
        """Begin the next batch that has rows; its rows. One without, as a quiet stream has, comes to its end before."""

        def rows() -> list[Row]:
            found = self.attempt()
            if found == []:
                self.batch()
            return found or []

        return wait_until(rows)

    def take(self, count: int, seconds: float = 60.0) -> list[Row]:
        """Run batches until they have brought so many rows, and not one more, and the initial snapshot is over."""
        rows: list[Row] = []
        deadline = time.monotonic() + seconds
        while len(rows) < count or self.offset.done < len(self.offset.tables):
            assert time.monotonic() < deadline, f"{len(rows)} of {count} rows came within {seconds:g} s: {rows}"
            rows += self.batch()
        # Spark asks again at once, and with that says that it has the batch: locks of the initial snapshot go.
        with pytest.MonkeyPatch.context() as patch:
            # Whatever else is there is on its way by now.
            patch.setattr(next_offset, "PATIENCE_SECONDS", min(next_offset.PATIENCE_SECONDS, 0.03))
            rows += self.batch()
        assert len(rows) == count, rows
        return rows

    def refusal(self, *expected: str, kind: type[PgCdcError] = SchemaChangedError, rows: int | None = 0) -> str:
        """Run batches until one is refused; the text. Before, as many rows come as ``rows`` says, None for any."""
        got: list[Row] = []

        def refused() -> None:
            deadline = time.monotonic() + 60
            while True:
                assert time.monotonic() < deadline, f"nothing was refused; these rows came: {got}"
                got.extend(self.batch())

        text = refusal_of(refused, *expected, kind=kind)
        assert rows is None or len(got) == rows, got
        assert parse_dsn(self.options["url"]).get("password", "\0") not in text
        return text


def refusal_of(action: Callable[[], object], *expected: str, kind: type[PgCdcError]) -> str:
    with pytest.raises(PgCdcError) as caught:
        action()
    assert isinstance(caught.value, kind), caught.value
    text = str(caught.value)
    assert text.count("Remedy: ") == 1, text
    for part in expected:
        assert part in text, text
    return text


def prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process drive streams."""
    # Partitions are read here and not in a task.
    monkeypatch.setattr(pgcdc, "execution", lambda: "test")
    # What is found in passing is found sooner.
    monkeypatch.setattr(next_offset, "IDLE_SECONDS", 0.5)
    monkeypatch.setattr(looks, "WATCH_SECONDS", 0.2)
    # Each table of a snapshot is a batch, as large ones are, so that much can happen between them.
    monkeypatch.setattr(trees, "read_sizes", lambda session, oids: dict.fromkeys(oids, 1 << 40))


@contextlib.contextmanager
def driving(pg: Session, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Driver]]:
    """``drive(dbtable=…)`` starts a stream. Afterwards it is stopped and its slot dropped."""
    prepare(monkeypatch)
    drivers: list[Driver] = []
    run(pg, "SET lock_timeout = '30s'")

    def drive(**options: str) -> Driver:
        drivers.append(Driver(url, **options))
        return drivers[-1].start()

    try:
        yield drive
    finally:
        for driver in drivers:
            driver.stop()
        drop_slots(pg)


def values(rows: Iterable[Row], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


def is_one_commit(rows: Sequence[Row]) -> bool:
    """Whether the rows are of one commit, in their order."""
    numbers = values(rows, "_seq")
    return len({row["_commit_lsn"] for row in rows}) == 1 and numbers == sorted(set(numbers))


def kinds(rows: Iterable[Row]) -> list[str]:
    return [row["_change_type"] for row in rows]


Drive = Callable[..., Driver]


class Query:
    """A query with a checkpoint; ``rows`` are those of each batch, of a repeated one the last."""

    def __init__(self, spark: SparkSession, directory: Path, url: str, **options: str) -> None:
        self._spark = spark
        self._checkpoint = directory / "checkpoint"
        self.options = {"url": url, "slot": SLOT, **options}
        self.batches: dict[int, list[Row]] = {}
        self.query: StreamingQuery | None = None
        self.each: Callable[[DataFrame], DataFrame] = lambda df: df

    @property
    def rows(self) -> list[Row]:
        return [row for _, rows in sorted(self.batches.items()) for row in rows]

    def start(self) -> StreamingQuery:
        df = self._spark.readStream.format("pgcdc").options(**self.options).load()

        def take(batch: DataFrame, number: int) -> None:
            self.batches[number] = [row.asDict(recursive=True) for row in self.each(batch).collect()]

        writer = df.writeStream.foreachBatch(take).option("checkpointLocation", str(self._checkpoint))
        self.query = writer.start()
        return self.query

    def take(self, count: int) -> None:
        wait_until(lambda: self._broken() or len(self.rows) >= count, 120)
        assert not self._broken(), self._broken()
        assert len(self.rows) == count, self.rows

    def _broken(self) -> StreamingQueryException | None:
        assert self.query is not None
        error = self.query.exception()
        assert error is None or isinstance(error, StreamingQueryException)
        return error

    def refusal(self, *expected: str) -> str:
        """The text of the exception that the query ends with: short, with one remedy and without the password."""
        text = str(wait_until(self._broken, 120))
        frames = [line for line in text.splitlines() if line.lstrip().startswith("File ") and "pg_cdc_source/" in line]
        assert len(frames) <= MOST_FRAMES, text
        assert text.count("Remedy: ") == 1, text
        assert parse_dsn(self.options["url"]).get("password", "\0") not in text
        for part in expected:
            assert part in text, text
        return text

    def stop(self) -> None:
        if self.query is not None:
            self.query.stop()
            self.query = None


@contextlib.contextmanager
def querying(spark: SparkSession, directory: Path, pg: Session, url: str, **options: str) -> Iterator[Query]:
    query = Query(spark, directory, url, **options)
    try:
        yield query
    finally:
        query.stop()
        drop_slots(pg)
