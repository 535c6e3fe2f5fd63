"""Find the keeper of this driver and database, or start it."""

from __future__ import annotations

import os
import select
import subprocess
import sys

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import TransientError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.instances import Instance
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.snapshot.board import Request, keeper_name
from pg_cdc_source.snapshot.driver import driver_process
from pg_cdc_source.snapshot.keeper.handshake import Settings, read_answer
from pg_cdc_source.snapshot.keeper.identity import name_pattern, token_of

_START_SECONDS = 30.0
_LOOKS = Backoff(0.02, growth=1.5, longest_seconds=0.25, within_seconds=_START_SECONDS)


def ensure_keeper(options: ConnectionOptions, session: Session, instance: Instance, example: Request) -> str:
    """Name of the keeper for this driver and database, started if none runs.

    ``instance`` is the server of ``session``. ``example`` is what a keeper on a standby takes for a request, since
    there it only sees that somebody asks.
    """
    driver = driver_process()
    token = token_of(driver, session)
    started = False
    for _ in _LOOKS.polls():
        if (name := _find(session, token)) is not None:
            return name
        if not started:
            _start(Settings(options, token, driver, example, instance))
            started = True
    raise TransientError(f"the keeper (process that holds snapshots) did not start within {_START_SECONDS:g} s")


def _find(session: Session, token: str) -> str | None:
    with translated("looking for the keeper"), session.cursor() as cursor:
        cursor.execute(
            """
            SELECT application_name
            FROM pg_catalog.pg_stat_activity
            WHERE datname = current_database() AND usename = session_user AND application_name ~ %s
            ORDER BY backend_start, pid
            LIMIT 1
            """,
            (f"^{keeper_name(name_pattern(token))}$",),
        )
        row = cursor.fetchone()
        return None if row is None else str(row[0]).split(":")[1]


def _start(settings: Settings) -> None:
    """Start a keeper; raises what keeps it from running. It leaves by itself where another one runs already."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pg_cdc_source.snapshot.keeper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Standard error is inherited, so that the keeper's warnings come into the driver's log.
        start_new_session=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    error = read_answer(_first_line(process, settings.to_json()))
    if error is not None:
        raise error


def _first_line(process: subprocess.Popen[bytes], settings: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        process.stdin.write(settings.encode())
        process.stdin.close()
        process.wait()
        if not select.select([process.stdout], [], [], _START_SECONDS)[0]:
            raise TransientError(
                f"the keeper (process that holds snapshots) gave no answer within {_START_SECONDS:g} s"
            )
        return process.stdout.readline().decode().strip()
