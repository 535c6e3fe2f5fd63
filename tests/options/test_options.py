from __future__ import annotations

import ctypes
import pickle
import re
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from typing import get_args
from urllib.parse import quote, quote_plus

import psycopg2
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from psycopg2.extensions import make_dsn, parse_dsn

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.options.declared import OPTIONS, Group, option_table_markdown
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.options.jdbc import IGNORED_PARAMETERS
from pg_cdc_source.options.libpq_keywords import LIBPQ_KEYWORDS, PASSED_KEYWORDS, SECRET_KEYWORDS
from pg_cdc_source.options.names import QualifiedName, TablePattern, dotted, parse_tables, quoted
from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.options.snapshot_options import SnapshotOptions, parse_snapshot_options
from pg_cdc_source.options.stream_options import StreamOptions, parse_stream_options

TABLE = {"dbtable": "public.orders"}
STREAM = {**TABLE, "slot": "orders_1"}


def parse(**options: str) -> SnapshotOptions:
    return parse_snapshot_options({**TABLE, **options})


def parse_query(**options: str) -> SnapshotOptions:
    return parse_snapshot_options({"query": "SELECT 1", **options})


def parse_stream(**options: str) -> StreamOptions:
    return parse_stream_options({**STREAM, **options})


def keywords(**options: str) -> dict[str, str]:
    """What libpq is handed in the end."""
    connection = parse_connection_options(options)
    text = make_dsn(connection.conninfo, **dict(connection.keywords))
    return dict(parse_dsn(text)) if text else {}


def refused(options: Mapping[str, str]) -> str:
    with pytest.raises(OptionError) as error:
        parse_snapshot_options(options)
    return str(error.value)


def refused_stream(options: Mapping[str, str]) -> str:
    with pytest.raises(OptionError) as error:
        parse_stream_options(options)
    return str(error.value)


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("orders", ("orders",)),
        ("public.orders", ("public", "orders")),
        ("db.public.orders", ("db", "public", "orders")),
        ("Public.ORDERS", ("public", "orders")),
        (" public . orders ", ("public", "orders")),
        ('public\t.\n"Or ders"', ("public", "Or ders")),
        ('"Public"."Orders"', ("Public", "Orders")),
        ('"a.b"."c""d"', ("a.b", 'c"d')),
        ('""""', ('"',)),
        ("_x$1", ("_x$1",)),
        ("Übersicht", ("Übersicht",)),
        ("ÄÖ_Z", ("ÄÖ_z",)),
        ("表.列", ("表", "列")),
        ("\u00a0x", ("\u00a0x",)),
        ("x" * 63, ("x" * 63,)),
        ('"(select 1)"', ("(select 1)",)),
        ("selected", ("selected",)),
        ("with_x", ("with_x",)),
    ],
)
def test_a_table_is_named_as_in_sql(text: str, parts: tuple[str, ...]) -> None:
    assert QualifiedName.parse(text).parts == parts


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("  ", "empty"),
        (".", "'.' at character 1"),
        ("a.", "ends where a name is expected"),
        (".a", "'.' at character 1"),
        ("a..b", "'.' at character 3"),
        ("a.b.c.d", "4 parts"),
        ("a b", "'b' at character 3"),
        ("public.orders o", "'o' at character 15"),
        ("1a", "'1' at character 1"),
        ("$a", "'$' at character 1"),
        ("a-b", "'-' at character 2"),
        ("a;", "';' at character 2"),
        ("a,b", "2 tables"),
        ("a,", "ends where"),
        ('"a', "not closed"),
        ('a."b""', "not closed"),
        ('""', "is empty"),
        ('a.""', "is empty"),
        ('"a"b', "'b' at character 4"),
        ('U&"d\\0061t"', "'&' at character 2"),
        ('"a\0"', "character"),
        ("x\ud800", "character"),
        ("x" * 64, "64 bytes"),
        ("ü" * 32, "64 bytes"),
        ("(select 1) t", "in the option query"),
        ("( select 1)", "in the option query"),
        ("SELECT * FROM t", "in the option query"),
        ("with x as (select 1) select * from x", "in the option query"),
    ],
)
def test_what_is_no_table_is_refused(text: str, says: str) -> None:
    with pytest.raises(OptionError, match=re.escape(says)):
        QualifiedName.parse(text)


NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20).filter(
    lambda name: len(name.encode()) <= 63
)


@given(st.lists(NAMES, min_size=1, max_size=3))
def test_every_name_survives_quoting(parts: list[str]) -> None:
    name = QualifiedName.parse(".".join('"' + part.replace('"', '""') + '"' for part in parts))
    assert name.parts == tuple(parts)
    assert QualifiedName.parse(str(name)) == name


@given(st.text(max_size=12) | st.text('ab."(), \0\ud800', max_size=12))
def test_any_text_is_a_name_or_an_option_error(text: str) -> None:
    try:
        name = QualifiedName.parse(text)
    except OptionError:
        return
    assert QualifiedName.parse(str(name)) == name


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (("public", "orders"), "public.orders"),
        (("Public", "a b"), '"Public"."a b"'),
        (('x"y',), '"x""y"'),
        (("1a",), '"1a"'),
        (("ä",), '"ä"'),
    ],
)
def test_a_name_is_quoted_only_where_needed(parts: tuple[str, ...], text: str) -> None:
    assert str(QualifiedName(parts)) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("etl", "etl"),
        ("_a1", "_a1"),
        ("user", '"user"'),
        ("order", '"order"'),
        ("values", '"values"'),
        ("left", '"left"'),
        ("name", "name"),
        ("User", '"User"'),
        ("1a", '"1a"'),
        ("a$", '"a$"'),
        ("ä", '"ä"'),
        ('a"b', '"a""b"'),
        ("", '""'),
    ],
)
def test_one_name_is_quoted_as_quote_ident_does(name: str, text: str) -> None:
    assert quoted(name) == text


def test_a_relations_name_keeps_its_form_in_checkpoints_and_rows() -> None:
    """A keyword needs no quotes after a dot, and older checkpoints have none."""
    assert str(QualifiedName(("public", "user"))) == dotted("public", "user") == "public.user"
    assert QualifiedName.parse('public."user"') == QualifiedName.parse("public.user")
    assert str(TablePattern("order", None)) == "order.*"


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("id", ("id",)),
        ('id, Name ,"Name"', ("id", "name", "Name")),
        ('"a,b","c.d"', ("a,b", "c.d")),
    ],
)
def test_columns_are_a_list_of_names(text: str, columns: tuple[str, ...]) -> None:
    assert parse(columns=text).columns == columns
    assert parse(asString=text).as_string == columns


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("a,", "ends where"),
        (",a", "',' at character 1"),
        ("a,,b", "',' at character 3"),
        ("t.a", "plain column"),
        ("*", "leave the option out"),
        ("a, A", "twice"),
        ("a b", "'b' at character 3"),
    ],
)
@pytest.mark.parametrize("option", ["columns", "asString"])
def test_malformed_columns_are_refused(option: str, text: str, says: str) -> None:
    message = refused({**TABLE, option: text})
    assert says in message
    assert f"option {option}:" in message


@pytest.mark.parametrize(
    ("text", "patterns"),
    [
        ("orders", [(None, "orders")]),
        ("public.orders, Sales.Items", [("public", "orders"), ("sales", "items")]),
        ("public.*", [("public", None)]),
        (" Public . * ,a", [("public", None), (None, "a")]),
        ("*", [(None, None)]),
        ('"*"', [(None, "*")]),
        ('public."*",public.*', [("public", "*"), ("public", None)]),
        ('"a.b,c"."d""e"', [("a.b,c", 'd"e')]),
        ('"Public".*', [("Public", None)]),
    ],
)
def test_tables_are_names_or_whole_schemas(text: str, patterns: list[tuple[str | None, str | None]]) -> None:
    expected = tuple(TablePattern(schema, name) for schema, name in patterns)
    assert parse_tables(text) == expected
    assert parse_tables(",".join(map(str, expected))) == expected
    assert parse_stream_options({"tables": text, "slot": "s"}).tables == expected


@given(st.lists(st.tuples(st.none() | NAMES, st.none() | NAMES), min_size=1, max_size=4, unique=True))
def test_every_list_of_tables_survives_being_shown(patterns: list[tuple[str | None, str | None]]) -> None:
    expected = tuple(TablePattern(schema, name) for schema, name in patterns)
    assert parse_tables(",".join(map(str, expected))) == expected


def test_a_pattern_gives_its_one_table_or_none() -> None:
    assert TablePattern("a", "b").qualified == QualifiedName(("a", "b"))
    assert TablePattern(None, "b").qualified == QualifiedName(("b",))
    assert TablePattern("a", None).qualified is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("a,", "ends where"),
        ("a,,b", "',' at character 3"),
        ("public.", "ends where"),
        ("public.**", "'*' at character 9"),
        ("public.a*", "'*' at character 9"),
        ("public.*a", "'a' at character 9"),
        ("*.orders", "* before its last part"),
        ("*.*", "* before its last part"),
        ("db.public.a", "3 parts"),
        ("db.public.*", "3 parts"),
        ("a, A", "the table a is named twice"),
        ("a.*,a.*", "the table a.* is named twice"),
        ("SELECT 1", "is a query"),
        ("x" * 64, "64 bytes"),
        ('""', "is empty"),
    ],
)
def test_malformed_tables_are_refused(text: str, says: str) -> None:
    message = refused_stream({"tables": text, "slot": "s"})
    assert says in message
    assert message.startswith("[OPTION] option tables: ")
    assert "\n  Remedy: " in message


def test_a_stream_is_of_one_table_in_dbtable() -> None:
    assert "use the option tables" in refused_stream({**STREAM, "dbtable": "a,b"})
    message = refused_stream({**STREAM, "dbtable": "(SELECT 1) q"})
    assert "streams take no query" in message
    assert "'*' at character 8" in refused_stream({**STREAM, "dbtable": "public.*"})


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64MB", 64 << 20),
        ("512kB", 512 << 10),
        ("512 KB", 512 << 10),
        ("1g", 1 << 30),
        ("4MiB", 4 << 20),
        ("1.5GB", 3 << 29),
        ("8192", 8192),
        ("65536B", 65536),
        (" 1TB ", 1 << 40),
        ("8kb", 8192),
    ],
)
def test_sizes_have_binary_units(text: str, size: int) -> None:
    assert parse(partitionBytes=text).partition_bytes == size


@pytest.mark.parametrize(
    "text", ["", "MB", "-1", "64XB", "64ib", "6_4MB", "1e6", "8191", "8.1", "33TB", "0", "٣MB", "9" * 5000, "1,5GB"]
)
def test_malformed_and_unbounded_sizes_are_refused(text: str) -> None:
    assert "option partitionBytes:" in refused({**TABLE, "partitionBytes": text})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10s", 10), ("500ms", 0.5), ("1min", 60), ("1m", 60), ("2h", 7200), ("7", 7), ("0.25", 0.25), (" 1 H ", 3600)],
)
def test_times_are_seconds_or_have_a_unit(text: str, seconds: float) -> None:
    assert parse(slotTimeout=text).slot_timeout_seconds == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "1y", "0", "25h", "inf", "nan", "9" * 5000])
@pytest.mark.parametrize("option", ["slotTimeout", "snapshotIdle"])
def test_malformed_and_unbounded_times_are_refused(option: str, text: str) -> None:
    assert f"option {option}:" in refused({**TABLE, option: text})


@pytest.mark.parametrize("text", ["0", "100001", "-1", "1.5", "", "x", "9" * 5000, "٣"])
def test_the_number_of_partitions_is_bounded(text: str) -> None:
    assert "whole number from 1 to 100000" in refused({**TABLE, "numPartitions": text})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("string", NumericAs("string")),
        ("DOUBLE", NumericAs("double")),
        ("decimal(38,9)", NumericAs("decimal", 38, 9)),
        (" Decimal ( 1 , 0 ) ", NumericAs("decimal", 1, 0)),
        ("decimal(5,5)", NumericAs("decimal", 5, 5)),
    ],
)
def test_numeric_is_read_as_chosen(text: str, expected: NumericAs) -> None:
    assert parse(numericAs=text).numeric_as == expected


@pytest.mark.parametrize(
    "text", ["", "float", "decimal", "decimal(10)", "decimal(0,0)", "decimal(39,0)", "decimal(5,6)", "decimal(5,-1)"]
)
def test_decimals_that_spark_lacks_are_refused(text: str) -> None:
    assert "option numericAs:" in refused({**TABLE, "numericAs": text})


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


@pytest.mark.parametrize(
    ("option", "text", "says"),
    [
        ("slot", "MySlot", "lower-case"),
        ("publication", " ", "empty"),
        ("publication", "p" * 64, "64 bytes"),
        ("publication", "ü" * 32, "64 bytes"),
        ("publication", '"Orders"', "without quotes"),
        ("publication", "a\0", "character"),
        ("publicationMode", "filtered", "create or require"),
        ("startFrom", "latest", "snapshot, slot or now"),
        ("maxRowsPerBatch", "0", "whole number from 1"),
        ("maxRowsPerBatch", "1e6", "whole number from 1"),
        ("maxRowsPerBatch", "1000000001", "whole number from 1"),
        ("maxBytesPerBatch", "1kB", "64kB"),
        ("maxBytesPerBatch", "lots", "not a size"),
        ("beforeImage", "yes", "true or false"),
        ("beforeImage", "", "true or false"),
        ("onSchemaChange", "emit", "fail or ignore"),
        ("onTruncate", "delete", "emit, fail or ignore"),
        ("asString", "a, A", "twice"),
        ("numericAs", "float", "decimal(p,s)"),
        ("unrepresentable", "NaN", "error or null"),
        ("partitionBytes", "1B", "8kB"),
        ("slotTimeout", "25h", "1d"),
    ],
)
def test_malformed_values_of_a_stream_are_refused(option: str, text: str, says: str) -> None:
    message = refused_stream({**STREAM, option: text})
    assert says in message
    assert message.startswith(f"[OPTION] option {option}: ")
    assert "things are wrong" not in message


@pytest.mark.parametrize("name", ["orders", "Orders", "a b", 'a"b', "p" * 63, "ü", '"'])
def test_a_publication_is_named_as_it_is_stored(name: str) -> None:
    assert parse_stream(publication=name).publication == name


@pytest.mark.parametrize(("text", "value"), [("true", True), ("FALSE", False), (" True ", True)])
def test_a_choice_of_two_is_true_or_false(text: str, value: bool) -> None:
    assert parse_stream(beforeImage=text).before_image is value


@pytest.mark.parametrize("text", ["", " ", ";", " ; "])
def test_an_empty_query_is_refused(text: str) -> None:
    assert refused({"query": text}).startswith("[OPTION] option query: it is empty")


def test_one_semicolon_may_end_a_query() -> None:
    assert parse_snapshot_options({"query": " SELECT 1 ;\n"}).query == "SELECT 1"


# --- what is set, and what is not ------------------------------------------------------------------------------------


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
    )


def test_what_a_stream_is_not_given_has_the_documented_default() -> None:
    assert parse_stream_options(STREAM) == StreamOptions(
        connection=ConnectionOptions(),
        dbtable=QualifiedName(("public", "orders")),
        tables=(),
        slot="orders_1",
        failover=False,
        publication="orders_1",
        publication_mode="create",
        start_from="snapshot",
        max_rows_per_batch=1_000_000,
        max_bytes_per_batch=128 << 20,
        before_image=False,
        on_schema_change="fail",
        on_truncate="emit",
        as_string=(),
        numeric_as=NumericAs("string"),
        unrepresentable="error",
        partition_bytes=64 << 20,
        slot_timeout_seconds=10.0,
    )


def test_everything_that_a_stream_is_given_arrives() -> None:
    options = parse_stream(
        host="db.example",
        failover="true",
        publication="Orders",
        publicationMode="require",
        startFrom="Snapshot",
        maxRowsPerBatch="5000",
        maxBytesPerBatch="1GB",
        beforeImage="true",
        onSchemaChange="ignore",
        onTruncate="fail",
        asString="at",
        numericAs="double",
        unrepresentable="null",
        partitionBytes="8MB",
        slotTimeout="1min",
    )
    assert options == StreamOptions(
        connection=ConnectionOptions("", (("host", "db.example"),)),
        dbtable=QualifiedName(("public", "orders")),
        tables=(),
        slot="orders_1",
        failover=True,
        publication="Orders",
        publication_mode="require",
        start_from="snapshot",
        max_rows_per_batch=5000,
        max_bytes_per_batch=1 << 30,
        before_image=True,
        on_schema_change="ignore",
        on_truncate="fail",
        as_string=("at",),
        numeric_as=NumericAs("double"),
        unrepresentable="null",
        partition_bytes=8 << 20,
        slot_timeout_seconds=60.0,
    )


@pytest.mark.parametrize("change", [str.lower, str.upper, str])
def test_option_names_have_no_case(change: type[str]) -> None:
    given = {"dbTable": "t", "numPartitions": "4", "sslMode": "require", "consistentPoint": "Off"}
    options = parse_snapshot_options({change(key): text for key, text in given.items()})
    assert (options.num_partitions, options.consistent_point) == (4, "off")
    assert options.connection.keywords == (("sslmode", "require"),)


def test_an_option_in_two_spellings_is_refused() -> None:
    assert "given twice" in refused({"dbtable": "a", "dbTable": "b"})


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("dbtabel", "did you mean dbtable?"),
        ("numpartition", "did you mean numPartitions?"),
        ("partition_bytes", "did you mean partitionBytes?"),
        ("sslmod", "did you mean sslmode?"),
        ("zzzzzz", "the options are url, host"),
        ("path", "dbtable"),
        ("paths", "dbtable"),
        ("dsn", "use url"),
        ("fetchsize", "batchBytes"),
        ("partitionColumn", "numPartitions"),
        ("lowerBound", "numPartitions"),
        ("upperBound", "numPartitions"),
        ("driver", "no JDBC driver is used"),
        ("pushDownPredicate", "where"),
        ("sessionInitStatement", "options"),
        ("connectTimeout", "connect_timeout"),
        ("replication", "itself"),
        ("application_name", "find each other"),
        ("fallback_application_name", "find each other"),
        ("client_encoding", "UTF-8"),
        ("publication", "belongs to pgcdc"),
        ("startFrom", "belongs to pgcdc"),
        ("tables", "on its own, in dbtable"),
    ],
)
def test_an_option_that_does_not_exist_gets_a_remedy(key: str, says: str) -> None:
    message = refused({**TABLE, key: "value-of-it"})
    assert says in message
    assert key.lower() in message
    assert "value-of-it" not in message


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("dbtabel", "did you mean dbtable?"),
        ("startfor", "did you mean startFrom?"),
        ("maxrows", "did you mean maxRowsPerBatch?"),
        ("zzzzzz", "the options are url, host"),
        ("path", "tables"),
        ("slot.name", "use slot"),
        ("replication_slot", "use slot"),
        ("publication.name", "use publication"),
        ("publication.autocreate.mode", "publicationMode"),
        ("plugin.name", "pgoutput"),
        ("slot.drop.on.stop", "pg_drop_replication_slot"),
        ("snapshot.mode", "startFrom"),
        ("startingOffsets", "startFrom"),
        ("startingVersion", "startFrom"),
        ("endingOffsets", "AvailableNow"),
        ("table", "dbtable"),
        ("table.include.list", "tables"),
        ("table.exclude.list", "publication"),
        ("subscribe", "tables"),
        ("query", "select and filter the DataFrame"),
        ("columns", "select and filter the DataFrame"),
        ("where", "select and filter the DataFrame"),
        ("maxOffsetsPerTrigger", "maxRowsPerBatch"),
        ("max.batch.size", "maxRowsPerBatch"),
        ("maxBytesPerTrigger", "maxBytesPerBatch"),
        ("maxFilesPerTrigger", "trigger"),
        ("poll.interval.ms", "trigger"),
        ("checkpointLocation", "writeStream"),
        ("failOnDataLoss", "always an error"),
        ("skipped.operations", "_change_type"),
        ("readChangeFeed", "every row"),
        ("truncate.handling.mode", "onTruncate"),
        ("decimal.handling.mode", "numericAs"),
        ("heartbeat.interval.ms", "keepalives"),
        ("consistentPoint", "always"),
        ("numPartitions", "partitionBytes"),
        ("lsnColumn", "_commit_lsn"),
        ("batchBytes", "belongs to pgsnapshot"),
        ("snapshotIdle", "belongs to pgsnapshot"),
        ("database.hostname", "use host"),
        ("database.dbname", "use database"),
        ("dsn", "use url"),
        ("replication", "itself"),
    ],
)
def test_an_option_that_no_stream_has_gets_a_remedy(key: str, says: str) -> None:
    message = refused_stream({**STREAM, key: "value-of-it"})
    assert says in message
    assert key.lower() in message
    assert "\n  Remedy: " in message
    assert "value-of-it" not in message
    assert "things are wrong" not in message


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"slot": "s"}, "neither dbtable nor tables"),
        ({"slot": "s", "dbtable": "a", "tables": "b"}, "both dbtable and tables"),
        ({"dbtable": "a"}, "no slot is given"),
        ({"slot": "s", "tables": "a", "beforeImage": "true"}, "beforeImage is not used with tables"),
        ({"slot": "s", "tables": "a", "asString": "x"}, "asString is not used with tables"),
        ({"slot": "s", "tables": "a", "numericAs": "double"}, "numericAs is not used with tables"),
        ({"slot": "s", "tables": "a", "unrepresentable": "null"}, "unrepresentable is not used with tables"),
        ({**STREAM, "startFrom": "slot", "partitionBytes": "1MB"}, "partitionBytes is not used with startFrom=slot"),
        ({**STREAM, "startFrom": "slot", "slotTimeout": "1s"}, "slotTimeout is not used with startFrom=slot"),
        ({**STREAM, "startFrom": "slot", "failover": "true"}, "failover is not used with startFrom=slot"),
        ({**STREAM, "startFrom": "now", "partitionBytes": "1MB"}, "partitionBytes is not used with startFrom=now"),
        ({**STREAM, "database": "a", "dbname": "a"}, "database and dbname are the same"),
    ],
)
def test_contradictions_of_a_stream_are_refused(options: dict[str, str], says: str) -> None:
    message = refused_stream(options)
    assert says in message
    assert "\n  Remedy: " in message
    assert "things are wrong" not in message
    if "is not used with tables" in says:
        assert "project()" in message


def test_what_does_not_contradict_in_a_stream_is_taken() -> None:
    assert parse_stream(startFrom="now", slotTimeout="1s").slot_timeout_seconds == 1
    assert parse_stream(startFrom="slot", maxRowsPerBatch="7").max_rows_per_batch == 7
    assert parse_stream_options({"tables": "a", "slot": "s", "partitionBytes": "1MB"}).partition_bytes == 1 << 20


def test_everything_wrong_with_a_stream_is_reported_at_once() -> None:
    message = refused_stream({"tabels": "t", "startFrom": "?", "maxBytesPerBatch": "?"})
    assert message.startswith("[OPTION] 5 things are wrong with the options:\n- ")
    for says in ("tables?", "option startFrom", "option maxBytesPerBatch", "no slot", "neither dbtable nor tables"):
        assert says in message


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "neither dbtable nor query"),
        ({"dbtable": "t", "query": "SELECT 1"}, "both dbtable and query"),
        ({"query": "SELECT 1", "columns": "a"}, "columns is not used with query"),
        ({"query": "SELECT 1", "where": "a"}, "where is not used with query"),
        ({"query": "SELECT 1", "partitionBytes": "1MB"}, "partitionBytes is not used with query"),
        ({"query": "SELECT 1", "numPartitions": "1"}, "numPartitions is not used with query"),
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


def test_each_thing_that_is_wrong_is_an_error_with_its_remedy() -> None:
    with pytest.raises(OptionError) as caught:
        parse_snapshot_options({"tabel": "t", "batchBytes": "?"})
    error = caught.value
    assert error.what == "3 things are wrong with the options"
    assert [problem.what for problem in error.problems] == [
        "the option tabel is not known",
        "option batchBytes: '?' is not a size",
        "neither dbtable nor query is given",
    ]
    assert all(problem.remedy for problem in error.problems)
    assert str(error) == "[OPTION] 3 things are wrong with the options:" + "".join(
        f"\n- {problem.what}\n  Remedy: {problem.remedy}" for problem in error.problems
    )


def test_everything_wrong_is_reported_at_once() -> None:
    message = refused({"tabel": "t", "port": "x", "batchBytes": "?", "columns": "a", "query": ""})
    assert message.startswith("[OPTION] 5 things are wrong with the options:\n- ")
    for says in ("tabel", "option batchBytes", "option query", "the port", "columns is not used"):
        assert says in message


def test_connection_options_alone_take_no_others() -> None:
    assert parse_connection_options({"HOST": "h", "sslmode": "require"}).keywords == (
        ("host", "h"),
        ("sslmode", "require"),
    )
    with pytest.raises(OptionError, match="dbtable is not known"):
        parse_connection_options(TABLE)


# --- connection ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("jdbc:postgresql:db", {"host": "localhost", "port": "5432", "dbname": "db"}),
        ("jdbc:postgresql://", {"host": "localhost", "port": "5432"}),
        ("jdbc:postgresql:///db", {"host": "localhost", "port": "5432", "dbname": "db"}),
        ("jdbc:postgresql://h/", {"host": "h", "port": "5432"}),
        ("jdbc:postgresql://h:1/db?", {"host": "h", "port": "1", "dbname": "db"}),
        ("jdbc:postgresql://h1:1,h2/db", {"host": "h1,h2", "port": "1,5432", "dbname": "db"}),
        ("jdbc:postgresql://[::1]:5/db", {"host": "::1", "port": "5", "dbname": "db"}),
        ("jdbc:postgresql://h/d%20b%2B", {"host": "h", "port": "5432", "dbname": "d b+"}),
        ("jdbc:postgresql:?user=x", {"host": "localhost", "port": "5432", "user": "x"}),
    ],
)
def test_the_address_of_a_jdbc_url_is_what_pgjdbc_makes_of_it(url: str, expected: dict[str, str]) -> None:
    assert keywords(url=url) == expected


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("user=a+b&password=p%2Bq%26%3D", {"user": "a b", "password": "p+q&="}),
        ("ssl", {"sslmode": "verify-full"}),
        ("ssl=true", {"sslmode": "verify-full"}),
        ("ssl=true&sslmode=require", {"sslmode": "require"}),
        ("ssl=false", {}),
        ("connectTimeout=5", {"connect_timeout": "5"}),
        ("loginTimeout=7", {"connect_timeout": "7"}),
        ("loginTimeout=7&connectTimeout=5", {"connect_timeout": "5"}),
        ("currentSchema=app", {"options": "-csearch_path=app"}),
        ('currentSchema=app,"My%20S"', {"options": '-csearch_path=app,"My\\ S"'}),
        ("options=-c%20work_mem=1MB&currentSchema=a", {"options": "-c work_mem=1MB -csearch_path=a"}),
        ("targetServerType=any", {}),
        ("targetServerType=preferSecondary", {"target_session_attrs": "prefer-standby"}),
        ("loadBalanceHosts=false", {}),
        ("channelBinding=require&kerberosServerName=pg", {"channel_binding": "require", "krbsrvname": "pg"}),
        ("sslcert=c.pem&sslkey=k.pem&sslpassword=s", {"sslcert": "c.pem", "sslkey": "k.pem", "sslpassword": "s"}),
        ("ApplicationName=etl&socketTimeout=30&prepareThreshold=0&tcpKeepAlive=true", {}),
        ("&".join(sorted(IGNORED_PARAMETERS)), {}),
    ],
)
def test_parameters_of_a_jdbc_url_become_libpq_keywords(query: str, expected: dict[str, str]) -> None:
    address = {"host": "h", "port": "5432", "dbname": "d"}
    assert keywords(url=f"jdbc:postgresql://h/d?{query}") == {**address, **expected}


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "not a URL of PostgreSQL"),
        ("orders", "not a URL of PostgreSQL"),
        ("mysql://u:p@h/d", "not a URL of PostgreSQL"),
        ("jdbc:mysql://h/d?a=b", "not a URL of PostgreSQL"),
        ("jdbc:postgresql://h", "not of the form"),
        ("jdbc:postgresql://h?user=u", "not of the form"),
        ("jdbc:postgresql://h/a/b", "not of the form"),
        ("jdbc:postgresql:/d", "not of the form"),
        ("jdbc:postgresql://u:p@h/d", "host and port cannot be read"),
        ("jdbc:postgresql://h:port/d", "not a number from 1 to 65535"),
        ("jdbc:postgresql://h/d;user=u", "its host or database has one of @ & = ;"),
        ("jdbc:postgresql://h/d?user=u&user=v", "user twice"),
        ("jdbc:postgresql://h/d?user=%zz", "% that is not part"),
        ("jdbc:postgresql://h/d?user=%ff", "not UTF-8"),
        ("jdbc:postgresql://h/d?Password=x", "its parameter 1 is not known\n  Remedy: did you mean password?"),
        ("jdbc:postgresql://h/d?user=u&zzz=1", "its parameter 2 is not known"),
        ("jdbc:postgresql://h/d?sslfactory=x", "sslfactory has no meaning here"),
        ("jdbc:postgresql://h/d?replication=true", "replication has no meaning here"),
        ("jdbc:postgresql://h/d?targetServerType=preferPrimary", "targetServerType has a value"),
        ("jdbc:postgresql://h/d?ssl=yes", "neither true nor false"),
        ("jdbc:postgresql://h/d?sslkey=k.pk8", "PEM"),
        ("jdbc:postgresql://h/d?connectTimeout=5s", "not a number"),
        ("postgresql://h/d b", "has a space"),
        ("postgresql://h/d?sslmode", "its parameter 1 is not of the form"),
        ("postgresql://h/d?options=a=b", "its parameter 1 is not of the form"),
        ("postgresql://h/d?sslmod=require", "did you mean sslmode?"),
        ("postgresql://h/d?application_name=x", "sets application_name"),
        ("postgresql://h/d?client_encoding=utf8", "sets client_encoding"),
        ("postgresql://u:p@@h/d", "its host or database has one of @ & = ;"),
        ("postgresql://u:p@ss@h/d", "its host or database has one of @ & = ;"),
        ("postgresql://u:p/ss@h/d", "its host or database has one of @ & = ;"),
        ("postgresql://h:p/d", "not a number from 1 to 65535"),
        ("postgresql://[::1/d", "libpq cannot read it"),
        ("postgresql://u:%zz@h/d", "libpq cannot read it"),
        ("postgresql://u:%00@h/d", "libpq cannot read it"),
        ("postgresql://u:%ff@h/d", "libpq cannot read it"),
        ("postgresql://h/d&user=x", "its host or database has one of @ & = ;"),
        ("postgresql://u:?@h/d@x", "its host or database has one of @ & = ;"),
        ("host=h replication=database", "sets replication"),
        ("host=h user", "its part 2 is not of the form"),
        ("host='h", "its part 1 is not of the form"),
        ("Host=h", "did you mean host?"),
        ("host=h;password=x", "seems to hold a password"),
        ("dbname=postgresql://h", "in the option url"),
    ],
)
def test_a_malformed_url_is_refused(url: str, says: str) -> None:
    message = refused({**TABLE, "url": url})
    assert says in message
    assert message.startswith("[OPTION] option url: ")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        (
            {"url": "postgresql://h/d", "user": "u", "password": "p@:/%' \\ü"},
            {"host": "h", "dbname": "d", "user": "u", "password": "p@:/%' \\ü"},
        ),
        ({"url": "postgres://u@h", "database": "d"}, {"user": "u", "host": "h", "dbname": "d"}),
        ({"url": "host=h", "port": "5", "sslmode": "require"}, {"host": "h", "port": "5", "sslmode": "require"}),
        ({"host": "h", "database": "d", "options": "-c a=b"}, {"host": "h", "dbname": "d", "options": "-c a=b"}),
        ({"dbname": "d", "passfile": "/x", "service": "s"}, {"dbname": "d", "passfile": "/x", "service": "s"}),
        ({"url": "  postgresql:///d?host=/run/pg\n"}, {"dbname": "d", "host": "/run/pg"}),
        ({"url": "postgresql://h/d?ssl=true"}, {"host": "h", "dbname": "d", "sslmode": "require"}),
    ],
)
def test_url_and_options_complete_each_other(options: dict[str, str], expected: dict[str, str]) -> None:
    assert keywords(**options) == expected


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:p@h:1/d?sslmode=require",
        "host=h port=1 dbname=d user=u password=p sslmode=require",
        "jdbc:postgresql://h:1/d?user=u&password=p&sslmode=require",
    ],
)
@pytest.mark.parametrize("option", ["host", "port", "database", "dbname", "user", "password", "sslmode"])
def test_what_the_url_says_cannot_be_an_option_too(url: str, option: str) -> None:
    keyword = "dbname" if option == "database" else option
    message = refused({**TABLE, "url": url, option: "1"})
    assert message.startswith(f"[OPTION] both url and the option {option} say {keyword}\n")


def test_libpq_itself_has_no_keyword_that_is_missing() -> None:
    class Row(ctypes.Structure):
        _fields_ = (
            *((name, ctypes.c_char_p) for name in ("keyword", "envvar", "compiled", "val", "label", "dispchar")),
            ("dispsize", ctypes.c_int),
        )

    libpq = ctypes.CDLL(psycopg2._psycopg.__file__)
    if not hasattr(libpq, "PQconndefaults") or psycopg2.__libpq_version__ >= 190000:
        pytest.skip("the libpq of psycopg2 cannot be asked, or is newer than the list")
    libpq.PQconndefaults.restype = ctypes.POINTER(Row)
    rows = libpq.PQconndefaults()
    found: dict[str, str] = {}
    while rows[len(found)].keyword:
        found[rows[len(found)].keyword.decode()] = rows[len(found)].dispchar.decode()
    assert found.keys() <= LIBPQ_KEYWORDS
    assert {keyword for keyword, display in found.items() if display == "*"} <= SECRET_KEYWORDS


FRAGMENTS = st.sampled_from(
    (*"='\\/:@?&%,; \nüh1", "host", "user", "password", "sslmode", "%20", "%41", "[::1]", "ssl=true", "dbname=d")
)


def same_as_libpq(url: str) -> None:
    """Either the URL is refused, or libpq reads the same in it."""
    try:
        connection = parse_connection_options({"url": url})
    except OptionError:
        return
    assert connection.settings() == parse_dsn(connection.conninfo)


@given(st.lists(FRAGMENTS, max_size=12).map("".join))
@example("u:p@h1:1,h2/d?host=x&")
@example("h1,h2")
@example("@h")
@example(":p@h")
@example("h?")
def test_an_uri_is_read_as_libpq_reads_it(rest: str) -> None:
    same_as_libpq(f"postgresql://{rest}")


@given(st.lists(FRAGMENTS, max_size=12).map("".join))
@example("host = 'a b'user=u")
@example("user='' host=h")
@example(r"user=a\ b\' host=h")
@example("host= user=u")
def test_a_connection_string_is_read_as_libpq_reads_it(text: str) -> None:
    assume("=" in text and not re.match(r"[a-z]+:", text))
    same_as_libpq(text)


def libpq_knows(keyword: str) -> bool:
    try:
        parse_dsn(f"{keyword}=''")
    except psycopg2.ProgrammingError:
        return False
    return True


@pytest.mark.parametrize("keyword", sorted(LIBPQ_KEYWORDS))
def test_the_keywords_that_pass_through_are_those_that_are_documented(keyword: str) -> None:
    declared = {option.name for option in OPTIONS if option.group == "connection"}
    if keyword in PASSED_KEYWORDS:
        assert keyword not in declared
        assert parse_connection_options({keyword: "1"}).keywords == ((keyword, "1"),)
    elif keyword not in declared:
        with pytest.raises(OptionError, match=f"the option {keyword} cannot be set"):
            parse_connection_options({keyword: "1"})


# --- secrets ---------------------------------------------------------------------------------------------------------

# What must appear nowhere, inside of what a password may hold around it.
CORE = "Zq7Xv"
PASSWORDS = st.builds(lambda before, after: before + CORE + after, st.text(max_size=6), st.text(max_size=6))
AWKWARD = st.text("@:/?&=%'\\ \t,;#[]+\"ü1", max_size=6)
RAW_PASSWORDS = PASSWORDS | st.builds(lambda before, after: before + CORE + after, AWKWARD, AWKWARD)


def conninfo_value(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def forms(password: str) -> list[dict[str, str]]:
    return [
        {"url": f"postgresql://u:{quote(password, safe='')}@h:5432/d"},
        {"url": f"postgresql://u@h:5432/d?password={quote(password, safe='')}"},
        {"url": f"host=h port=5432 dbname=d user=u password={conninfo_value(password)}"},
        {"url": f"jdbc:postgresql://h/d?user=u&password={quote_plus(password)}"},
        {"host": "h", "port": "5432", "database": "d", "user": "u", "password": password},
        {"url": "postgresql://u@h:5432/d", "password": password},
    ]


@given(RAW_PASSWORDS.filter(lambda password: "\0" not in password))
@example(f"{CORE}@:/?#[]%'\" \\&=+ü")
def test_every_password_arrives_and_is_never_shown(password: str) -> None:
    for form in forms(password):
        assert keywords(**form) == {"host": "h", "port": "5432", "dbname": "d", "user": "u", "password": password}
        options = parse(**form)
        assert CORE not in repr(options)
        assert "password=***" in repr(options)
        assert options.connection.display() == "h:5432/d as u"
        again = pickle.loads(pickle.dumps(options))  # noqa: S301 - our own bytes
        assert again == options
        assert CORE not in repr(again)


def all_that_is_shown(options: dict[str, str]) -> str:
    try:
        read = parse(**options)
    except OptionError as error:
        return str(error)
    return repr(read) + read.connection.display()


@given(RAW_PASSWORDS)
@example(f"a@{CORE}")
@example(f"a/{CORE}")
@example(f"1/{CORE}")
@example(f"1/x?{CORE}=")
@example(f"@{CORE}:1/")
@example(f"@{CORE}/?x=")
@example(f"a&{CORE}=b")
@example(f"a {CORE}=b")
@example(f"' {CORE}")
@example(f"%{CORE}")
@example(f"\0{CORE}")
@example(f"{CORE}\ud800")
def test_a_password_that_is_not_encoded_is_never_shown(password: str) -> None:
    urls = [
        f"postgresql://u:{password}@h:5432/d",
        f"postgres://h/d?user=u&password={password}",
        f"postgresql://h/d?password={password}&sslmode=require",
        f"host=h user=u password={password}",
        f"password={password} host=h",
        f"password='{password}' host=h",
        f"host=h;password={password}",
        f"jdbc:postgresql://u:{password}@h/d",
        f"jdbc:postgresql://h/d?password={password}&user=u",
        f"jdbc:postgresql://h/d;password={password}",
        f"jdbc:postgresql://h/d&password={password}",
        f"postgresql://h/d&password={password}",
        f"mysql://u:{password}@h/d",
        password,
    ]
    for url in urls:
        for extra in ({}, {"password": password}, {"user": "u", "port": "5432"}):
            assert CORE not in all_that_is_shown({"url": url, **extra})
        built = ConnectionOptions(url, ())
        assert CORE not in repr(built) + built.display()


@pytest.mark.parametrize("keyword", sorted(SECRET_KEYWORDS))
def test_every_secret_keyword_is_masked(keyword: str) -> None:
    assert CORE not in repr(parse_connection_options({keyword: CORE}))
    assert CORE not in all_that_is_shown({"url": f"host=h {keyword}={CORE}"})
    assert CORE not in all_that_is_shown({"url": f"postgresql://h/d?{keyword}={CORE}"})


def test_a_keyword_that_is_newer_than_this_libpq_is_named_by_position() -> None:
    newer = next((keyword for keyword in sorted(LIBPQ_KEYWORDS) if not libpq_knows(keyword)), None)
    if newer is None:
        pytest.skip("the libpq of psycopg2 knows every keyword")
    for url in (f"host=h {newer}={CORE}", f"postgresql://h/d?sslmode=require&{newer}={CORE}"):
        message = refused({**TABLE, "url": url})
        assert "its parameter 2 is not known to the libpq that psycopg2 uses" in message
        assert CORE not in message


def test_everything_else_is_shown() -> None:
    connection = parse_connection_options({"url": "postgresql://u:p@h/d?options=-c%20a%3Db", "sslmode": "require"})
    assert repr(connection) == (
        "ConnectionOptions(user='u', password=***, dbname='d', host='h', options='-c a=b', sslmode='require')"
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "the default host"),
        ({"host": "h"}, "h"),
        ({"host": "::1", "port": "5"}, "[::1]:5"),
        ({"host": "/run/pg", "database": "d"}, "/run/pg/d"),
        ({"hostaddr": "10.0.0.1", "user": "u"}, "10.0.0.1 as u"),
        ({"url": "postgresql://a,b:2/d"}, "a,b:2/d"),
        ({"url": "host=a,b port=5"}, "a:5,b:5"),
        ({"url": "jdbc:postgresql://h/d", "user": "u"}, "h:5432/d as u"),
        ({"service": "prod"}, "the default host (service prod)"),
    ],
)
def test_display_names_the_server(options: dict[str, str], text: str) -> None:
    assert parse_connection_options(options).display() == text


def test_display_survives_what_was_never_checked() -> None:
    assert ConnectionOptions("postgresql://u:p@[/x", ()).display() == "a server whose url cannot be read"
    assert repr(ConnectionOptions("postgresql://u:p@[/x", ())) == "ConnectionOptions(url=***)"


def test_options_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        parse().where = "x"  # type: ignore[misc]


# --- documentation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", get_args(Group))
def test_the_documentation_has_a_row_for_every_option(group: Group) -> None:
    lines = option_table_markdown(group).splitlines()
    assert lines[:2] == ["| option | meaning | default |", "| --- | --- | --- |"]
    assert [line.split("`")[1] for line in lines[2:]] == [o.name for o in OPTIONS if o.group == group]
    assert all(line.count("|") == 4 for line in lines)


@pytest.mark.parametrize("read_by", ["pgsnapshot", "pgcdc"])
def test_names_are_unique_within_what_one_format_reads(read_by: str) -> None:
    names = [option.name.lower() for option in OPTIONS if option.group in ("connection", read_by)]
    assert len(set(names)) == len(names)
    assert len(names) > 10
    assert names.count("slot") == 1


def test_a_name_that_both_formats_read_is_read_alike() -> None:
    of_snapshots = {option.name: option for option in OPTIONS if option.group == "pgsnapshot"}
    shared = [option for option in OPTIONS if option.group == "pgcdc" and option.name in of_snapshots]
    assert len(shared) == 7
    for option in shared:
        assert option.default == of_snapshots[option.name].default
        if option.name != "dbtable":
            assert option.parse is of_snapshots[option.name].parse
