"""A DataFrame that was planned before the server was restarted with old_snapshot_threshold (PostgreSQL 13 to 16)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from databases import connect
from driving import run
from losses import RestartableServer
from psycopg2.extensions import connection as Session
from servers import second_server
from watch import wait_until

from pg_cdc_source.errors import ServerSetupError, TransientError
from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.snapshot.reader import read_range
from pg_cdc_source.snapshot.scan import make_plan
from pg_cdc_source.snapshot.source import plan_ranges


def is_refused(read: Callable[[], object]) -> bool:
    """Whether the server is refused; False while its keeper has not come back."""
    try:
        read()
    except TransientError:
        return False
    except ServerSetupError as error:
        return "old_snapshot_threshold" in str(error)
    raise AssertionError("the server was not refused")


@pytest.mark.corner
@pytest.mark.usefixtures("own_driver")
@pytest.mark.parametrize("wants", [{}, {"lsnColumn": "lsn"}])
def test_a_server_that_removes_rows_a_snapshot_sees_is_refused_also_after_planning(
    wants: dict[str, str], pg: Session
) -> None:
    if pg.server_version >= 170000:
        pytest.skip("there is no such setting")
    with second_server({}) as url:
        with connect(url) as session:
            run(session, "CREATE TABLE t AS SELECT i AS id FROM generate_series(1, 1000) AS i")
        options = parse_snapshot_options({"url": url, "dbtable": "t", **wants})
        plan = make_plan(options)
        source, [part] = plan_ranges(plan, options)
        server = RestartableServer(url)
        server.stop("fast")
        with (server.data / "postgresql.auto.conf").open("a") as conf:
            conf.write("old_snapshot_threshold = 1min\n")
        server.start()
        try:
            # Without the error the task is given all 1000 rows, and one that begins two minutes later finds those
            # that nobody has deleted and vacuumed away meanwhile (500 were seen, with 1min).
            wait_until(lambda: is_refused(lambda: list(read_range(plan, source, part, "7"))))
        finally:
            server.close()
