"""``open_snapshot``: several reads and several actions at one point; and the options that make one for an action."""

from __future__ import annotations

import contextlib
import re
import secrets
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import psycopg2
import pytest
from databases import connect
from frames import load
from psycopg2.extensions import connection as Session
from psycopg2.extensions import make_dsn, parse_dsn
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from watch import open_transactions, session_names, slots, wait_until

from pg_cdc_source import DefiniteError, Lsn, open_snapshot
from pg_cdc_source.errors import OptionError, SchemaChangedError, ServerSetupError, SnapshotLostError
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.postgres.connection import connect as connect_ours
from pg_cdc_source.postgres.exported_snapshots import import_snapshot
from pg_cdc_source.postgres.snapshots import Held


@pytest.fixture
def orders(pg: Session) -> str:
    """A table of 1,000 rows that further rows can be inserted into."""
    with pg.cursor() as cursor:
        cursor.execute("CREATE TABLE orders (id int GENERATED ALWAYS AS IDENTITY, item text NOT NULL DEFAULT 'tea')")
    insert(pg, 1000)
    return "orders"


def insert(pg: Session, rows: int) -> None:
    with pg.cursor() as cursor:
        cursor.execute("INSERT INTO orders (item) SELECT 'tea' FROM generate_series(1, %s)", (rows,))


def current_lsn(pg: Session) -> int:
    with pg.cursor() as cursor:
        cursor.execute("SELECT pg_current_wal_insert_lsn()")
        return int(Lsn.parse(cursor.fetchone()[0]))


@pytest.fixture
def slot(pg: Session) -> Iterator[str]:
    """Name of a slot that the test makes, and that is dropped afterwards."""
    name = f"s_{secrets.token_hex(4)}"
    yield name
    with pg.cursor() as cursor:
        cursor.execute("SELECT pg_drop_replication_slot(%s)", (name,))


@pytest.fixture
def plain_role(server: str, db: str, pg: Session) -> Iterator[str]:
    """Conninfo of a role that may read everything and not replicate."""
    name = f"plain_{secrets.token_hex(4)}"
    with pg.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'plain'; GRANT pg_read_all_data TO {name}")
        yield make_dsn(**{**parse_dsn(db), "user": name, "password": "plain"})
        cursor.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", (name,))
        cursor.execute(f"DROP ROLE {name}")


# --- open_snapshot ---------------------------------------------------------------------------------------------------


@pytest.mark.matrix("several actions under one snapshot, and a slot at its end")
def test_several_reads_and_actions_see_one_point(db: str, pg: Session, spark: SparkSession, orders: str) -> None:
    before = current_lsn(pg)
    with open_snapshot(db) as snapshot:
        insert(pg, 10)
        one = load(spark, None, dbtable=orders, lsnColumn="lsn", numPartitions=2, **snapshot.options)
        assert one.count() == 1000
        insert(pg, 10)
        assert one.count() == 1000
        other = load(spark, None, query="SELECT id FROM orders", lsnColumn="lsn", **snapshot.options)
        both = one.select("id", "lsn").union(other).collect()
        assert len(both) == 2000
        assert {row.lsn for row in both} == {snapshot.lsn}
        # The greatest position that the snapshot contains lies between the two writes.
        assert snapshot.lsn is not None
        assert before <= snapshot.lsn + 1 <= current_lsn(pg)
    assert load(spark, db, dbtable=orders).count() == 1020
    # The sessions of the action just run belong to the keeper; none is open_snapshot's.
    wait_until(lambda: not session_names(pg, "pgsnapshot:%:open:%"))


def test_a_snapshot_ends_with_its_block(db: str, pg: Session, spark: SparkSession, orders: str) -> None:
    with open_snapshot(db) as snapshot:
        frame = load(spark, None, dbtable=orders, **snapshot.options)
        assert frame.count() == 1000
    assert wait_until(lambda: not open_transactions(pg))
    with pytest.raises(PySparkException, match=r"snapshot [0-9A-F-]+ has ended"):
        frame.count()


def test_no_slot_is_left_without_the_option(db: str, pg: Session, orders: str) -> None:
    with open_snapshot(db, tables=[orders]) as snapshot:
        assert snapshot.lsn is not None
        assert slots(pg) == []
    assert slots(pg) == []


def test_no_slot_is_left_where_a_table_was_emptied_meanwhile(
    db: str, pg: Session, orders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = Held.lock

    def late(self: Held, oids: Sequence[int], *, within_seconds: float) -> None:
        assert slots(pg) != []
        with pg.cursor() as cursor:
            cursor.execute("TRUNCATE orders")
        lock(self, oids, within_seconds=within_seconds)

    monkeypatch.setattr(Held, "lock", late)
    with pytest.raises(SchemaChangedError), open_snapshot(db, tables=[orders], slot="kept"):
        pass
    assert slots(pg) == []


def test_no_slot_is_left_where_ctrl_c_comes_while_it_is_made(db: str, pg: Session, orders: str) -> None:
    """The interrupt is raised once the server has answered, when the slot is there."""
    main = threading.get_ident()

    def interrupt(writer: Session) -> None:
        wait_until(lambda: slots(pg) != [])
        signal.pthread_kill(main, signal.SIGINT)
        writer.commit()

    with connect(db) as writer, ThreadPoolExecutor(1) as pool:
        writer.autocommit = False
        with writer.cursor() as cursor:
            cursor.execute("SELECT pg_current_xact_id()")
        interrupted = pool.submit(interrupt, writer)
        with pytest.raises(KeyboardInterrupt), open_snapshot(db, tables=[orders], slot="kept"):
            pass
        interrupted.result()
    assert slots(pg) == []


def slot_facts(pg: Session, slot: str) -> tuple[int, bool, str, bool]:
    """(confirmed_flush_lsn, active, plugin, temporary) of a slot."""
    with pg.cursor() as cursor:
        cursor.execute(
            "SELECT confirmed_flush_lsn, active, plugin, temporary FROM pg_replication_slots WHERE slot_name = %s",
            (slot,),
        )
        lsn, active, plugin, temporary = cursor.fetchone()
        return int(Lsn.parse(lsn)), active, plugin, temporary


@pytest.mark.matrix("several actions under one snapshot, and a slot at its end")
def test_a_slot_starts_where_the_snapshot_ends(
    db: str, pg: Session, spark: SparkSession, orders: str, slot: str
) -> None:
    with pg.cursor() as cursor:
        cursor.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    with open_snapshot(db, slot=slot) as snapshot:
        assert snapshot.lsn is not None
        assert slot_facts(pg, slot) == (snapshot.lsn + 1, False, "pgoutput", False)
        insert(pg, 10)
        frame = load(spark, None, dbtable=orders, lsnColumn="lsn", **snapshot.options)
        assert {(row.id, row.lsn) for row in frame.collect()} == {(i, snapshot.lsn) for i in range(1, 1001)}
    assert slot_facts(pg, slot) == (snapshot.lsn + 1, False, "pgoutput", False)
    with pg.cursor() as cursor:
        # Messages of pgoutput that begin with I are inserted rows: the ten that the snapshot does not have.
        cursor.execute(
            "SELECT count(*) FROM pg_logical_slot_get_binary_changes("
            " %s, NULL, NULL, 'proto_version', '1', 'publication_names', 'everything') WHERE get_byte(data, 0) = %s",
            (slot, ord("I")),
        )
        assert cursor.fetchone() == (10,)


def test_a_slot_that_exists_is_refused(db: str, pg: Session, orders: str, slot: str) -> None:
    with pg.cursor() as cursor:
        cursor.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
    found = slot_facts(pg, slot)
    with pytest.raises(DefiniteError, match=f"slot {slot} exists already") as error, open_snapshot(db, slot=slot):
        pass
    assert f"pg_drop_replication_slot('{slot}')" in str(error.value)
    assert slot_facts(pg, slot) == found
    assert open_transactions(pg) == []


def test_truncate_waits_for_the_tables_of_an_open_snapshot(
    db: str, pg: Session, spark: SparkSession, orders: str
) -> None:
    with pg.cursor() as cursor:
        cursor.execute("CREATE TABLE unlocked (i int)")
    truncated = threading.Event()

    def truncate() -> None:
        with connect(db) as session, session.cursor() as cursor:
            cursor.execute("SET application_name = 'truncate'; TRUNCATE orders")
            truncated.set()

    thread = threading.Thread(target=truncate)
    with open_snapshot(db, tables=["public.orders"]):
        with pg.cursor() as cursor:
            cursor.execute("SET lock_timeout = '1s'; TRUNCATE unlocked")
        thread.start()
        wait_until(
            lambda: session_names(pg, "truncate", "wait_event_type = 'Lock' AND cardinality(pg_blocking_pids(pid)) = 1")
        )
        assert not truncated.is_set()
    thread.join(60)
    assert truncated.is_set()
    assert load(spark, db, dbtable=orders).count() == 0


def test_a_table_truncated_under_an_open_snapshot_is_an_error(
    db: str, pg: Session, spark: SparkSession, orders: str
) -> None:
    with open_snapshot(db) as snapshot:  # without tables, so that nothing is locked
        frame = load(spark, None, dbtable=orders, **snapshot.options)
        with pg.cursor() as cursor:
            cursor.execute("TRUNCATE orders")
        with pytest.raises(PySparkException, match="orders was truncated or rewritten after the snapshot was taken"):
            frame.count()


def test_a_missing_table_is_named(db: str, pg: Session, orders: str) -> None:
    with pytest.raises(DefiniteError, match=r"did you mean public\.orders"), open_snapshot(db, tables=["public.order"]):
        pass
    assert open_transactions(pg) == []


def test_a_snapshot_without_a_consistent_point_has_no_lsn(
    db: str, pg: Session, spark: SparkSession, orders: str
) -> None:
    with open_snapshot(db, consistentPoint="off") as snapshot:
        assert snapshot.lsn is None
        insert(pg, 10)
        frame = load(spark, None, dbtable=orders, lsnColumn="lsn", **snapshot.options)
        assert {row.lsn for row in frame.collect()} == {None}
        assert frame.count() == 1000


def test_a_snapshot_that_psycopg2_exported_can_be_read(db: str, pg: Session, spark: SparkSession, orders: str) -> None:
    session = psycopg2.connect(db)
    try:
        session.set_session(isolation_level="REPEATABLE READ")
        with session.cursor() as cursor:
            cursor.execute("SELECT pg_export_snapshot()")
            (snapshot,) = cursor.fetchone()
        insert(pg, 10)
        frame = load(spark, db, dbtable=orders, snapshot=snapshot, lsnColumn="lsn")
        assert frame.count() == 1000
        assert frame.distinct().where("lsn IS NULL").count() == 1000
    finally:
        session.close()


def test_the_options_of_a_snapshot_hide_the_password(db: str) -> None:
    with open_snapshot(db) as snapshot:
        assert parse_dsn(db)["password"] not in repr(snapshot)


# --- options of one action -------------------------------------------------------------------------------------------


def test_the_slot_option_leaves_a_slot_at_the_point_of_its_action(
    db: str, pg: Session, spark: SparkSession, orders: str, slot: str
) -> None:
    frame = load(spark, db, dbtable=orders, slot=slot, lsnColumn="lsn", numPartitions=2)
    assert slots(pg) == []
    rows = frame.collect()
    assert len(rows) == 1000
    (lsn,) = {row.lsn for row in rows}
    assert slot_facts(pg, slot) == (lsn + 1, False, "pgoutput", False)
    # A second action would be another snapshot, where this slot does not start.
    with pytest.raises(PySparkException, match=f"slot {slot} exists already"):
        frame.collect()
    assert slot_facts(pg, slot) == (lsn + 1, False, "pgoutput", False)


def test_an_action_without_a_consistent_point_has_no_lsn(db: str, spark: SparkSession, orders: str) -> None:
    frame = load(spark, db, dbtable=orders, consistentPoint="off", lsnColumn="lsn")
    assert {row.lsn for row in frame.collect()} == {None}


def test_auto_does_without_a_consistent_point_where_the_role_may_not_replicate(
    plain_role: str, spark: SparkSession, orders: str
) -> None:
    frame = load(spark, plain_role, dbtable=orders, lsnColumn="lsn")
    rows = frame.collect()
    assert len(rows) == 1000
    assert {row.lsn for row in rows} == {None}


def test_require_names_what_the_role_lacks(plain_role: str, spark: SparkSession, orders: str) -> None:
    role = parse_dsn(plain_role)["user"]
    with pytest.raises(PySparkException) as refused:
        load(spark, plain_role, dbtable=orders, consistentPoint="require").collect()
    assert f"which role {role} lacks" in str(refused.value)
    assert f"Remedy: ALTER ROLE {role} REPLICATION" in str(refused.value)
    with pytest.raises(ServerSetupError, match=rf"ALTER ROLE {role} REPLICATION"), open_snapshot(plain_role, slot="x"):
        pass


def test_a_slot_with_nothing_to_make_it_is_refused(db: str) -> None:
    with pytest.raises(OptionError, match=re.escape("slot contradicts consistentPoint=off")):  # noqa: SIM117
        with open_snapshot(db, slot="x", consistentPoint="off"):
            pass


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ({"snapshot": "00000003-0000001B-1"}, "this makes a snapshot"),
        ({"snapshotIdle": "3s"}, "as long as the block"),
        ({"dbtable": "t"}, "give it to the reads"),
        ({"query": "SELECT 1"}, "give it to the reads"),
    ],
)
def test_what_an_open_snapshot_has_no_use_for_is_refused(option: dict[str, str], remedy: str, db: str) -> None:
    with pytest.raises(OptionError, match=f"the option {next(iter(option))} is not known here.*\\n.*{remedy}"):  # noqa: SIM117
        with open_snapshot(db, **option):
            pass


def test_options_of_an_open_snapshot_are_passed_to_its_reads_as_texts(db: str) -> None:
    at = parse_dsn(db)
    login = {"host": at["host"], "port": int(at["port"]), "database": at["dbname"]}
    with open_snapshot(**login, user=at["user"], password=at["password"], columns=["id", "n"], url=None) as snapshot:
        assert (snapshot.options["port"], snapshot.options["columns"]) == (at["port"], "id,n")
        assert "url" not in snapshot.options


def test_a_reader_whose_snapshot_has_ended_goes_on_to_another(db: str) -> None:
    """A task that finds two holders imports from the second where the first was lost in the meantime."""
    ours = connect_ours(parse_connection_options({"url": db}), "pgsnapshot:test")
    with open_snapshot(db) as held, contextlib.closing(ours) as session:
        with pytest.raises(SnapshotLostError):
            import_snapshot(session, "00000003-00000001-1")
        import_snapshot(session, held.options["snapshot"])
        with session.cursor() as cursor:
            cursor.execute("SELECT 1")
