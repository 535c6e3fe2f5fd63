"""Errors of the keeper as its readers raise them: of the same class, with what happened and the remedy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from databases import connect
from psycopg2.extensions import connection as Session
from roles import conninfo, role
from servers import second_server
from watch import holders, session_names, slots, wait_until

from pg_cdc_source.errors import DefiniteError, PgCdcError, ServerFullError, SnapshotLostError, TransientError
from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.snapshot.keeper import launch
from pg_cdc_source.snapshot.reader import read_range
from pg_cdc_source.snapshot.scan import make_plan
from pg_cdc_source.snapshot.source import plan_ranges

pytestmark = pytest.mark.usefixtures("own_driver")


def run(pg: Session, *statements: str) -> None:
    with pg.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


class Scan:
    """A scan of table t without Spark."""

    def __init__(self, url: str, **options: str) -> None:
        parsed = parse_snapshot_options({"url": url, "dbtable": "t", **options})
        self._plan = make_plan(parsed)
        self._source, self._ranges = plan_ranges(self._plan, parsed)

    def rows(self, execution: str) -> int:
        batches = (b for part in self._ranges for b in read_range(self._plan, self._source, part, execution))
        return sum(batch.num_rows for batch in batches)

    def refusal(self, execution: str) -> PgCdcError:
        with pytest.raises(PgCdcError) as caught:
            self.rows(execution)
        return caught.value


def test_a_transient_error_stays_transient(db: str, pg: Session) -> None:
    run(pg, "CREATE TABLE t AS SELECT 1 AS id")
    scan = Scan(db, consistentPoint="require", slotTimeout="500ms")
    with connect(db) as writer:
        pid = writer.info.backend_pid
        run(writer, "BEGIN", "INSERT INTO t VALUES (2)")
        error = scan.refusal("1")
        run(writer, "ROLLBACK")
    assert type(error) is TransientError
    assert (
        f"found no consistent point within 0.5 s, because it waits for every running transaction that has written: "
        f"pid {pid} for " in error.what
    )
    assert error.remedy == "end them, or raise slotTimeout, or use consistentPoint=off (a snapshot without LSN)"
    # The execution has failed for good, and another one works.
    assert type(scan.refusal("1")) is TransientError
    assert scan.rows("2") == 1


def test_a_snapshot_that_was_released_is_lost(db: str, pg: Session) -> None:
    run(pg, "CREATE TABLE t AS SELECT 1 AS id")
    scan = Scan(db, snapshotIdle="1s")
    assert scan.rows("1") == 1
    wait_until(lambda: not holders(pg))
    error = scan.refusal("1")
    assert type(error) is SnapshotLostError
    assert error.what == ("the snapshot of this action has ended, because no task of it read from PostgreSQL for 1 s")
    assert error.remedy == "raise snapshotIdle above the longest pause between two reads of one action"


def test_a_stage_whose_snapshot_was_released_takes_no_other_one(
    db: str, pg: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Under df.rdd a stage stands in for the execution. Some of its tasks may have read.
    run(pg, "CREATE TABLE t AS SELECT 1 AS id")
    scan = Scan(db, snapshotIdle="1s")
    assert scan.rows("r5") == 1
    wait_until(lambda: not holders(pg))
    assert type(scan.refusal("r5")) is SnapshotLostError
    # In another SparkContext, stages are numbered from 0 again.
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path / "another"))
    assert Scan(db).rows("r5") == 1


def test_a_slot_that_is_asked_for_too_late_is_refused(db: str, pg: Session) -> None:
    run(pg, "CREATE TABLE t AS SELECT 1 AS id")
    assert Scan(db).rows("1") == 1
    late = Scan(db, slot="late")
    # The keeper may be slower to say so than the task is to find the snapshot that is there.
    error = late.refusal("1")
    assert type(error) is DefiniteError
    assert error.what.startswith("slot late was asked for after another scan of the same action")
    assert error.remedy.startswith("give every DataFrame of the action the same option slot")


def test_a_slot_that_is_being_made_goes_with_its_action(db: str, pg: Session) -> None:
    run(pg, "CREATE TABLE t AS SELECT 1 AS id")
    with connect(db) as writer, ThreadPoolExecutor(1) as pool:
        run(writer, "BEGIN", "INSERT INTO t VALUES (2)")
        first = pool.submit(Scan(db, slot="first").refusal, "1")
        wait_until(lambda: slots(pg))
        assert type(Scan(db, slot="second").refusal("1")) is DefiniteError
        run(writer, "COMMIT")
        first.result()
    wait_until(lambda: not slots(pg), 15)


def test_a_server_that_cuts_queries_short_leaves_the_class_and_the_beginning() -> None:
    with second_server({"track_activity_query_size": "100"}) as url:
        with connect(url) as writer:
            run(writer, "CREATE TABLE t AS SELECT 1 AS id")
            scan = Scan(url, consistentPoint="require", slotTimeout="500ms")
            run(writer, "BEGIN", "INSERT INTO t VALUES (2)")
            error = scan.refusal("1")
            run(writer, "ROLLBACK")
        assert type(error) is TransientError
        assert error.what.startswith("slot pgsnapshot_")
        assert error.what.endswith(" …")
        assert error.remedy == "the driver's standard error says why"


def test_a_keeper_that_cannot_start_says_why(db: str, pg: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_FULL", Backoff(0.2, within_seconds=1.0))
    run(pg, "CREATE TABLE t AS SELECT 1 AS id")
    with role(pg, db) as login:
        run(pg, f"GRANT SELECT ON t TO {login['user']}")
        parsed = parse_snapshot_options({"url": conninfo(login), "dbtable": "t"})
        plan = make_plan(parsed)
        wait_until(lambda: not session_names(pg, "pgsnapshot:planning"))
        # Planning takes the one that there is.
        run(pg, f"ALTER ROLE {login['user']} CONNECTION LIMIT 1")
        with pytest.raises(PgCdcError) as caught:
            plan_ranges(plan, parsed)
    error = caught.value
    assert type(error) is ServerFullError
    assert error.what.startswith("the keeper (process that holds snapshots) could not start: ")
    assert "too many connections" in error.what
    assert "let fewer tasks read at a time" in error.remedy
