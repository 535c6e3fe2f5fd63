"""A stream tells what happened: each change once, in order, as ``test_decoding`` does on a slot of its own."""

from __future__ import annotations

import itertools
import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import history
import pytest
import workload
from driving import Drive, Driver
from history import Change, Contents, Transaction
from psycopg2.extensions import connection as Session
from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from watch import wait_until

from pg_cdc_source.errors import DefiniteError
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.spark.pgcdc import HAS_LIMITS, PgCdcDataSource

if HAS_LIMITS:
    from pyspark.sql.streaming.datasource import ReadMaxRows

Row = dict[str, Any]

CHANGE_COLUMNS = ("_change_type", "_commit_lsn", "_seq", "_commit_ts", "_xid", "_unchanged")


class Collected:
    """An append-only sink: what each batch had."""

    def __init__(self) -> None:
        self.batches: dict[int, list[Row]] = {}

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        # Within a batch, order is that of the change columns; a DataFrame has none.
        try:
            rows = sorted(batch.toArrow().to_pylist(), key=_place)
        except Py4JJavaError as error:
            # Without the JVM's stack: when a query is stopped, Spark searches it by a pattern that it is too long for.
            raise RuntimeError(error.java_exception.toString()) from None
        assert rows == self.batches.setdefault(batch_id, rows), f"batch {batch_id} came again and was another"

    @property
    def filled(self) -> list[list[Row]]:
        """The batches that have rows, in order."""
        batches = dict(self.batches)
        assert sorted(batches) == list(range(len(batches)))
        return [batches[i] for i in range(len(batches)) if batches[i]]

    @property
    def rows(self) -> list[Row]:
        return [row for batch in self.filled for row in batch]

    @property
    def changes(self) -> list[Row]:
        return [row for row in self.rows if row["_change_type"] != "snapshot"]


def _place(row: Row) -> tuple[int, int, str]:
    # Rows of a snapshot are all at one place.
    return row["_commit_lsn"], row["_seq"], repr(row) if row["_change_type"] == "snapshot" else ""


@dataclass(frozen=True)
class Stream:
    """A query that can be started again from its checkpoint."""

    spark: SparkSession
    db: str
    checkpoint: Path
    options: dict[str, str]

    def start(self, sink: Callable[[DataFrame, int], None], **trigger: Any) -> StreamingQuery:
        source = self.spark.readStream.format("pgcdc").option("url", self.db).options(**self.options)
        writer = source.load().writeStream.foreachBatch(sink).option("checkpointLocation", str(self.checkpoint))
        return (writer.trigger(**trigger) if trigger else writer).start()

    @contextmanager
    def running(self, sink: Callable[[DataFrame, int], None], **trigger: Any) -> Iterator[StreamingQuery]:
        query = self.start(sink, **trigger)
        try:
            yield query
        finally:
            query.stop()

    def follow(self, sink: Collected, until: Callable[[], bool], seconds: float = 300) -> None:
        """Run until something is true, and look at what the query has to say when it ends before."""
        with self.running(sink) as query:
            wait_until(lambda: until() or not query.isActive, seconds)
            assert query.exception() is None, str(query.exception())


def drop(pg: Session, slot: str) -> None:
    """Drop a slot as soon as its query has let go of it."""

    def inactive() -> bool:
        cursor.execute("SELECT NOT active FROM pg_replication_slots WHERE slot_name = %s", (slot,))
        return bool(cursor.fetchone()[0])

    with pg.cursor() as cursor:
        wait_until(inactive)
        cursor.execute("SELECT pg_drop_replication_slot(%s)", (slot,))


def is_end(row: Row) -> bool:
    """Whether it is the row that ``workload.mark`` writes."""
    return row.get("note") == "the end" or '"the end"' in (row.get("after") or "")


def has_end(sink: Collected) -> bool:
    """Whether the row that ``workload.mark`` writes has come."""
    # After it, a batch without rows may come before anybody looks.
    batches = [batch for batch in list(sink.batches.values()) if batch]
    return bool(batches) and is_end(batches[-1][-1])


# --- comparing -------------------------------------------------------------------------------------------------------


def from_envelope(row: Row) -> Change:
    key, after, before = (None if row[name] is None else json.loads(row[name]) for name in ("key", "after", "before"))
    return Change(row["_table"], row["_change_type"], key, after, before, tuple(row["_unchanged"]))


def typed(values: dict[str, Any] | None, unchanged: Sequence[str] = ()) -> Row | None:
    """A row of ``items`` in the test's own types."""
    if values is None:
        return None
    read: dict[str, Callable[[str], Any]] = {
        "amount": Decimal,
        "at": history.moment,
        "day": date.fromisoformat,
        "raw": lambda text: bytes.fromhex(text[2:]),
        "numbers": lambda text: [None if item == "NULL" else int(item) for item in text[1:-1].split(",")],
        "ratio": float,
    }
    row: Row = {}
    for name in workload.ITEMS.columns:
        value = values.get(name)
        row[name] = read[name](value) if value is not None and name in read else value
    return row


def from_typed(row: Row) -> tuple[Any, ...]:
    values = {name: row[name] for name in workload.ITEMS.columns}
    return row["_change_type"], values, tuple(row["_unchanged"]), row["_before"]


def as_typed(change: Change) -> tuple[Any, ...]:
    """What the typed stream of ``items`` has to say of a change. A delete has what is known of the row."""
    image = change.before if change.kind == "delete" else change.after
    nothing = dict.fromkeys(workload.ITEMS.columns)
    return change.kind, typed(image) or nothing, change.unchanged, typed(change.before)


def compare(
    expected: list[Transaction],
    found: list[Row],
    of_row: Callable[[Row], Any],
    of_change: Callable[[Change], Any] = lambda change: change,
) -> None:
    """Assert that the rows are the transactions' changes, all of them, each once, in order."""
    assert found == sorted(found, key=_place)
    assert len({_place(row) for row in found}) == len(found), "_commit_lsn and _seq do not tell rows apart"
    rows = iter(found)
    last_end = 0
    for number, transaction in enumerate(expected):
        places = set()
        for change in transaction.changes:
            row = next(rows, None)
            where = f"transaction {number} of {len(expected)}, xid {transaction.xid}"
            assert row is not None, f"{where}: missing is {change}"
            assert of_row(row) == of_change(change), where
            assert (row["_xid"], row["_commit_ts"]) == (transaction.xid, transaction.commit_ts), where
            places.add(row["_commit_lsn"])
        # One commit record, which lies behind the transaction's last change and before its end.
        assert len(places) == 1, transaction.xid
        assert max(last_end - 1, transaction.last_lsn) < places.pop() < transaction.end_lsn
        last_end = transaction.end_lsn
    assert next(rows, None) is None


def check_batches(batches: list[list[Row]], most_rows: int) -> int:
    """Assert that batches end between commits, but for one that is too large for any; return how often one was cut."""
    sizes = Counter(row["_commit_lsn"] for batch in batches for row in batch if row["_change_type"] != "snapshot")
    cuts = 0
    for batch, following in itertools.pairwise(batches):
        assert _place(batch[-1]) < _place(following[0])
        if batch[-1]["_change_type"] != "snapshot" and batch[-1]["_commit_lsn"] == following[0]["_commit_lsn"]:
            cuts += 1
            assert sizes[batch[-1]["_commit_lsn"]] > most_rows
            assert {row["_commit_lsn"] for row in batch} == {batch[-1]["_commit_lsn"]}
    return cuts


def tables_option() -> str:
    return ",".join(table.name for table in workload.TABLES)


# --- the random workload ---------------------------------------------------------------------------------------------


# So many that statements of every kind have come, DDL among them.
TRANSACTIONS = 600


def filled(driver: Driver) -> Iterator[list[Row]]:
    """The batches that have rows."""
    while True:
        yield wait_until(driver.batch)


def through_the_end(batches: Iterable[list[Row]]) -> Iterator[list[Row]]:
    """The batches up to the one with the row that ``workload.mark`` writes."""
    for batch in batches:
        yield batch
        if is_end(batch[-1]):
            break


@pytest.mark.corner
def test_an_envelope_from_a_slot_has_every_change_once_and_in_order(db: str, pg: Session, drive: Drive) -> None:
    most_rows = 700
    workload.create_tables(pg)
    with pg.cursor() as cursor:
        # Transactions larger than this come before they have ended.
        cursor.execute(
            "DO $$BEGIN EXECUTE format('ALTER DATABASE %I SET logical_decoding_work_mem = ''1MB''',"
            " current_database()); END$$"
        )
        cursor.execute(f"CREATE PUBLICATION feed FOR TABLE {tables_option()} WITH (publish_via_partition_root)")
        cursor.execute("SELECT pg_create_logical_replication_slot('feed', 'pgoutput')")
    history.begin(pg, "oracle")
    driver = drive(slot="feed", startFrom="slot", tables=tables_option(), maxRowsPerBatch=str(most_rows))
    coming = filled(driver)
    batches: list[list[Row]] = []
    with workload.writers(db, seed=1, big=8_000) as progress:
        # Its process ends between some batches; after others, the sink has written what Spark does not know of.
        for more, crash in ((2, False), (3, True), (4, False), (2, True)):
            batches += itertools.islice(coming, more)
            if crash:
                assert driver.again() == batches[-1]
            else:
                driver.restart()
        # Before Spark 4.2, limits hold from the second batch of a run on.
        batches.append(next(coming))
        with pg.cursor() as cursor:
            workload.write_large(cursor, 3_000)
        while check_batches(batches, most_rows) <= 2 or progress.transactions < TRANSACTIONS:
            batches.append(next(coming))
    workload.mark(pg)
    batches += through_the_end(coming)
    driver.stop()
    compare(history.end(pg, "oracle", workload.TABLES, workload.LEAVES), driver.rows, from_envelope)
    assert check_batches(batches, most_rows) > 2
    assert not HAS_LIMITS or max(map(len, batches)) == most_rows


def test_a_typed_stream_from_now_has_every_change_since_its_start(db: str, pg: Session, drive: Drive) -> None:
    workload.create_tables(pg)
    history.begin(pg, "oracle")
    with pg.cursor() as cursor:
        cursor.execute("INSERT INTO items (note) VALUES ('too early')")
    driver = drive(
        **{"slot": "typed", "startFrom": "now", "dbtable": "items", "beforeImage": "true"},
        **{"maxBytesPerBatch": "64kB", "numericAs": "string"},
    )
    wait_until(lambda: driver.batch() or driver.batches)
    coming = filled(driver)
    batches: list[list[Row]] = []
    with workload.writers(db, seed=2, big=3_000) as progress:
        for _ in range(2):
            driver.restart()
            batches += itertools.islice(coming, 3)
        while progress.transactions < TRANSACTIONS:
            batches.append(next(coming))
    workload.mark(pg)
    batches += through_the_end(coming)
    driver.stop()
    # Only one table is read; a transaction that changed others says nothing here.
    told = history.end(pg, "oracle", [workload.ITEMS], {})
    first = next(i for i, transaction in enumerate(told) if transaction.xid == driver.rows[0]["_xid"])
    assert first > 0
    compare(told[first:], driver.rows, from_typed, as_typed)
    assert len(batches) > 5


@pytest.mark.matrix("stream from the snapshot on")
def test_snapshot_and_changes_meet_without_a_gap_or_an_overlap(
    db: str, pg: Session, spark: SparkSession, tmp_path: Path
) -> None:
    workload.create_tables(pg)
    history.begin(pg, "oracle")
    options = {"slot": "whole", "tables": tables_option(), "partitionBytes": "64kB", "maxRowsPerBatch": "5000"}
    stream = Stream(spark, db, tmp_path, options)
    sink = Collected()
    # Without DDL, which waits for the snapshot's locks or, when it comes first, makes the snapshot fail.
    with workload.writers(db, seed=3, big=5_000, ddl=False) as progress:
        wait_until(lambda: progress.large_ones_done and progress.transactions > 50, 300)
        stream.follow(sink, lambda: len(sink.filled) > 3)
    workload.mark(pg)
    stream.follow(sink, lambda: has_end(sink))
    drop(pg, "whole")
    told = history.end(pg, "oracle", workload.TABLES, workload.LEAVES)
    snapshot = [row for row in sink.rows if row["_change_type"] == "snapshot"]
    assert len(snapshot) > 0
    assert len({(row["_commit_lsn"], row["_seq"]) for row in snapshot}) == 1
    assert sink.rows[: len(snapshot)] == snapshot
    meeting = next(i for i, transaction in enumerate(told) if transaction.xid == sink.changes[0]["_xid"])
    assert meeting > 0
    compare(told[meeting:], sink.changes, from_envelope)
    contents = Contents(workload.TABLES)
    for transaction in told[:meeting]:
        for change in transaction.changes:
            contents.apply(change)
    rows = map(from_envelope, snapshot)
    assert Counter(contents.row(row.table, row.after or {}) for row in rows) == contents.rows()
    assert snapshot[0]["_commit_lsn"] >= told[meeting - 1].end_lsn - 1


# --- triggers --------------------------------------------------------------------------------------------------------


# Before Spark 4.2 both are one batch.
@pytest.mark.parametrize(
    "trigger",
    [
        pytest.param(
            "availableNow",
            marks=pytest.mark.matrix("Trigger.AvailableNow", since="Spark 4.2", before="in one batch"),
        ),
        "once",
    ],
)
def test_a_run_that_ends_by_itself_takes_what_was_there_at_its_start(
    trigger: str, db: str, pg: Session, spark: SparkSession, tmp_path: Path
) -> None:
    with pg.cursor() as cursor:
        cursor.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 500)")
        cursor.execute("CREATE TABLE u (id int PRIMARY KEY); INSERT INTO u SELECT generate_series(1, 500)")
    stream = Stream(spark, db, tmp_path, {"slot": "runs", "tables": "t,u", "maxRowsPerBatch": "300"})
    sink = Collected()

    def run(late: int) -> list[int]:
        """The ids that a run brings, during whose every batch a row with the id ``late`` or the next is committed."""
        before, ids = len(sink.rows), itertools.count(late)

        def write(batch: DataFrame, batch_id: int) -> None:
            with pg.cursor() as cursor:
                cursor.execute("INSERT INTO t VALUES (%s)", (next(ids),))
            sink(batch, batch_id)

        with stream.running(write, **{trigger: True}) as query:
            assert query.awaitTermination(180)
        return [json.loads(row["key"])["id"] for row in sink.rows[before:]]

    assert sorted(run(late=10_000)) == sorted([*range(1, 501), *range(1, 501)])
    late = [10_000 + i for i in range(len(sink.batches))]
    with pg.cursor() as cursor:
        for i in range(1, 11):
            cursor.execute(f"INSERT INTO u SELECT generate_series({i}000, {i}099)")
    too_late, batches = len(late), len(sink.batches)
    assert run(late=20_000) == [*late, *(id for i in range(1, 11) for id in range(i * 1000, i * 1000 + 100))]
    late = [20_000 + i for i in range(len(sink.batches) - batches)]
    sizes = [len(batch) for batch in sink.filled]
    if trigger == "availableNow" and HAS_LIMITS:
        # Both tables of the snapshot are small.
        assert sizes[0] == 1000
        assert len(sizes) > 4
        assert max(sizes[1:]) <= 300
        assert check_batches(sink.filled, 300) == 0
    else:
        # Before Spark 4.2 every run is one batch.
        assert sizes == [1000, 1000 + too_late]
    assert run(late=30_000) == late
    assert {row["_change_type"] for row in sink.changes} == {"insert"}
    drop(pg, "runs")


def test_a_trigger_by_time_is_obeyed_and_a_quiet_stream_makes_no_batches(
    db: str, pg: Session, spark: SparkSession, tmp_path: Path
) -> None:
    with pg.cursor() as cursor:
        cursor.execute("CREATE TABLE t (id int PRIMARY KEY)")
    stream = Stream(spark, db, tmp_path, {"slot": "timed", "dbtable": "t", "startFrom": "now"})
    sink = Collected()
    with stream.running(sink, processingTime="500 milliseconds") as query, pg.cursor() as cursor:
        wait_until(lambda: sink.batches or query.recentProgress)
        for i in range(3):
            cursor.execute("INSERT INTO t VALUES (%s)", (i,))
            wait_until(lambda i=i: len(sink.changes) == i + 1 or query.exception())  # type: ignore[misc]
        # One for each row, and the stream's first offset.
        assert len(sink.batches) <= 5
    drop(pg, "timed")
    assert [row["id"] for row in sink.changes] == [0, 1, 2]


# --- replay ----------------------------------------------------------------------------------------------------------


class Asked:
    """The source as Spark asks it, here by the test itself; what it hands to tasks goes through pickle as there."""

    def __init__(self, options: dict[str, str]) -> None:
        source = PgCdcDataSource(options)
        self._reader: Any = source.streamReader(source.schema())

    def next_offset(self, start: Row) -> Row:
        offset: Row = self._reader.latestOffset(start, ReadMaxRows(0)) if HAS_LIMITS else self._reader.latestOffset()
        return offset

    def rows(self, start: Row, end: Row) -> list[Row]:
        partitions = [pickle.loads(pickle.dumps(part)) for part in self._reader.partitions(start, end)]  # noqa: S301
        return [row for part in partitions for batch in self._reader.read(part) for row in batch.to_pylist()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


@contextmanager
def asked(options: dict[str, str]) -> Iterator[Asked]:
    source = Asked(options)
    try:
        yield source
    finally:
        source.stop()


@pytest.mark.corner
def test_what_lies_between_two_offsets_is_the_same_however_often_and_by_whom_it_is_asked(db: str, pg: Session) -> None:
    workload.create_tables(pg)
    with pg.cursor() as cursor:
        cursor.execute(f"CREATE PUBLICATION again FOR TABLE {tables_option()} WITH (publish_via_partition_root)")
        cursor.execute("SELECT pg_create_logical_replication_slot('again', 'pgoutput')")
    options = {"url": db, "slot": "again", "startFrom": "slot", "tables": tables_option(), "maxRowsPerBatch": "700"}
    with asked(options) as source:
        # Before Spark 4.2, limits hold from the second batch of a run on.
        offsets = [source.initialOffset()]
        offsets.append(source.next_offset(offsets[0]))
        rows = source.rows(*offsets)
        until = [0, len(rows)]  # how many rows lie before each offset
        with workload.writers(db, seed=4, big=8_000) as progress:
            wait_until(lambda: progress.large_ones_done and progress.transactions > 100, 300)
        workload.mark(pg)
        while not rows or '"the end"' not in (rows[-1]["after"] or ""):
            end = source.next_offset(offsets[-1])
            if end != offsets[-1]:
                found = source.rows(offsets[-1], end)
                # Spark commits when it has the next end, and may do so twice, or not at all when a run ends.
                for _ in range(len(offsets) % 3):
                    source.commit(offsets[-1])
                assert source.rows(offsets[-1], end) == found
                rows += found
                offsets.append(end)
                until.append(len(rows))
        assert len(offsets) > 10
        assert any("change" in offset for offset in offsets), "no transaction was cut"
        # What Spark was done with is not there any more, and never just nothing.
        with pytest.raises(DefiniteError, match="persist"):
            source.rows(offsets[1], offsets[2])

    def check(source: Asked, start: int, end: int) -> None:
        assert source.rows(offsets[start], offsets[end]) == rows[until[start] : until[end]], (start, end)

    # The slot stands at what was committed and known to be so; what comes after can be had.
    last_known = max(i for i in range(1, len(offsets) - 1) if (i + 1) % 3)
    with pg.cursor() as cursor:
        cursor.execute("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 'again'")
        assert Lsn.parse(cursor.fetchone()[0]) <= Lsn.parse(offsets[last_known]["lsn"]) + 1
    for first in (last_known, last_known, len(offsets) - 2):
        # As after a crash: nothing but the offsets is known.
        with asked(options) as source:
            check(source, first, len(offsets) - 1)
            check(source, first, first + 1)
            check(source, len(offsets) - 2, len(offsets) - 1)
    drop(pg, "again")
