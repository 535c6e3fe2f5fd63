"""Questions about streams: the time to drain a backlog, memory; and the queries that questions start."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import psutil
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from pg_cdc_source.bench import peers, to_arrow
from pg_cdc_source.bench.datasets import WIDE
from pg_cdc_source.bench.lab import CORES, Lab
from pg_cdc_source.bench.meter import Peak, timings, watching
from pg_cdc_source.bench.question import Contender, Question, Sample, Target
from pg_cdc_source.bench.ready_batches import ReadySource, write_batch
from pg_cdc_source.bench.small_tables import READY
from pg_cdc_source.postgres.backoff import Backoff

OURS = "pgcdc"
RECVLOGICAL = "pg_recvlogical"
DEBEZIUM = "Debezium engine"

TABLE, _PUBLICATION, _BASE_SLOT = "streamed", "bench", "bench_base"
_CHANGES_PER_TRANSACTION = 1_000
_WITHIN_SECONDS = 600.0  # a query that runs gets where it is awaited


# --- a backlog -------------------------------------------------------------------------------------------------------


def backlog(lab: Lab) -> Question:
    changes = _make_backlog(lab, lab.scale.changes)
    end = str(lab.value("SELECT pg_current_wal_lsn()"))
    ready = _ready(lab, changes)

    def contender(name: str, drain: Callable[[str], Sample]) -> Contender:
        return Contender(name, partial(_with_own_slot, lab, drain))

    return Question(
        "backlog",
        f"{changes:,} changes of the wide table that wait in a slot",
        [
            contender(OURS, partial(_drain_by_pgcdc, lab, changes)),
            peers.missing_program(RECVLOGICAL, RECVLOGICAL)
            or contender(RECVLOGICAL, partial(_drain_by_recvlogical, lab, changes, end)),
            peers.missing_debezium() or contender(DEBEZIUM, partial(_drain_by_debezium, lab, changes)),
            Contender(READY, lambda: lab.meter.measure(lambda: _drained(lab, ready, changes)[0])),
        ],
        ("rows_per_s", "rows_per_s_begun", "wall_s", "client_cpu_s", "server_cpu_s"),
        [
            Target("rows_per_s", OURS, "at least", 1.0, to=RECVLOGICAL),
            Target("rows_per_s_begun", OURS, "at least", 5.0, to=DEBEZIUM),
            # 6 s for the 1,200,000 changes of a full run; the walsender's CPU is PostgreSQL's own.
            Target("client_cpu_us_per_row", OURS, "at most", 5.0),
        ],
        # In the second run, what the JVM has compiled for the stream still gets faster.
        warm_ups=2,
        notes=f"Transactions of {_CHANGES_PER_TRANSACTION:,} changes: 70 % inserts, 25 % updates, 5 % deletes; all runs"
        " read the same WAL. pgcdc writes typed rows to a no-op sink and is timed from start() to the query's end;"
        " pg_recvlogical writes to /dev/null; Debezium is timed from its first record to its last, as pgcdc is in"
        " rows_per_s_begun, from the trigger of its first batch. Ready rows are those of a Python stream that has as"
        " many, in one batch.",
    )


def _drain_by_pgcdc(lab: Lab, changes: int, slot: str) -> Sample:
    rows = load(lab, slot, startFrom="slot")
    seconds = 0.0

    def work() -> int:
        nonlocal seconds
        came, seconds = _drained(lab, rows, changes)
        return came

    sample = lab.meter.measure(work)
    return Sample({**sample.measures, "rows_per_s_begun": changes / seconds})


def _drain_by_recvlogical(lab: Lab, changes: int, end: str, slot: str) -> Sample:
    program = peers.find_program(RECVLOGICAL)
    assert program is not None
    where = ["--dbname", lab.server["dbname"], "--slot", slot, "--endpos", end, "--file", "/dev/null"]
    options = ["--option", "proto_version=1", "--option", f"publication_names={_PUBLICATION}"]

    def work() -> int:
        lab.program([program, "--start", "--no-loop", *where, *options])
        return changes

    return lab.meter.measure(work)


def _drain_by_debezium(lab: Lab, changes: int, slot: str) -> Sample:
    class_path = peers.debezium_class_path()
    assert class_path is not None
    server = lab.server
    where = (server["host"], server["port"], server["user"], server["dbname"], slot, _PUBLICATION, str(changes))
    source = Path(__file__).with_name("Drain.java")
    found: dict[str, float] = {}

    def work() -> int:
        found.update(json.loads(lab.program([peers.java(), "-cp", class_path, source, *where]).splitlines()[-1]))
        return changes

    server_cpu_s = lab.meter.measure(work).measures["server_cpu_s"]
    measures = timings(int(found["rows"]), found["wall_s"], found["client_cpu_s"], server_cpu_s)
    return Sample({**measures, "rows_per_s_begun": measures["rows_per_s"]})


def _make_backlog(lab: Lab, changes: int) -> int:
    """Fill a table and change it, after creating a slot; return the number of changes that wait in the slot."""
    make_table(lab)
    lab.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (_BASE_SLOT,))
    transactions = max(1, changes // _CHANGES_PER_TRANSACTION)
    inserted, updated = _CHANGES_PER_TRANSACTION * 70 // 100, _CHANGES_PER_TRANSACTION * 25 // 100
    deleted = _CHANGES_PER_TRANSACTION - inserted - updated
    for i in range(transactions):
        first, last = i * inserted + 1, (i + 1) * inserted
        lab.execute(
            f"BEGIN; INSERT INTO {TABLE} {WIDE.rows_between(str(first), str(last))};"
            f" UPDATE {TABLE} SET quantity = 1, updated = now() WHERE id BETWEEN {first} AND {first + updated - 1};"
            f" DELETE FROM {TABLE} WHERE id BETWEEN {last - deleted + 1} AND {last}; COMMIT"
        )
    return transactions * _CHANGES_PER_TRANSACTION


def make_table(lab: Lab) -> None:
    lab.execute(
        f"DROP TABLE IF EXISTS {TABLE}; CREATE TABLE {TABLE} ({WIDE.columns}, PRIMARY KEY (id));"
        f" DROP PUBLICATION IF EXISTS {_PUBLICATION};"
        f" CREATE PUBLICATION {_PUBLICATION} FOR TABLE {TABLE} WITH (publish_via_partition_root = true)"
    )


def _with_own_slot(lab: Lab, run: Callable[[str], Sample]) -> Sample:
    """Run with a copy of the slot, so that what one contender confirms does not move the slot of the next."""
    slot = "bench_run"
    lab.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", (_BASE_SLOT, slot))
    try:
        return run(slot)
    finally:
        lab.drop_slot(slot)


def load(lab: Lab, slot: str, **options: str) -> DataFrame:
    settings: dict[str, str] = {"url": lab.url, "dbtable": TABLE, "slot": slot, "publication": _PUBLICATION, **options}
    return lab.spark.readStream.format("pgcdc").options(**settings).load()


def _ready(lab: Lab, changes: int) -> DataFrame:
    """As many rows of the same table as a stream that has them already."""
    path = lab.home / "backlog.arrow"
    batch = next(to_arrow.ours(lab.url, TABLE))
    in_batch = max(rows for rows in range(1, batch.num_rows + 1) if changes % rows == 0)
    write_batch(batch.slice(0, in_batch), path)
    lab.spark.dataSource.register(ReadySource)
    options = {"path": str(path), "batches": str(changes // in_batch), "partitions": str(CORES)}
    return lab.spark.readStream.format(ReadySource.name()).options(**options).load()


def _drained(lab: Lab, rows: DataFrame, expected: int) -> tuple[int, float]:
    """Read what waits, typed, into a no-op sink, and check the number of changes.

    Returns it, and the seconds since the trigger of the first batch.
    """
    writer = rows.writeStream.format("noop").trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(lab.scratch())).start()
    query.awaitTermination()
    end = datetime.now(timezone.utc)
    came: int = sum(progress["numInputRows"] for progress in query.recentProgress)
    if came != expected:
        raise RuntimeError(f"the stream read {came:,} changes of {expected:,}")
    first = next(progress["timestamp"] for progress in query.recentProgress if progress["numInputRows"])
    return came, (end - datetime.fromisoformat(first.replace("Z", "+00:00"))).total_seconds()


# --- queries ----------------------------------------------------------------------------------------------------------


@contextmanager
def started(
    lab: Lab, rows: DataFrame, take: Callable[[DataFrame, int], None], is_up: Callable[[], bool]
) -> Iterator[StreamingQuery]:
    """Run a query until the block ends, which starts when ``is_up`` says so."""
    writer = rows.writeStream.foreachBatch(take).option("checkpointLocation", str(lab.scratch()))
    query = writer.start()
    try:
        until(is_up, query)
        yield query
    finally:
        query.stop()


def is_read(lab: Lab, slot: str) -> bool:
    return bool(lab.value("SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s AND active", (slot,)))


def until(done: Callable[[], bool], query: StreamingQuery, every_seconds: float = 0.05) -> None:
    """Wait until something is ``done`` that a query does; raises the query's error."""
    for _ in Backoff(every_seconds, growth=1, within_seconds=_WITHIN_SECONDS).polls():
        if (error := query.exception()) is not None:
            raise error
        if done():
            return
    raise RuntimeError(f"the query did not bring its rows within {_WITHIN_SECONDS:.0f} s")


# --- memory ----------------------------------------------------------------------------------------------------------


def stream_memory(lab: Lab) -> Question:
    changes = lab.scale.changes
    make_table(lab)

    def one_transaction() -> None:
        lab.execute(f"INSERT INTO {TABLE} {WIDE.rows_between('1', str(changes))}")

    def many_transactions() -> None:
        for first in range(1, changes + 1, _CHANGES_PER_TRANSACTION):
            last = min(first + _CHANGES_PER_TRANSACTION - 1, changes)
            lab.execute(f"INSERT INTO {TABLE} {WIDE.rows_between(str(first), str(last))}")

    def run(write: Callable[[], None]) -> Sample:
        lab.execute(f"TRUNCATE {TABLE}")
        slot, came = "bench_memory", 0

        def take(batch: DataFrame, batch_id: int) -> None:
            nonlocal came
            came += batch.count()

        peak = Peak(lambda: _sources(lab))
        rows = load(lab, slot, startFrom="now")
        with watching(peak.look), started(lab, rows, take, lambda: is_read(lab, slot)) as query:
            write()
            until(lambda: came >= changes, query)
        lab.drop_slot(slot)
        return Sample({"source_peak_mb": peak.bytes / 1e6, "rows": came})

    works = {"one transaction": one_transaction, f"{changes // 1_000:,} transactions": many_transactions}
    return Question(
        "stream-memory",
        f"{changes:,} changes of the wide table: memory of the stream's process on the driver",
        [Contender(name, partial(run, write)) for name, write in works.items()],
        ("source_peak_mb", "rows"),
        [Target("source_peak_mb", name, "at most", 600) for name in works],
        warm_ups=0,
        most_rounds=1,
    )


def _sources(lab: Lab) -> Iterator[psutil.Process]:
    for process in lab.spark_processes():
        with contextlib.suppress(psutil.Error):
            if any("streaming_source" in argument for argument in process.cmdline()):
                yield process
