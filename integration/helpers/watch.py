"""What can be seen of the connector from outside, its sessions and processes, and waiting for them within a bound."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
from psycopg2.extensions import connection as Session

T = TypeVar("T")


def wait_until(look: Callable[[], T], seconds: float = 60.0) -> T:
    """Return the first true value of ``look``; fails when there is none within ``seconds``.

    What is not said is patience, for machines that are slow and busy; what the connector promises is to be said.
    """
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s; still {found!r}"
        time.sleep(0.05)
    return found


def session_names(pg: Session, like: str, condition: str = "true") -> list[str]:
    """The application_name of every session in ``pg``'s database whose name is ``like`` that."""
    with pg.cursor() as cursor:
        cursor.execute(
            "SELECT application_name FROM pg_stat_activity WHERE datname = current_database()"
            f" AND application_name LIKE %s AND {condition} ORDER BY backend_start",
            (like,),
        )
        return [name for (name,) in cursor]


def keeper_sessions(pg: Session) -> list[str]:
    """The sessions in which keepers of ``pg``'s database wait for requests."""
    return [name for name in session_names(pg, "pgsnapshot:%") if name.count(":") == 1 and len(name) == 27]


def holders(pg: Session) -> list[str]:
    """The sessions that hold snapshots in ``pg``'s database."""
    return session_names(pg, "pgsnapshot:%:%:%")


def readers(pg: Session) -> list[str]:
    """The sessions of tasks that are in the middle of a COPY in ``pg``'s database."""
    return session_names(pg, "pgsnapshot:%?%", "state = 'active' AND query LIKE 'COPY%%'")


def open_transactions(pg: Session) -> list[str]:
    """The connector's sessions in ``pg``'s database that are in a transaction."""
    return session_names(pg, "pgsnapshot%", "xact_start IS NOT NULL")


def slots(pg: Session) -> list[str]:
    """The replication slots of ``pg``'s database."""
    with pg.cursor() as cursor:
        cursor.execute("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()")
        return [name for (name,) in cursor]


def keeper_processes(scratch: Path) -> set[psutil.Process]:
    """The keepers of drivers whose JVM was started with ``scratch`` as its directory for temporary files."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "pg_cdc_source.snapshot.keeper" in process.cmdline() and process.environ().get("TMPDIR") == str(scratch):
                found.add(process)
    return found
