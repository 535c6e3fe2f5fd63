"""Steps of a batch in tables that Delta itself writes: what its log keeps of them, and what it may pass over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lake_jars
import pytest
from driving import run
from lake import Begin, CatalogLake, is_same, rows_of
from psycopg2.extensions import connection as Session
from pyspark.errors import AnalysisException
from watch import wait_until

from pg_cdc_source.mirrors.delta import DeltaTable

pytestmark = [
    pytest.mark.corner,
    pytest.mark.skipif(lake_jars.lacking("delta") is not None, reason=lake_jars.lacking("delta") or ""),
]
T = ("CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'a'), (2, 'b')")
# A table that keeps its rows takes each of them as a step.
STEPS = (
    "TRUNCATE t",
    "INSERT INTO t VALUES (3, 'c')",
    "TRUNCATE t",
    "INSERT INTO t VALUES (4, 'd')",
)


@pytest.fixture(scope="module")
def format() -> str:
    return "delta"


class _Killed(BaseException):
    """Ends a batch as a killed process does."""


def log_of(lake: CatalogLake, kind: str) -> list[dict[str, Any]]:
    """All actions of a kind that the log of the table has."""
    [(location,)] = lake._spark.sql(f"DESCRIBE DETAIL {lake.targets['public.t']}").select("location").collect()
    logs = sorted(Path(location.removeprefix("file:"), "_delta_log").glob("*.json"))
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    return [line[kind] for line in lines if kind in line]


def expect_states(lake: CatalogLake, pg: Session, ever: set[int]) -> None:
    """Each row that ever was has one state, which has ended unless the row is there."""
    found = {row["id"]: row["_valid_to"] for row in lake.found("t")}
    assert found.keys() == ever
    assert len(found) == len(lake.found("t"))
    assert {key for key, end in found.items() if end is None} == {key for (key,) in run(pg, "SELECT id FROM t")}
    last = lake.ledger.last()
    assert last is not None
    assert last.set_aside == {}


def test_what_a_kill_leaves_at_a_path_before_the_first_commit_is_no_table(begin: Begin, tmp_path: Path) -> None:
    lake = begin(*T)
    assert isinstance(lake, CatalogLake)
    spark, name = lake._spark, f"delta.`{tmp_path}/a ``b`"
    writer = spark.createDataFrame([], "id int").writeTo(name).using("delta")
    log = tmp_path / "a `b" / "_delta_log"
    (log / "_staged_commits").mkdir(parents=True)
    (log / ".00000000000000000000.json.0b6b.tmp").write_text("{")
    with pytest.raises(AnalysisException, match="already exists"):
        writer.create()
    DeltaTable.create(spark, writer, lambda _: False)
    assert spark.table(name).count() == 0
    # What has files is somebody's.
    with pytest.raises(AnalysisException, match="already exists"):
        DeltaTable.create(spark, writer, lambda _: False)
    assert spark.table(name).count() == 0


def test_a_log_has_one_application_for_all_steps(pg: Session, begin: Begin) -> None:
    lake = begin(*T, mode="history")
    assert isinstance(lake, CatalogLake)
    for statement in STEPS:
        run(pg, statement)
        wait_until(lambda: [lake.step(), lake.rows("t") == rows_of(pg, "t")][1])
    run(pg, *(statement.replace("3", "5").replace("4", "6") for statement in STEPS))
    wait_until(lambda: [lake.step(), lake.rows("t") == rows_of(pg, "t")][1])
    assert {found["appId"] for found in log_of(lake, "txn")} == {"q/steps"}
    versions = [found["version"] for found in log_of(lake, "txn")]
    assert versions == sorted(set(versions))
    expect_states(lake, pg, {1, 2, 3, 4, 5, 6})


def test_a_step_that_delta_passes_over_is_not_taken_for_done(
    pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = begin(*T, mode="history")
    assert isinstance(lake, CatalogLake)
    whole = DeltaTable.sign
    failed: list[str] = []

    def sign(self: DeltaTable, text: str, number: int | None) -> None:
        if number == 1 and not failed:
            # Somebody else has made a step of this number.
            failed.append(text)
            number = 0
        whole(self, text, number)

    monkeypatch.setattr(DeltaTable, "sign", sign)
    run(pg, *STEPS)
    wait_until(lambda: [lake.step(), lake.rows("t") == rows_of(pg, "t")][1])
    assert len(failed) == 1
    expect_states(lake, pg, {1, 2, 3, 4})


@pytest.mark.parametrize("number", range(1, len(STEPS)))
def test_a_batch_that_was_begun_with_an_application_for_each_step_is_ended(
    number: int, pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = begin(*T, mode="history")
    assert isinstance(lake, CatalogLake)
    commits = 0

    def signed(self: Any, step: str, *, is_last: bool = False) -> str:
        text = json.dumps({"query": self._mark.query, "batch": self._mark.batch, "step": step, "last": is_last})
        self.sign(text, None)
        self._spark.conf.set("spark.databricks.delta.write.txnAppId", f"{self._mark.query}/{step}")
        self._spark.conf.set("spark.databricks.delta.write.txnVersion", self._mark.batch)
        self._text = text
        return text

    with monkeypatch.context() as patch:
        patch.setattr(DeltaTable, "_signed", signed)
        for name in ("apply", "empty", "add_files"):
            whole = getattr(DeltaTable, name)

            def breaking(self: Any, *args: Any, whole: Any = whole, **named: Any) -> None:
                nonlocal commits
                if commits == number:
                    raise _Killed
                whole(self, *args, **named)
                commits += 1

            patch.setattr(DeltaTable, name, breaking)
        run(pg, *STEPS)
        with pytest.raises(_Killed):
            wait_until(is_same(lake, pg, "t"))
    lake.restart()
    wait_until(lambda: [lake.step(), lake.rows("t") == rows_of(pg, "t")][1])
    expect_states(lake, pg, {1, 2, 3, 4})
