"""Two scans of one action may say another snapshotIdle each."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from driving import run
from psycopg2.extensions import connection as Session

from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.snapshot.reader import read_range
from pg_cdc_source.snapshot.scan import make_plan
from pg_cdc_source.snapshot.source import plan_ranges


@pytest.mark.usefixtures("own_driver")
@pytest.mark.parametrize("wants", [{}, {"lsnColumn": "lsn"}])
def test_a_snapshot_is_kept_as_long_as_any_scan_of_its_action_says(db: str, pg: Session, wants: dict[str, str]) -> None:
    run(pg, "CREATE TABLE small AS SELECT 1 AS id", "CREATE TABLE large AS SELECT 1 AS id")

    def scan(table: str, idle: str) -> Callable[[], list[int]]:
        options = parse_snapshot_options({"url": db, "dbtable": table, "snapshotIdle": idle, **wants})
        plan = make_plan(options)
        source, [part] = plan_ranges(plan, options)
        return lambda: [batch.num_rows for batch in read_range(plan, source, part, "7")]

    small, large = scan("small", "1s"), scan("large", "1min")
    assert small() == [1]
    assert large() == [1]
    # Spark works on what both have given, for longer than the one says, and then reads on.
    time.sleep(4)
    assert large() == [1]
