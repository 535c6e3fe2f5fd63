"""What must not be there when the tests of a process are over: keepers, sessions, slots, transactions, files."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from databases import connect
from watch import keeper_processes

# The keeper looks for its driver every second or so; sessions end with their process.
GONE_WITHIN_SECONDS = 15

SLOTS = "SELECT slot_name::text FROM pg_replication_slots"
SESSIONS = """
    SELECT format('%s: %s', application_name, state) FROM pg_stat_activity
    WHERE pid <> pg_backend_pid() AND backend_type IN ('client backend', 'walsender')
"""
PREPARED_TRANSACTIONS = "SELECT gid FROM pg_prepared_xacts"
# Spark 4.0.0 leaves an empty directory of this name where its JVM runs.
ALLOWED_FILES = {"artifacts"}


def expect_none(server: str, scratch: Path) -> None:
    """Fail where something stays, on the server or of the JVM whose files and keepers have ``scratch``."""
    looks: dict[str, Callable[[], list[str]]] = {
        "keepers": lambda: [str(process) for process in keeper_processes(scratch)],
        "replication slots": lambda: first_column(server, SLOTS),
        "sessions": lambda: first_column(server, SESSIONS),
        "prepared transactions": lambda: first_column(server, PREPARED_TRANSACTIONS),
        "files": lambda: [path.name for path in scratch.iterdir() if path.name not in ALLOWED_FILES],
    }
    deadline = time.monotonic() + GONE_WITHIN_SECONDS
    while (left := {what: found for what, look in looks.items() if (found := look())}) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, left


def first_column(server: str, query: str) -> list[str]:
    with connect(server) as session, session.cursor() as cursor:
        cursor.execute(query)
        return [value for (value,) in cursor]
