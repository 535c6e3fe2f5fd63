"""Spark 4.1 and later keep the partitions of a DataFrame: one that shows the LSN outlives a restart of the server."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from databases import connect
from driving import run
from losses import RestartableServer
from servers import second_server

from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.snapshot.reader import read_range
from pg_cdc_source.snapshot.scan import make_plan
from pg_cdc_source.snapshot.source import plan_ranges


def scan(url: str, **wants: str) -> Callable[[str], list[int | None]]:
    """The last column of the one row of table t, in an execution."""
    options = parse_snapshot_options({"url": url, "dbtable": "t", **wants})
    plan = make_plan(options)
    source, [part] = plan_ranges(plan, options)

    def read(execution: str) -> list[int | None]:
        [batch] = read_range(plan, source, part, execution)
        return list(batch.column(batch.num_columns - 1).to_pylist())

    return read


@pytest.mark.usefixtures("own_driver")
def test_an_action_has_an_lsn_where_one_of_its_scans_was_loaded_before_a_restart() -> None:
    with second_server({}) as url:
        with connect(url) as session:
            run(session, "CREATE TABLE t AS SELECT 1 AS id")
        wanting = scan(url, lsnColumn="lsn")
        assert wanting("7") != [None]
        server = RestartableServer(url)
        server.stop("fast")
        server.start()
        try:
            assert wanting("8") != [None]
            silent = scan(url)
            # Both are of one action, and the first scan asks for the snapshot.
            assert silent("9") == [1]
            assert wanting("9") != [None]
        finally:
            server.close()
