"""Batches that are applied to a lake's tables: each once, whatever breaks in between; nothing is lost or invented."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from driving import run
from joining_late import HELD, hold_joins_back
from lake import Begin, CatalogLake, Lake, is_same, rows_of, set_aside
from psycopg2.extensions import connection as Session
from watch import wait_until

from pg_cdc_source.lake.ledger import LedgerRow
from pg_cdc_source.lake.shape import Shapes
from pg_cdc_source.lake.standing import caught_up_at
from pg_cdc_source.mirrors import spark_commits
from pg_cdc_source.postgres.publication import identity
from pg_cdc_source.stream.batch_reading import BatchReading
from pg_cdc_source.stream.first_rows.batch_rows import BatchRows

T = ("CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'a'), (2, 'b')")
U = ("CREATE TABLE u (id int PRIMARY KEY, v text)", "INSERT INTO u VALUES (1, 'x')")


def newest(lake: Lake) -> LedgerRow:
    last = lake.ledger.last()
    assert last is not None
    return last


@pytest.mark.corner
def test_changes_of_every_kind(pg: Session, begin: Begin) -> None:
    lake = begin(*T)
    for statements in (
        ("INSERT INTO t VALUES (3, 'c')", "UPDATE t SET v = NULL WHERE id = 1", "DELETE FROM t WHERE id = 2"),
        ("UPDATE t SET id = 30 WHERE id = 3", "DELETE FROM t WHERE id = 30", "INSERT INTO t VALUES (30, 'again')"),
        ("INSERT INTO t VALUES (4, 'd')", "TRUNCATE t", "INSERT INTO t VALUES (4, 'e'), (5, 'f')"),
        ("TRUNCATE t",),
        ("BEGIN; INSERT INTO t VALUES (1, 'x'), (2, 'y'); UPDATE t SET id = -id; UPDATE t SET id = 3 + id; COMMIT",),
    ):
        run(pg, *statements)
        wait_until(is_same(lake, pg, "t"))


# Values of two rows, and of one without any.
KINDS = {
    "smallint": ("-1", "32767"), "int": ("-1", "2147483647"), "bigint": ("-1", "9223372036854775807"),
    "real": ("NaN", "1.1e-30"), "float8": ("-Infinity", "0.1"), "bool": ("t", "f"),
    "numeric": ("NaN", "1e-30"), "numeric(12,2)": ("-9999999999.99", "0.10"), "numeric(38,0)": ("-1", "9" * 38),
    "date": ("0001-01-01", "9999-12-31"), "timestamp": ("1969-12-31 23:59:59.999999", "2026-11-23 00:00:00"),
    "timestamptz": ("1969-12-31 23:59:59.999999+00", "2026-11-23 00:00:00+05"),
    "time": ("24:00:00", "00:00:00.000001"), "interval": ("1 mon -1 day", "P1Y"), "uuid": (f"{'0' * 31}1", "f" * 32),
    "text": ("", "ä漢\t"), "char(3)": ("a", ""), "bytea": ("\\x", "\\x00ff"), "json": ('{"b": 1, "a":2}', "[]"),
    "jsonb": ('{"b": 1, "a":2}', "null"), "inet": ("10.0.0.1", "::1/64"), "bit(3)": ("101", "000"),
    "int[]": ("{}", "{1,NULL}"), "text[]": ('{"",NULL,"NULL"}', "{a}"), "timestamptz[]": ("{2026-01-01+00}", "{}"),
}  # fmt: skip


@pytest.mark.corner
@pytest.mark.parametrize("flat", [True, False])
def test_rows_of_a_snapshot_are_what_changes_make_of_them(flat: bool, pg: Session, begin: Begin, format: str) -> None:
    """Values come in binary with the one, as texts with the others. Iceberg takes files without lists as they are."""
    kinds = {kind: values for kind, values in KINDS.items() if not (flat and "[]" in kind)}
    columns = ", ".join(f"c{i} {kind}" for i, kind in enumerate(kinds))
    rows = [", ".join(f"'{value}'" for value in values) for values in zip(*kinds.values(), strict=True)]
    run(pg, f"CREATE TABLE t (id int PRIMARY KEY, {columns})",
        *(f"INSERT INTO t VALUES ({i}, {values})" for i, values in enumerate(rows, 1)),
        "INSERT INTO t VALUES (3)")  # fmt: skip
    lake = begin()

    def found(*ids: int) -> list[dict[str, str]]:
        """The rows of the lake that have these ids, when it has no others, with what Python prints of their values."""
        rows: dict[int, dict[str, str]] = {}

        def look() -> bool:
            lake.step()
            last = lake.ledger.last()
            assert last is not None
            assert last.set_aside == {}
            rows.update({row.pop("id"): {name: repr(row[name]) for name in row} for row in lake.found("t")})
            return rows.keys() == {*ids}

        wait_until(look)
        return [rows[i] for i in ids]

    names = ", ".join(f"c{i}" for i in range(len(kinds)))
    snapshot = found(1, 2, 3)
    if format == "iceberg":
        assert isinstance(lake, CatalogLake)
        assert lake.are_taken_over("t") == flat
    run(pg, f"INSERT INTO t SELECT id + 10, {names} FROM t")
    assert found(1, 2, 3, 11, 12, 13) == snapshot * 2
    # A column goes, and another one gets its name: what the old one had does not come back.
    run(pg, "ALTER TABLE t DROP COLUMN c0", "INSERT INTO t VALUES (4)", "ALTER TABLE t ADD COLUMN c0 smallint",
        "ALTER TABLE t RENAME c1 TO renamed", "INSERT INTO t VALUES (5)")  # fmt: skip
    changed = [{**row, "c0": "None", "renamed": row["c1"]} for row in snapshot]
    changed = [{name: row[name] for name in row if name != "c1"} for row in changed]
    assert found(1, 2, 3, 4, 5, 11, 12, 13) == [*changed, changed[2], changed[2], *changed]


def test_a_column_that_goes_before_rows_are_read_is_not_said_to_have_been_empty(
    pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change that says so comes with a later batch, and the ledger's row is of a point where the column was."""
    if pg.server_version < 140000:
        pytest.skip("rows are asked for by a message from PostgreSQL 14 on")
    lake = begin(*T)
    ask = """SELECT pg_logical_emit_message(true, 'pgcdc', '{"snapshot": ["public.t"]}')"""
    as_said = BatchReading._as_said

    def dropping(self: BatchReading, rows: BatchRows) -> BatchRows:
        run(pg, "ALTER TABLE t DROP COLUMN IF EXISTS v")
        return as_said(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(BatchReading, "_as_said", dropping)
        run(pg, ask)
        wait_until(lambda: set_aside(lake))
    assert "column v was changed right behind the rows that came anew" in newest(lake).set_aside["public.t"]
    run(pg, ask)
    wait_until(is_same(lake, pg, "t"))


@pytest.mark.corner
def test_values_that_did_not_travel_are_kept(pg: Session, begin: Begin) -> None:
    big = "(SELECT string_agg(md5(i::text), '') FROM generate_series(1, 400) AS i)"
    lake = begin("CREATE TABLE t (id int PRIMARY KEY, n int, v text)",
                 f"INSERT INTO t SELECT i, 0, i || {big} FROM generate_series(1, 9) AS i")  # fmt: skip
    run(pg, "UPDATE t SET n = 1 WHERE id = 1")
    wait_until(is_same(lake, pg, "t"))
    # Over changes of the key, within a batch, and more than once.
    run(pg, "BEGIN; UPDATE t SET n = 2 WHERE id = 2; UPDATE t SET id = 20 WHERE id = 2;"
        " UPDATE t SET id = 21 WHERE id = 20;"
        " UPDATE t SET id = 30 WHERE id = 3; UPDATE t SET v = 'short' WHERE id = 4; UPDATE t SET id = 40 WHERE id = 4;"
        f" INSERT INTO t VALUES (5000, 5, {big}); UPDATE t SET id = 50 WHERE id = 5000;"
        " UPDATE t SET n = 6 WHERE id = 50;"
        " DELETE FROM t WHERE id = 6; INSERT INTO t VALUES (6, 6, NULL); COMMIT")  # fmt: skip
    wait_until(is_same(lake, pg, "t"))
    # What the lake has now, and not what it had when it was asked before.
    run(pg, f"UPDATE t SET v = 'new' || {big} WHERE id = 21")
    wait_until(is_same(lake, pg, "t"))
    run(pg, "UPDATE t SET id = 22 WHERE id = 21")
    wait_until(is_same(lake, pg, "t"))


@pytest.mark.corner
def test_values_go_along_with_a_key_while_columns_change_or_the_table_is_set_aside(pg: Session, begin: Begin) -> None:
    large = "SELECT 1, 0, string_agg(md5(i::text), '') FROM generate_series(1, 400) AS i"
    lake = begin("CREATE TABLE t (id int PRIMARY KEY, n int, v text)", f"INSERT INTO t {large}")
    run(pg, "UPDATE t SET id = 2", "ALTER TABLE t RENAME v TO w", "UPDATE t SET n = 1")

    def is_same_or_set_aside() -> bool:
        lake.step()
        last = lake.ledger.last()
        assert last is not None
        return lake.rows("t") == rows_of(pg, "t") or "changed their keys" in last.set_aside.get("public.t", "")

    wait_until(is_same_or_set_aside)


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [("text", "a", "b"), ("bytea", "\\\\x", "\\\\x00"), ("float8", "NaN", "-0"), ("float8", "0", "-0")],
)
def test_values_go_along_with_a_key_that_is_no_number(kind: str, old: str, new: str, pg: Session, begin: Begin) -> None:
    lake = begin(*U)
    run(pg, f"CREATE TABLE t (k {kind} PRIMARY KEY, n int, v text)", "ALTER PUBLICATION s ADD TABLE t",
        f"INSERT INTO t SELECT '{old}', 0, string_agg(md5(i::text), '') FROM generate_series(1, 400) AS i")  # fmt: skip
    (large,) = run(pg, "SELECT v FROM t")[0]

    def has(number: int) -> Callable[[], bool]:
        def look() -> bool:
            lake.step()
            last = lake.ledger.last()
            assert last is not None
            assert last.set_aside == {}
            rows = lake.found("t") if "public.t" in last.tables else []
            return [(row["n"], row["v"]) for row in rows] == [(number, large)]

        return look

    # The first merge writes the files that the second one asks.
    for number, key in ((1, old), (2, new), (3, old)):
        run(pg, f"BEGIN; UPDATE t SET n = {number}; UPDATE t SET k = '{key}'; COMMIT")
        wait_until(has(number))


@pytest.mark.corner
def test_keys_that_a_statement_could_take_for_something_else(pg: Session, begin: Begin) -> None:
    keys = ["${user}", "${env:HOME}", "O'Brien", "a\\b", "\\u0041", '"', "%_", "ö", " ", ""]
    run(pg, "CREATE TABLE k (key text PRIMARY KEY, n int)")
    with pg.cursor() as cursor:
        cursor.executemany("INSERT INTO k VALUES (%s, 0)", [(key,) for key in keys])
    lake = begin()
    for statement in ("UPDATE k SET n = 1", "DELETE FROM k WHERE key LIKE '%$%'", "UPDATE k SET n = 2"):
        run(pg, statement)
        wait_until(is_same(lake, pg, "k"))


@pytest.mark.corner
def test_columns_that_change(pg: Session, begin: Begin) -> None:
    lake = begin(*T)
    for statements in (
        ("ALTER TABLE t ADD COLUMN n int", "INSERT INTO t VALUES (3, 'c', 3)"),
        ("ALTER TABLE t ADD COLUMN filled text NOT NULL DEFAULT 'f'", "UPDATE t SET v = 'x' WHERE id = 1"),
        ("ALTER TABLE t RENAME v TO w", "DELETE FROM t WHERE id = 2", "INSERT INTO t VALUES (9, 'i', 9, 'g')"),
        ("ALTER TABLE t DROP COLUMN n", "INSERT INTO t VALUES (10, 'j', 'h')"),
        ("ALTER TABLE t DROP COLUMN w, ADD COLUMN w text DEFAULT 'new'", "INSERT INTO t VALUES (11, 'h', 'k')"),
        ("ALTER TABLE t ALTER w DROP DEFAULT, ALTER w TYPE int USING length(w)", "INSERT INTO t VALUES (12, 'h', 4)"),
        ("ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id, filled)", "UPDATE t SET w = 5 WHERE id = 12"),
    ):
        run(pg, *statements)
        wait_until(is_same(lake, pg, "t"))
    # Several layouts in one batch, and rows of each.
    run(pg, "INSERT INTO t VALUES (20, 'a', 1)", "ALTER TABLE t ADD a int DEFAULT 5",
        "INSERT INTO t VALUES (21, 'a', 1, 6)",
        "ALTER TABLE t RENAME a TO b", "UPDATE t SET w = 2 WHERE id = 20", "ALTER TABLE t DROP b",
        "INSERT INTO t VALUES (22, 'a', 3)")  # fmt: skip
    wait_until(is_same(lake, pg, "t"))


def test_a_table_that_is_rewritten_is_not_said_to_be_of_one_point_until_its_rows_have_come(
    pg: Session, begin: Begin
) -> None:
    lake = begin(*T, *U)
    run(pg, "ALTER TABLE t ADD COLUMN r float DEFAULT random()", "INSERT INTO t VALUES (3, 'c')",
        "INSERT INTO u VALUES (2, 'y')")  # fmt: skip
    wait_until(is_same(lake, pg, "t", "u"))
    assert any("public.t was rewritten" in dict(row["set_aside"]).get("public.t", "") for row in lake.ledger_rows())
    last = lake.ledger.last()
    assert last is not None
    assert last.set_aside == {}


def test_all_tables_of_a_batch_are_rewritten(pg: Session, begin: Begin) -> None:
    lake = begin(*T, *U)
    run(pg, *(f"ALTER TABLE {name} ADD COLUMN r float DEFAULT random()" for name in "tu"),
        "BEGIN; INSERT INTO t VALUES (3, 'c'); INSERT INTO u VALUES (2, 'y'); COMMIT")  # fmt: skip
    wait_until(is_same(lake, pg, "t", "u"))


@pytest.mark.corner
def test_rows_from_before_an_added_column_have_its_default(pg: Session, begin: Begin) -> None:
    """Of types whose values Spark, Arrow and Python each have in another way."""
    columns = {
        "h": ("hstore", "'a=>1, b=>NULL'"), "l": ("hstore[]", "ARRAY['a=>1'::hstore, NULL]"),
        "z": ("timestamptz", "'0001-01-01 00:00:00+00'"), "p": ("timestamp", "'1500-02-28 00:00:00.000001'"),
        "d": ("date[]", "'{0001-01-01,NULL}'"), "b": ("bytea[]", r"ARRAY['\x00'::bytea]"),
    }  # fmt: skip
    lake = begin("CREATE EXTENSION hstore", *T)
    added = ", ".join(f"ADD {name} {kind} DEFAULT {value}" for name, (kind, value) in columns.items())
    run(pg, f"ALTER TABLE t {added}", "INSERT INTO t VALUES (3, 'c')")
    wait_until(lambda: [lake.step(), len(lake.found("t")) == 3 or newest(lake).set_aside][1])
    assert newest(lake).set_aside == {}
    first, second, new = ([row[name] for name in columns] for row in sorted(lake.found("t"), key=lambda row: row["id"]))
    assert first == second == new


def test_another_primary_key_under_replica_identity_full_sets_the_table_aside(pg: Session, begin: Begin) -> None:
    """The stream does not say where it begins: rows from before may have been told apart by it."""
    lake = begin("CREATE TABLE t (id int PRIMARY KEY, v text NOT NULL)", "ALTER TABLE t REPLICA IDENTITY FULL", *U)
    run(pg, "INSERT INTO t VALUES (2, 'a'), (3, 'a')", "DELETE FROM t WHERE id = 2",
        "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (v)", "INSERT INTO u VALUES (2, 'y')")  # fmt: skip
    wait_until(is_same(lake, pg, "u"))
    last = lake.ledger.last()
    assert last is not None
    assert "another key under REPLICA IDENTITY FULL" in last.set_aside["public.t"]


@pytest.mark.parametrize("first", ["t", "u", "both"])
def test_tables_that_swap_their_names_are_set_aside(first: str, pg: Session, begin: Begin) -> None:
    lake = begin(*T, *U)
    run(pg, "BEGIN; ALTER TABLE t RENAME TO o; ALTER TABLE u RENAME TO t; ALTER TABLE o RENAME TO u; COMMIT")
    if first == "both":
        run(pg, "BEGIN; INSERT INTO t VALUES (3, 'c'); INSERT INTO u VALUES (3, 'y'); COMMIT")
    else:
        run(pg, f"INSERT INTO {first} VALUES (3, 'c')")
        wait_until(lambda: f"public.{first}" in set_aside(lake))
        run(pg, "INSERT INTO u VALUES (4, 'y')", "INSERT INTO t VALUES (4, 'y')")

    wait_until(lambda: set_aside(lake).keys() == {"public.t", "public.u"})


class _Killed(BaseException):
    """Ends a batch as a killed process does."""


@pytest.mark.parametrize(
    ("number", "after"),
    [
        *((number, after) for number in range(3) for after in (False, True) if (number, after) != (1, True)),
        pytest.param(1, True, marks=pytest.mark.corner),
    ],
)
def test_a_batch_that_breaks_in_the_middle_is_applied_once(
    number: int, after: bool, pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = begin(*T, *U)
    commits = 0
    for name in ("apply", "empty", "add_files"):
        whole = getattr(lake.kind, name)

        def breaking(self: Any, *args: Any, whole: Any = whole, **named: Any) -> None:
            nonlocal commits
            commits += 1
            if commits == number + 1 and not after:
                raise _Killed
            whole(self, *args, **named)
            if commits == number + 1:
                raise _Killed

        monkeypatch.setattr(lake.kind, name, breaking)
    # A snapshot with changes behind it, a truncate, and plain changes.
    run(pg, "BEGIN; TRUNCATE u; INSERT INTO u VALUES (5, 'five'); UPDATE t SET v = v || '!'; COMMIT",
        "CREATE TABLE w (id int PRIMARY KEY, v text)", "INSERT INTO w VALUES (1, 'w')",
        "ALTER PUBLICATION s ADD TABLE w", "UPDATE t SET v = v || '?'", "UPDATE w SET v = 'later'")  # fmt: skip

    def step() -> bool:
        try:
            return is_same(lake, pg, "t", "u", "w")()
        except _Killed:
            lake.restart()
            return False

    wait_until(step)
    assert commits > number
    batches = lake.merged_batches("t")
    assert len(batches) == len(set(batches))


def test_a_table_that_somebody_else_changed_is_set_aside_and_taken_up_again(pg: Session, begin: Begin) -> None:
    if pg.server_version < 140000:
        pytest.skip("PostgreSQL 14 has messages")
    lake = begin(*T, *U)
    lake.write_as_somebody_else("t")
    run(pg, "INSERT INTO t VALUES (3, 'c')", "INSERT INTO u VALUES (2, 'y')")
    wait_until(is_same(lake, pg, "u"))
    last = lake.ledger.last()
    assert last is not None
    assert "changed by somebody else: version" in last.set_aside["public.t"]
    run(pg, "INSERT INTO t VALUES (4, 'd')", "INSERT INTO u VALUES (3, 'z')")
    wait_until(is_same(lake, pg, "u"))
    assert lake.rows("t") != rows_of(pg, "t")
    ask = json.dumps({"snapshot": ["public.t"]})
    run(pg, f"SELECT pg_logical_emit_message(true, 'pgcdc', '{ask}')")
    wait_until(is_same(lake, pg, "t", "u"))
    last = lake.ledger.last()
    assert last is not None
    assert last.set_aside == {}


@pytest.mark.corner
def test_a_table_that_was_rolled_back_is_set_aside(pg: Session, begin: Begin) -> None:
    """Iceberg's history has nothing of it: what came behind is gone, and the table's beginning is still there."""
    lake = begin(*T)
    then = newest(lake).tables["public.t"]
    run(pg, "INSERT INTO t VALUES (3, 'c')")
    wait_until(is_same(lake, pg, "t"))
    lake.roll_back_as_somebody_else("t", then)
    run(pg, "INSERT INTO t VALUES (4, 'd')")
    wait_until(lambda: lake.step() and newest(lake).set_aside)
    assert re.search("was restored|changed by somebody else", newest(lake).set_aside["public.t"])
    assert sum(lake.rows("t").values()) == 2


@pytest.mark.corner
def test_versions_of_a_table_that_was_moved_away_are_not_those_of_the_one_that_has_its_place(
    pg: Session, begin: Begin, format: str
) -> None:
    if pg.server_version < 140000:
        pytest.skip("PostgreSQL 14 has messages")
    lake = begin(*T)
    then = newest(lake)
    lake.keep_house_as_somebody_else("t")
    run(pg, "INSERT INTO t VALUES (3, 'c')")
    wait_until(is_same(lake, pg, "t"))
    assert lake.is_of("t", then)
    assert lake.is_of("t", newest(lake))
    lake.move_away("t")
    run(pg, "INSERT INTO t VALUES (4, 'd')")
    wait_until(lambda: lake.step() and "is gone" in newest(lake).set_aside.get("public.t", ""))
    run(pg, f"""SELECT pg_logical_emit_message(true, 'pgcdc', '{json.dumps({"snapshot": ["public.t"]})}')""")
    wait_until(lambda: lake.step() and not newest(lake).set_aside)
    assert lake.is_of("t", newest(lake))
    if format == "iceberg":
        with pytest.raises(Exception, match=f"{then.tables['public.t']}"):
            lake.rows("t", then.tables["public.t"])
    else:
        # As if the former one had come as far.
        assert not lake.is_of("t", replace(then, tables=newest(lake).tables))


@pytest.mark.corner
def test_what_somebody_else_commits_right_behind_the_mirror_is_noticed(
    pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = begin(*T)
    apply = lake.kind.apply

    def raced(self: Any, *args: Any, **named: Any) -> None:
        apply(self, *args, **named)
        lake.write_as_somebody_else("t")

    before = lake.ledger.last()
    assert before is not None
    with monkeypatch.context() as patch:
        patch.setattr(lake.kind, "apply", raced)
        run(pg, "INSERT INTO t VALUES (3, 'c')")
        wait_until(lambda: (row := lake.step()) is not None and row.tables != before.tables)
    run(pg, "INSERT INTO t VALUES (4, 'd')")

    def is_said() -> bool:
        lake.step()
        last = lake.ledger.last()
        return last is not None and "changed by somebody else: version" in last.set_aside.get("public.t", "")

    wait_until(is_said)


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.corner)])
def test_what_somebody_else_commits_while_a_batch_is_applied_is_noticed(
    killed: bool, pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = begin(*T, *U)
    apply = lake.kind.apply

    def raced(self: Any, *args: Any, **named: Any) -> None:
        lake.write_as_somebody_else("t")
        apply(self, *args, **named)
        if killed:
            raise _Killed

    def is_said() -> bool:
        try:
            return "changed by somebody else: version" in set_aside(lake).get("public.t", "")
        except _Killed:
            lake.restart()
            return False

    with monkeypatch.context() as patch:
        patch.setattr(lake.kind, "apply", raced)
        run(pg, "INSERT INTO t VALUES (3, 'c')")
        wait_until(is_said)
    run(pg, "INSERT INTO u VALUES (2, 'y')")
    wait_until(is_same(lake, pg, "u"))


@pytest.mark.corner
def test_what_is_done_is_found_behind_what_others_have_done_since(
    pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = begin(*T, mode="append")
    monkeypatch.setattr(spark_commits, "RECENT", 2)
    apply = lake.kind.apply

    def killed(self: Any, *args: Any, **named: Any) -> None:
        apply(self, *args, **named)
        for _ in range(3):
            lake.keep_house_as_somebody_else("t")
        raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr(lake.kind, "apply", killed)
        run(pg, "INSERT INTO t VALUES (3, 'c')")

        def step() -> bool:
            try:
                lake.step()
            except _Killed:
                return True
            return False

        wait_until(step)
    lake.restart()
    run(pg, "INSERT INTO t VALUES (4, 'd')")
    wait_until(is_same(lake, pg, "t"))
    assert sorted(row["id"] for row in lake.found("t")) == [1, 2, 3, 4]


def test_a_table_whose_first_rows_the_lake_cannot_have_does_not_stop_the_others(pg: Session, begin: Begin) -> None:
    lake = begin(*T)
    run(pg, "CREATE TABLE d (id int PRIMARY KEY, day date)", "INSERT INTO d VALUES (1, 'infinity')",
        "ALTER PUBLICATION s ADD TABLE d", "INSERT INTO t VALUES (3, 'c')")  # fmt: skip

    def is_said() -> bool:
        last = lake.ledger.last()
        return is_same(lake, pg, "t")() and last is not None and "infinity" in last.set_aside.get("public.d", "")

    wait_until(is_said)
    if pg.server_version < 140000:
        return
    ask = json.dumps({"snapshot": ["public.d"]})
    run(pg, "UPDATE d SET day = '2026-11-23'", f"SELECT pg_logical_emit_message(true, 'pgcdc', '{ask}')")
    wait_until(is_same(lake, pg, "t", "d"))
    last = lake.ledger.last()
    assert last is not None
    assert last.set_aside == {}


def test_what_the_lake_cannot_have_may_be_text_or_null(pg: Session, begin: Begin, format: str) -> None:
    """``asString``, ``numericAs`` and ``unrepresentable``: of first rows and of changes, in a table that is there."""
    if pg.server_version < 140000:
        pytest.skip("PostgreSQL 14 has messages, by which an operator asks for rows")
    d = "CREATE TABLE d (id int PRIMARY KEY, day date, fee numeric(8, 2), rate numeric, at timestamptz[])"
    lake = begin(*T, d, "INSERT INTO d VALUES (1, '2026-11-23', 1.50, 2.5, NULL)")
    run(pg, "UPDATE d SET day = 'infinity'")

    def set_aside() -> str:
        lake.step()
        last = lake.ledger.last()
        return "" if last is None else last.set_aside.get("public.d", "")

    assert "asString=schema.table.column" in wait_until(set_aside)
    wanted = {"as_string": "public.d.day, public.d.at", "numeric_as": "decimal(12, 3)", "unrepresentable": "null"}
    lake.begin_as(Shapes.of("merge", "hard", format, **wanted))
    ask = json.dumps({"snapshot": ["public.d"]})
    run(pg, "INSERT INTO d VALUES (2, '-infinity', 'NaN', 'NaN', '{infinity}')",
        f"SELECT pg_logical_emit_message(true, 'pgcdc', '{ask}')")  # fmt: skip
    first = [
        {"id": 1, "day": "infinity", "fee": Decimal("1.50"), "rate": Decimal("2.500"), "at": None},
        {"id": 2, "day": "-infinity", "fee": None, "rate": None, "at": "{infinity}"},
    ]

    def has(rows: list[dict[str, object]]) -> bool:
        lake.step()
        last = lake.ledger.last()
        return last is not None and not last.set_aside and lake.found("d") == rows

    wait_until(lambda: has(first))
    run(pg, "UPDATE d SET fee = 'NaN', rate = 'NaN', at = '{-infinity}' WHERE id = 1", "DELETE FROM d WHERE id = 2")
    wait_until(lambda: has([{**first[0], "fee": None, "rate": None, "at": "{-infinity}"}]))


def until_planned(lake: Lake) -> None:
    """Go on until a batch is planned that has a table's rows, and is not read."""

    def is_begun() -> bool:
        if lake.driver.attempt(read=False) is not None and not lake.driver.planned_tables:
            lake.step()
        return bool(lake.driver.planned_tables)

    wait_until(is_begun)


@pytest.mark.parametrize("loss", ["DELETE FROM u", "TRUNCATE u"])
def test_a_table_that_is_empty_when_it_is_read_again_is_not_said_to_be_of_the_point(
    loss: str, pg: Session, begin: Begin
) -> None:
    lake = begin(*T)
    run(pg, *U, "ALTER PUBLICATION s ADD TABLE u")
    until_planned(lake)
    run(pg, loss)
    lake.driver.restart()
    row = lake.step()
    assert row is not None
    assert caught_up_at(row.set_aside["public.u"])
    run(pg, "INSERT INTO t VALUES (3, 'c')")

    def has_caught_up() -> bool:
        last = lake.ledger.last()
        return is_same(lake, pg, "t", "u")() and last is not None and not last.set_aside

    wait_until(has_caught_up)


@pytest.mark.parametrize("again", [False, True], ids=["dropped", "created again"])
@pytest.mark.parametrize("is_crashed", [False, True], ids=["held", "crashed"])
def test_a_table_that_is_gone_before_its_first_rows_are_read_is_said_to_be_missing(
    is_crashed: bool, again: bool, pg: Session, begin: Begin
) -> None:
    lake = begin(*T)
    run(pg, *U, "ALTER PUBLICATION s ADD TABLE u")
    until_planned(lake)
    run(pg, "DROP TABLE u", *((*U, "ALTER PUBLICATION s ADD TABLE u") if again else ()))
    if is_crashed:
        lake.driver.restart()
    row = lake.step()
    assert row is not None
    assert "public.u: it was dropped" in row.set_aside["public.u"]
    run(pg, "INSERT INTO t VALUES (3, 'c')")

    tables = ("t", "u") if again else ("t",)

    def is_over() -> bool:
        is_equal, last = is_same(lake, pg, *tables)(), lake.ledger.last()
        return is_equal and last is not None and not last.set_aside and ("public.u" in last.tables) == again

    wait_until(is_over)


def test_a_table_whose_name_leads_elsewhere_does_not_stop_the_others(pg: Session, begin: Begin) -> None:
    lake = begin(*T)
    run(pg, 'CREATE TABLE "a/b" (id int PRIMARY KEY)', """INSERT INTO "a/b" VALUES (1)""",
        'ALTER PUBLICATION s ADD TABLE "a/b"', "INSERT INTO t VALUES (3, 'c')")  # fmt: skip

    def is_said() -> bool:
        last = lake.ledger.last()
        why = "" if last is None else last.set_aside.get('public."a/b"', "")
        return is_same(lake, pg, "t")() and "cannot be a directory's" in why

    wait_until(is_said)


def test_a_table_without_a_key_is_set_aside_and_does_not_stop_the_others(pg: Session, begin: Begin) -> None:
    lake = begin(*T, "CREATE TABLE k (v text)", "ALTER TABLE k REPLICA IDENTITY FULL")
    run(pg, "INSERT INTO k VALUES ('a')", "INSERT INTO t VALUES (3, 'c')")
    wait_until(is_same(lake, pg, "t"))
    last = lake.ledger.last()
    assert last is not None
    assert "public.k has no key" in last.set_aside["public.k"]


DEFERRABLE = (
    "CREATE TABLE k (id int PRIMARY KEY DEFERRABLE, v text)",
    "ALTER TABLE k REPLICA IDENTITY FULL",
    "INSERT INTO k VALUES (1, 'a'), (2, 'b'), (3, 'c')",
)
SHIFTED = "UPDATE k SET id = id + 1"


@pytest.mark.parametrize("deletes", ["hard", "soft"])
def test_a_deferrable_primary_key_is_none(deletes: str, pg: Session, begin: Begin) -> None:
    """Where a statement gives one row the key that another one still has, the last change of a key is not its row's."""
    lake = begin(*T, *DEFERRABLE, deletes=deletes)
    run(pg, SHIFTED, "INSERT INTO t VALUES (3, 'c')")
    wait_until(is_same(lake, pg, "t"))
    last = lake.ledger.last()
    assert last is not None
    assert "public.k has no key" in last.set_aside["public.k"]
    assert "not DEFERRABLE" in last.set_aside["public.k"]


def test_a_log_has_the_changes_of_a_table_with_a_deferrable_primary_key(pg: Session, begin: Begin) -> None:
    lake = begin(*DEFERRABLE, mode="append")
    run(pg, SHIFTED)
    wait_until(lambda: [lake.step(), len(lake.found("k")) > 3][1])
    assert sorted(row["id"] for row in lake.found("k") if row["_change_type"] != "snapshot") == [2, 3, 4]
    last = lake.ledger.last()
    assert last is not None
    assert last.set_aside == {}


def test_a_checkpoint_that_took_a_deferrable_primary_key_for_a_key_sets_its_table_aside(
    pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        was = re.sub(r"AND x.indimmediate\n\) AS p", ") AS p", identity._READ_IDENTITIES)
        assert was != identity._READ_IDENTITIES
        patch.setattr(identity, "_READ_IDENTITIES", was)
        lake = begin(*T, *DEFERRABLE)
        run(pg, "INSERT INTO k VALUES (7, 'g')")
        wait_until(is_same(lake, pg, "k"))
        lake.driver.stop()
    lake.driver.restart()
    lake.restart()
    run(pg, SHIFTED, "INSERT INTO t VALUES (3, 'c')")
    wait_until(is_same(lake, pg, "t"))
    last = lake.ledger.last()
    assert last is not None
    assert "another key under REPLICA IDENTITY FULL: none instead of id" in last.set_aside["public.k"]


def test_a_transaction_larger_than_a_batch_is_no_point_before_its_end(pg: Session, begin: Begin) -> None:
    lake = begin(*T, *U, maxRowsPerBatch="3")
    point, within = lake.ledger.last(), 0
    run(
        pg,
        "BEGIN; INSERT INTO t SELECT i, 'n' FROM generate_series(10, 19) AS i; INSERT INTO u VALUES (2, 'y'); COMMIT",
    )

    def is_there() -> bool:
        nonlocal point, within
        if (row := lake.step()) is None:
            return False
        if row.is_whole:
            # One without rows may come before the transaction does.
            point = row
        else:
            within += 1
        assert lake.ledger.last() == point
        return row.is_whole and lake.rows("t") == rows_of(pg, "t")

    wait_until(is_there)
    assert within > 1


def test_every_row_of_the_ledger_is_one_point_of_postgresql(pg: Session, begin: Begin) -> None:
    lake = begin("CREATE TABLE a (id int PRIMARY KEY, n int)", "CREATE TABLE b (id int PRIMARY KEY, n int)",
                 "INSERT INTO a SELECT i, 100 FROM generate_series(1, 20) AS i",
                 "INSERT INTO b SELECT i, 100 FROM generate_series(1, 20) AS i", maxRowsPerBatch="7")  # fmt: skip
    for i in range(60):
        run(pg, f"BEGIN; UPDATE a SET n = n - {i} WHERE id = {i % 20 + 1};"
                f" UPDATE b SET n = n + {i} WHERE id = {i % 7 + 1}; COMMIT")  # fmt: skip
    wait_until(is_same(lake, pg, "a", "b"), 240)
    whole = [dict(row["tables"]) for row in lake.ledger_rows() if len(row["tables"]) == 2]
    assert len(whole) > 10
    for tables in whole:
        sums = [
            sum(int(row[1] or 0) * count for row, count in lake.rows(name, tables[f"public.{name}"]).items())
            for name in "ab"
        ]
        assert sum(sums) == 4000


@pytest.mark.corner
def test_rows_that_are_turned_back_beside_changes_of_their_table(
    pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream is past the point of a table that joins, and its rows are read again after a crash."""
    lake = begin(*T)
    late = hold_joins_back(monkeypatch)
    run(pg, "CREATE TABLE u (id int PRIMARY KEY, v text)", "ALTER TABLE u REPLICA IDENTITY FULL",
        "INSERT INTO u VALUES (1, 'old'), (2, 'old'), (3, 'same')", "ALTER PUBLICATION s ADD TABLE u")  # fmt: skip
    wait_until(lambda: (lake.step(), run(pg, HELD))[1])
    run(pg, "UPDATE u SET v = 'new' WHERE id = 1", "DELETE FROM u WHERE id = 2", "INSERT INTO t VALUES (90, 'late')")
    wait_until(is_same(lake, pg, "t"))
    late.set()

    def has_rows_of_u() -> bool:
        found = lake.driver.attempt() or []
        if ("public.u", "file") in {(row["_table"], row["_change_type"]) for row in found}:
            return True
        lake.step()
        return False

    wait_until(has_rows_of_u)
    lake.driver.restart()
    wait_until(is_same(lake, pg, "t", "u"))
    assert set_aside(lake) == {}


def test_pyspark_prints_nothing_of_tables_that_are_not_there_yet(begin: Begin, format: str) -> None:
    if format == "deltalake":
        pytest.skip("no catalog is asked")
    printed = io.StringIO()
    handler = logging.StreamHandler(printed)
    logger = logging.getLogger("SQLQueryContextLogger")
    logger.addHandler(handler)
    try:
        begin("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    finally:
        logger.removeHandler(handler)
    assert printed.getvalue() == ""
