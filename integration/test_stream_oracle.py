"""A stream tells what happened: each change once, in order, as ``test_decoding`` does on a slot of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import history
import pytest
import workload
from history import Change, Contents, Transaction
from psycopg2.extensions import connection as Session
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from watch import wait_until

from pg_cdc_source.stream import HAS_LIMITS

Row = dict[str, Any]

CHANGE_COLUMNS = ("_change_type", "_commit_lsn", "_seq", "_commit_ts", "_xid", "_unchanged")


class Crash(Exception):
    """What a sink fails with after it has written a batch and before Spark knows."""


class Collected:
    """An append-only sink: what each batch had. A batch that comes again has to be the same."""

    def __init__(self) -> None:
        self.batches: dict[int, list[Row]] = {}
        self.repeated: list[int] = []
        self.crash_at: int | None = None
        self._lock = threading.Lock()

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        # Within a batch, order is that of the change columns; a DataFrame has none.
        rows = sorted(batch.toArrow().to_pylist(), key=_place)
        with self._lock:
            if batch_id in self.batches:
                self.repeated.append(batch_id)
                assert rows == self.batches[batch_id], f"batch {batch_id} came again and was another"
            self.batches[batch_id] = rows
        if batch_id == self.crash_at:
            self.crash_at = None
            raise Crash

    @property
    def filled(self) -> list[list[Row]]:
        """The batches that have rows, in order."""
        assert sorted(self.batches) == list(range(len(self.batches)))
        return [self.batches[i] for i in range(len(self.batches)) if self.batches[i]]

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

    def follow(self, sink: Collected, until: Callable[[], bool], seconds: float = 60) -> None:
        """Run until something is true, and look at what the query has to say when it ends before."""
        with self.running(sink) as query:
            wait_until(lambda: until() or not query.isActive, seconds)
            if query.exception() is not None and "Crash" not in str(query.exception()):
                raise AssertionError(str(query.exception()))


def drop(pg: Session, slot: str) -> None:
    """Drop a slot as soon as its query has let go of it."""

    def inactive() -> bool:
        cursor.execute("SELECT NOT active FROM pg_replication_slots WHERE slot_name = %s", (slot,))
        return bool(cursor.fetchone()[0])

    with pg.cursor() as cursor:
        wait_until(inactive)
        cursor.execute("SELECT pg_drop_replication_slot(%s)", (slot,))


def has_end(sink: Collected) -> bool:
    """Whether the row that ``workload.mark`` writes has come."""
    batches = list(sink.batches.values())
    return any(row.get("note") == "the end" or '"the end"' in (row.get("after") or "") for row in batches[-1]) if batches else False


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
    return {
        name: None if values.get(name) is None else read.get(name, lambda value: value)(values[name])
        for name in workload.ITEMS.columns
    }


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


def check_batches(sink: Collected, most_rows: int) -> int:
    """Assert that batches end between commits, but for one that is too large for any; return how often one was cut."""
    sizes: dict[int, int] = {}
    for row in sink.changes:
        sizes[row["_commit_lsn"]] = sizes.get(row["_commit_lsn"], 0) + 1
    cuts = 0
    for batch, following in zip(sink.filled, sink.filled[1:], strict=False):
        assert _place(batch[-1]) < _place(following[0])
        if batch[-1]["_change_type"] != "snapshot" and batch[-1]["_commit_lsn"] == following[0]["_commit_lsn"]:
            cuts += 1
            assert sizes[batch[-1]["_commit_lsn"]] > most_rows
            assert {row["_commit_lsn"] for row in batch} == {batch[-1]["_commit_lsn"]}
    return cuts


def tables_option() -> str:
    return ",".join(table.name for table in workload.TABLES)


# --- the random workload ---------------------------------------------------------------------------------------------


def test_an_envelope_from_a_slot_has_every_change_once_and_in_order(
    db: str, pg: Session, spark: SparkSession, tmp_path: Path
) -> None:
    most_rows = 700
    workload.create_tables(pg)
    with pg.cursor() as cursor:
        # Transactions larger than this are decoded by way of the server's disk.
        cursor.execute("DO $$BEGIN EXECUTE format('ALTER DATABASE %I SET logical_decoding_work_mem = ''64kB''',"
                       " current_database()); END$$")
        cursor.execute(f"CREATE PUBLICATION feed FOR TABLE {tables_option()} WITH (publish_via_partition_root)")
        cursor.execute("SELECT pg_create_logical_replication_slot('feed', 'pgoutput')")
    history.begin(pg, "oracle")
    options = {"slot": "feed", "startFrom": "slot", "tables": tables_option(), "maxRowsPerBatch": str(most_rows)}
    stream = Stream(spark, db, tmp_path, options)
    sink = Collected()
    with workload.writers(db, seed=1, transactions=150, big=30_000):
        # Stopped at some batches; after others, the sink has written what Spark does not know of.
        for more, crash in ((3, False), (6, True), (9, False), (4, True)):
            at = len(sink.batches) + more
            sink.crash_at = at if crash else None
            stream.follow(sink, lambda at=at: at in sink.batches)  # type: ignore[misc]
    workload.mark(pg)
    stream.follow(sink, lambda: has_end(sink))
    drop(pg, "feed")
    compare(history.end(pg, "oracle", workload.TABLES, workload.LEAVES), sink.changes, from_envelope)
    assert sink.changes == sink.rows
    assert len(set(sink.repeated)) >= 2
    assert check_batches(sink, most_rows) > 2
