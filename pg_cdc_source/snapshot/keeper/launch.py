"""Find the keeper of this driver and database, or start it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import wait

from psycopg2.extensions import TRANSACTION_STATUS_IDLE
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import ServerFullError, TransientError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.connection import FULL_SECONDS
from pg_cdc_source.postgres.instances import INSTANCE, Instance
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.snapshot.board import Request, keeper_name
from pg_cdc_source.snapshot.driver import driver_process
from pg_cdc_source.snapshot.keeper.handshake import Settings, read_answer
from pg_cdc_source.snapshot.keeper.identity import ANY_TOKEN, name_pattern, token_of

_START_SECONDS = 30.0
_FULL = Backoff(0.5, longest_seconds=5.0, within_seconds=FULL_SECONDS)
_LOOKS = Backoff(0.02, growth=1.5, longest_seconds=0.25, within_seconds=_START_SECONDS)


@dataclass(frozen=True, slots=True)
class Site:
    """What a session sees of the server that matters to the keeper.

    ``connections_left`` are those that the server, the role and the database have for this role, if all sessions of
    pgsnapshot ended. ``keepers`` are the names of those that run.
    """

    instance: Instance
    database: str
    role: str
    connections_left: int
    keepers: tuple[str, ...]


# Backends with a database are those of clients, and workers of autovacuum; of others' sessions a role sees no more. One
# statement, because each is a round trip of planning; without the view pg_stat_activity, because the names of roles and
# databases would take as long as all the rest.
_READ_SITE = f"""
WITH sessions AS MATERIALIZED (
    SELECT pid, datid, usesysid, application_name, backend_start
    FROM pg_catalog.pg_stat_get_activity(NULL)
    WHERE datid IS NOT NULL
)
SELECT {INSTANCE},
    current_database(),
    session_user::text,
    (
        SELECT least(
            current_setting('max_connections')::int
                - current_setting('superuser_reserved_connections')::int
                - coalesce(current_setting('reserved_connections', true)::int, 0)
                - count(*),
            nullif(r.rolconnlimit, -1) - count(*) FILTER (WHERE a.usesysid = r.oid),
            nullif(d.datconnlimit, -1) - count(*) FILTER (WHERE a.datid = d.oid)
        )::int
        FROM pg_catalog.pg_roles AS r
        JOIN pg_catalog.pg_database AS d ON d.datname = current_database()
        LEFT JOIN sessions AS a ON NOT (a.usesysid = r.oid AND a.application_name LIKE 'pgsnapshot:%%')
        WHERE r.rolname = session_user
        GROUP BY r.oid, r.rolconnlimit, d.oid, d.datconnlimit
    ),
    ARRAY(
        SELECT application_name
        FROM sessions
        WHERE datid = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
            AND usesysid = to_regrole(quote_ident(session_user))
            AND application_name ~ %s
        ORDER BY backend_start, pid
    )
"""


def read_site(session: Session) -> Site:
    """Look at the server; a transaction that the session is in ends with it."""
    ending = "" if session.info.transaction_status == TRANSACTION_STATUS_IDLE else "COMMIT; "
    with translated("looking for the keeper"), session.cursor() as cursor:
        cursor.execute(f"{ending}{_READ_SITE}", (f"^{keeper_name(name_pattern(ANY_TOKEN))}$",))
        started, address, in_recovery, database, role, left, names = cursor.fetchone()
    keepers = tuple(name.split(":")[1] for name in names)
    return Site(Instance(started, address, in_recovery), database, role, left, keepers)


def start_keeper(options: ConnectionOptions, session: Session, site: Site, example: Request) -> str:
    """Start a keeper for this driver and database, and return its name, or that of one that was started meanwhile.

    ``site`` is what ``session`` has just seen. ``example`` is what a keeper on a standby takes for a request, since
    there it only sees that somebody asks.
    """
    driver = driver_process()
    token = token_of(driver, site.database, site.role)
    settings = Settings(options, token, driver, example, site.instance, _directory())
    _FULL.retrying(lambda: _start(settings), ServerFullError)
    for _ in _LOOKS.polls():
        if (name := _find(read_site(session), token)) is not None:
            return name
    raise TransientError(f"the keeper (process that holds snapshots) did not start within {_START_SECONDS:g} s")


def find_keeper(site: Site) -> str | None:
    """Name of the keeper that runs for this driver, the site's database and role."""
    return _find(site, token_of(driver_process(), site.database, site.role))


def _find(site: Site, token: str) -> str | None:
    return next((name for name in site.keepers if name.startswith(token)), None)


def _start(settings: Settings) -> None:
    """Start a keeper; raises what keeps it from running. It leaves by itself where another one runs already."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pg_cdc_source.snapshot.keeper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Standard error is inherited, so that the keeper's warnings come into the driver's log.
        start_new_session=True,
        # Python would take a checkout in the working directory for the package. The keeper goes there afterwards.
        cwd="/",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    error = read_answer(_first_line(process, settings.to_json()))
    if error is not None:
        raise error


def _directory() -> str:
    """The working directory; the root where that was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


def _first_line(process: subprocess.Popen[bytes], settings: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(settings.encode())
            process.stdin.close()
        try:
            process.wait(_START_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise _late() from None
        # Not select(), which does not take more than 1,024 files.
        if not wait([process.stdout.fileno()], _START_SECONDS):
            raise _late()
        return process.stdout.readline().decode().strip()


def _late() -> TransientError:
    return TransientError(f"the keeper (process that holds snapshots) gave no answer within {_START_SECONDS:g} s")
