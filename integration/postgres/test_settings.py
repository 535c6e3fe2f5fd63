"""Encodings, collations, and settings of role and database do not change the rows of snapshot and stream.

A stream's first batch reads its table as ``pgsnapshot`` does, so that one stream shows both.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from databases import connect, end_sessions
from driving import Driver, driving, run, values
from psycopg2 import sql
from psycopg2.extensions import connection as Session
from psycopg2.extensions import make_dsn, parse_dsn
from roles import SETTINGS_OF_ROLES, TELLING_COLUMNS, conninfo, role

from pg_cdc_source.errors import AccessError, DefiniteError, QueryError, TransientError, UnrepresentableError
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.postgres import connection, search_path
from pg_cdc_source.postgres.connection import connect as opened
from pg_cdc_source.snapshot.reader import read_range
from pg_cdc_source.snapshot.scan import make_plan
from pg_cdc_source.snapshot.source import plan_ranges
from pg_cdc_source.spark.open_snapshot import open_snapshot
from pg_cdc_source.stream import next_offset

Drive = Callable[..., Driver]
RANGES = 140000  # the version that brought what reads a table by ctid
Drives = Callable[[str], tuple[Drive, Session]]


@contextlib.contextmanager
def database(server: str, how: str) -> Iterator[tuple[str, Session]]:
    """Create a database; yields its URL and a session there."""
    name = f"pg_cdc_test_{secrets.token_hex(4)}"
    url = make_dsn(**{**parse_dsn(server), "dbname": name})
    with connect(server) as session, session.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name} TEMPLATE template0 {how}")
        try:
            with connect(url) as pg:
                pg.set_client_encoding("UTF8")
                yield url, pg
        finally:
            end_sessions(cursor, name)
            cursor.execute(f"DROP DATABASE {name}")


@pytest.fixture
def drive_in(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drives]:
    """``drive_in("ENCODING …")`` makes a database; what starts streams there, and a session."""
    with contextlib.ExitStack() as stack:

        def make(how: str) -> tuple[Drive, Session]:
            url, pg = stack.enter_context(database(server, how))
            return stack.enter_context(driving(pg, url, monkeypatch)), pg

        yield make


def texts(driver: Driver, pg: Session, table: str, columns: Sequence[str]) -> None:
    """Expect the same values from the snapshot, from inserts, and from PostgreSQL."""
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    with pg.cursor() as cursor:
        cursor.execute(sql.SQL("SELECT {} FROM {} ORDER BY id").format(names, sql.Identifier(table)))
        expected = cursor.fetchall()
        assert sorted(values(driver.take(len(expected)), *columns)) == sorted(expected)
        copy = "INSERT INTO {0} SELECT id + 1000, {1} FROM {0}"
        rest = sql.SQL(", ").join(map(sql.Identifier, columns[1:]))
        cursor.execute(sql.SQL(copy).format(sql.Identifier(table), rest))
    rows = values(driver.take(len(expected)), *columns)
    assert sorted((id_ - 1000, *others) for id_, *others in rows) == sorted(expected)


# --- encodings -------------------------------------------------------------------------------------------------------


@pytest.mark.matrix("settings of role and database, encodings")
@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII", "UTF8", "EUC_JP"])
def test_values_and_names_of_any_encoding_arrive_as_utf_8(encoding: str, drive_in: Drives) -> None:
    drive, pg = drive_in(f"ENCODING '{encoding}' LOCALE 'C'")
    characters = {
        "LATIN1": "".join(map(chr, (*range(1, 128), *range(160, 256)))),
        "EUC_JP": "日本語ｶﾅ" + "".join(map(chr, range(1, 128))),
    }.get(encoding, "größe €𝄞日本" + "".join(map(chr, range(1, 128))))
    # Names and values out of these characters alone.
    word = characters[-3:] if encoding != "EUC_JP" else "日本語"
    table, column, label = f"t {word}", f"c {word}", f"l {word}"
    names = {
        "t": sql.Identifier(table),
        "c": sql.Identifier(column),
        "l": sql.Literal(label),
        "p": sql.Identifier(word),
    }
    with pg.cursor() as cursor:
        cursor.execute(
            sql.SQL(
                "CREATE TYPE {p} AS ENUM ({l});"
                " CREATE TABLE {t} (id int PRIMARY KEY, {c} text, e {p}, a text[], j jsonb)"
            ).format(**names)
        )
        cursor.execute(
            sql.SQL("INSERT INTO {t} SELECT i, v, {l}, ARRAY[v, NULL], to_jsonb(v) FROM").format(**names)
            + sql.SQL(" unnest(%s::text[]) WITH ORDINALITY AS u (v, i)"),
            ([characters, word, ""],),
        )
        cursor.execute("SELECT current_setting('server_encoding')")
        assert cursor.fetchone() == (encoding,)
    driver = drive(dbtable=str(sql.Identifier(table).as_string(pg)), publication=word, asString="j")
    texts(driver, pg, table, ["id", column, "e", "a"])


@pytest.mark.parametrize(
    ("encoding", "says"),
    [
        ("SQL_ASCII", "not UTF-8\n  Remedy: unrepresentable=null makes"),
        ("WIN1252", "has no equivalent in encoding \"UTF8\".*\n.*convert_to\\(column, 'WIN1252'\\)"),
    ],
)
def test_bytes_that_are_no_text_have_a_remedy_that_works(encoding: str, says: str, server: str) -> None:
    with database(server, f"ENCODING '{encoding}' LOCALE 'C'") as (url, pg):
        pg.set_client_encoding("SQL_ASCII")
        run(pg, "CREATE TABLE t (v text)", r"INSERT INTO t VALUES (E'ab\x81')")
        with open_snapshot(url) as opened:
            for column in ("v", f"convert_to(v, '{encoding}') AS v"):
                options = parse_snapshot_options({**opened.options, "query": f"SELECT {column} FROM t"})
                plan = make_plan(options)
                source, [whole] = plan_ranges(plan, options)
                if column == "v":
                    with pytest.raises(UnrepresentableError, match=says):
                        list(read_range(plan, source, whole, "test"))
                else:
                    [batch] = read_range(plan, source, whole, "test")
                    assert batch.to_pylist() == [{"v": b"ab\x81"}]


@pytest.mark.parametrize("encoding", ["LATIN1", "UTF8"])
def test_names_are_as_long_as_the_encoding_lets_them_be(encoding: str, server: str) -> None:
    with database(server, f"ENCODING '{encoding}' LOCALE 'C'") as (url, pg):
        run(pg, f'CREATE TABLE "{"é" * 40}" ("{"ü" * 63}" int)')  # in UTF-8, PostgreSQL cuts both to 31 characters
        options = {"url": url, "dbtable": f'"{"é" * 40}"', "columns": f'"{"ü" * 63}"'}
        if encoding == "LATIN1":
            [column] = make_plan(parse_snapshot_options(options)).columns
            assert column.name == "ü" * 63
        else:
            with pytest.raises(AccessError, match=f'at most 63 bytes.*\n.*did you mean public."{"é" * 31}"'):
                make_plan(parse_snapshot_options(options))


@pytest.mark.parametrize(("encoding", "word"), [("LATIN1", "größe"), ("EUC_JP", "日本語"), ("UTF8", "€𝄞")])
def test_hstore_of_any_encoding_arrives(encoding: str, word: str, drive_in: Drives) -> None:
    """hstore_send gives the lengths of its texts in the database's encoding."""
    drive, pg = drive_in(f"ENCODING '{encoding}' LOCALE 'C'")
    run(pg, "CREATE EXTENSION hstore", "CREATE TABLE t (id int PRIMARY KEY, h hstore, a hstore[])")
    insert = (
        f"INSERT INTO t SELECT {{}}, h, ARRAY[h, NULL] FROM hstore(ARRAY['{word}', 'a', '{word}{word}', NULL]) AS h"
    )
    run(pg, insert.format(1))
    driver = drive(dbtable="t")
    expected = [(word, "a"), (word * 2, None)]
    (of_snapshot,) = driver.take(1)
    run(pg, insert.format(2))
    (of_stream,) = driver.take(1)
    for row in (of_snapshot, of_stream):
        assert sorted(row["h"]) == expected
        assert [None if one is None else sorted(one) for one in row["a"]] == [expected, None]


# One byte, which no UTF-8 has by itself, in values of many types.
NOT_UTF_8 = {
    "v": r"E'a\xe9'",
    "c": r"E'\xe9'",
    "a": r"ARRAY['a', E'\xe9', NULL]",
    "j": r"""E'"\xe9"'::json""",
    "e": r"E'\xe9'::e",
    "r": r"ROW(E'\xe9', 1)::r",
}


@pytest.mark.parametrize("column", NOT_UTF_8)
def test_bytes_that_are_not_utf_8_are_refused_by_their_place(
    column: str, ascii_database: tuple[Drive, Session]
) -> None:
    drive, pg = ascii_database
    run(
        pg,
        "DROP TABLE IF EXISTS t CASCADE",
        "CREATE TABLE t (id int PRIMARY KEY, v text, c char(3), a text[], j json, e e, r r)",
        "INSERT INTO t (id, v) VALUES (1, 'größe')",
    )
    slots = [f"{kind}_{column}" for kind in ("typed", "null", "envelope")]
    typed, null, envelope = (
        drive(slot=slot, **options)
        for slot, options in zip(
            slots, ({"dbtable": "t"}, {"dbtable": "t", "unrepresentable": "null"}, {"tables": "t"}), strict=True
        )
    )
    for driver in (typed, null, envelope):
        driver.take(1)
    run(pg, f"INSERT INTO t (id, {column}) VALUES (2, {NOT_UTF_8[column]})", "INSERT INTO t (id) VALUES (3)")
    where = f"public.t, column {column} ("
    typed.refusal(where, "the change at ", "not UTF-8", kind=UnrepresentableError)
    assert values(null.take(2), "id", column) == [(2, None), (3, None)]
    envelope.refusal(where, "the change at ", "not UTF-8", "with tables, repair the value", kind=UnrepresentableError)
    for driver in (typed, null, envelope):
        driver.stop()
    if pg.server_version >= RANGES:
        drive(slot=f"snapshot_{column}", dbtable="t").refusal(where, "ctid (0,2): ", kind=UnrepresentableError)


def test_a_session_that_is_used_again_leaves_no_warning_in_the_servers_log(db: str) -> None:
    with contextlib.closing(opened(parse_connection_options({"url": db}), "first")) as session:
        for statement in ("SELECT 1", "BEGIN"):
            run(session, statement)
            assert connection.begin_anew(session, "second")
        assert session.notices == []
        assert run(session, "SELECT current_setting('application_name'), now() = statement_timestamp()") == [
            ("second", True)
        ]


@pytest.fixture(scope="module")
def ascii_database(server: str) -> Iterator[tuple[Drive, Session]]:
    with pytest.MonkeyPatch.context() as patch, database(server, "ENCODING 'SQL_ASCII' LOCALE 'C'") as (url, pg):
        # An error waits for the batch before it, and that one, without rows, for this time.
        patch.setattr(next_offset, "IDLE_SECONDS", 0.1)
        run(pg, r"CREATE TYPE e AS ENUM (E'\xe9')", "CREATE TYPE r AS (a text, b int)")
        with driving(pg, url, patch) as drive:
            yield drive, pg


def test_prefixes_that_are_not_utf_8_are_passed_over(ascii_database: tuple[Drive, Session]) -> None:
    """Whoever may write in the database chooses the prefix of a logical decoding message."""
    drive, pg = ascii_database
    if pg.server_version < 140000:
        pytest.skip("pgoutput sends messages from PostgreSQL 14 on")
    run(pg, "CREATE TABLE m (id int PRIMARY KEY)", "CREATE PUBLICATION prefixes FOR TABLE m")
    driver = drive(slot="prefixes", publication="prefixes", tables="m", messagePrefixes="outbox")
    driver.batch()
    emit, foreign = "SELECT pg_logical_emit_message({}, {}, 'a')", r"E'\xe9'"
    run(pg, f"BEGIN; {emit.format('true', foreign)}; INSERT INTO m VALUES (1); COMMIT", emit.format("false", foreign),
        emit.format("true", "'outbox'"))  # fmt: skip
    assert values(driver.take(2), "_change_type") == [("insert",), ("message",)]
    driver.stop()


def test_names_that_are_not_utf_8_are_refused(ascii_database: tuple[Drive, Session]) -> None:
    drive, pg = ascii_database
    execute = "DO $do$BEGIN EXECUTE E'{}'; END$do$"
    run(pg, execute.format(r'CREATE TABLE "t\xe9" (id int PRIMARY KEY)'))
    run(pg, execute.format(r'CREATE TABLE named (id int PRIMARY KEY, "c\xe9" int)'))
    for options in ({"dbtable": "named"}, {"tables": "public.*"}):
        with pytest.raises(DefiniteError, match=r"is not UTF-8[^\n]*\n  Remedy: rename"):
            drive(slot="names", **options).batch()
    run(pg, execute.format(r'DROP TABLE "t\xe9", named'))


# --- collations ------------------------------------------------------------------------------------------------------

KEYS = ("a", "A", "\u00e1", "a\u0301", "z", "\u00c4", "", "10", "9")


def test_keys_of_any_collation_stay_what_they_are(drive_in: Drives) -> None:
    """What a collation sorts or takes for equal makes no difference to a row."""
    drive, pg = drive_in("LOCALE 'C'")
    collations = ['"C"', '"POSIX"', '"default"']
    # Not each build has ICU.
    if run(pg, "SELECT count(*) FROM pg_collation WHERE collprovider = 'i'") > [(1,)]:
        run(pg, "CREATE COLLATION loose (provider = icu, locale = 'und-u-ks-level1', deterministic = false)")
        collations += ['"und-x-icu"', "loose"]
    for number, collation in enumerate(collations):
        keys = KEYS if collation != "loose" else ("a", "z", "", "10", "9")
        table = f"t{number}"
        run(pg, f"CREATE TABLE {table} (k text COLLATE {collation} PRIMARY KEY, v int)")
        with pg.cursor() as cursor:
            cursor.execute(f"INSERT INTO {table} SELECT k, 0 FROM unnest(%s) AS k", (list(keys),))
        driver = drive(dbtable=table, slot=f"s{number}")
        assert sorted(values(driver.take(len(keys)), "k")) == sorted((key,) for key in keys)
        run(pg, f"UPDATE {table} SET v = 1 WHERE k IN ('a', 'z')")
        assert sorted(values(driver.take(2), "_change_type", "k", "v")) == [("update", "a", 1), ("update", "z", 1)]
        if collation == "loose":
            # The same key to PostgreSQL, and other bytes: a new key to whoever keeps rows by it.
            run(pg, f"UPDATE {table} SET k = 'A' WHERE k = 'a'")
            assert values(driver.take(2), "_change_type", "k") == [("delete", "a"), ("insert", "A")]
        driver.stop()


# --- settings --------------------------------------------------------------------------------------------------------


def test_a_role_of_serializable_sessions_waits_for_no_transaction_of_others(db: str, pg: Session) -> None:
    run(pg, "CREATE TABLE t (id int)")
    with role(pg, db, "REPLICATION") as login, connect(db) as writer:
        for name, value in (("isolation", "serializable"), ("deferrable", "on"), ("read_only", "on")):
            run(pg, f"ALTER ROLE {login['user']} SET default_transaction_{name} = {value}")
        run(pg, f"GRANT SELECT ON t TO {login['user']}")
        run(writer, "BEGIN ISOLATION LEVEL SERIALIZABLE", "INSERT INTO t VALUES (1)")
        end_of_waiting = threading.Timer(10, writer.close)
        end_of_waiting.start()
        options = parse_snapshot_options({"url": conninfo(login), "dbtable": "t"})
        make_plan(options)
        opened(options.connection, "walsender", replication=True).close()
        end_of_waiting.cancel()
        assert not writer.closed


SETTINGS = {
    **SETTINGS_OF_ROLES,
    "array_nulls": "off",
    "xmloption": "document",
    "idle_session_timeout": "100ms",
    "transaction_timeout": "100ms",
    "default_transaction_isolation": "serializable",
    "default_transaction_read_only": "on",
    "enable_tidscan": "off",
    "plan_cache_mode": "force_generic_plan",
    "backslash_quote": "off",
    "escape_string_warning": "on",
    "synchronize_seqscans": "on",
    "logical_decoding_work_mem": "64kB",
}


@pytest.mark.matrix("settings of role and database, encodings")
@pytest.mark.parametrize("level", ["ROLE", "DATABASE"])
def test_settings_of_role_and_database_change_nothing_in_a_stream(
    level: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        url, pg = stack.enter_context(database(server, "LOCALE 'C'"))
        run(pg, f"SET TimeZone = 'UTC'; CREATE TABLE public.t AS {TELLING_COLUMNS} FROM generate_series(1, 3) AS i")
        run(pg, "ALTER TABLE public.t ADD PRIMARY KEY (id)")
        run(pg, "CREATE SCHEMA decoy; CREATE TABLE decoy.t (id int PRIMARY KEY)")
        login = stack.enter_context(role(pg, url, "SUPERUSER"))
        drive = stack.enter_context(driving(pg, conninfo(login), monkeypatch))
        before = drive(dbtable="public.t", slot="before")
        expected = before.take(3)
        names = [name for name in expected[0] if not name.startswith("_")]
        known = {name.lower() for (name,) in run(pg, "SELECT name FROM pg_settings WHERE context <> 'internal'")}
        target = login["user"] if level == "ROLE" else pg.info.dbname
        for name, value in SETTINGS.items():
            # Some are lists.
            if name.lower() in known:
                quoted = ", ".join(f"'{part}'" for part in value.split(", "))
                run(pg, f"ALTER {level} {target} SET {name} = {quoted}")
        with connect(conninfo(login)) as bystander:
            assert run(bystander, "SHOW TimeZone") == [("Asia/Kathmandu",)]
        before.restart()
        after = drive(dbtable="public.t", slot="after")
        envelope = drive(tables="public.t", slot="envelope")
        assert values(after.take(3), *names) == values(expected, *names)
        envelope.take(3)
        run(pg, "UPDATE public.t SET txt = txt")
        for stream in (before, after):
            assert values(stream.take(3), *names) == values(expected, *names)
        documents = [json.loads(row["after"]) for row in envelope.take(3)]
    assert [documents[0][name] for name in ("d", "iv", "b", "tz")] == [
        "2024-02-04",
        "P1Y-2DT3H4M5S",
        "\\x00ff41",
        "2024-02-03 04:05:06+00",
    ]


@pytest.mark.parametrize("encoding", ["LATIN1", "UTF8", "SQL_ASCII"])
def test_the_place_of_an_error_in_the_users_sql_is_counted_in_characters(server: str, encoding: str) -> None:
    with database(server, f"ENCODING '{encoding}' LOCALE 'C'") as (url, _):
        options = parse_snapshot_options({"url": url, "query": "SELECT 'größe' AS a, x"})
        with pytest.raises(QueryError) as caught:
            make_plan(options)
    # The last one counts bytes, which say nothing here.
    place = ", at character 22 of the option query" if encoding != "SQL_ASCII" else ""
    assert caught.value.what == f'reading the query: column "x" does not exist (SQLSTATE 42703){place}'


@pytest.mark.parametrize(("given", "milliseconds"), [("", 60000), ("tcp_user_timeout=5000", 5000)])
def test_what_nobody_acknowledges_ends_a_session(given: str, milliseconds: int, db: str) -> None:
    options = parse_connection_options({"url": make_dsn(db, host="127.0.0.1") + f" {given}"})
    with (
        contextlib.closing(opened(options, "pgcdc:test")) as session,
        socket.socket(fileno=os.dup(session.fileno())) as copy,
    ):
        assert copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == milliseconds


def test_a_server_whose_platform_cannot_see_that_a_client_is_gone_has_all_other_settings(
    db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Windows takes no value but 0, and no server takes this one.
    monkeypatch.setitem(connection._SETTINGS, "client_connection_check_interval", "-1s")
    with contextlib.closing(opened(parse_connection_options({"url": db}), "test")) as session:
        assert run(session, "SHOW default_transaction_read_only") == [("on",)]
        assert run(session, "SHOW extra_float_digits") == [("1",)]
        assert run(session, "SHOW client_min_messages") == [("error",)]


def test_money_has_the_decimals_that_the_database_says(server: str) -> None:
    """It is stored as a whole number: with another lc_monetary, '￥1,234' would be '$12.34'."""
    with database(server, "LOCALE 'C'") as (url, pg):
        run(pg, f"ALTER DATABASE {pg.info.dbname} SET lc_monetary = 'POSIX'")
        for replication in (False, True):
            options = parse_connection_options({"url": url})
            with contextlib.closing(opened(options, "test", replication=replication)) as session:
                assert run(session, "SHOW lc_monetary") == [("POSIX",)]


def test_a_type_by_the_name_of_text_cuts_no_value(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number = "1234567890123456789012345678901234567890123456789.75"
    with database(server, "LOCALE 'C'") as (url, pg):
        run(pg, "CREATE SCHEMA odd", "CREATE DOMAIN odd.text AS varchar(8)",
            f"CREATE TABLE t AS SELECT 1 AS id, {number}::numeric AS a", "ALTER TABLE t ADD PRIMARY KEY (id)",
            f"ALTER DATABASE {pg.info.dbname} SET search_path = odd, public, pg_catalog")  # fmt: skip
        with driving(pg, url, monkeypatch) as drive:
            driver = drive(dbtable="public.t")
            assert values(driver.take(1), "a") == [(number,)]
            run(pg, "UPDATE public.t SET a = a + 1")
            assert [len(a) for (a,) in values(driver.take(1), "a")] == [len(number)]


def test_a_server_that_hangs_once_it_has_let_somebody_in_is_not_waited_for_for_ever(
    db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_PREPARED_WITHIN_SECONDS", 0.3)
    monkeypatch.setattr(search_path, "KEEP_ROLES", "SELECT pg_sleep(60)")
    with pytest.raises(TransientError, match="preparing a session"):
        opened(parse_connection_options({"url": db}), "test")
