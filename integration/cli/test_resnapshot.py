"""``pg-cdc resnapshot`` writes one message, which the stream of that slot sees; everything else is refused before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from driving import Drive, driving, kinds, run, values
from psycopg2.extensions import connection as Session
from psycopg2.extensions import parse_dsn
from servers import second_server
from standby import standby_of
from typer.testing import CliRunner, Result

from pg_cdc_source.cli.app import app
from pg_cdc_source.errors import ServerSetupError
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.protocol.decoding_messages import Asked, read_request
from pg_cdc_source.protocol.pgoutput import Message, read

SLOT = "shop"


@pytest.fixture
def shop(pg: Session) -> Iterator[None]:
    run(
        pg,
        'CREATE TABLE orders (id int PRIMARY KEY); CREATE TABLE "Other table" (id int PRIMARY KEY);'
        " CREATE TABLE unpublished (id int)",
        f'CREATE PUBLICATION {SLOT} FOR TABLE orders, "Other table"',
        f"SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput')",
    )
    yield
    run(pg, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()")


@pytest.fixture
def drive(pg: Session, db: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    with driving(pg, db, monkeypatch) as drive:
        yield drive


def resnapshot(url: str, *arguments: str) -> Result:
    # In this process, because there are many and each would import everything again.
    result = CliRunner().invoke(app, ["resnapshot", url, *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert parse_dsn(url)["password"] not in result.output
    return result


def messages(pg: Session) -> list[Message]:
    """The messages that the slot has."""
    rows = run(
        pg,
        f"SELECT data FROM pg_logical_slot_peek_binary_changes('{SLOT}', NULL, NULL,"
        f" 'proto_version', '1', 'publication_names', '{SLOT}', 'messages', 'true')",
    )
    return [read(bytes(data)) for (data,) in rows if bytes(data)[:1] == b"M"]


def require_messages(pg: Session) -> None:
    if pg.server_version < 140000:
        pytest.skip("pgoutput sends messages from PostgreSQL 14 on")


@pytest.mark.corner
@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize(
    ("arguments", "tables"),
    [
        (("--table", "orders", "--table", 'public."Other table"'), ("public.orders", 'public."Other table"')),
        (("--table", "orders", "--table", "public.orders"), ("public.orders",)),
        (("--all",), ("*",)),
        (("--all", "--publication", SLOT), ("*",)),
    ],
)
def test_the_message_asks_the_streams_slot_for_the_tables(
    pg: Session, db: str, arguments: tuple[str, ...], tables: tuple[str, ...]
) -> None:
    require_messages(pg)
    result = resnapshot(db, "--slot", SLOT, *arguments, "--json")
    assert result.exit_code == 0, result.output
    (message,) = messages(pg)
    assert (message.prefix, message.transactional) == ("pgcdc", True)
    assert read_request(message.content) == Asked(tables, SLOT)
    told: dict[str, Any] = json.loads(result.stdout)
    asked = {"slot": SLOT, "publication": SLOT, "tables": list(tables), "lsn": str(message.lsn)}
    assert told == {**asked, "active_pid": None}
    ((flushed,),) = run(pg, "SELECT pg_current_wal_flush_lsn()::text")
    assert Lsn.parse(flushed) > message.lsn, "it is safe on disk, and so is its commit"
    text = resnapshot(db, "--slot", SLOT, *arguments).stdout
    assert text.startswith("asked at ")
    assert "No query reads the slot now: the request waits until one does." in text


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize(
    ("arguments", "said", "remedy"),
    [
        (("--slot", "none", "--all"), "slot none does not exist", "pg-cdc slots"),
        (("--slot", "test", "--all"), "decodes with the plugin test_decoding", "Remedy: name the stream's slot"),
        (("--slot", SLOT, "--all", "--publication", "missing"), "publication missing does not exist", "--publication"),
        (("--slot", SLOT, "--table", "nowhere"), "nowhere does not exist in database", "Remedy: "),
        (("--slot", SLOT, "--table", "unpublished"), "shop does not have public.unpublished", "tables of the stream"),
        (("--slot", SLOT, "--table", "public.*"), "--table 'public.*': ", "Remedy: "),
        (("--slot", SLOT, "--table", ""), "--table '': it is empty", "Remedy: "),
    ],
)
def test_what_cannot_be_done_is_refused_and_nothing_is_written(
    pg: Session, db: str, arguments: tuple[str, ...], said: str, remedy: str
) -> None:
    require_messages(pg)
    run(pg, "SELECT pg_create_logical_replication_slot('test', 'test_decoding')")
    result = resnapshot(db, *arguments)
    assert result.exit_code == 1
    assert said in result.stderr
    assert remedy in result.stderr
    assert messages(pg) == []


@pytest.mark.matrix("rows again on demand, messages", since="PostgreSQL 14")
def test_the_stream_that_is_asked_reads_the_table_again(pg: Session, db: str, drive: Drive) -> None:
    run(pg, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)", "CREATE PUBLICATION s FOR TABLE t")
    driver = drive(tables="public.*", messagePrefixes="outbox")
    if pg.server_version < 140000:
        driver.refusal("logical decoding messages from PostgreSQL 14 on", kind=ServerSetupError)
        del driver.options["messagePrefixes"]
        driver.restart()
        driver.take(1)
        result = resnapshot(db, "--slot", "s", "--table", "t")
        assert (result.exit_code, "from PostgreSQL 14 on" in result.stderr) == (1, True)
        return
    driver.take(1)
    assert resnapshot(db, "--slot", "s", "--table", "t").exit_code == 0
    assert sorted(kinds(driver.take(2))) == ["snapshot", "truncate"]
    run(pg, "SELECT pg_logical_emit_message(true, 'outbox', 'sent')")
    assert values(driver.take(1), "_change_type", "after") == [("message", '"sent"')]


@pytest.mark.parametrize("arguments", [(), ("--all", "--table", "orders")])
def test_it_is_either_tables_or_all_of_them(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["resnapshot", "postgresql://h/x", "--slot", SLOT, *arguments])
    assert result.exit_code == 2
    assert "--all" in result.output


@pytest.mark.usefixtures("shop")
def test_before_14_it_is_refused(pg: Session, db: str) -> None:
    if pg.server_version >= 140000:
        pytest.skip("pgoutput sends messages from PostgreSQL 14 on")
    result = resnapshot(db, "--slot", SLOT, "--all")
    assert result.exit_code == 1
    assert "from PostgreSQL 14 on" in result.stderr


def test_a_standby_is_refused(pg: Session) -> None:
    require_messages(pg)
    with second_server({}) as url, standby_of(url, {}) as standby:
        result = resnapshot(standby.url, "--slot", SLOT, "--all")
    assert result.exit_code == 1
    assert "this server is a standby" in result.stderr
    assert "connect to the primary" in result.stderr
