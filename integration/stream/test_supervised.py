"""A query that is started again where that helps, by the loop of the documents as it stands."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from documents import PAGES, blocks, name_of
from driving import drop_slots, run
from psycopg2.extensions import connection as Session
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from watch import wait_until

Row = dict[str, Any]


@pytest.fixture
def supervise() -> Callable[[Callable[[], StreamingQuery]], None]:
    """The function of docs/operations.md."""
    (page,) = [page for page in PAGES if name_of(page) == "docs/operations.md"]
    (block,) = [block for block in blocks(page) if "def run(start" in block.text]
    names: dict[str, Any] = {}
    exec(block.text, names)  # noqa: S102 - our own page
    found: Callable[[Callable[[], StreamingQuery]], None] = names["run"]
    return found


@pytest.fixture
def rows() -> list[Row]:
    return []


@pytest.fixture
def start(
    db: str, pg: Session, spark: SparkSession, tmp_path: Path, rows: list[Row]
) -> Iterator[Callable[[], StreamingQuery]]:
    """Starts a query of table t that collects its rows."""
    queries: list[StreamingQuery] = []

    def take(batch: DataFrame, _: int) -> None:
        rows.extend(row.asDict() for row in batch.collect())

    def start() -> StreamingQuery:
        changes = spark.readStream.format("pgcdc").options(url=db, dbtable="t", slot="s").load()
        writer = changes.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / "checkpoint"))
        queries.append(writer.start())
        return queries[-1]

    run(pg, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    yield start
    for query in queries:
        query.stop()
    drop_slots(pg)


class Clock:
    """Time that passes without waiting."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Query:
    """One that ends with ``error`` after ``seconds`` by ``clock``."""

    def __init__(self, clock: Clock, seconds: float, error: Exception) -> None:
        self._clock, self._seconds, self._error = clock, seconds, error

    def awaitTermination(self) -> None:  # noqa: N802 - Spark's name
        self._clock.sleep(self._seconds)
        raise self._error


@pytest.mark.parametrize(
    ("text", "most"),
    [
        # What needs somebody, whatever it quotes.
        ("[DEFINITE] no table could be written; t: [TRANSIENT] away", 1),
        ("[STREAM_FAILED] without a code of ours", 1),
        ("[SCHEMA_CHANGED] t: a column was added", 2),
        # Nothing helps for a quarter of an hour.
        ("[TRANSIENT] away", 83),
        ("[SERVER_FULL] no connection is left", 83),
    ],
)
def test_the_loop_ends_where_starting_again_does_not_help(
    text: str, most: int, supervise: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, starts = Clock(), 0
    monkeypatch.setitem(supervise.__globals__, "time", clock)

    def start() -> Query:
        nonlocal starts
        starts += 1
        return Query(clock, 1, PySparkException(text))

    with pytest.raises(PySparkException):
        supervise(start)
    assert starts == most


def test_the_loop_goes_on_with_runs_that_get_somewhere(supervise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lost = Clock(), PySparkException("[TRANSIENT] the session was lost")
    monkeypatch.setitem(supervise.__globals__, "time", clock)
    queries = iter([*(Query(clock, 600, lost) for _ in range(50)), Query(clock, 1, PySparkException("[WIRE] end"))])
    with pytest.raises(PySparkException, match="end"):
        supervise(lambda: next(queries))


def test_a_query_goes_on_after_columns_have_changed(
    supervise: Callable[[Callable[[], StreamingQuery]], None],
    start: Callable[[], StreamingQuery],
    pg: Session,
    rows: list[Row],
) -> None:
    ended: list[BaseException] = []

    def supervised() -> None:
        try:
            supervise(start)
        except StreamingQueryException as error:
            ended.append(error)

    thread = threading.Thread(target=supervised)
    thread.start()
    wait_until(lambda: len(rows) == 1, 120)
    run(pg, "ALTER TABLE t ADD v text", "INSERT INTO t VALUES (2, 'b')")
    wait_until(lambda: len(rows) == 2, 120)
    assert [(row["id"], row.get("v")) for row in rows] == [(1, None), (2, "b")]
    # Here starting again brings nothing.
    run(pg, "DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY, v text)", "ALTER PUBLICATION s ADD TABLE t")
    thread.join(120)
    assert "was dropped and created again" in str(ended[0])
