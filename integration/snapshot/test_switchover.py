"""A DataFrame that was planned on a primary, and whose endpoint is a standby by the time of an action (switchover)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from balancer import balanced
from databases import connect
from driving import run
from servers import second_server
from standby import standby_of
from watch import wait_until

from pg_cdc_source.errors import SnapshotLostError
from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.snapshot import reader, receiving
from pg_cdc_source.snapshot.reader import read_range
from pg_cdc_source.snapshot.scan import make_plan
from pg_cdc_source.snapshot.source import plan_ranges


@pytest.mark.usefixtures("own_driver")
def test_rows_that_a_standby_removes_are_missed_by_an_error_whatever_the_server_was_when_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conflicts = {"hot_standby_feedback": "off", "max_standby_streaming_delay": "5s"}
    with second_server({}) as primary, standby_of(primary, conflicts) as standby, connect(primary) as on_primary:
        run(on_primary, "CREATE TABLE quiet AS SELECT i AS id FROM generate_series(1, 10) AS i")
        standby.catch_up(primary)
        now = [primary]
        with balanced(primary, lambda _: now[0]) as url:
            options = parse_snapshot_options({"url": url, "dbtable": "quiet"})
            plan = make_plan(options)
            source, [scan_range] = plan_ranges(plan, options)
            # The switchover: the endpoint is the standby's now, and all sessions on the old primary end.
            now[0] = str(standby.url)
            run(
                on_primary,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'pgsnapshot:%'",
            )

            def rows() -> int:
                return sum(batch.num_rows for batch in read_range(plan, source, scan_range, "7"))

            # A first task of the action: the keeper has come to the standby as well, and gives a snapshot of it.
            assert rows() == 10
            with connect(standby.url) as session:
                reading = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pgsnapshot:%?%'"
                wait_until(lambda: run(session, reading) == [(0,)])
            run(on_primary, "DELETE FROM quiet WHERE id = 5", "VACUUM quiet")
            with connect(standby.url) as session:
                waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event LIKE 'RecoveryConflict%%'"
                wait_until(lambda: run(session, waits) == [(1,)])

            received = receiving.receive

            def receive_late(*arguments: Any) -> Iterator[receiving.Decoded]:
                standby.catch_up(primary)
                yield from received(*arguments)

            monkeypatch.setattr(reader, "receive", receive_late)
            # A second task of the same action: all ten rows, or an error.
            with pytest.raises(SnapshotLostError, match="may have removed rows that it sees"):
                assert rows() == 10
