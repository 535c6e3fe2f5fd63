from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from given_options import TABLE, parse, parse_query, refused

from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.options.names import QualifiedName
from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.options.query import Query
from pg_cdc_source.options.snapshot_options import SnapshotOptions, parse_snapshot_options


@pytest.mark.parametrize(
    ("option", "text", "says"),
    [
        ("consistentPoint", "yes", "auto, require or off"),
        ("unrepresentable", "NaN", "error or null"),
        ("slot", "MySlot", "lower-case"),
        ("slot", "a-b", "lower-case"),
        ("slot", "", "lower-case"),
        ("slot", "s" * 64, "lower-case"),
        ("snapshot", "x", "pg_export_snapshot"),
        ("snapshot", "00000003-0000001b-1; --", "pg_export_snapshot"),
        ("lsnColumn", " ", "empty"),
        ("where", " ", "empty"),
        ("batchBytes", "1kB", "64kB"),
        ("host", "", "empty"),
        ("port", "http", "1 to 65535"),
        ("port", "0", "1 to 65535"),
        ("port", "65536", "1 to 65535"),
        ("port", "5432,x", "1 to 65535"),
        ("host", "h;password=x", "seems to hold a password"),
        ("host", "u@h", "host names do not have"),
        ("database", "postgresql://h/d", "in the option url"),
        ("sslrootcert", "a\0b", "character"),
        ("password", "a\0b", "character"),
    ],
)
def test_malformed_values_are_refused(option: str, text: str, says: str) -> None:
    message = refused({**TABLE, option: text})
    assert says in message
    assert option in message or option in ("host", "port")


@pytest.mark.parametrize("text", ["", " ", ";", " ; "])
def test_an_empty_query_is_refused(text: str) -> None:
    assert refused({"query": text}).startswith("[OPTION] option query: it is empty")


def test_one_semicolon_may_end_a_query() -> None:
    assert parse_snapshot_options({"query": " SELECT 1 ;\n"}).query == Query("query", " SELECT 1")


def test_a_query_may_stand_in_parentheses_where_a_table_is_named() -> None:
    options = parse_snapshot_options({"dbtable": "(SELECT 1 AS a\n) AS t"})
    assert options.dbtable is None
    assert options.query == Query("dbtable", "(SELECT 1 AS a\n) AS t")
    assert options.query.sql == "SELECT * FROM (SELECT 1 AS a\n) AS t"
    assert parse_query().query == Query("query", "SELECT 1")
    assert "in parentheses" in refused({"dbtable": "SELECT 1"})


@pytest.mark.parametrize(
    "text", ["public.t AS x", '"a b" as x', "t JOIN u USING (id)", "t x left join u ON true", "t, u AS x JOIN v"]
)
def test_an_alias_or_a_join_goes_into_a_query(text: str) -> None:
    assert "in the option query, or in parentheses: (SELECT" in refused({"dbtable": text})


def test_what_is_not_given_has_the_documented_default() -> None:
    assert parse_snapshot_options(TABLE) == SnapshotOptions(
        connection=ConnectionOptions(),
        dbtable=QualifiedName(("public", "orders")),
        query=None,
        columns=None,
        where=None,
        partition_bytes=64 << 20,
        num_partitions=None,
        consistent_point="auto",
        slot=None,
        snapshot=None,
        lsn_column=None,
        as_string=(),
        numeric_as=NumericAs("string"),
        unrepresentable="error",
        batch_bytes=4 << 20,
        slot_timeout_seconds=10.0,
        snapshot_idle_seconds=60.0,
        max_connections=None,
    )


def test_everything_that_is_given_arrives() -> None:
    options = parse(
        host="db.example",
        columns='id, "Total", at',
        where="id > 5",
        numPartitions="32",
        slot="orders_1",
        lsnColumn="Read At!",
        asString="at",
        numericAs="decimal(38,2)",
        unrepresentable="NULL",
        batchBytes="1MB",
        slotTimeout="30s",
        snapshotIdle="5min",
        maxConnections="20",
    )
    assert options == SnapshotOptions(
        connection=ConnectionOptions("", (("host", "db.example"),)),
        dbtable=QualifiedName(("public", "orders")),
        query=None,
        columns=("id", "Total", "at"),
        where="id > 5",
        partition_bytes=64 << 20,
        num_partitions=32,
        consistent_point="require",
        slot="orders_1",
        snapshot=None,
        lsn_column="Read At!",
        as_string=("at",),
        numeric_as=NumericAs("decimal", 38, 2),
        unrepresentable="null",
        batch_bytes=1 << 20,
        slot_timeout_seconds=30.0,
        snapshot_idle_seconds=300.0,
        max_connections=20,
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "neither dbtable nor query"),
        ({"dbtable": "t", "query": "SELECT 1"}, "both dbtable and query"),
        ({"query": "SELECT 1", "columns": "a"}, "columns is not used with query"),
        ({"query": "SELECT 1", "where": "a"}, "where is not used with query"),
        ({"query": "SELECT 1", "partitionBytes": "1MB"}, "partitionBytes is not used with query"),
        ({"dbtable": "(SELECT 1) t", "query": "SELECT 1"}, "both dbtable and query"),
        ({"dbtable": "(SELECT 1) t", "columns": "a"}, "columns is not used with a sub-select in dbtable"),
        ({"dbtable": "(SELECT 1) t", "where": "a"}, "where is not used with a sub-select in dbtable"),
        ({"dbtable": "(SELECT 1) t", "partitionBytes": "1MB"}, "partitionBytes is not used with a sub-select"),
        ({"dbtable": "t", "numPartitions": "1", "partitionBytes": "1MB"}, "partitionBytes and numPartitions"),
        ({"dbtable": "t", "snapshot": "0-1", "slot": "s"}, "slot is not used with snapshot"),
        ({"dbtable": "t", "snapshot": "0-1", "consistentPoint": "auto"}, "consistentPoint is not used with snapshot"),
        ({"dbtable": "t", "snapshot": "0-1", "slotTimeout": "1s"}, "slotTimeout is not used with snapshot"),
        ({"dbtable": "t", "snapshot": "0-1", "snapshotIdle": "1s"}, "snapshotIdle is not used with snapshot"),
        ({"dbtable": "t", "consistentPoint": "off", "slot": "s"}, "slot contradicts consistentPoint=off"),
        ({"dbtable": "t", "consistentPoint": "off", "slotTimeout": "1s"}, "slotTimeout contradicts"),
        ({"dbtable": "t", "columns": "a", "asString": 'a,"B"'}, 'the column "B", which columns leaves out'),
        ({"dbtable": "t", "columns": '"Lsn"', "lsnColumn": "lSN"}, "lsnColumn 'lSN' is also one of columns"),
        ({"dbtable": "t", "database": "a", "dbname": "a"}, "database and dbname are the same"),
    ],
)
def test_contradictions_are_refused(options: dict[str, str], says: str) -> None:
    message = refused(options)
    assert says in message
    assert "\n  Remedy: " in message
    assert "things are wrong" not in message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"slot": "s"}, "require"),
        ({"slot": "s", "consistentPoint": "auto"}, "require"),
        ({"slot": "s", "consistentPoint": "require"}, "require"),
        ({"consistentPoint": "require"}, "require"),
        ({}, "auto"),
    ],
)
def test_a_slot_requires_its_consistent_point(options: dict[str, str], expected: str) -> None:
    assert parse(**options).consistent_point == expected


def test_what_does_not_contradict_is_taken() -> None:
    assert parse(snapshot="00000003-0000001B-1", lsnColumn="lsn").snapshot == "00000003-0000001B-1"
    assert parse(consistentPoint="off", snapshotIdle="5s").snapshot_idle_seconds == 5
    assert parse_query(asString="a", slot="s", numericAs="double").as_string == ("a",)


def test_options_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        parse().where = "x"  # type: ignore[misc]
