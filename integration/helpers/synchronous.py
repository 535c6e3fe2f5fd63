"""A transaction that waits for a synchronous standby: it is in the WAL, and nobody sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from databases import connect
from driving import run
from psycopg2.extensions import connection as Session
from watch import wait_until

from pg_cdc_source.offsets import Lsn
from pg_cdc_source.postgres import horizon
from pg_cdc_source.postgres.slots import read_end_of_wal


@contextmanager
def waiting_for_a_standby(url: str, pg: Session, statement: str) -> Iterator[None]:
    """Have this transaction committed in the WAL, and not seen by anybody until the block ends."""
    run(pg, "ALTER SYSTEM SET synchronous_commit = 'local'", "ALTER SYSTEM SET synchronous_standby_names = 'nobody'",
        "SELECT pg_reload_conf()")  # fmt: skip
    try:
        wait_until(lambda: run(pg, "SHOW synchronous_standby_names") == [("nobody",)])
        with connect(url) as session, ThreadPoolExecutor(1) as pool:
            run(session, "SET synchronous_commit = 'on'")
            pid = session.info.backend_pid
            committed = pool.submit(run, session, statement)
            waits = f"SELECT 1 FROM pg_stat_activity WHERE pid = {pid} AND wait_event = 'SyncRep'"
            try:
                wait_until(lambda: bool(run(pg, waits)))
                yield
            finally:
                run(pg, f"SELECT pg_cancel_backend({pid})")
                committed.result()
    finally:
        run(pg, "ALTER SYSTEM RESET synchronous_standby_names", "ALTER SYSTEM RESET synchronous_commit",
            "SELECT pg_reload_conf()")  # fmt: skip
        wait_until(lambda: run(pg, "SHOW synchronous_standby_names") == [("",)])


def before_horizon(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Run ``action`` right before the next plan of a stream reads how far the WAL goes."""

    def read_behind_it(session: Session) -> Lsn:
        monkeypatch.setattr(horizon, "read_end_of_wal", read_end_of_wal)
        action()
        return read_end_of_wal(session)

    monkeypatch.setattr(horizon, "read_end_of_wal", read_behind_it)
