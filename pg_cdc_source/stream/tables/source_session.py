"""The source's own session with the server: for its questions, besides the slot's stream and the snapshot's session."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import PgCdcError, TransientError
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres import catalog, slot_creation
from pg_cdc_source.postgres.answers import answered_within
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.connection import FULL_SECONDS, connect
from pg_cdc_source.postgres.kept_session import KeptSession
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.slots import read_end_of_wal, wait_for_end_of_wal
from pg_cdc_source.stream.tables.second_look import settled
from pg_cdc_source.stream.tables.stream_plan import session_name

log = logging.getLogger(__name__)

T = TypeVar("T")

ASKING = Backoff(0.5, attempts=3)
# While an address leads to a standby that is about to be promoted, or to the primary of before.
PROMOTING = Backoff(0.5, longest_seconds=5.0, within_seconds=30.0)


class StandbyError(TransientError):
    """A stream of a primary has come to a standby."""


class SourceSession:
    """Opened when it is first needed, and again where it was lost. ``in_recovery``: the server is a standby."""

    def __init__(self, options: StreamOptions) -> None:
        self.in_recovery = False
        self._options = options
        self._name = session_name(options, "source")
        self._session = KeptSession(self._begin)
        self._has_begun = False

    def open(self) -> Session:
        """The session. Raises what keeps a stream of this server from working."""
        return self._session.open()

    def _begin(self) -> Session:
        return PROMOTING.retrying(self._connect, after=StandbyError)

    def _connect(self) -> Session:
        options = self._options
        session = connect(
            options.connection, self._name, retry_seconds=30, full_seconds=FULL_SECONDS, was_there=self._has_begun
        )
        try:
            server = catalog.read_server(session)
            self.require_no_fall_back(in_recovery=server.in_recovery)
            slot_creation.require_consistent_point(
                server, stream=True, failover=options.failover, messages=bool(options.message_prefixes)
            )
        except BaseException:
            session.close()
            raise
        self._has_begun, self.in_recovery = True, server.in_recovery
        return session

    def require_no_fall_back(self, *, in_recovery: bool) -> None:
        """Raise StandbyError where a server is a standby, and the stream was on a primary.

        Its catalog may be that of a while ago, and it has no slot to go on with.
        """
        if self._has_begun and in_recovery and not self.in_recovery:
            raise StandbyError(
                f"the address {self._options.connection.display()} leads to a standby, and the stream was on a primary",
                remedy="see that a server is promoted; several in host with target_session_attrs=primary are found by "
                "themselves",
            )

    @contextmanager
    def asking(self) -> Iterator[Session]:
        """The session, for questions that are answered within some minutes."""
        session = self.open()
        with answered_within(session):
            yield session

    def ask(self, question: Callable[[Session], T], *, may_take_long: bool = False) -> T:
        """Run ``question`` in the session, and again where that is lost or DDL may have been in the way.

        One that ``may_take_long`` is waited for without a bound.
        """

        def attempt() -> T:
            try:
                with contextlib.nullcontext(self.open()) if may_take_long else self.asking() as session:
                    return settled(lambda: question(session))
            except TransientError:
                self.close()
                raise

        return ASKING.retrying(attempt)

    def ask_in_passing(self, question: Callable[[Session], T]) -> T | None:
        """Run ``question`` if there is a session, for an answer that the stream can do without."""
        session = self._session.present
        if session is None:
            return None
        try:
            with answered_within(session):
                return question(session)
        except PgCdcError as error:
            log.debug("not asked again: %s", error.what)
            self.close()
            return None

    def read_end_of_wal(self) -> Lsn:
        """How far the WAL is safe on disk: what may be decoded."""
        return self.ask(read_end_of_wal)

    def wait_for_end_of_wal(self) -> Lsn:
        """As above, past all that other sessions can see by now, asynchronous commits included."""
        return self.ask(wait_for_end_of_wal)

    def run_replication_command(self, command: str) -> tuple[Any, ...]:
        """The one row that a command of the replication protocol gives, in a session of its own."""

        def run() -> tuple[Any, ...]:
            opened = connect(
                self._options.connection, self._name, replication=True, retry_seconds=30, was_there=self._has_begun
            )
            with (
                contextlib.closing(opened) as session,
                translated("identifying the server"),
                answered_within(session),
                session.cursor() as cursor,
            ):
                cursor.execute(command)
                row: tuple[Any, ...] = cursor.fetchone()
                return row

        return ASKING.retrying(run)

    def close(self) -> None:
        """Give the session up; the next question opens another."""
        self._session.close()
