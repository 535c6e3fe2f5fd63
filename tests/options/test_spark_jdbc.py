from __future__ import annotations

import pytest
from given_options import STREAM, TABLE, refused, refused_stream

from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.options.spark_jdbc import TAKEN

NAMES = [name for names, _ in TAKEN for name in names]


@pytest.mark.parametrize("name", NAMES)
def test_an_option_without_an_effect_is_taken_and_named_as_its_documentation_does(name: str) -> None:
    assert parse_snapshot_options({**TABLE, name.lower(): "true"}).without_effect.startswith(f"{name}: ")
    assert "is not known" in refused_stream({**STREAM, name.lower(): "true"})


def test_one_text_names_all_of_them_and_shows_no_value() -> None:
    options = parse_snapshot_options(
        {**TABLE, "upperbound": "a-value", "driver": "a-value", "lowerbound": "a-value", "partitioncolumn": "a-value"}
    )
    assert options.without_effect == (
        "upperBound, lowerBound, partitionColumn: a table is split into numPartitions physical ranges;"
        " a query is one partition; driver: no JDBC driver is used"
    )
    assert parse_snapshot_options(TABLE).without_effect == ""


@pytest.mark.parametrize("read", [{"query": "SELECT 1"}, {"dbtable": "(SELECT 1) AS t"}])
def test_the_number_of_partitions_of_a_query_is_taken(read: dict[str, str]) -> None:
    options = parse_snapshot_options({**read, "numPartitions": "4"})
    assert options.num_partitions is None
    assert options.without_effect == "numPartitions: a query is one partition"
    assert parse_snapshot_options({**TABLE, "numPartitions": "4"}).without_effect == ""


def test_an_option_that_asks_for_another_type_is_refused() -> None:
    message = refused({**TABLE, "prefertimestampntz": "false"})
    assert message.startswith("[OPTION] option preferTimestampNTZ: timestamp is always TIMESTAMP_NTZ here\n  Remedy: ")


# What Spark 4.0 to 4.3 gives the source in CREATE TABLE t USING … OPTIONS (url '…').
CREATE_TABLE = {"provider": "pgsnapshot", "owner": "root", "url": "postgresql://h/d", "option.url": "postgresql://h/d"}


def test_a_table_of_the_catalog_is_refused_with_what_to_do() -> None:
    message = refused(CREATE_TABLE)
    assert message.startswith("[OPTION] CREATE TABLE … USING cannot work")
    assert "CREATE TEMPORARY VIEW" in message
    assert "readStream" in refused_stream(CREATE_TABLE)
    assert "CREATE TEMPORARY VIEW" in refused({})
    assert "CREATE TEMPORARY VIEW" not in refused({"host": "h"})
    assert "CREATE TEMPORARY VIEW" not in refused({"sslmode": "require"})
