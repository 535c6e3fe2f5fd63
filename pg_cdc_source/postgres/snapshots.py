"""Make, hold and import snapshots.

The consistent point is where a logical slot starts: the snapshot that a new slot exports holds every commit before it,
and the slot's stream gives every commit at or after it. So a slot, even one that lives for a moment, turns "a snapshot"
into "the snapshot at this LSN".

- A temporary slot is dropped inside the exporting transaction as soon as its LSN is known. The snapshot stays valid and
  no WAL is held back while tables are copied.
- Any transaction that imported a snapshot can export it again, and the new id outlives the first exporter. So the
  session with the slot leaves as soon as plain sessions hold the snapshot: no walsender is kept. On a standby it stays
  and is the holder: recovery ends those that have a snapshot when it begins to wait for them, and nobody who imports
  it later. So only the first one tells that rows are still there.
- The session that has looked at the server and watched the slot become ready is the first holder. So a snapshot takes
  one session, and a walsender for a moment.

TRUNCATE and rewrites of tables do not follow snapshots. ``locks`` has what a reader does about that under its own lock;
the holder's locks only make it rare.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import ConnectError, PgCdcError, ServerSetupError, TransientError
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.options.declared import ConsistentPoint
from pg_cdc_source.options.session_settings import SESSION_SETTINGS
from pg_cdc_source.postgres.answers import answered_within
from pg_cdc_source.postgres.catalog import Server, read_server
from pg_cdc_source.postgres.connection import connect
from pg_cdc_source.postgres.exported_snapshots import BEGIN_READING, LockKey, announce, export_snapshot, import_snapshot
from pg_cdc_source.postgres.instances import Instance, read_instance, require_instance
from pg_cdc_source.postgres.locks import RUN_AGAIN, begin_locking, lock_relations, release_locks
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.slot_creation import (
    NewSlot,
    create_slot,
    drop_slot,
    give_up_slot,
    lacks_for_slot,
    refuse_existing_slot,
)

log = logging.getLogger(__name__)

# The two numbers of an advisory lock's key.


@dataclass(frozen=True, slots=True)
class SnapshotSpec:
    """How a snapshot is to be made; the part of the options that its maker needs. ``failover`` is the slot's.

    Making it ends with a TransientError when ``given_up`` is set.
    """

    consistent_point: ConsistentPoint
    slot: str | None
    slot_timeout_seconds: float
    failover: bool = False
    given_up: threading.Event | None = None


class Holder(NamedTuple):
    """A session that keeps a snapshot open, and the id under which it has exported it."""

    session: Session
    snapshot_id: str


@dataclass(slots=True)
class Held:
    """A snapshot of ``instance`` and the sessions that keep it open."""

    lsn: Lsn | None
    instance: Instance
    announced: Sequence[LockKey] = ()
    holders: list[Holder] = field(default_factory=list)

    @property
    def first(self) -> Holder:
        """The holder that has held it longest. Only of one that has holders."""
        return self.holders[0]

    @property
    def point(self) -> Lsn:
        """The slot's consistent point: the first LSN that the snapshot does not contain. Only of one with an LSN."""
        assert self.lsn is not None
        return Lsn(self.lsn + 1)

    def add_holder(self, options: ConnectionOptions, name_for: Callable[[str], str], snapshot_id: str) -> None:
        """Have one more session import the snapshot, export it, and announce it as ``name_for(id)``.

        ``snapshot_id`` is one under which the snapshot is exported now.
        """
        session = connect(options, name_for(""), known_to_last=True)
        try:
            require_instance(session, self.instance, "holding a snapshot")
            import_snapshot(session, snapshot_id)
            self.begin_holding(session, name_for)
        except BaseException:
            session.close()
            raise

    def begin_holding(self, session: Session, name_for: Callable[[str], str]) -> None:
        """Make a session that is in the snapshot's transaction a holder of it."""
        own_id = export_snapshot(session, of_slot=self.lsn is not None)
        announce(session, self.lsn, self.announced, name_for(own_id))
        begin_locking(session)
        self.holders.append(Holder(session, own_id))

    def lock(self, oids: Sequence[int], *, within_seconds: float) -> None:
        """Lock relations (ACCESS SHARE, with all they consist of) on every holder, as pg_dump does.

        ``oids`` are all that are to be locked from now on; see :func:`lock_relations`.
        """
        lock_relations([session for session, _ in self.holders], oids, within_seconds=within_seconds)

    def unlock(self) -> None:
        """Release all locks; the snapshot stays. A session that is lost has none left."""
        for session, _ in self.holders:
            with contextlib.suppress(TransientError):
                release_locks(session)

    def close(self) -> None:
        for session, _ in self.holders:
            session.close()
        self.holders.clear()


def make_snapshot(
    options: ConnectionOptions,
    spec: SnapshotSpec,
    name_for: Callable[[str], str],
    *,
    stream: bool = False,
    announced: Sequence[LockKey] = (),
    retry_seconds: float = 0,
    full_seconds: float = 0,
) -> Held:
    """Make a snapshot as ``spec`` says, and hold it in one plain session.

    ``name_for`` gives the application_name for a snapshot id ("" before there is one). With a consistent point the LSN
    is that point minus one, the greatest position the snapshot contains. Raises what prevents a consistent point that
    is required; with ``auto`` a plain snapshot without an LSN is made instead. ``stream`` words errors for the slot of
    a stream, which cannot do without. The holder also announces the keys ``announced``. A server that is away, or has
    no connection left, is waited for: ``retry_seconds`` and ``full_seconds`` at most.
    """
    session = connect(
        options,
        name_for(""),
        retry_seconds=retry_seconds,
        full_seconds=full_seconds,
        was_there=retry_seconds > 0,
        known_to_last=True,
    )
    try:
        with answered_within(session):
            server, instance = _read_lasting_server(session), read_instance(session)
        # What fails within the block drops a durable slot again.
        with contextlib.ExitStack() as slot:
            lsn, holder = _begin(options, spec, name_for(""), session, server, instance, slot, stream=stream)
            held = Held(lsn, instance, announced)
            held.begin_holding(holder, name_for)
            if spec.given_up is not None and spec.given_up.is_set():
                raise TransientError("making a snapshot was given up", remedy=RUN_AGAIN)
        if holder is not session:
            session.close()
        return held
    except BaseException:
        session.close()
        raise


def _read_lasting_server(session: Session) -> Server:
    """The server, which since planning may have been restarted with another setting, or be another one."""
    server = read_server(session)
    server.require_lasting_snapshots()
    return server


def _begin(
    options: ConnectionOptions,
    spec: SnapshotSpec,
    name: str,
    session: Session,
    server: Server,
    instance: Instance,
    slot: contextlib.ExitStack,
    *,
    stream: bool,
) -> tuple[Lsn | None, Session]:
    """Begin a transaction in a new snapshot; return its LSN, None for one without, and the session that is in it."""
    # On a standby a slot waits for a record that the primary writes now and then, or never: too long for ``auto``.
    # Nor is it for a read to have a server write more WAL, for everybody and for each action anew.
    auto = spec.consistent_point == "auto" and not server.in_recovery and not server.decodes_on_demand
    if spec.consistent_point == "require" or auto:
        lacks = list(lacks_for_slot(server, stream=stream, failover=spec.failover, messages=False))
        if lacks and not auto:
            raise lacks[0]
        try:
            if not lacks:
                new_slot = _at_new_slot(options, spec, name, session, server, instance, stream=stream)
                consistent_point, snapshot_id, exporter = slot.enter_context(new_slot)
                if server.in_recovery:
                    return Lsn(consistent_point - 1), exporter
                with answered_within(session):
                    import_snapshot(session, snapshot_id)
                return Lsn(consistent_point - 1), session
        except (ConnectError, ServerSetupError, TransientError) as error:
            # The role could log in, and may yet be refused for replication, which managed services grant apart.
            if not auto or (spec.given_up is not None and spec.given_up.is_set()):
                raise
            _say_once_without_lsn(error)
    with translated("opening a snapshot"), session.cursor() as cursor:
        cursor.execute(BEGIN_READING)
    return None, session


_said: set[type[PgCdcError]] = set()


def _say_once_without_lsn(error: PgCdcError) -> None:
    """Log that snapshots do without an LSN, once in this process for each kind of reason."""
    if type(error) not in _said:
        _said.add(type(error))
        log.warning(
            "snapshots have no LSN while this lasts, which is said once (consistentPoint=auto): %s\n  Remedy: %s",
            error.what,
            error.remedy,
        )


@contextmanager
def _at_new_slot(
    options: ConnectionOptions,
    spec: SnapshotSpec,
    name: str,
    watcher: Session,
    server: Server,
    instance: Instance,
    *,
    stream: bool,
) -> Iterator[tuple[Lsn, str, Session]]:
    """Create the slot; yield its consistent point, the id of its snapshot, and the session that has exported it.

    That session ends with the block, but on a standby only if it fails. Then a slot that ``spec`` names is dropped.
    """
    slot = NewSlot(
        spec.slot or f"pgsnapshot_{secrets.token_hex(8)}",
        temporary=not spec.slot,
        failover=spec.failover,
        timeout_seconds=spec.slot_timeout_seconds,
        for_stream=stream,
        given_up=spec.given_up,
    )
    if not slot.temporary:
        refuse_existing_slot(watcher, slot.name, stream=stream)
    session = connect(options, name, replication=True)
    created = False
    try:
        require_instance(session, instance, f"creating slot {slot.name}")
        with session.cursor() as cursor:
            with translated("opening a snapshot"):
                # The slot waits for one transaction after the other, and slotTimeout is what bounds that.
                cursor.execute("SET lock_timeout = 0")
                cursor.execute(BEGIN_READING)
            # Ctrl-C that comes while it waits is raised behind it.
            created = True
            try:
                consistent_point = create_slot(cursor, slot, watcher, server)
            except PgCdcError:
                created = False
                raise
            with translated("preparing a session"):
                cursor.execute("SET lock_timeout = %s", (SESSION_SETTINGS["lock_timeout"],))
            snapshot_id = export_snapshot(session, of_slot=True)
            if slot.temporary:
                with translated(f"dropping the temporary slot {slot.name}"):
                    cursor.execute(f'DROP_REPLICATION_SLOT "{slot.name}"')
        yield consistent_point, snapshot_id, session
    except BaseException:
        session.close()
        if created and not slot.temporary:
            give_up_slot(slot.name, lambda: _drop_outside(options, name, watcher, slot.name))
        raise
    if not server.in_recovery:
        session.close()


def _drop_outside(options: ConnectionOptions, name: str, session: Session, slot: str) -> None:
    """Drop a slot outside of the transaction that the session may have begun."""
    try:
        with translated("leaving a snapshot"), session.cursor() as cursor:
            cursor.execute("ROLLBACK")
        drop_slot(session, slot)
    except TransientError:
        # That it is lost may be why the slot is given up.
        with contextlib.closing(connect(options, name, retry_seconds=30, known_to_last=True)) as another:
            drop_slot(another, slot)


def open_exporter(
    options: ConnectionOptions, name: str, *, retry_seconds: float, full_seconds: float
) -> tuple[Session, Instance]:
    """A session whose transaction can export any number of snapshots, each as of then; all last as long as it does.

    That takes READ COMMITTED, in which a statement has a snapshot of its own. Such a transaction cannot import one, as
    that of a slot, so these snapshots have no LSN. Nor can it release locks (``begin_locking``), so it takes none.
    """
    session = connect(
        options,
        name,
        retry_seconds=retry_seconds,
        full_seconds=full_seconds,
        was_there=True,
        known_to_last=True,
    )
    try:
        _read_lasting_server(session)
        instance = read_instance(session)
        with translated("opening a snapshot"), session.cursor() as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY")
    except BaseException:
        session.close()
        raise
    return session, instance
