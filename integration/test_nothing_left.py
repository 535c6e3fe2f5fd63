"""Comes last: with the tests over and Spark's JVM gone, nothing of ours is left on the server or on this machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import psutil
import pytest
from databases import connect
from sessions import SparkSessions

# The keeper looks for its driver every second or so; sessions end with their process.
GONE_WITHIN_SECONDS = 15


def eventually_empty(look: Callable[[], list[str]]) -> list[str]:
    """Return what ``look`` still finds when the time is over."""
    deadline = time.monotonic() + GONE_WITHIN_SECONDS
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


@pytest.fixture(scope="module", autouse=True)
def _jvm_ended(spark_sessions: SparkSessions) -> None:
    spark_sessions.end_jvm()


def first_column(server: str, query: str) -> list[str]:
    with connect(server) as session, session.cursor() as cursor:
        cursor.execute(query)
        return [value for (value,) in cursor]


def keepers_of(sessions: SparkSessions) -> list[str]:
    """Keepers that our JVM's workers started, which have its environment; another run on this machine has its own."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            ours = process.environ().get("TMPDIR") == str(sessions.scratch)
            if ours and "pg_cdc_source.snapshot.keeper" in (process.info["cmdline"] or []):
                found.append(f"pid {process.pid}")
    return found


def test_no_keeper_runs(spark_sessions: SparkSessions) -> None:
    assert eventually_empty(lambda: keepers_of(spark_sessions)) == []


def test_no_replication_slot_is_left(server: str) -> None:
    assert eventually_empty(lambda: first_column(server, "SELECT slot_name::text FROM pg_replication_slots")) == []


def test_no_session_is_left(server: str) -> None:
    query = (
        "SELECT format('%s: %s', application_name, state) FROM pg_stat_activity"
        " WHERE pid <> pg_backend_pid() AND backend_type IN ('client backend', 'walsender')"
    )
    assert eventually_empty(lambda: first_column(server, query)) == []


def test_no_prepared_transaction_is_left(server: str) -> None:
    assert first_column(server, "SELECT gid FROM pg_prepared_xacts") == []


def test_no_file_is_left(spark_sessions: SparkSessions) -> None:
    # Spark 4.0.0 leaves an empty directory of this name where its JVM runs.
    expected = {"artifacts"}
    assert eventually_empty(lambda: [p.name for p in spark_sessions.scratch.iterdir() if p.name not in expected]) == []
