from __future__ import annotations

import pytest
from given_options import STREAM, TABLE, refused, refused_stream

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.options.stream_options import parse_stream_options


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
        ("scram_client_key", "put it into url"),
        ("sessionInitStatement", "options"),
        ("customSchema", "asString"),
        ("predicates", "use where"),
        ("prepareQuery", "WITH"),
        ("hint", "has no hints"),
        ("keytab", "krbsrvname"),
        ("connectionProvider", "krbsrvname"),
        ("currentSchema", "search_path"),
        ("ssl", "use sslmode"),
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
    message = refused({**TABLE, key.lower(): "value-of-it"})
    assert says in message
    assert f"the option {key} " in message
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
        ("table.exclude.list", "-schema.table"),
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
        ("failOnDataLoss", "use onSlotLost"),
        ("skipped.operations", "_change_type"),
        ("readChangeFeed", "changeFormat=changelog"),
        ("truncate.handling.mode", "onTruncate"),
        ("decimal.handling.mode", "numericAs"),
        ("schema-name", "tables"),
        ("snapshot.mode", "onSlotLost=resnapshot"),
        ("snapshot.select.statement.overrides", "row filter"),
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
    message = refused_stream({**STREAM, key.lower(): "value-of-it"})
    assert says in message
    assert f"the option {key} " in message
    assert "\n  Remedy: " in message
    assert "value-of-it" not in message
    assert "things are wrong" not in message


def test_everything_wrong_with_a_stream_is_reported_at_once() -> None:
    message = refused_stream({"tabels": "t", "startFrom": "?", "maxBytesPerBatch": "?"})
    assert message.startswith("[OPTION] 5 things are wrong with the options:\n- ")
    for says in ("tables?", "option startFrom", "option maxBytesPerBatch", "no slot", "neither dbtable nor tables"):
        assert says in message


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


ASKED = {"passwordCommand": "token-of orders", "passwordProvider": "tokens:of_rds"}


@pytest.mark.parametrize("option", ASKED)
def test_who_is_asked_for_the_password_reaches_both_formats(option: str) -> None:
    for parse, needed in ((parse_snapshot_options, TABLE), (parse_stream_options, STREAM)):
        connection = parse({**needed, "url": "postgresql://u@h/d", option: ASKED[option]}).connection
        assert {connection.password_command, connection.password_provider} == {None, ASKED[option]}
        assert "token-of" not in repr(connection)


@pytest.mark.parametrize("option", ASKED)
@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"password": "x"}, "password"),
        ({"url": "postgresql://u:x@h/d"}, "password"),
        ({"url": "jdbc:postgresql://h/d?user=u&password=x"}, "password"),
        ({"passfile": "/x"}, "passfile"),
    ],
)
def test_a_password_comes_from_one_place(option: str, other: dict[str, str], name: str) -> None:
    message = refused({**TABLE, option: ASKED[option], **other})
    assert f"{name} and {option} each say where the password comes from" in message


def test_a_command_and_a_function_are_not_both_asked() -> None:
    assert "passwordCommand and passwordProvider each say" in refused({**TABLE, **ASKED})


@pytest.mark.parametrize("text", ["tokens", "tokens:", ":f", "a b:f", "tokens:f()", "tokens.f", "a..b:f", "1a:f"])
def test_a_provider_that_names_no_function_is_refused(text: str) -> None:
    assert "write module:function" in refused({**TABLE, "passwordProvider": text})
