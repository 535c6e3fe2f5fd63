"""A Spark driver that streams tables into files, one for each batch, and dies by SIGKILL at a named point.

It starts Spark and reads lines of JSON (``Errand``) from its standard input. For each it runs the query until it dies,
or until the batch with the marker is committed; then it makes the file ``done``. The sink is idempotent by batch id: a
batch that comes again takes the place of its file. What was there before is kept beside it, for the test to compare.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from pg_cdc_source import register
from pg_cdc_source.demo.local_spark import end_jvm, start_session, stop_session

Point = Literal["snapshot", "sink", "transaction", "committed", "none"]


@dataclass(frozen=True)
class Errand:
    """What one run of the driver shall do.

    ``batch`` counts from 0 and says at which one to die: ``snapshot`` while its tasks run, ``sink`` when its file is
    written, ``committed`` when Spark has committed it. ``transaction``: when the file of a batch is written that starts
    and ends within one transaction.
    """

    options: dict[str, str]
    directory: str
    marker: str
    point: Point = "none"
    batch: int = 0


class Driver:
    """One run."""

    def __init__(self, spark: SparkSession, errand: Errand) -> None:
        self._spark = spark
        self._errand = errand
        self._directory = Path(errand.directory)
        self._batches = self._directory / "batches"
        self._batches.mkdir(exist_ok=True)
        self._jvm_pid = int(spark._jvm.java.lang.ProcessHandle.current().pid())  # type: ignore[union-attr]
        self._marked: int | None = None  # the batch that has the marker

    def run(self) -> None:
        errand = self._errand
        query = (
            self._spark.readStream.format("pgcdc")
            .options(**errand.options)
            .load()
            .writeStream.foreachBatch(self._sink)
            .option("checkpointLocation", str(self._directory / "checkpoint"))
            .start()
        )
        while query.isActive:
            if errand.point == "committed" and self._is_committed(errand.batch):
                self._die()
            if self._marked is not None and self._is_committed(self._marked):
                query.stop()
            time.sleep(0.005)
        if (error := query.exception()) is not None:
            raise error
        (self._directory / "done").touch()

    def _is_committed(self, batch: int) -> bool:
        return (self._directory / "checkpoint" / "commits" / str(batch)).exists()

    def _sink(self, df: DataFrame, batch: int) -> None:
        errand = self._errand
        if errand.point == "snapshot" and batch == errand.batch:
            self._die_in_a_task(df)
        rows = [json.dumps(row.asDict(recursive=True), default=str) for row in df.collect()]
        self._write(batch, rows)
        if any(errand.marker in row for row in rows):
            self._marked = batch
        if errand.point == "sink" and batch == errand.batch:
            self._die()
        if errand.point == "transaction" and self._within_one_transaction(batch):
            self._die()

    def _write(self, batch: int, rows: list[str]) -> None:
        path = self._batches / f"{batch}.jsonl"
        new = path.with_suffix(".new")
        new.write_text("".join(f"{row}\n" for row in rows))
        if path.exists():
            taken = len(list(self._batches.glob(f"{batch}.*.before")))
            os.link(path, self._batches / f"{batch}.{taken}.before")
        new.replace(path)

    def _die_in_a_task(self, df: DataFrame) -> None:
        seen = self._directory / "seen"
        seen.unlink(missing_ok=True)

        def hang(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                seen.touch()
                time.sleep(60)
                yield batch

        threading.Thread(target=df.mapInArrow(hang, df.schema).collect, daemon=True).start()
        while not seen.exists():
            time.sleep(0.005)
        self._die()

    def _within_one_transaction(self, batch: int) -> bool:
        """Whether the batch starts and ends in the middle of a transaction: its offsets then count its changes."""

        def counts(number: int) -> bool:
            path = self._directory / "checkpoint" / "offsets" / str(number)
            return path.exists() and "change" in json.loads(path.read_text().splitlines()[-1])

        return counts(batch - 1) and counts(batch)

    def _die(self) -> None:
        os.kill(self._jvm_pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def main(scratch: Path) -> None:
    spark = start_session("local[2]", {"spark.log.level": "ERROR"}, scratch)
    register(spark)
    for line in sys.stdin:
        Driver(spark, Errand(**json.loads(line))).run()
    stop_session(spark)
    end_jvm()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
