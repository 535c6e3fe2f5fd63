"""The board: how tasks and the keeper find each other in PostgreSQL.

This module holds the names on it, what a task asks the keeper for (``Request``), and how a task finds its snapshot.
Every session says in its ``application_name`` what it is, and ``pg_stat_activity`` is the board that all read::

    pgsnapshot:<keeper>                        the keeper itself, waiting for notifications
    pgsnapshot:<keeper>:<execution>?<oid>      a task that reads the relation <oid> in <execution>
    pgsnapshot:<keeper>:<execution>:<id>       a holder: snapshot <id> is the one of <execution> and maybe of others
    pgsnapshot:<keeper>:<execution>!           <execution> has no snapshot; the session's last query is the reason

PostgreSQL is the one thing that all of them can reach, so no port is opened and no file is shared. A name has 63 bytes,
room for one execution. So a holder and a mark say by shared advisory locks, which all can see too, whom they are for,
and a holder that has exported several snapshots, which of them.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import DefiniteError, SnapshotLostError, TransientError
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.exported_snapshots import LockKey
from pg_cdc_source.postgres.instances import Instance, other_server, read_instance
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.snapshots import SnapshotSpec
from pg_cdc_source.snapshot.reasons import error_in

ANSWER_SECONDS = 30.0  # on top of slotTimeout and of waiting in line
LINE_SECONDS = 600.0  # how long an execution waits in line for a snapshot, where maxConnections lets no more be held
LOST_KEEPER_SECONDS = 5.0  # how long a keeper may be away: one whose session was lost opens another
RING_SECONDS = 3.0


class NoAnswerError(TransientError):
    """A keeper that is there has not answered, for as long as a task waits."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a task asks for.

    ``max_connections`` bounds the sessions of planning and keeper together. ``shows_lsn`` is whether the scan has a
    column for the snapshot's LSN. ``lsn_file`` is on the driver's host, and there once any of its scans wants an LSN.
    """

    execution: str
    snapshot_idle_seconds: float
    max_connections: int
    shows_lsn: bool
    lsn_file: str
    spec: SnapshotSpec

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def to_comment(self) -> str:
        """The request as a comment of SQL without characters that end one, or that psycopg2 takes for a parameter."""
        return f"/* {self.to_json().replace('*', _escaped('*')).replace('%', _escaped('%'))} */"

    @classmethod
    def from_json(cls, text: str) -> Request:
        """Read a request; raises ValueError for one of another version, or of somebody else."""
        fields = json.loads(text)
        try:
            return cls(**{**fields, "spec": SnapshotSpec(**fields["spec"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a request: {error}") from None


def _escaped(character: str) -> str:
    return f"\\u{ord(character):04x}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot as a reader finds it: the ids of its holders (each may vanish) and its LSN."""

    ids: tuple[str, ...]
    lsn: Lsn | None


def keeper_name(keeper: str) -> str:
    """The application_name of the keeper's own session, and the channel of its notifications."""
    return f"pgsnapshot:{keeper}"


def reader_name(keeper: str, execution: str, oid: int) -> str:
    """The application_name of a task's session; the keeper counts these as readers of the execution."""
    return f"pgsnapshot:{keeper}:{execution}?{oid}"


# A pooler may add the client's address to the name that a session is opened with: pgbouncer's
# application_name_add_host. Keeper, holders and marks take their names later, by SQL, and have them as they are.
_READER = re.compile(r"pgsnapshot:[^:]+:([^:?]+)\?([0-9]+)")


def parse_reader_name(name: str) -> tuple[str, int] | None:
    """The execution and the relation of a ``reader_name``; None for any other name."""
    found = _READER.match(name)
    return None if found is None else (found[1], int(found[2]))


# The first numbers of the keys by which holders and marks say whom they are for: any that nobody else is likely to use.
# On top is the snapshot's number in a transaction that has exported several, or 0. Ids differ in that number alone.
_STAGES, _EXECUTIONS = 1_885_000_000, 1_886_000_000
MOST_SNAPSHOTS = 999_999  # of a transaction


def execution_key(execution: str, number: int = 0) -> LockKey:
    """The advisory lock that stands for an execution, or for a stage under ``df.rdd``, and a snapshot's number."""
    of = _STAGES if execution.startswith("r") else _EXECUTIONS
    return of + number, int(execution.removeprefix("r")) % 2**31


def lasting_key(execution: str, context: int) -> str:
    """The key by which the board knows an execution; no other one of the driver has it, before or after.

    SQL executions are numbered through the JVM's life. Stages, which stand in for them under ``df.rdd``, begin again
    with each SparkContext; so theirs are counted from ``context``, a random number of the context's.
    """
    return f"r{(int(execution[1:]) + context) % 2**31}" if execution.startswith("r") else execution


def snapshot_number(snapshot_id: str) -> int:
    """The number of a snapshot in the transaction that has exported it: snapmgr.c, XactExportFilePath."""
    return int(snapshot_id.rsplit("-", 1)[1])


def _nth(snapshot_id: str, number: int) -> str:
    return f"{snapshot_id.rsplit('-', 1)[0]}-{number}" if number else snapshot_id


def holder_name(keeper: str, execution: str, snapshot_id: str) -> str:
    return f"pgsnapshot:{keeper}:{execution}:{snapshot_id}"


def mark_name(keeper: str, execution: str) -> str:
    """The application_name of a session whose last query says why an execution has no snapshot."""
    return f"pgsnapshot:{keeper}:{execution}!"


# The sessions of this role in this database. What reads them is asked by every task: the view pg_stat_activity would
# look up the names of all roles and databases, which takes as long as the rest.
_SESSIONS = """
WITH sessions AS (
    SELECT pid, application_name, query, backend_start
    FROM pg_catalog.pg_stat_get_activity(NULL)
    WHERE datid = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
        AND usesysid = to_regrole(quote_ident(session_user))
)"""


def read_readers(session: Session, keeper: str) -> dict[str, set[int]]:
    """Which executions have readers now, and the relations that these read (0: a query)."""
    readers: dict[str, set[int]] = {}
    with translated("looking for readers"), session.cursor() as cursor:
        cursor.execute(
            f"""
            {_SESSIONS}
            SELECT application_name
            FROM sessions
            WHERE application_name LIKE %s
            """,
            (f"{keeper_name(keeper)}:%?%",),
        )
        for (name,) in cursor:
            if (reader := parse_reader_name(name)) is not None:
                execution, oid = reader
                readers.setdefault(execution, set()).add(oid)
    return readers


def read_requests(session: Session, keeper: str) -> dict[str, Request | None]:
    """By execution, what those of its readers ask for who wait for a snapshot; None where that cannot be seen.

    A standby takes no notifications. A reader's last query is the one by which it looks for the snapshot, and the
    request is a comment in it. It is hidden where the role has another one set, and cut off by a small
    track_activity_query_size.
    """
    requests: dict[str, Request | None] = {}
    with translated("looking who asks"), session.cursor() as cursor:
        cursor.execute(
            f"""
            {_SESSIONS}
            SELECT application_name, query
            FROM sessions
            WHERE application_name LIKE %s
            """,
            (f"{keeper_name(keeper)}:%?%",),
        )
        for name, query in cursor:
            if (reader := parse_reader_name(name)) is None:
                continue
            execution, _ = reader
            if query.startswith("/* {"):
                try:
                    requests[execution] = Request.from_json(query[3 : query.index(" */")])
                except ValueError:
                    requests.setdefault(execution, None)
            elif query in ("", _HIDDEN):
                requests.setdefault(execution, None)
    return requests


def read_own_sessions(session: Session, pids: Collection[int]) -> set[int]:
    """Those of these processes that are sessions of the same role in the same database."""
    with translated("looking who asks"), session.cursor() as cursor:
        cursor.execute(
            f"""
            {_SESSIONS}
            SELECT pid FROM sessions WHERE pid = ANY (%s)
            """,
            (list(pids),),
        )
        return {pid for (pid,) in cursor}


def find_snapshot(session: Session, keeper: str, request: Request, planned_on: Instance) -> Snapshot:
    """The snapshot of the request's execution; asks the keeper to make it where there is none, and waits, bounded.

    Raises the keeper's error where the execution has failed, SnapshotLostError where no keeper answers, and
    ServerSetupError where that is because this session has come to another server than ``planned_on``.
    """
    keeper_seen = next_ring = time.monotonic()
    answer_seconds = ANSWER_SECONDS + LINE_SECONDS + request.spec.slot_timeout_seconds
    for _ in Backoff(0.005, growth=1.2, longest_seconds=0.25, within_seconds=answer_seconds).polls():
        if time.monotonic() >= next_ring:
            # Also where the snapshot exists, because a request keeps it from being released. And more than once,
            # because a keeper whose session was just lost does not hear it.
            _ring(session, keeper, request)
            next_ring = time.monotonic() + RING_SECONDS
        keeper_runs, snapshot = _look(session, keeper, request)
        if snapshot is not None:
            _check_fits(session, snapshot, request)
            return snapshot
        if keeper_runs:
            keeper_seen = time.monotonic()
        elif time.monotonic() - keeper_seen > LOST_KEEPER_SECONDS:
            found = read_instance(session)
            if (found.address, found.in_recovery) != (planned_on.address, planned_on.in_recovery):
                raise other_server(f"looking for keeper {keeper}", planned_on, found)
            raise SnapshotLostError(
                f"no process on the driver's host holds snapshots for this DataFrame (keeper {keeper} has ended)",
                remedy="load the DataFrame again: planning starts a new one",
            )
    raise NoAnswerError(
        f"keeper {keeper} did not give a snapshot for execution {request.execution} within {answer_seconds:.0f} s"
    )


def _look(session: Session, keeper: str, request: Request) -> tuple[bool, Snapshot | None]:
    own_name = keeper_name(keeper)
    rows = _read_board(session, keeper, request)
    if any(row[1] == _HIDDEN for row in rows):
        # ALTER ROLE ... SET role gives sessions a role that may not see their own queries.
        with translated("looking for the snapshot"), session.cursor() as cursor:
            cursor.execute("SELECT current_setting('role'), set_config('role', 'none', false)")
            ((role, _),) = cursor.fetchall()
            try:
                rows = _read_board(session, keeper, request)
            finally:
                # Not RESET: a pooler or an event trigger may have set it.
                cursor.execute("SELECT set_config('role', %s, false)", (role,))
    ids = []
    lsn = None
    for name, query, lock_key, number in rows:
        if name == own_name:
            continue
        if name.endswith("!"):
            raise error_in(query)
        ids.append(_nth(name.rsplit(":", 1)[1], number))
        lsn = None if lock_key is None else Lsn(lock_key)
    return any(row[0] == own_name for row in rows), Snapshot(tuple(ids), lsn) if ids else None


# What pg_stat_activity shows in place of a query that the role may not see.
_HIDDEN = "<insufficient privilege>"


def _read_board(session: Session, keeper: str, request: Request) -> list[tuple[str, str, int | None, int]]:
    """Keeper, holders and mark: name, query, the LSN and the snapshot's number it announces."""
    own_name = keeper_name(keeper)
    of, execution = execution_key(request.execution)
    with translated("looking for the snapshot"), session.cursor() as cursor:
        cursor.execute(
            f"{request.to_comment()}{_SESSIONS},"
            """
            announced AS MATERIALIZED (
                SELECT pid, classid, objid, objsubid
                FROM pg_catalog.pg_locks
                WHERE locktype = 'advisory' AND mode = 'ShareLock'
            )
            SELECT a.application_name, a.query, (
                SELECT (l.classid::bigint << 32) | l.objid::bigint
                FROM announced AS l
                WHERE l.pid = a.pid AND l.objsubid = 1
                LIMIT 1
            ), coalesce(e.classid::bigint - %(of)s, 0)
            FROM sessions AS a
            LEFT JOIN announced AS e
                ON e.pid = a.pid
                AND e.objsubid = 2
                AND e.classid::bigint BETWEEN %(of)s AND %(of)s + %(most)s
                AND e.objid = %(execution)s
            WHERE a.application_name = %(keeper)s OR a.application_name LIKE %(any)s AND e.pid IS NOT NULL
            ORDER BY a.backend_start
            """,
            {"of": of, "most": MOST_SNAPSHOTS, "execution": execution, "keeper": own_name, "any": f"{own_name}:%"},
        )
        return list(cursor.fetchall())


def _check_fits(session: Session, snapshot: Snapshot, request: Request) -> None:
    """Raise DefiniteError where the snapshot was made for another scan, which asked for less."""
    slot = request.spec.slot
    if snapshot.lsn is None and request.spec.consistent_point == "require" and not slot:
        raise DefiniteError(
            f"execution {request.execution} has a snapshot without a consistent point already, made for another of its "
            "scans",
            remedy="give every DataFrame of the action the same consistentPoint",
        )
    if slot and (snapshot.lsn is None or not _starts_after(session, slot, snapshot.lsn)):
        raise DefiniteError(
            f"slot {slot} was asked for after another scan of the same action had taken its snapshot, or it was "
            "dropped since",
            remedy="give every DataFrame of the action the same option slot, or use open_snapshot()",
        )


def _starts_after(session: Session, slot: str, lsn: Lsn) -> bool:
    """Whether a slot is there and has nothing from before a snapshot that ends at ``lsn``."""
    with translated(f"looking for slot {slot}"), session.cursor() as cursor:
        cursor.execute(
            """
            SELECT confirmed_flush_lsn > %s::pg_lsn
            FROM pg_catalog.pg_replication_slots
            WHERE slot_name = %s
            """,
            (str(lsn), slot),
        )
        row = cursor.fetchone()
        return row is not None and bool(row[0])


def _ring(session: Session, keeper: str, request: Request) -> None:
    with translated("asking for a snapshot"), session.cursor() as cursor:
        cursor.execute(
            "SELECT pg_notify(%s, %s) WHERE NOT pg_is_in_recovery()", (keeper_name(keeper), request.to_json())
        )
