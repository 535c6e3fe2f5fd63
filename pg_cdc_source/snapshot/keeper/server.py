"""Serve requests for snapshots: the keeper's session on the board, and its loop."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from dataclasses import replace
from multiprocessing.connection import wait

import psycopg2
import psycopg2.errors
from psycopg2 import sql
from psycopg2.extensions import connection as Session
from psycopg2.extensions import cursor as Cursor

from pg_cdc_source.errors import DefiniteError, PgCdcError, TransientError
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.catalog import read_server
from pg_cdc_source.postgres.connection import connect
from pg_cdc_source.postgres.instances import require_instance
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.snapshot.board import Request, keeper_name, read_own_sessions, read_requests
from pg_cdc_source.snapshot.connections import keeper_share
from pg_cdc_source.snapshot.driver_files import may_want_lsn
from pg_cdc_source.snapshot.keeper import readers
from pg_cdc_source.snapshot.keeper.executions import Executions
from pg_cdc_source.snapshot.keeper.handshake import Settings
from pg_cdc_source.snapshot.keeper.identity import lock_key, new_name
from pg_cdc_source.snapshot.keeper.marks import Marks
from pg_cdc_source.snapshot.keeper.workers import Workers

log = logging.getLogger(__name__)

TICK_SECONDS = 0.5  # how often the driver is looked for; a dead driver's sessions are gone within twice this
STANDBY_LOOK_SECONDS = 0.2
UNUSED_SECONDS = 24 * 3600.0  # without a request for so long, the keeper ends although the driver runs
SNAPSHOTS_AT_ONCE = 8
# Between attempts to have a session again. Readers wait LOST_KEEPER_SECONDS for a keeper that was away.
AWAY = Backoff(TICK_SECONDS, longest_seconds=3.0)
# A keeper that is not let in any more cannot see when its snapshots are not read any more, or what they keep waiting.
REFUSED_SECONDS = 60.0


class Keeper:
    """Holds snapshots until the driver is gone. One thread runs ``run``; others make snapshots and take locks."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.name = new_name(settings.token)
        self._workers = Workers(SNAPSHOTS_AT_ONCE)
        self._marks = Marks(settings.connection, self.name)
        self._executions = Executions(settings.connection, self.name, self._marks, self._workers)
        self._board: Session | None = None
        self._opened_at = self._lost_at = 0.0  # time.monotonic()
        self._pauses = AWAY.pauses()
        self._standby = False
        self._last_request = time.monotonic()
        self._looked = 0.0  # time.monotonic()
        # The directories of SparkContexts in which a scan has asked for an LSN. The name of the file that says so is
        # another one once the server was restarted, and Spark keeps what was planned before.
        self._contexts_with_lsn: set[str] = set()
        self._stop = threading.Event()

    def stop(self) -> None:
        self._stop.set()

    def open(self, *, first: bool = False) -> bool:
        """Connect, become the keeper, and announce it; False when another one is.

        The ``first`` time it has to be on the server that planning is on, or would not be found. Later that may have
        been restarted, or failed over.
        """
        connection = self._settings.connection
        session = connect(connection, "pgsnapshot:starting", was_there=not first, known_to_last=True)
        try:
            if first:
                require_instance(session, self._settings.planned_on, "starting the keeper")
            self._standby = self._executions.on_standby = read_server(session).in_recovery
            with translated("becoming the keeper"), session.cursor() as cursor:
                if not self._locks(cursor):
                    self._end_old_session(cursor)
                    if self._locks(cursor):
                        raise TransientError("the session that was lost has ended just now")
                    session.close()
                    return False
                if not self._standby:
                    cursor.execute(sql.SQL("LISTEN {}").format(sql.Identifier(keeper_name(self.name))))
                # The name is taken once the lock is held: who sees it can rely on it.
                cursor.execute("SELECT set_config('application_name', %s, false)", (keeper_name(self.name),))
        except BaseException:
            session.close()
            raise
        self._board = session
        self._opened_at = time.monotonic()
        return True

    def _locks(self, cursor: Cursor) -> bool:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", (lock_key(self._settings.token),))
        return bool(cursor.fetchone()[0])

    def _end_old_session(self, cursor: Cursor) -> None:
        """End the session that this keeper has lost, where the server has it yet, and raise TransientError."""
        # ALTER ROLE ... SET role gives sessions a role that may not do so.
        cursor.execute("SET ROLE NONE")
        of_old = "FROM pg_catalog.pg_stat_activity WHERE application_name = %s AND usename = session_user"
        cursor.execute(f"SELECT pid {of_old}", (keeper_name(self.name),))
        if cursor.fetchone() is not None:
            # Where it may not be ended, the server finds out by itself.
            with contextlib.suppress(psycopg2.errors.InsufficientPrivilege):
                cursor.execute(f"SELECT pg_catalog.pg_terminate_backend(pid) {of_old}", (keeper_name(self.name),))
            raise TransientError("the server has the session that was lost, and ends it")

    def run(self) -> None:
        """Serve until the driver is gone, ``stop`` is called, or nobody has asked for a day."""
        try:
            while not self._stop.is_set() and self._settings.driver.runs():
                if not self._executions and time.monotonic() - self._last_request > UNUSED_SECONDS:
                    log.warning("no request for %g h, keeper %s ends", UNUSED_SECONDS / 3600, self.name)
                    return
                is_away = self._board is None
                try:
                    if is_away and not self.open():
                        log.warning("another keeper took over while the server was away, keeper %s ends", self.name)
                        return
                    assert self._board is not None
                    self._wait(self._board)
                    self._serve(self._board)
                except (PgCdcError, psycopg2.Error) as error:
                    self._lose_board(error)
                    if is_away and self._is_refused_for_good(error):
                        return
                if self._marks.refused is not None and not self._executions.hold_any():
                    log.warning("the server does not let keeper %s in any more, it ends", self.name)
                    return
        finally:
            self._close()

    def _wait(self, board: Session) -> None:
        """Wait for a notification, a finished thread or a lost holder, or until the next tick or look."""
        seconds = min(TICK_SECONDS, self._look_seconds())
        # Not select(), which does not take more than 1,024 files.
        wait([board, self._workers.fileno(), *self._executions.idle_holders()], seconds)

    def _look_seconds(self) -> float:
        return STANDBY_LOOK_SECONDS if self._standby else readers.look_seconds(self._executions)

    def _serve(self, board: Session) -> None:
        self._workers.finish()
        board.poll()
        # More may come with the answer of any statement.
        while board.notifies:
            notifies = [board.notifies.pop(0) for _ in range(len(board.notifies))]
            # Any role of the database may notify. Readers wait for an answer, so they are there.
            own = read_own_sessions(board, {notify.pid for notify in notifies})
            for notify in notifies:
                if notify.pid in own:
                    self._hear(notify.payload)
        self._executions.mend()
        now = time.monotonic()
        # A snapshot that was just made has readers who wait for it, and what they read is locked at once.
        due = self._executions.take_made_some() or now - self._looked >= self._look_seconds()
        if due and (self._standby or self._executions or self._marks):
            self._looked = now
            self._look(board, now)
        self._executions.serve_line(now)

    def _hear(self, payload: str) -> None:
        try:
            self._accept(Request.from_json(payload))
        except ValueError as error:
            # Its reader gets no snapshot, and says so itself; the others go on.
            log.warning("keeper %s passes over a request that it cannot read: %s", self.name, error)

    def _accept(self, request: Request) -> None:
        key = request.execution
        self._last_request = now = time.monotonic()
        self._executions.most_sessions = keeper_share(request.max_connections)
        point, context = request.spec.consistent_point, os.path.dirname(request.lsn_file)
        if point == "require" or (request.shows_lsn and point != "off"):
            self._contexts_with_lsn.add(context)
        known = self._executions.get(key)
        if known is not None:
            known.last_reader = now
            # An action's scans may say another time each; it lasts for the longest.
            idle_seconds = max(known.request.snapshot_idle_seconds, request.snapshot_idle_seconds)
            known.request = replace(known.request, snapshot_idle_seconds=idle_seconds)
        if self._executions.tell_why_ended(key):
            return
        if known is None:
            shows_lsn = request.shows_lsn or context in self._contexts_with_lsn or may_want_lsn(request.lsn_file)
            self._executions.begin(replace(request, shows_lsn=shows_lsn))
        elif request.spec.slot and request.spec.slot != known.request.spec.slot:
            self._executions.end(
                known,
                DefiniteError(
                    f"slot {request.spec.slot} was asked for after another scan of the same action had taken its "
                    "snapshot",
                    remedy="give every DataFrame of the action the same option slot, or use open_snapshot()",
                ),
            )
            self._executions.tell_why_ended(key)

    def _look(self, board: Session, now: float) -> None:
        """Take in which executions have readers; a reader of one that is not known waits for something."""
        unknown = readers.watch(board, self.name, self._executions, now)
        asked = read_requests(board, self.name) if self._standby and unknown else {}
        for key in unknown:
            if key in asked:
                self._accept(asked[key] or replace(self._settings.example, execution=key))
            elif key in self._marks:
                self._executions.tell_why_ended(key)
        self._marks.end_old(now)

    def _lose_board(self, error: Exception) -> None:
        if self._board is not None:
            log.warning("keeper %s lost its session: %s", self.name, error)
            self._board.close()
            self._board = None
            self._lost_at, self._pauses = time.monotonic(), AWAY.pauses()
            if self._lost_at - self._opened_at > TICK_SECONDS:
                # At once: where planning finds no keeper, it starts another one, and this one's snapshots end.
                return
        until = time.monotonic() + next(self._pauses)
        while time.monotonic() < until and self._settings.driver.runs() and not self._stop.wait(TICK_SECONDS):
            pass

    def _is_refused_for_good(self, error: Exception) -> bool:
        """Whether a keeper that cannot have a session again ends: at once, or later where it holds snapshots."""
        if isinstance(error, (TransientError, psycopg2.Error)):
            return False
        holds = self._executions.hold_any()
        if holds and time.monotonic() - self._lost_at <= REFUSED_SECONDS:
            return False
        snapshots = ", with the snapshots that it holds" if holds else ""
        log.warning("the server does not let keeper %s in any more, it ends%s: %s", self.name, snapshots, error)
        return True

    def _close(self) -> None:
        self._marks.close()
        self._executions.close()
        if self._board is not None:
            self._board.close()
        self._workers.close()
