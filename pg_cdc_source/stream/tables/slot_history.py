"""The slot's identity and history: whether what a stream has read lies in the past of the server that is connected now.

A checkpoint names a cluster, a timeline, a database and a slot. A server that was promoted or restored goes on in
another timeline, which has left the old one at some LSN. What lies before that LSN is common to both::

    timeline 1  ──────────┬───────✗ read up to here: not in this server's history
    timeline 2            └──────────►
                  ✓ read up to here: the stream goes on

- Each session of the slot's stream is checked again: the same address may lead to another server by now.
- A server that was set back by a copy of its directory stays in its timeline. Its WAL then ends before what was read,
  until it has written as much again.
- A slot that was moved past the checkpoint has lost changes; PostgreSQL would go on behind them without an error.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import START_OVER, SlotLostError
from pg_cdc_source.offsets import Lsn, Position, SlotIdentity, end_of_timeline
from pg_cdc_source.options.names import quoted
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres import publication
from pg_cdc_source.postgres.answers import answered_within
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.catalog import is_in_recovery
from pg_cdc_source.postgres.connection import connect
from pg_cdc_source.postgres.replication import ReplicationStream
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.slot_checks import (
    behind_now_error,
    check_confirmed,
    check_slot,
    in_use_error,
    missing_now_error,
    refuse_unreadable,
    require_unused,
)
from pg_cdc_source.postgres.slot_creation import drop_slot
from pg_cdc_source.postgres.slots import Slot, may_be_within_a_record, read_slot, read_user
from pg_cdc_source.stream.tables.source_session import SourceSession
from pg_cdc_source.stream.tables.stream_plan import session_name

log = logging.getLogger(__name__)

IN_USE = Backoff(0.2, attempts=7)  # about 12 s in all
# The server drops a session whose host is gone after a minute (keepalives).
LINGERING = Backoff(0.2, longest_seconds=5.0, within_seconds=75.0)


class SlotHistory:
    """Knows the slot on the server that is connected now, and compares it with what offsets say."""

    def __init__(self, options: StreamOptions, source: SourceSession) -> None:
        self._options = options
        self._source = source
        self._identity: SlotIdentity | None = None
        self._was_missing = False  # so this process makes the slot

    def identify(self) -> SlotIdentity:
        """The slot's identity, as this process has seen it last."""
        if self._identity is None:
            system, timeline, _, database = self._source.run_replication_command("IDENTIFY_SYSTEM")
            self._identity = SlotIdentity(str(system), int(timeline), str(database), self._options.slot)
        return self._identity

    def forget_identity(self) -> None:
        """Let :meth:`identify` ask again: a standby may come to another timeline under a session that lasts."""
        self._identity = None

    def require_common(self, theirs: SlotIdentity, position: Position) -> None:
        """Raise SlotLostError unless what a stream has read through ``position`` there is the server's past, too."""
        self._require_common(self.as_named_now(theirs), position, self.identify())

    def as_named_now(self, theirs: SlotIdentity) -> SlotIdentity:
        """Return an identity with the name that its database has now, if that was renamed.

        A slot stays with its database, so it has to be here. One that was made again in another database is past the
        checkpoint.
        """
        ours = self.identify()

        def is_renamed(session: Session) -> bool:
            with translated("looking for the database of the checkpoint"), session.cursor() as cursor:
                cursor.execute("SELECT FROM pg_catalog.pg_database WHERE datname = %s", (theirs.database,))
                if cursor.fetchone() is not None:
                    return False
            slot = read_slot(session, ours.slot)
            return slot is not None and slot.database == ours.database

        is_another = (theirs.system, theirs.slot) != (ours.system, ours.slot)
        if theirs.database == ours.database or is_another or not self._source.ask(is_renamed):
            return theirs
        log.info("database %s is called %s now", quoted(theirs.database), quoted(ours.database))
        return replace(theirs, database=ours.database)

    def _require_common(self, theirs: SlotIdentity, position: Position, ours: SlotIdentity) -> None:
        if theirs == ours:
            return
        if replace(theirs, timeline=ours.timeline) != ours or theirs.timeline > ours.timeline:
            raise _other(theirs, ours)
        _, history = self._source.run_replication_command(f"TIMELINE_HISTORY {ours.timeline}")
        # Bytes from older servers.
        text = history if isinstance(history, str) else bytes(history).decode()
        end = end_of_timeline(text, theirs.timeline)
        if end is None:
            raise _other(theirs, ours)
        if position.lsn >= end:
            raise SlotLostError(
                f"the server was promoted or restored and left timeline {theirs.timeline} at {end}; the stream has "
                f"read that one up to {position.lsn}, and may have changes that are not in this server's history",
                remedy=f"{START_OVER}. So that standbys never lag behind a stream: "
                "synchronized_standby_slots (PostgreSQL 17)",
            )
        log.warning("the server went from timeline %d to %d; the stream goes on", theirs.timeline, ours.timeline)

    def find_slot(self) -> Slot | None:
        """The slot, None where there is none. Raises where it is not one for this stream, or another stream has it."""
        return IN_USE.retrying(self._find_slot)

    def _find_slot(self) -> Slot | None:
        with self._source.asking() as session:
            found = read_slot(session, self._options.slot)
            if found is None:
                self._was_missing = True
                return None
            check_slot(found, self.identify().database, failover=self._options.failover)
            if not self._was_missing:
                require_unused(session, found)
            return found

    def drop_lost_slot(self) -> None:
        """Drop the slot, if there is one, so that it can be made anew. Raises where somebody reads it.

        Raises as well where it cannot be a stream's: then it is somebody else's, by the same name.
        """

        def drop() -> None:
            with self._source.asking() as session:
                slot = read_slot(session, self._options.slot)
                if slot is not None:
                    refuse_unreadable(slot, self.identify().database, "choose another name in the option slot")
                    require_unused(session, slot)
                drop_slot(session, self._options.slot)

        IN_USE.retrying(drop)

    def require_free(self, position: Position, *, with_snapshot: bool = False) -> None:
        """Raise where the slot lacks what comes after ``position``, or somebody else reads it for longer.

        ``with_snapshot``: or the tables that come before, as another process with the same checkpoint does meanwhile.
        """

        def check() -> None:
            with self._source.asking() as session:
                slot = self._slot_with(session, position.next_lsn)
                if with_snapshot:
                    require_unused(session, slot)
                elif slot.active_pid is not None:
                    raise in_use_error(session, slot)

        (LINGERING if with_snapshot else IN_USE).retrying(check)

    def connect_stream(self, received: Position, *, streaming: bool) -> ReplicationStream:
        """Start the slot's stream after ``received``, on a server whose past that is."""
        options, start = self._options, received.next_lsn
        # Each time: while a session is lost, the slot may be lost too, or be made anew.
        with contextlib.closing(self.connect()) as session, answered_within(session):
            self._source.require_no_fall_back(in_recovery=is_in_recovery(session))
            slot = self._slot_with(session, start)
            if may_be_within_a_record(start):
                # What has been received comes again, and is left out.
                start = slot.confirmed_flush or start
            publications = publication.existing_names(session, options.publications)
        before = self.identify()
        stream = ReplicationStream(
            options.connection,
            session_name(options, "changes"),
            options.slot,
            publications,
            start,
            streaming=streaming,
        )
        # The same address may lead to another server by now, to one that was promoted or restored.
        found = replace(before, system=stream.system, timeline=stream.timeline)
        try:
            self._require_common(before, received, found)
            if received.next_lsn > stream.end_of_wal:
                with contextlib.closing(self.connect()) as session, answered_within(session):
                    raise behind_now_error(session, options.slot, received.next_lsn, stream.end_of_wal)
        except BaseException:
            stream.close()
            raise
        # Only now: until then, what is here was read from the one before.
        self._identity = found
        return stream

    def connect(self) -> Session:
        """A session of the thread that reads."""
        # Beside the source's own session, which has looked for a pooler.
        return connect(self._options.connection, session_name(self._options, "source"), known_to_last=True)

    def _slot_with(self, session: Session, start: Lsn) -> Slot:
        """The slot, which has all from ``start`` on."""
        slot = read_slot(session, self._options.slot)
        if slot is None:
            raise missing_now_error(session, self._options.slot)
        check_slot(slot, self.identify().database, failover=self._options.failover)
        check_confirmed(slot, start, None if slot.active_pid is None else read_user(session, slot.name))
        return slot


def _other(of_checkpoint: SlotIdentity, found: SlotIdentity) -> SlotLostError:
    differences = [
        f"{what} {now!r} instead of {was!r}"
        for what, was, now in (
            ("system identifier", of_checkpoint.system, found.system),
            ("timeline", of_checkpoint.timeline, found.timeline),
            ("database", of_checkpoint.database, found.database),
            ("slot", of_checkpoint.slot, found.slot),
        )
        if was != now
    ]
    upgraded = "after pg_upgrade: pg-cdc adopt; " if of_checkpoint.system != found.system else ""
    return SlotLostError(
        f"the checkpoint was made with another server or slot: the connection leads to {', '.join(differences)}",
        remedy=f"{upgraded}connect to the server that the checkpoint was made with, or {START_OVER}",
    )
