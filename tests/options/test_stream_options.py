from __future__ import annotations

import pytest
from given_options import STREAM, parse_stream, refused_stream

from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.options.names import QualifiedName
from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.options.stream_options import Publications, StreamOptions, parse_stream_options


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
        ("onSchemaChange", "stop", "fail, ignore or emit"),
        ("onTruncate", "delete", "emit, fail or ignore"),
        ("changeFormat", "cdf", "plain or changelog"),
        ("keyless", "inserts", "fail or insertOnly"),
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


def test_what_a_stream_is_not_given_has_the_documented_default() -> None:
    assert parse_stream_options(STREAM) == StreamOptions(
        connection=ConnectionOptions(),
        dbtable=QualifiedName(("public", "orders")),
        tables=(),
        slot="orders_1",
        failover=False,
        publication="orders_1",
        publication_mode="create",
        keyless="fail",
        start_from="snapshot",
        max_rows_per_batch=1_000_000,
        max_bytes_per_batch=128 << 20,
        change_format="plain",
        envelope="json",
        before_image=False,
        on_schema_change="fail",
        on_truncate="emit",
        message_prefixes=(),
        on_new_table="fail",
        on_slot_lost="fail",
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
        keyless="insertonly",
        startFrom="Snapshot",
        maxRowsPerBatch="5000",
        maxBytesPerBatch="1GB",
        changeFormat="Plain",
        beforeImage="true",
        onSchemaChange="ignore",
        onTruncate="fail",
        onNewTable="changes",
        onSlotLost="resnapshot",
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
        keyless="insertOnly",
        start_from="snapshot",
        max_rows_per_batch=5000,
        max_bytes_per_batch=1 << 30,
        change_format="plain",
        envelope="json",
        before_image=True,
        on_schema_change="ignore",
        on_truncate="fail",
        message_prefixes=(),
        on_new_table="changes",
        on_slot_lost="resnapshot",
        as_string=("at",),
        numeric_as=NumericAs("double"),
        unrepresentable="null",
        partition_bytes=8 << 20,
        slot_timeout_seconds=60.0,
    )


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
        ({"slot": "s", "tables": "a", "changeFormat": "plain"}, "changeFormat is not used with tables"),
        ({**STREAM, "keyless": "insertOnly", "publication": "p" * 56}, "too long for keyless=insertOnly"),
        ({**STREAM, "changeFormat": "changelog", "beforeImage": "true"}, "beforeImage is not used with changeFormat="),
        (
            {**STREAM, "changeFormat": "changelog", "onTruncate": "emit"},
            "onTruncate=emit is not used with changeFormat=",
        ),
        ({**STREAM, "messagePrefixes": "outbox"}, "messagePrefixes is not used with dbtable"),
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
    if "is not used with tables" in says and not says.startswith("changeFormat"):
        assert "project()" in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (" ", "empty"),
        ("outbox,,audit", "a prefix that is empty"),
        ("outbox, outbox", "named twice"),
        ("outbox, pgcdc", "the prefix pgcdc is reserved"),
        ("a\0", "character"),
    ],
)
def test_malformed_prefixes_of_messages_are_refused(text: str, says: str) -> None:
    message = refused_stream({"tables": "a", "slot": "s", "messagePrefixes": text})
    assert message.startswith("[OPTION] option messagePrefixes: ")
    assert says in message


def test_what_does_not_contradict_in_a_stream_is_taken() -> None:
    assert parse_stream(startFrom="now", slotTimeout="1s").slot_timeout_seconds == 1
    assert parse_stream(startFrom="slot", maxRowsPerBatch="7").max_rows_per_batch == 7
    assert parse_stream(publication="p").publications == Publications("p")
    assert parse_stream(publication="p" * 55, keyless="insertOnly").publications.inserts == "p" * 55 + "_inserts"
    assert parse_stream(changeFormat="changelog").before_image
    assert parse_stream(changeFormat="changelog").on_truncate == "fail"
    assert parse_stream(changeFormat="changelog", onTruncate="ignore").on_truncate == "ignore"
    assert parse_stream_options({"tables": "a", "slot": "s", "partitionBytes": "1MB"}).partition_bytes == 1 << 20
    messages = parse_stream_options({"tables": "a", "slot": "s", "messagePrefixes": "outbox, Audit log"})
    assert messages.message_prefixes == ("outbox", "Audit log")
