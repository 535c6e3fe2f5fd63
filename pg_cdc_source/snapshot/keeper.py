"""The keeper: one process on the driver's host that holds one snapshot for each SQL execution.

The problem: all tasks of one Spark action have to see the same snapshot, and a snapshot lives only as long as the
session that exported it. But Spark gives a Python source no process that lasts: planning workers die a minute after
planning, tasks run anywhere, and a DataFrame may be planned once and used in many actions, an hour later. A snapshot
made while planning would be stale in the second action, or differ between two scans of one.

So planning makes sure that a keeper runs, and tasks ask it. They meet on the board (see ``board``)::

          task                     PostgreSQL                        keeper
           │ connect as …?16384 ──────►│                                │
           │ holder of 7? ────────────►│ none                           │
           │ NOTIFY {execution: 7} ───►│───────────────────────────────►│ slot, export, drop slot
           │                           │◄── two sessions …:7:<id> ──────│ lock the relation
           │ holder of 7? ────────────►│ <id>, LSN                      │
           │ SET TRANSACTION SNAPSHOT ►│                                │

``<keeper>`` is 10 characters for the driver JVM, server, database and role, and 6 random ones for this very process,
so tasks never take a snapshot from a successor that does not know what its predecessor gave out.

Invariants:

- One keeper per JVM, server, database and role: it holds an advisory lock for its lifetime; a second one leaves.
- An execution never changes snapshots. Once all holders are lost or released, it has failed, for good.
- Two sessions hold each snapshot; one that dies is replaced from the other.
- A snapshot is released ``snapshotIdle`` after the last session of a reader of its execution was seen, or earlier when
  later ones without readers would take more than a tenth of the server's connections.
- Tables are locked (ACCESS SHARE) only while tasks of the execution read: DDL does not wait for an idle snapshot. Nor
  do locks stay once somebody waits for them, since the next tasks would queue behind. A reader that comes after DDL
  finds out by itself, see ``check_files``.
- The keeper ends when the driver JVM is gone. All it holds are sessions, so nothing outlives it, whatever ends it.

A standby has no NOTIFY; there the keeper looks at the board by itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import queue
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace

import psycopg2
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import ConnectError, DefiniteError, PgCdcError, TransientError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.catalog import read_server
from pg_cdc_source.postgres.connection import connect
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.snapshots import Held, make_snapshot
from pg_cdc_source.snapshot.board import REASON_QUERY, Request, holder_name, keeper_name, mark_name, read_readers
from pg_cdc_source.snapshot.driver import Process, driver_process

log = logging.getLogger(__name__)

HOLDERS = 2
TICK_SECONDS = 0.5  # how often the driver is looked for; a dead driver's sessions are gone within twice this
BOARD_SECONDS = 1.0  # how often readers are looked for while snapshots are held, if not more often for snapshotIdle
# Tasks that are connected for a fifth of the time only are missed by most looks, but not by so many in a row. Four in a
# row did miss them.
LOOKS_PER_IDLE = 20
STANDBY_BOARD_SECONDS = 0.2
START_SECONDS = 30.0
UNUSED_SECONDS = 24 * 3600.0  # without a request for so long, the keeper ends although the driver runs
SNAPSHOTS_AT_ONCE = 8
# Nobody tells when an action is done, so its snapshot waits for snapshotIdle. A loop of short actions must not take the
# server's connections for that: at two sessions a snapshot, a tenth of them at most.
CONNECTIONS_PER_IDLE_SNAPSHOT = 20
IDLE_KEPT_AT_LEAST = 4
MEND_SECONDS = 1.0  # before another try to replace a holder
MARK_SECONDS = 60.0
ENDED_REMEMBERED = 100_000


def ensure_keeper(options: ConnectionOptions, session: Session, example: Request) -> str:
    """Name of the keeper for this driver and database, started if none runs.

    ``example`` is what a keeper on a standby takes for a request, since there it only sees that somebody asks.
    """
    driver = driver_process()
    token = _token(driver, session)
    started = False
    for _ in Backoff(0.02, growth=1.5, longest_seconds=0.25, within_seconds=START_SECONDS).polls():
        with translated("looking for the keeper"), session.cursor() as cursor:
            cursor.execute(
                "SELECT application_name FROM pg_catalog.pg_stat_activity WHERE datname = current_database()"
                " AND usename = session_user AND application_name ~ %s ORDER BY backend_start, pid LIMIT 1",
                (f"^pgsnapshot:{token}[a-z2-7]{{6}}$",),
            )
            row = cursor.fetchone()
        if row is not None:
            return str(row[0]).split(":")[1]
        if not started:
            _start(options, token, driver, example)
            started = True
    raise TransientError(f"the keeper (process that holds snapshots) did not start within {START_SECONDS:g} s")


def _token(driver: Process, session: Session) -> str:
    """Tell this driver, server, database and role from every other, in 10 characters (50 bits)."""
    with translated("reading the server's identity"), session.cursor() as cursor:
        cursor.execute("SELECT current_database(), session_user")
        database, role = cursor.fetchone()
    info = session.info
    identity = [socket.gethostname(), driver.pid, driver.started, info.host, info.port, database, role]
    return _base32(hashlib.sha256(json.dumps(identity).encode()).digest(), 10)


def _base32(octets: bytes, length: int) -> str:
    """Five bits a character: application_name has 63 bytes, and a snapshot's id needs some 20 of them."""
    return base64.b32encode(octets).decode().lower()[:length]


def _start(options: ConnectionOptions, token: str, driver: Process, example: Request) -> None:
    # Inherited standard error puts the keeper's warnings into the driver's log. The password goes through stdin: argv
    # and environment can be read by others.
    process = subprocess.Popen(
        [sys.executable, "-m", "pg_cdc_source.snapshot.keeper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    settings = {"connection": asdict(options), "token": token, "driver": asdict(driver), "example": example.to_json()}
    answer = _first_line(process, json.dumps(settings))
    if answer.startswith("error "):
        raise DefiniteError(f"the keeper (process that holds snapshots) could not start: {answer[6:]}")


def _first_line(process: subprocess.Popen[bytes], settings: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        process.stdin.write(settings.encode())
        process.stdin.close()
        process.wait()
        if not select.select([process.stdout], [], [], START_SECONDS)[0]:
            return f"error no answer within {START_SECONDS:g} s"
        line = process.stdout.readline().decode().strip()
        return line or "error it ended at once; the driver's standard error says why"


@dataclass(slots=True)
class Execution:
    """An SQL execution and its snapshot; ``held`` is None until it is made."""

    request: Request
    asked_at: float  # epoch seconds, the server's clock
    last_reader: float  # time.monotonic(); until then it may have had a reader
    being_read: bool = False  # at the last look
    held: Held | None = None
    locked: set[int] = field(default_factory=set)
    busy: bool = False  # a thread works on it
    mend_after: float = 0.0  # time.monotonic(); a server that refuses sessions is not asked in a loop


class Keeper:
    """Holds snapshots until the driver is gone. One thread runs ``run``; others make snapshots and take locks."""

    def __init__(self, options: ConnectionOptions, token: str, driver: Process, example: Request) -> None:
        self._options = options
        self._driver = driver
        self._example = example
        self.name = token + _base32(secrets.token_bytes(4), 6)
        self._lock_key = int.from_bytes(hashlib.sha256(f"pgsnapshot:{token}".encode()).digest()[:8], "big", signed=True)
        self._executions: dict[str, Execution] = {}
        self._ended: dict[str, str] = {}  # execution -> why it has no snapshot any more, oldest first
        self._marks: dict[str, tuple[Session, float]] = {}  # execution -> session that says why, last asked for
        self._pool = ThreadPoolExecutor(SNAPSHOTS_AT_ONCE, thread_name_prefix="snapshot")
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        self._board: Session | None = None
        self._standby = False
        self._idle_kept = IDLE_KEPT_AT_LEAST
        self._last_request = time.monotonic()
        self._next_board = 0.0
        self._stop = threading.Event()

    def stop(self) -> None:
        self._stop.set()

    def open(self) -> bool:
        """Connect, become the keeper, and announce it; False when another one is."""
        # The name is taken once the lock is held: who sees it can rely on it.
        session = connect(self._options, "pgsnapshot:starting")
        try:
            server = read_server(session)
            self._standby = server.in_recovery
            self._idle_kept = max(IDLE_KEPT_AT_LEAST, server.max_connections // CONNECTIONS_PER_IDLE_SNAPSHOT)
            with translated("becoming the keeper"), session.cursor() as cursor:
                cursor.execute("SELECT pg_try_advisory_lock(%s)", (self._lock_key,))
                if not cursor.fetchone()[0]:
                    session.close()
                    return False
                if not self._standby:
                    cursor.execute(f'LISTEN "{keeper_name(self.name)}"')
                cursor.execute("SELECT set_config('application_name', %s, false)", (keeper_name(self.name),))
        except BaseException:
            session.close()
            raise
        self._board = session
        return True

    def run(self) -> None:
        """Serve until the driver is gone, ``stop`` is called, or nobody has asked for a day."""
        try:
            while not self._stop.is_set() and self._driver.runs():
                if not self._executions and time.monotonic() - self._last_request > UNUSED_SECONDS:
                    log.warning("no request for %g h, keeper %s ends", UNUSED_SECONDS / 3600, self.name)
                    return
                try:
                    if self._board is None and not self.open():
                        log.warning("another keeper took over while the server was away, keeper %s ends", self.name)
                        return
                    self._wait()
                    self._serve()
                except (PgCdcError, psycopg2.Error) as error:
                    self._lose_board(error)
                    if isinstance(error, ConnectError) and not self._holds():
                        log.warning("the server does not let keeper %s in any more, it ends", self.name)
                        return
        finally:
            self._close()

    def _wait(self) -> None:
        assert self._board is not None
        holders = [s for e in self._executions.values() if e.held and not e.busy for s, _ in e.held.holders]
        seconds = min(TICK_SECONDS, self._board_seconds())
        # A holder's socket becomes readable when its session ends.
        select.select([self._board, self._wake_read, *(s for s in holders if not s.closed)], [], [], seconds)

    def _board_seconds(self) -> float:
        if self._standby:
            return STANDBY_BOARD_SECONDS
        idle = (execution.request.snapshot_idle_seconds for execution in self._executions.values())
        return min([BOARD_SECONDS, *(seconds / LOOKS_PER_IDLE for seconds in idle)])

    def _serve(self) -> None:
        assert self._board is not None
        while select.select([self._wake_read], [], [], 0)[0]:
            os.read(self._wake_read, 4096)
        while not self._done.empty():
            self._done.get()()
        self._board.poll()
        while self._board.notifies:
            self._accept(Request.from_json(self._board.notifies.pop(0).payload))
        for execution in list(self._executions.values()):
            self._mend(execution)
        now = time.monotonic()
        if now >= self._next_board and (self._standby or self._executions or self._marks):
            self._next_board = now + self._board_seconds()
            self._read_board(now)

    def _accept(self, request: Request) -> None:
        key = request.execution
        self._last_request = now = time.monotonic()
        known = self._executions.get(key)
        if request.is_stage:
            if known is not None and known.asked_at < request.planned_at and not known.busy:
                self._end(key, "")
                known = None
            self._ended.pop(key, None)
        if known is not None:
            known.last_reader = now
        if key in self._ended:
            self._mark(key)
        elif known is None:
            execution = self._executions[key] = Execution(request, self._server_clock(), now)
            self._submit(execution, self._make)
        elif request.spec.slot and request.spec.slot != known.request.spec.slot:
            self._end(
                key,
                f"slot {request.spec.slot} was asked for after another scan of the same action had taken its snapshot\n"
                "  Remedy: give every DataFrame of the action the same option slot, or use open_snapshot()",
            )
            self._mark(key)

    def _server_clock(self) -> float:
        assert self._board is not None
        with self._board.cursor() as cursor:
            cursor.execute("SELECT extract(epoch FROM clock_timestamp())::float8")
            return float(cursor.fetchone()[0])

    def _submit(self, execution: Execution, work: Callable[[Execution], Callable[[], None] | None]) -> None:
        """Run ``work`` in a thread; a function that it returns is run by the main thread afterwards."""
        execution.busy = True

        def run() -> None:
            finish: Callable[[], None] | None
            try:
                finish = work(execution)
            except Exception as error:
                if not isinstance(error, PgCdcError):
                    log.exception("execution %s", execution.request.execution)
                finish = self._failing(execution, str(error))

            def finish_and_rest() -> None:
                execution.busy = False
                if finish is not None:
                    finish()

            self._done.put(finish_and_rest)
            os.write(self._wake_write, b"x")

        self._pool.submit(run)

    def _failing(self, execution: Execution, failure: str) -> Callable[[], None]:
        def fail() -> None:
            key = execution.request.execution
            self._end(key, failure)
            self._mark(key)

        return fail

    def _make(self, execution: Execution) -> Callable[[], None]:
        held = make_snapshot(self._options, execution.request.spec, self._namer(execution), holders=HOLDERS)

        def take() -> None:
            execution.held = held
            if self._executions.get(execution.request.execution) is not execution:
                held.close()  # it was ended while it was made
            execution.last_reader = time.monotonic()
            self._next_board = 0.0  # lock at once what the waiting readers are about to read

        return take

    def _namer(self, execution: Execution) -> Callable[[str], str]:
        # While an id is not known, the name must not look like a holder's.
        return lambda snapshot_id: (
            holder_name(self.name, execution.request.execution, snapshot_id) if snapshot_id else "pgsnapshot:making"
        )

    def _mend(self, execution: Execution) -> None:
        """Replace a holder that was lost; end the execution when none is left."""
        held = execution.held
        if held is None or execution.busy:
            return
        for session, snapshot_id in [holder for holder in held.holders if _is_lost(holder[0])]:
            session.close()
            held.holders.remove((session, snapshot_id))
        if not held.holders:
            self._end(
                execution.request.execution,
                "the snapshot of this action has ended, because PostgreSQL ended all sessions that held it\n"
                "  Remedy: run the action again: it takes a new snapshot",
            )
        elif len(held.holders) < HOLDERS and time.monotonic() > execution.mend_after:
            self._submit(execution, self._replace_holder)

    def _replace_holder(self, execution: Execution) -> None:
        held = execution.held
        assert held is not None
        try:
            held.add_holder(self._options, self._namer(execution), held.holders[0][1])
        except PgCdcError as error:
            # The other holder still works; a later tick tries again, or finds that one lost as well.
            execution.mend_after = time.monotonic() + MEND_SECONDS
            log.warning("execution %s: a holder could not be replaced: %s", execution.request.execution, error)
        self._lock(execution)

    def _lock(self, execution: Execution) -> None:
        held = execution.held
        assert held is not None
        try:
            held.lock(sorted(execution.locked), timeout="10s")
        except PgCdcError as error:
            # A reader that is harmed by the missing lock finds out by itself, see check_files.
            log.warning("execution %s: %s", execution.request.execution, error)

    def _read_board(self, now: float) -> None:
        """Take in which executions have readers and what they read; release snapshots that nobody reads."""
        assert self._board is not None
        readers = read_readers(self._board, self.name)
        for key, oids in readers.items():
            execution = self._executions.get(key)
            if execution is None:
                if self._standby:
                    self._accept(replace(self._example, execution=key))
                elif key in self._marks:
                    self._mark(key)
                continue
            new = oids - execution.locked - {0}
            if new and execution.held and not execution.busy:
                execution.locked |= new
                self._submit(execution, self._lock)
        waited_for = self._find_waited_for()
        for key, execution in self._executions.items():
            # DDL must not wait for a snapshot that nobody reads, nor everybody else behind it.
            if not (execution.locked and execution.held) or execution.busy:
                continue
            pids = {session.info.backend_pid for session, _ in execution.held.holders}
            if key not in readers or pids & waited_for:
                execution.locked.clear()
                self._submit(execution, self._unlock)
        for key, execution in self._executions.items():
            if key in readers or execution.being_read:
                execution.last_reader = now
            execution.being_read = key in readers
        self._release_idle(now)
        for key, (session, asked) in list(self._marks.items()):
            if now - asked > MARK_SECONDS:
                session.close()
                del self._marks[key]

    def _find_waited_for(self) -> set[int]:
        """The sessions whose locks on tables somebody waits for."""
        assert self._board is not None
        if not any(execution.locked for execution in self._executions.values()):
            return set()
        with translated("looking for who waits"), self._board.cursor() as cursor:
            cursor.execute(
                "SELECT DISTINCT holding.pid FROM pg_catalog.pg_locks AS waiting"
                " JOIN pg_catalog.pg_locks AS holding USING (locktype, database, relation)"
                " WHERE locktype = 'relation' AND NOT waiting.granted AND holding.granted"
            )
            return {pid for (pid,) in cursor}

    def _unlock(self, execution: Execution) -> None:
        assert execution.held is not None
        execution.held.unlock()

    def _release_idle(self, now: float) -> None:
        """Release snapshots without a reader for snapshotIdle, and beyond a number those longest without one."""
        for key, execution in list(self._executions.items()):
            idle = execution.request.snapshot_idle_seconds
            if execution.held and not execution.busy and now - execution.last_reader > idle:
                self._end(
                    key,
                    "the snapshot of this action has ended, because no task of it read from PostgreSQL for "
                    f"{idle:g} s\n"
                    "  Remedy: raise snapshotIdle above the longest pause between two reads of one action",
                )
        idle_now = sorted(
            (execution.last_reader, key)
            for key, execution in self._executions.items()
            if execution.held and not execution.busy and execution.last_reader < now
        )
        for _, key in idle_now[: max(0, len(idle_now) - self._idle_kept)]:
            self._end(
                key,
                f"the snapshot of this action has ended, because {self._idle_kept} later ones waited for readers too, "
                "and each takes two of the server's connections\n"
                "  Remedy: run fewer actions at a time, read all tables of an action early (cache()), or raise the "
                "server's max_connections",
            )

    def _end(self, key: str, why: str) -> None:
        """End an execution's snapshot for good; ``why`` is what later requests for it are told."""
        execution = self._executions.pop(key, None)
        if execution is not None and execution.held:
            execution.held.close()
        self._ended[key] = why
        if len(self._ended) > ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _mark(self, key: str) -> None:
        """Show readers of an ended execution why it has ended."""
        session = self._marks[key][0] if key in self._marks else None
        if session is None or _is_lost(session):
            session = connect(self._options, "pgsnapshot:failing")
            with translated("announcing a failure"), session.cursor() as cursor:
                # One statement, so that whoever sees the name sees the reason as well.
                cursor.execute(REASON_QUERY, (self._ended[key].encode().hex(), mark_name(self.name, key)))
        self._marks[key] = (session, time.monotonic())

    def _holds(self) -> bool:
        held = [execution.held for execution in self._executions.values() if execution.held]
        return any(not _is_lost(session) for one in held for session, _ in one.holders)

    def _lose_board(self, error: Exception) -> None:
        if self._board is not None:
            log.warning("keeper %s lost its session: %s", self.name, error)
            self._board.close()
            self._board = None
        self._stop.wait(TICK_SECONDS)

    def _close(self) -> None:
        for session, _ in self._marks.values():
            session.close()
        for execution in self._executions.values():
            if execution.held:
                execution.held.close()
        if self._board is not None:
            self._board.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _is_lost(session: Session) -> bool:
    """Whether the server has ended an idle session; it says so, or hangs up, without being asked."""
    if session.closed:
        return True
    if not select.select([session], [], [], 0)[0]:
        return False
    try:
        with session.cursor() as cursor:
            cursor.execute("SELECT")
    except psycopg2.Error:
        return True
    return False


def main() -> None:
    """Entry point of the process: settings come as JSON on stdin, one line on stdout answers ready, taken or error."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s pgsnapshot keeper: %(message)s")
    settings = json.load(sys.stdin)
    # The process that planning started leaves at once and is waited for; nobody would wait for the keeper.
    if os.fork():
        os._exit(0)
    connection = settings["connection"]
    options = ConnectionOptions(**{**connection, "keywords": tuple((k, v) for k, v in connection["keywords"])})
    example = Request.from_json(settings["example"])
    keeper = Keeper(options, settings["token"], Process(**settings["driver"]), example)
    signal.signal(signal.SIGTERM, lambda *_: keeper.stop())
    try:
        ready = keeper.open()
        print("ready" if ready else "taken", flush=True)
    except PgCdcError as error:
        print("error " + " ".join(str(error).split()), flush=True)
        ready = False
    os.close(sys.stdout.fileno())
    if ready:
        keeper.run()
    # Threads may still wait for a server that does not answer; sessions end with the process.
    os._exit(0)


if __name__ == "__main__":
    main()
