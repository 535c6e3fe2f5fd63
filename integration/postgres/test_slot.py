"""What a slot must be for a stream, and what prevents a stream from using it. Every refusal says what to do."""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psycopg2
import psycopg2.extras
import pytest
from databases import connect
from psycopg2.extensions import connection as Session
from psycopg2.extensions import make_dsn, parse_dsn
from roles import conninfo, role
from servers import second_server
from threads import at_work
from watch import slots, wait_until

from pg_cdc_source.errors import (
    ConnectError,
    DefiniteError,
    OptionError,
    PgCdcError,
    ServerSetupError,
    SlotLostError,
    TransientError,
)
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.postgres import catalog, slot_creation, snapshots
from pg_cdc_source.postgres import connection as postgres_connection
from pg_cdc_source.postgres.connection import connect as connect_source
from pg_cdc_source.postgres.exported_snapshots import announced_lsn
from pg_cdc_source.postgres.slot_checks import check_confirmed, check_slot, in_use_error, missing_error
from pg_cdc_source.postgres.slot_creation import require_consistent_point
from pg_cdc_source.postgres.slots import Slot, read_end_of_wal, read_slot, read_usages, read_user, wait_for_end_of_wal
from pg_cdc_source.postgres.snapshots import SnapshotSpec, make_snapshot


def run(pg: Session, *statements: str) -> list[tuple[Any, ...]]:
    with pg.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
        return cursor.fetchall() if cursor.description else []


def connection(url: str) -> ConnectionOptions:
    return parse_connection_options({"url": url})


def open_session(url: str) -> contextlib.closing[Session]:
    return contextlib.closing(connect_source(connection(url), "pgcdc:test"))


@pytest.fixture
def session(db: str) -> Iterator[Session]:
    """A session as the stream has it."""
    with open_session(db) as opened:
        yield opened


def test_the_end_of_the_wal_is_behind_commits_that_are_seen_and_not_yet_on_disk() -> None:
    server = second_server({"wal_writer_delay": "2s"})
    with server as url, open_session(url) as session, connect(url) as pg:
        run(pg, "CREATE TABLE t (id int PRIMARY KEY)", "SET synchronous_commit = off")
        for number in range(20):
            # The writer may just have been awake.
            run(pg, f"INSERT INTO t VALUES ({number})")
            committed = Lsn.parse(run(pg, "SELECT pg_current_wal_insert_lsn()::text")[0][0])
            if read_end_of_wal(session) < committed:
                break
        else:
            pytest.fail("all commits were on disk at once")
        assert run(session, "SELECT max(id) FROM public.t") == [(number,)]
        assert wait_for_end_of_wal(session) >= committed


@pytest.fixture
def database(db: str) -> str:
    return str(parse_dsn(db)["dbname"])


@pytest.fixture
def name(pg: Session) -> Iterator[str]:
    """A name for a slot, which is dropped afterwards where the test has made it."""
    name = f"s_{secrets.token_hex(4)}"
    yield name
    here = f"FROM pg_replication_slots WHERE slot_name = '{name}'"
    # A session that was closed lets go of its slot a little later.
    wait_until(lambda: run(pg, f"SELECT count(*) {here} AND active") == [(0,)])
    run(pg, f"SELECT pg_drop_replication_slot(slot_name) {here}")


def made(pg: Session, name: str, *arguments: str) -> Slot:
    """Make a slot, of this package's plugin where ``arguments`` say nothing else, and read it."""
    run(pg, f"SELECT pg_create_logical_replication_slot('{name}', {', '.join(arguments or (PGOUTPUT,))})")
    return found(pg, name)


PGOUTPUT = "'pgoutput'"


def found(pg: Session, name: str) -> Slot:
    slot = read_slot(pg, name)
    assert slot is not None
    return slot


def refused(kind: type[PgCdcError], action: Callable[[], object], *says: str) -> str:
    with pytest.raises(kind) as caught:
        action()
    text = str(caught.value)
    assert type(caught.value) is kind
    assert text.count("\n  Remedy: ") == 1, text
    for part in says:
        assert part in text, text
    return text


# --- facts -----------------------------------------------------------------------------------------------------------


def test_a_slot_that_is_not_there_is_none(session: Session) -> None:
    assert read_slot(session, "no_such_slot") is None


def test_a_slot_is_read_with_all_it_says(pg: Session, session: Session, name: str, database: str) -> None:
    made(pg, name)
    ((restart, confirmed),) = run(
        pg, f"SELECT restart_lsn, confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{name}'"
    )
    assert found(session, name) == Slot(
        name=name,
        plugin="pgoutput",
        slot_type="logical",
        database=database,
        active_pid=None,
        restart_lsn=Lsn.parse(restart),
        confirmed_flush=Lsn.parse(confirmed),
        wal_status="reserved",
        invalidation=None,
        temporary=False,
        two_phase=False,
        failover=False,
        synced=False,
    )


def test_a_slot_of_this_database_is_taken(pg: Session, name: str, database: str) -> None:
    check_slot(made(pg, name), database)


# --- slots of others -------------------------------------------------------------------------------------------------


def test_a_physical_slot_is_refused(pg: Session, name: str, database: str) -> None:
    run(pg, f"SELECT pg_create_physical_replication_slot('{name}', true)")
    slot = found(pg, name)
    assert (slot.plugin, slot.database, slot.confirmed_flush) == (None, None, None)
    text = refused(OptionError, lambda: check_slot(slot, database), name, "a physical slot", "another name")
    assert f"SELECT pg_drop_replication_slot('{name}')" in text


def test_a_slot_of_another_plugin_is_refused(pg: Session, name: str, database: str) -> None:
    try:
        slot = made(pg, name, "'test_decoding'")
    except psycopg2.errors.UndefinedFile:
        pytest.skip("this server comes without test_decoding")
    refused(
        OptionError, lambda: check_slot(slot, database), "the plugin test_decoding", "needs pgoutput", "another name"
    )


def test_a_slot_of_another_database_is_refused(server: str, pg: Session, name: str, database: str) -> None:
    with connect(server) as elsewhere:
        slot = made(elsewhere, name)
        other = parse_dsn(server)["dbname"]
        refused(OptionError, lambda: check_slot(slot, database), f"belongs to the database {other}", database)


def test_a_temporary_slot_is_refused(db: str, pg: Session, name: str, database: str) -> None:
    with connect(db) as owner:
        slot = made(owner, name, PGOUTPUT, "true")
        assert (slot.temporary, slot.active_pid) == (True, owner.info.backend_pid)
        refused(OptionError, lambda: check_slot(slot, database), "is temporary", "another name")


def test_a_slot_of_prepared_transactions_is_refused(pg: Session, name: str, database: str) -> None:
    if pg.server_version < 140000:
        pytest.skip("two_phase came with PostgreSQL 14")
    slot = made(pg, name, PGOUTPUT, "false", "true")
    assert slot.two_phase
    refused(OptionError, lambda: check_slot(slot, database), "two_phase", "another name")


def test_a_slot_in_the_making_is_tried_again(pg: Session, name: str, database: str) -> None:
    slot = replace(made(pg, name), confirmed_flush=None, active_pid=17)
    refused(TransientError, lambda: check_slot(slot, database), "still being created by pid 17")
    nobodys = replace(slot, active_pid=None)
    refused(TransientError, lambda: check_slot(nobodys, database), "nobody is creating it", "pg_drop_replication_slot")


# --- slots that lost something ---------------------------------------------------------------------------------------


def test_a_slot_whose_wal_was_removed_is_lost() -> None:
    with second_server({"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB"}) as url, connect(url) as pg:
        assert made(pg, "kept").invalidation is None
        run(pg, "CREATE TABLE t (id int)")
        for _ in range(4):
            run(pg, "INSERT INTO t VALUES (1)", "SELECT pg_switch_wal()")
        run(pg, "CHECKPOINT")
        slot = found(pg, "kept")
        assert (slot.wal_status, slot.invalidation) == ("lost", "wal_removed")
        text = refused(
            SlotLostError,
            lambda: check_slot(slot, "postgres"),
            "slot kept was given up by the server: wal_removed (max_slot_wal_keep_size",
            "new checkpoint",
            "startFrom=snapshot",
        )
        assert "SELECT pg_drop_replication_slot('kept')" in text
        run(pg, "SELECT pg_drop_replication_slot('kept')")


@pytest.mark.parametrize("reason", ["rows_removed", "wal_level_insufficient", "idle_timeout"])
def test_the_servers_reason_is_named(reason: str, pg: Session, name: str, database: str) -> None:
    slot = replace(made(pg, name), wal_status="lost", invalidation=reason)
    text = refused(SlotLostError, lambda: check_slot(slot, database), f"by the server: {reason};", "new checkpoint")
    assert "max_slot_wal_keep_size" not in text


def test_a_slot_past_the_checkpoint_is_lost(pg: Session, name: str) -> None:
    before = made(pg, name)
    assert before.confirmed_flush is not None
    end = before.confirmed_flush
    check_confirmed(before, end)
    check_confirmed(before, Lsn(end + 1))
    run(pg, "CREATE TABLE t (id int)", f"SELECT pg_replication_slot_advance('{name}', pg_current_wal_lsn())")
    after = found(pg, name)
    assert after.confirmed_flush is not None
    assert after.confirmed_flush > end
    refused(
        SlotLostError,
        lambda: check_confirmed(after, end),
        f"stands at {after.confirmed_flush}, past the end of the checkpoint at {end}",
        f"SELECT pg_drop_replication_slot('{name}')",
        "new checkpoint",
    )
    check_confirmed(after, after.confirmed_flush)


def test_a_missing_slot_is_lost_only_where_a_stream_had_begun() -> None:
    lost, never = missing_error("s", begun=True), missing_error("s", begun=False)
    assert isinstance(lost, SlotLostError)
    assert "does not exist any more" in str(lost)
    assert "new checkpoint" in str(lost)
    assert isinstance(never, OptionError)
    assert "startFrom=snapshot or startFrom=now" in str(never)


# --- who uses it -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reader(url: str, slot: str) -> Iterator[int]:
    """Read a slot as another stream would; yields the pid of its walsender."""
    factory = psycopg2.extras.LogicalReplicationConnection
    session = psycopg2.connect(make_dsn(url, application_name="rival"), connection_factory=factory)
    try:
        with session.cursor() as cursor:
            options = {"proto_version": "1", "publication_names": "p"}
            cursor.start_replication(slot_name=slot, decode=False, options=options)
            yield session.info.backend_pid
    finally:
        session.close()


def test_who_uses_a_slot_is_named(db: str, pg: Session, session: Session, name: str) -> None:
    made(pg, name)
    run(pg, "CREATE PUBLICATION p FOR ALL TABLES")
    with reader(db, name) as pid:
        slot = found(session, name)
        assert slot.active_pid == pid
        text = str(in_use_error(session, slot))
        assert f"in use by pid {pid} (application_name 'rival', from 127.0.0.1" in text
        assert re.search(r", connected for \d s\)", text)
        assert "\n  Remedy: " in text
        assert f"SELECT pg_terminate_backend({pid})" in text
        run(pg, text.rpartition("by ")[2])
        with role(pg, db) as login, open_session(conninfo(login)) as other:
            # The server may already have ended it, as the remedy says.
            again = str(in_use_error(other, slot))
            assert str(pid) in again


def test_a_role_that_may_not_see_the_session_is_told_its_pid(db: str, pg: Session, name: str) -> None:
    made(pg, name)
    run(pg, "CREATE PUBLICATION p FOR ALL TABLES")
    with reader(db, name) as pid, role(pg, db) as login, open_session(conninfo(login)) as other:
        text = str(in_use_error(other, found(other, name)))
        assert f"in use by pid {pid} (application_name 'rival')" in text


def test_a_slot_that_somebody_reads_is_not_to_be_dropped(
    db: str, pg: Session, session: Session, name: str, database: str
) -> None:
    before = made(pg, name)
    assert before.confirmed_flush is not None
    run(pg, "CREATE PUBLICATION p FOR ALL TABLES", "CREATE TABLE t (id int)")
    run(pg, f"SELECT pg_replication_slot_advance('{name}', pg_current_wal_lsn())")
    end = before.confirmed_flush
    with reader(db, name) as pid:
        user = read_user(session, name)
        assert user is not None
        slot = found(session, name)
        texts = [
            refused(SlotLostError, lambda: check_confirmed(slot, end, user), f"in use by pid {pid}", "its reader"),
            refused(DefiniteError, lambda: make(db, name), f"in use by pid {pid} (application_name 'rival'"),
            refused(OptionError, lambda: check_slot(slot, f"not_{database}"), f"pid {pid} uses this one"),
        ]
    assert [text for text in texts if "drop" in text] == []


def test_a_slot_that_was_let_go_meanwhile_is_tried_again(pg: Session, session: Session, name: str) -> None:
    error = in_use_error(session, replace(made(pg, name), active_pid=17))
    assert "was in use by pid 17 a moment ago" in str(error)
    assert type(error) is TransientError


# --- making one for a stream -----------------------------------------------------------------------------------------


def make(url: str, slot: str, timeout_seconds: float = 10) -> Lsn | None:
    """Make a stream's slot and let go of its snapshot."""
    spec = SnapshotSpec("require", slot, timeout_seconds)
    held = make_snapshot(connection(url), spec, lambda snapshot_id: f"pgcdc:{snapshot_id}", stream=True)
    held.close()
    return held.lsn


def fits_a_stream(text: str) -> None:
    """Nothing in it is about what only a snapshot can do without."""
    assert "consistentPoint" not in text
    assert "DataFrame" not in text


def test_the_slot_of_a_stream_is_made_where_its_snapshot_ends(db: str, pg: Session, name: str, database: str) -> None:
    lsn = make(db, name)
    assert lsn is not None
    slot = found(pg, name)
    assert slot.confirmed_flush == lsn + 1
    check_slot(slot, database)


def test_a_slot_that_exists_is_not_made_again(db: str, pg: Session, name: str) -> None:
    made(pg, name)
    fits_a_stream(refused(DefiniteError, lambda: make(db, name), f"slot {name} exists already", "startFrom=slot"))


def test_a_role_that_sees_little_is_told_whom_a_new_slot_waits_for(db: str, pg: Session, name: str) -> None:
    run(pg, "CREATE TABLE t (id int)")
    with connect(db) as writer, role(pg, db, "REPLICATION") as login:
        run(writer, "BEGIN; INSERT INTO t VALUES (1)")
        pid = writer.info.backend_pid
        refused(TransientError, lambda: make(conninfo(login), name, 0.5), f"that has written: pid {pid}", "slotTimeout")


def test_the_log_says_what_a_new_slot_waits_for(
    db: str, pg: Session, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slot_creation, "SAY_SECONDS", 0.3)
    run(pg, "CREATE TABLE t (id int)")

    def create(stop: threading.Event) -> None:
        make(db, name, 60)

    with connect(db) as writer:
        run(writer, "BEGIN; INSERT INTO t VALUES (1)")
        expected = f"it waits for every running transaction that has written: pid {writer.info.backend_pid} for "
        with at_work(create):
            wait_until(lambda: caplog.text.count(f"slot {name} has waited ") == 2)
            assert caplog.text.count(expected) == 2
            run(writer, "COMMIT")


def test_what_a_new_slot_waits_for_is_named(db: str, pg: Session, name: str) -> None:
    run(pg, "CREATE TABLE t (id int)")
    with connect(db) as writer:
        run(writer, "BEGIN; INSERT INTO t VALUES (1)")
        pid = writer.info.backend_pid
        text = refused(TransientError, lambda: make(db, name, 0.5), "within 0.5 s", f"pid {pid} for ", "slotTimeout")
        fits_a_stream(text)
    assert slots(pg) == []


def test_a_server_without_a_free_slot_is_refused(db: str, pg: Session, name: str) -> None:
    free = "current_setting('max_replication_slots')::int - (SELECT count(*)::int FROM pg_replication_slots)"
    run(pg, f"SELECT pg_create_physical_replication_slot('{name}_' || i) FROM generate_series(1, {free}) AS i")
    try:
        fits_a_stream(
            refused(ServerSetupError, lambda: make(db, name), "slots are in use", "raise max_replication_slots")
        )
    finally:
        run(pg, f"SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name ~ '^{name}_'")


def test_a_server_without_a_free_walsender_is_refused() -> None:
    with second_server({"max_wal_senders": "1"}) as url, connect(url) as pg:
        run(pg, "CREATE PUBLICATION p FOR ALL TABLES")
        made(pg, "taken")
        with reader(url, "taken"):
            refused(ServerSetupError, lambda: make(url, "s"), "max_wal_senders", "raise max_wal_senders", "walsenders")
        assert read_slot(pg, "s") is None


@pytest.mark.parametrize(
    "refusal",
    [
        # RDS without rds.iam_auth_for_replication refuses tokens of IAM so.
        'FATAL:  PAM authentication failed for user "reader"',
        'FATAL:  no pg_hba.conf entry for replication connection from host "10.0.0.9", user "reader", SSL encryption',
    ],
)
def test_a_role_whose_replication_logins_are_refused_gets_a_snapshot_without_lsn(
    db: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refusal: str
) -> None:
    let_in = psycopg2.connect

    def log_in(*arguments: Any, **keywords: Any) -> Session:
        if keywords.get("connection_factory") is psycopg2.extras.LogicalReplicationConnection:
            raise psycopg2.OperationalError(f'connection to server at "db" (10.0.0.1), port 5432 failed: {refusal}\n')
        return let_in(*arguments, **keywords)

    monkeypatch.setattr(psycopg2, "connect", log_in)
    snapshots._said.clear()
    held = make_snapshot(connection(db), SnapshotSpec("auto", None, 10), lambda _: "pgcdc:test")
    held.close()
    assert held.lsn is None
    [message] = caplog.messages
    assert refusal.split("  ")[1] in message
    refused(ConnectError, lambda: make(db, name), "check user, password")


def test_a_role_without_replication_is_refused(db: str, pg: Session, name: str) -> None:
    with role(pg, db) as login:
        user = login["user"]
        text = refused(
            ServerSetupError,
            lambda: make(conninfo(login), name),
            f"role {user} lacks",
            f"ALTER ROLE {user} REPLICATION",
        )
        fits_a_stream(text)
        with open_session(conninfo(login)) as session:
            server = catalog.read_server(session)
        refused(ServerSetupError, lambda: require_consistent_point(server), "consistentPoint=off")
        # The server's own word, where somebody comes without the check.
        refused(
            ServerSetupError,
            lambda: connect_source(connection(conninfo(login)), "pgcdc:test", replication=True),
            f"ALTER ROLE {user} REPLICATION",
        )
        run(pg, f"ALTER ROLE {user} REPLICATION")
        assert make(conninfo(login), name) is not None


def test_a_new_slot_waits_for_one_transaction_longer_than_others_wait_for_a_lock(
    db: str, pg: Session, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(postgres_connection._SETTINGS, "lock_timeout", "200ms")
    run(pg, "CREATE TABLE t (id int)")
    waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query_start < now() - interval '1 s'"
    with connect(db) as writer, ThreadPoolExecutor(1) as pool:
        run(writer, "BEGIN; INSERT INTO t VALUES (1)")
        making = pool.submit(make, db, name)
        wait_until(lambda: making.done() or run(pg, waits))
        run(writer, "COMMIT")
        assert making.result() is not None


def test_sessions_that_are_only_called_like_ours_do_not_count(db: str, pg: Session) -> None:
    """Whoever may connect to the server may call a session as they like."""
    run(pg, "SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    try:
        named = make_dsn(db, dbname="postgres", application_name="pgcdc:s:snapshot")
        with connect(named), open_session(db) as session:
            assert read_user(session, "s", with_snapshot=True) is None
            [usage] = [usage for usage in read_usages(session) if usage.slot.name == "s"]
            assert usage.running is None
        with connect(make_dsn(db, application_name="pgcdc:s:snapshot")), open_session(db) as session:
            assert read_user(session, "s", with_snapshot=True) is not None
            [usage] = [usage for usage in read_usages(session) if usage.slot.name == "s"]
            assert usage.running == "pgcdc"
    finally:
        run(pg, "SELECT pg_drop_replication_slot('s')")


def test_an_lsn_is_only_that_of_a_session_of_the_same_role(db: str, pg: Session) -> None:
    with role(pg, db) as other, connect(conninfo(other)) as namesake, open_session(db) as session:
        run(namesake, "SELECT pg_advisory_lock_shared(4660)", "SET application_name = 'pgsnapshot:evil:00000003-1'")
        assert announced_lsn(session, "00000003-1") is None
        run(pg, "SELECT pg_advisory_lock_shared(291)", "SET application_name = 'pgsnapshot:k:1:00000003-1'")
        assert announced_lsn(session, "00000003-1") == Lsn(291)
        run(pg, "SELECT pg_advisory_unlock_all()", "RESET application_name")
