"""Questions about streams: the time to drain a backlog, latency, memory."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
from pyspark.sql import DataFrame, functions
from pyspark.sql.streaming.query import StreamingQuery

from pg_cdc_source.bench import peers
from pg_cdc_source.bench.datasets import WIDE
from pg_cdc_source.bench.lab import Lab
from pg_cdc_source.bench.meter import Peak, timings, watching
from pg_cdc_source.bench.question import Contender, Question, Sample, Target
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.slot_creation import drop_slot

OURS = "pgcdc"
RECVLOGICAL = "pg_recvlogical"
DEBEZIUM = "Debezium engine"

_TABLE, _PUBLICATION, _BASE_SLOT = "streamed", "bench", "bench_base"
_CHANGES_PER_TRANSACTION = 1_000
_TRANSACTIONS_PER_SECOND = 500
_DROP_SECONDS = 60.0

# By default Spark writes a checkpoint's files through Hadoop's FileContext, which starts a process for each file if
# Hadoop's native library is missing.
_OWN_FILES = f"{OURS}, checkpoints by FileSystem"
_FILES_SETTING = "spark.sql.streaming.checkpointFileManagerClass"
_FILES_CLASS = "org.apache.spark.sql.execution.streaming.{}FileSystemBasedCheckpointFileManager"


# --- a backlog -------------------------------------------------------------------------------------------------------


def backlog(lab: Lab) -> Question:
    changes = _make_backlog(lab, lab.scale.changes)
    end = str(lab.value("SELECT pg_current_wal_lsn()"))

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
        ],
        ("rows_per_s", "wall_s", "client_cpu_s", "server_cpu_s"),
        [
            Target("rows_per_s", OURS, "at least", 1.2, to=RECVLOGICAL),
            Target("rows_per_s", OURS, "at least", 5.0, to=DEBEZIUM),
        ],
        # In the second run, what the JVM has compiled for the stream still gets faster.
        warm_ups=2,
        notes=f"Transactions of {_CHANGES_PER_TRANSACTION:,} changes: 70 % inserts, 25 % updates, 5 % deletes; all runs"
        " read the same WAL. pgcdc writes typed rows to a no-op sink and is timed from start() to the query's end;"
        " pg_recvlogical writes to /dev/null; Debezium is timed from its first record to its last.",
    )


def _drain_by_pgcdc(lab: Lab, changes: int, slot: str) -> Sample:
    rows = _load(lab, slot, startFrom="slot")
    return lab.meter.measure(lambda: _drained(lab, rows, changes))


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
    return Sample(timings(int(found["rows"]), found["wall_s"], found["client_cpu_s"], server_cpu_s))


def _make_backlog(lab: Lab, changes: int) -> int:
    """Fill a table and change it, after creating a slot; return the number of changes that wait in the slot."""
    _make_table(lab)
    lab.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (_BASE_SLOT,))
    transactions = max(1, changes // _CHANGES_PER_TRANSACTION)
    inserted, updated = _CHANGES_PER_TRANSACTION * 70 // 100, _CHANGES_PER_TRANSACTION * 25 // 100
    deleted = _CHANGES_PER_TRANSACTION - inserted - updated
    for i in range(transactions):
        first, last = i * inserted + 1, (i + 1) * inserted
        lab.execute(
            f"BEGIN; INSERT INTO {_TABLE} {WIDE.rows_between(str(first), str(last))};"
            f" UPDATE {_TABLE} SET quantity = 1, updated = now() WHERE id BETWEEN {first} AND {first + updated - 1};"
            f" DELETE FROM {_TABLE} WHERE id BETWEEN {last - deleted + 1} AND {last}; COMMIT"
        )
    return transactions * _CHANGES_PER_TRANSACTION


def _make_table(lab: Lab) -> None:
    lab.execute(
        f"DROP TABLE IF EXISTS {_TABLE}; CREATE TABLE {_TABLE} ({WIDE.columns}, PRIMARY KEY (id));"
        f" DROP PUBLICATION IF EXISTS {_PUBLICATION};"
        f" CREATE PUBLICATION {_PUBLICATION} FOR TABLE {_TABLE} WITH (publish_via_partition_root = true)"
    )


def _with_own_slot(lab: Lab, run: Callable[[str], Sample]) -> Sample:
    """Run with a copy of the slot, so that what one contender confirms does not move the slot of the next."""
    slot = "bench_run"
    lab.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", (_BASE_SLOT, slot))
    try:
        return run(slot)
    finally:
        _drop_slot(lab, slot)


def _drop_slot(lab: Lab, slot: str) -> None:
    # For a moment the server has not noticed yet that the reader is gone.
    backoff = Backoff(0.05, longest_seconds=1, within_seconds=_DROP_SECONDS)
    backoff.retrying(lambda: drop_slot(lab.admin, slot))


def _load(lab: Lab, slot: str, **options: str) -> DataFrame:
    settings: dict[str, str] = {"url": lab.url, "dbtable": _TABLE, "slot": slot, "publication": _PUBLICATION, **options}
    return lab.spark.readStream.format("pgcdc").options(**settings).load()


def _drained(lab: Lab, rows: DataFrame, expected: int) -> int:
    """Read what waits in a slot, typed, into a no-op sink, and check the number of changes."""
    writer = rows.writeStream.format("noop").trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(lab.scratch())).start()
    query.awaitTermination()
    came: int = sum(progress["numInputRows"] for progress in query.recentProgress)
    if came != expected:
        raise RuntimeError(f"pgcdc read {came:,} changes of {expected:,}")
    return came


# --- latency ---------------------------------------------------------------------------------------------------------


def latency(lab: Lab) -> Question:
    _make_table(lab)
    return Question(
        "latency",
        f"From the commit to the row in foreachBatch, at {_TRANSACTIONS_PER_SECOND} transactions a second",
        [Contender(OURS, partial(_latency, lab)), Contender(_OWN_FILES, partial(_latency_with_own_files, lab))],
        ("p50_s", "p99_s", "most_s", "rows"),
        [Target("p50_s", OURS, "at most", 0.25), Target("p99_s", OURS, "at most", 0.6)],
        plotted=2,
        warm_ups=2,
        most_rounds=3,
        notes=f"Default trigger; {lab.scale.latency_seconds:g} s, the first fifth of which is not counted. The commit's"
        f" time is PostgreSQL's own, on the same clock. The second contender has {_FILES_SETTING} set.",
    )


def _latency_with_own_files(lab: Lab) -> Sample:
    # The class has moved in Spark 4.1.
    package = "checkpointing." if lab.spark.version >= "4.1" else ""
    lab.spark.conf.set(_FILES_SETTING, _FILES_CLASS.format(package))
    try:
        return _latency(lab)
    finally:
        lab.spark.conf.unset(_FILES_SETTING)


def _latency(lab: Lab) -> Sample:
    seconds = lab.scale.latency_seconds
    sent = int(_TRANSACTIONS_PER_SECOND * seconds)
    arrived: list[tuple[float, float]] = []  # commit, latency

    def take(batch: DataFrame, batch_id: int) -> None:
        commits = batch.select(functions.unix_micros("_commit_ts")).collect()
        now = time.time()
        arrived.extend((micros / 1e6, now - micros / 1e6) for (micros,) in commits)

    lab.execute(f"TRUNCATE {_TABLE}")
    slot = "bench_latency"
    rows = _load(lab, slot, startFrom="now")
    statements = [f"INSERT INTO {_TABLE} {WIDE.rows_between('$1', '$1')}"]

    def work() -> int:
        with (
            _started(lab, rows, take, slot) as query,
            lab.start("writer", json.dumps(statements), str(_TRANSACTIONS_PER_SECOND), str(seconds)) as writer,
        ):
            _, errors = writer.communicate(lab.url)
            if writer.returncode != 0:
                raise RuntimeError(f"the writer failed:\n{errors[-3000:]}")
            _until(lambda: len(arrived) >= sent, query)
        return len(arrived)

    sample = lab.meter.measure(work)
    _drop_slot(lab, slot)
    begin = min(commit for commit, _ in arrived)
    counted = sorted((commit - begin, late) for commit, late in arrived if commit >= begin + seconds / 5)
    cuts = statistics.quantiles((late for _, late in counted), n=100)
    measures = {"p50_s": cuts[49], "p99_s": cuts[98], "most_s": max(late for _, late in counted)}
    return Sample({**sample.measures, **measures}, {"seconds from commit to row": tuple(counted)})


@contextmanager
def _started(lab: Lab, rows: DataFrame, take: Callable[[DataFrame, int], None], slot: str) -> Iterator[StreamingQuery]:
    """Run a query until the block ends, which starts when the query reads its slot."""
    writer = rows.writeStream.foreachBatch(take).option("checkpointLocation", str(lab.scratch()))
    query = writer.start()
    try:
        active = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s AND active"
        _until(lambda: bool(lab.value(active, (slot,))), query)
        yield query
    finally:
        query.stop()


def _until(done: Callable[[], bool], query: StreamingQuery, seconds: float = 600.0) -> None:
    for _ in Backoff(0.05, growth=1, within_seconds=seconds).polls():
        if done():
            return
        if (error := query.exception()) is not None:
            raise error
    raise RuntimeError(f"the query did not bring its rows within {seconds:.0f} s")


# --- memory ----------------------------------------------------------------------------------------------------------


def stream_memory(lab: Lab) -> Question:
    changes = lab.scale.changes
    _make_table(lab)

    def one_transaction() -> None:
        lab.execute(f"INSERT INTO {_TABLE} {WIDE.rows_between('1', str(changes))}")

    def many_transactions() -> None:
        for first in range(1, changes + 1, _CHANGES_PER_TRANSACTION):
            last = min(first + _CHANGES_PER_TRANSACTION - 1, changes)
            lab.execute(f"INSERT INTO {_TABLE} {WIDE.rows_between(str(first), str(last))}")

    def run(write: Callable[[], None]) -> Sample:
        lab.execute(f"TRUNCATE {_TABLE}")
        slot, came = "bench_memory", 0

        def take(batch: DataFrame, batch_id: int) -> None:
            nonlocal came
            came += batch.count()

        peak = Peak(lambda: _sources(lab))
        with watching(peak.look), _started(lab, _load(lab, slot, startFrom="now"), take, slot) as query:
            write()
            _until(lambda: came >= changes, query)
        _drop_slot(lab, slot)
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
