"""What Spark calls with each batch of a mirror's query."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pg_cdc_source.errors import DefiniteError
from pg_cdc_source.lake.ledger import MODES
from pg_cdc_source.lake.sink import Applied, Sink
from pg_cdc_source.lake.targets import Targets
from pg_cdc_source.mirrors.lakes import Lake
from pg_cdc_source.mirrors.sessions import errors_of_jvm, is_connect, keep_alive, query_of
from pg_cdc_source.offsets import StreamOffset
from pg_cdc_source.spark.copies import Sealed


class Batches(Sealed):
    """Applies the batches of one query.

    Spark Connect pickles it, and a process of the server's calls it, which opens the lake in its own session.
    """

    def __init__(
        self,
        checkpoint: str,
        targets: Targets,
        modes: str,
        format: str,
        open_lake: Callable[[SparkSession], Lake],
        on_batch: Callable[[Applied], None] | None,
        lake: Lake,
    ) -> None:
        self._checkpoint = checkpoint
        self._targets = targets
        self._modes = modes
        self._format = format
        self._open_lake = open_lake
        self._on_batch = on_batch
        self._lake: Lake | None = lake
        self._sink: Sink | None = None
        self._query: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lake": None, "_sink": None, "_query": None}

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        if self._lake is None:
            lake = self._open_lake(batch.sparkSession)
            # The client may not see the lake.
            lake.require_shapes(not_known_to_keep(lake, self._modes))
            if is_connect(batch.sparkSession):
                keep_alive(batch.sparkSession)
            self._lake = lake
        lake = self._lake
        if self._sink is None:
            self._sink = Sink(
                self._targets,
                lake.ledger,
                self._on_batch,
                lake.try_to_read,
                modes=self._modes,
                format=self._format,
            )
        if self._query is None:
            self._query = query_of(batch, self._checkpoint)
        try:
            self._sink.apply(
                self._query,
                batch_id,
                lambda start: lake.run(batch, start),
                lambda lsn: _is_past(batch, self._checkpoint, batch_id, lsn),
            )
        except errors_of_jvm(batch.sparkSession) as error:
            # Without the JVM's stack: when a query is stopped, Spark searches it by a pattern that it is too long for.
            raise PySparkException(error.java_exception.toString()) from None
        except BaseException as error:
            if isinstance(error, (Exception, KeyboardInterrupt, SystemExit)):
                raise
            # A panic of delta-rs is no Exception; py4j would not pass it on, and the JVM would wait for ever.
            raise DefiniteError(
                f"batch {batch_id}: {type(error).__name__}: {error}",
                remedy="start the mirror again; where it ends like this again, report it with the version of deltalake",
            ) from None


def not_known_to_keep(lake: Lake, modes: str) -> Collection[str]:
    """The tables that have to be opened to know whether they keep what the mirror is to: none if the ledger says so."""
    last = lake.ledger.last()
    return () if last is None or lake.ledger.said.get(MODES) == modes else last.tables


def _is_past(batch: DataFrame, checkpoint: str, batch_id: int, lsn: int) -> bool:
    """Whether a batch has anything behind an LSN. Raises DefiniteError."""
    # A line each for the format's version, Spark's settings, and the offset of the one source.
    *_, said = [row[0] for row in batch.sparkSession.read.text(f"{checkpoint}/offsets/{batch_id}").collect()]
    end = StreamOffset.from_json(json.loads(said))
    # An initial snapshot ends where it began, so its rows need not be read for that.
    return end is not None and end.position.lsn > lsn and not batch.filter(F.col("_commit_lsn") > lsn).isEmpty()
