"""A scan whose LSN needs no slot of the keeper's must not have every later action of the driver make one."""

from __future__ import annotations

import time

import pytest
from databases import connect
from driving import run
from psycopg2.extensions import connection as Session

from pg_cdc_source import open_snapshot
from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.snapshot.reader import read_range
from pg_cdc_source.snapshot.scan import make_plan
from pg_cdc_source.snapshot.source import plan_ranges


@pytest.mark.usefixtures("own_driver")
@pytest.mark.parametrize("how", ["snapshot", "off"])
def test_a_scan_that_needs_no_slot_brings_none_to_other_actions(db: str, pg: Session, how: str) -> None:
    run(pg, "CREATE TABLE t AS SELECT 1 AS id", "CREATE TABLE other (id int)")

    def count(execution: str, **wants: str) -> float:
        options = parse_snapshot_options({"url": db, "dbtable": "t", **wants})
        plan = make_plan(options)
        source, [part] = plan_ranges(plan, options)
        began = time.monotonic()
        assert sum(batch.num_rows for batch in read_range(plan, source, part, execution)) == 1
        return time.monotonic() - began

    if how == "snapshot":
        with open_snapshot(db, tables=["t"]) as opened:
            count("1", lsnColumn="lsn", snapshot=opened.options["snapshot"])
    else:
        count("1", lsnColumn="lsn", consistentPoint="off")
    with connect(db) as writer:
        run(writer, "BEGIN", "INSERT INTO other VALUES (1)")
        assert count("2") < 3
