"""A question about streams: the time from a commit to its row in ``foreachBatch``."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial

from pyspark.sql import DataFrame, functions

from pg_cdc_source.bench.datasets import WIDE
from pg_cdc_source.bench.lab import Lab
from pg_cdc_source.bench.question import Contender, Question, Sample, Target
from pg_cdc_source.bench.small_tables import READY
from pg_cdc_source.bench.stream import OURS, TABLE, is_read, load, make_table, started, until
from pg_cdc_source.bench.ticks import TicksSource

_TRANSACTIONS_PER_SECOND = 500
_SLOT = "bench_latency"


# By default Spark writes a checkpoint's files through Hadoop's FileContext, which starts a process for each file if
# Hadoop's native library is missing.
_OWN_FILES = f"{OURS}, checkpoints by FileSystem"
_FILES_SETTING = "spark.sql.streaming.checkpointFileManagerClass"
_FILES_CLASS = "org.apache.spark.sql.execution.streaming.{}FileSystemBasedCheckpointFileManager"


def latency(lab: Lab) -> Question:
    """Of the connector, and of a Python stream that has its rows ready, while the same transactions come in."""
    make_table(lab)
    return Question(
        "latency",
        f"From the commit to the row in foreachBatch, at {_TRANSACTIONS_PER_SECOND} transactions a second",
        [
            Contender(OURS, partial(_ours, lab)),
            Contender(_OWN_FILES, partial(_ours_with_own_files, lab)),
            Contender(READY, partial(_ready, lab)),
        ],
        ("p50_s", "p99_s", "most_s", "rows"),
        [
            Target("p50_s", OURS, "at most", 1.3, to=READY),
            Target("p50_s", OURS, "at most", 0.25),
            Target("p99_s", OURS, "at most", 0.6),
        ],
        plotted=2,
        warm_ups=2,
        most_rounds=3,
        notes=f"Default trigger; {lab.scale.latency_seconds:g} s, the first fifth of which is not counted. The commit's"
        f" time is PostgreSQL's own, on the same clock. The second contender has {_FILES_SETTING} set. Ready rows are"
        " those of a Python stream that has as many, and answers at once.",
    )


def _ours_with_own_files(lab: Lab) -> Sample:
    # The class has moved in Spark 4.1.
    package = "checkpointing." if lab.spark.version >= "4.1" else ""
    lab.spark.conf.set(_FILES_SETTING, _FILES_CLASS.format(package))
    try:
        return _ours(lab)
    finally:
        lab.spark.conf.unset(_FILES_SETTING)


def _ours(lab: Lab) -> Sample:
    try:
        return _measured(lab, load(lab, _SLOT, startFrom="now"), lambda _: is_read(lab, _SLOT))
    finally:
        lab.drop_slot(_SLOT)


def _ready(lab: Lab) -> Sample:
    lab.spark.dataSource.register(TicksSource)
    rows = lab.spark.readStream.format(TicksSource.name()).option("rate", str(_TRANSACTIONS_PER_SECOND)).load()
    return _measured(lab, rows, bool)


def _measured(lab: Lab, rows: DataFrame, is_up: Callable[[int], bool]) -> Sample:
    """Read a stream whose rows have ``_commit_ts`` while transactions come in.

    ``is_up`` says, given how many rows have come, whether the stream is up and transactions may begin.
    """
    seconds = lab.scale.latency_seconds
    sent = int(_TRANSACTIONS_PER_SECOND * seconds)
    arrived: list[tuple[float, float]] = []  # commit, latency

    def take(batch: DataFrame, batch_id: int) -> None:
        commits = batch.select(functions.unix_micros("_commit_ts")).collect()
        now = time.time()
        arrived.extend((micros / 1e6, now - micros / 1e6) for (micros,) in commits)

    lab.execute(f"TRUNCATE {TABLE}")
    statements = [f"INSERT INTO {TABLE} {WIDE.rows_between('$1', '$1')}"]

    def work() -> int:
        with (
            started(lab, rows, take, lambda: is_up(len(arrived))) as query,
            lab.start("writer", json.dumps(statements), str(_TRANSACTIONS_PER_SECOND), str(seconds)) as writer,
        ):
            _, errors = writer.communicate(lab.url)
            if writer.returncode != 0:
                raise RuntimeError(f"the writer failed:\n{errors[-3000:]}")
            until(lambda: len(arrived) >= sent, query)
        return len(arrived)

    sample = lab.meter.measure(work)
    begin = min(commit for commit, _ in arrived)
    counted = sorted((commit - begin, late) for commit, late in arrived if commit >= begin + seconds / 5)
    cuts = statistics.quantiles((late for _, late in counted), n=100)
    measures = {"p50_s": cuts[49], "p99_s": cuts[98], "most_s": max(late for _, late in counted)}
    return Sample({**sample.measures, **measures}, {"seconds from commit to row": tuple(counted)})
