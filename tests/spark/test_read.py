from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, get_args

import pytest
import typed_functions
from given_options import refused, refused_stream
from pyspark.sql import SparkSession

import pg_cdc_source
from pg_cdc_source import read, stream
from pg_cdc_source.errors import OptionError
from pg_cdc_source.options import declared
from pg_cdc_source.options.declared import OPTIONS, Option
from pg_cdc_source.options.libpq_keywords import PASSED_KEYWORDS
from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.options.stream_options import parse_stream_options
from pg_cdc_source.options.suggestions import in_words
from pg_cdc_source.options.texts import option_texts
from pg_cdc_source.options.value_parsers import boolean
from pg_cdc_source.spark.read import Libpq

FUNCTIONS: dict[str, Callable[..., Any]] = {"pgsnapshot": read, "pgcdc": stream}
EACH = [(format, option) for format in FUNCTIONS for option in OPTIONS if option.group in ("connection", format)]


def refusal_of(format: str, option: Option) -> str:
    refuse = {"pgsnapshot": refused, "pgcdc": refused_stream}[format]
    return refuse({option.name: "no such thing", "no such option": ""})


def test_the_functions_are_those_of_the_declared_options() -> None:
    written = typed_functions.MODULE.read_text(encoding="utf-8")
    assert written == typed_functions.source(), "run: python tests/helpers/readme_tables.py"


@pytest.mark.parametrize("format", FUNCTIONS)
def test_a_function_has_the_options_of_its_format_and_no_others(format: str) -> None:
    first, *keywords, libpq = inspect.signature(FUNCTIONS[format]).parameters.values()
    assert (first.name, libpq.name, libpq.kind) == ("spark", "libpq", inspect.Parameter.VAR_KEYWORD)
    assert [keyword.name for keyword in keywords] == [option.name for of, option in EACH if of == format]
    assert {keyword.kind for keyword in keywords} == {inspect.Parameter.KEYWORD_ONLY}
    assert Libpq.__annotations__.keys() == PASSED_KEYWORDS


@pytest.mark.parametrize(("format", "option"), EACH, ids=[f"{format}-{option.name}" for format, option in EACH])
def test_an_option_that_is_left_out_is_not_given_and_its_default_is_said(format: str, option: Option) -> None:
    keyword = inspect.signature(FUNCTIONS[format]).parameters[option.name]
    assert keyword.default is (inspect.Parameter.empty if option.without == "required" else None)
    # Python 3.13 takes the indentation off by itself.
    page = inspect.getdoc(FUNCTIONS[format]) or ""
    said = re.search(rf"\n    {option.name}: (.*?)(?=\n    \w|$(?!\n))", page, re.DOTALL)
    assert said is not None
    text = " ".join(said[1].split()).replace("``", "`")
    assert text.startswith(option.meaning)
    default = option.without if option.default is None else f"`{option.default}`"
    assert text.removeprefix(option.meaning) == ("" if default in ("none", "required") else f"; default: {default}")


CHOSEN = [(format, option) for format, option in EACH if "is not a choice" in refusal_of(format, option)]


@pytest.mark.parametrize(("format", "option"), CHOSEN, ids=[f"{format}-{option.name}" for format, option in CHOSEN])
def test_the_choices_of_a_keyword_are_those_of_the_option(format: str, option: Option) -> None:
    annotation = inspect.signature(FUNCTIONS[format]).parameters[option.name].annotation
    if option.parse is boolean:
        assert annotation == "bool | None"
        return
    choices = get_args(getattr(declared, annotation.removesuffix(" | None")))
    assert [option.parse(choice) for choice in choices] == list(choices)
    assert f"use {in_words(choices)}" in refusal_of(format, option)


def test_values_of_python_are_read_as_their_texts() -> None:
    given = option_texts(
        {
            **{"columns": ["id", '"Total, gross"'], "numPartitions": 4, "port": 5433, "snapshotIdle": 0.0015e3},
            **{"dbtable": "t", "batchBytes": 1 << 20, "where": None, "asString": ("id",)},
        }
    )
    options = parse_snapshot_options(given)
    assert options.columns == ("id", "Total, gross")
    assert (options.num_partitions, options.batch_bytes, options.snapshot_idle_seconds) == (4, 1 << 20, 1.5)
    assert (options.as_string, options.where) == (("id",), None)
    assert options.connection.keywords == (("port", "5433"),)
    streamed = parse_stream_options(option_texts({"tables": ["a.*", "b"], "slot": "s", "failover": True}))
    assert [str(table) for table in streamed.tables] == ["a.*", "b"]
    assert streamed.failover is True


def test_an_option_is_given_once_in_any_case() -> None:
    # The function's own keyword is there as well, and nobody has given it.
    assert option_texts({"dbtable": None, "DBTABLE": "t"}) == {"DBTABLE": "t"}
    with pytest.raises(OptionError, match="the option dbtable is given twice, also as DBTABLE"):
        option_texts({"dbtable": "t", "DBTABLE": "u"})


def test_a_keyword_that_is_not_there_is_an_error_of_python() -> None:
    with pytest.raises(TypeError, match="slot"):
        stream(None, dbtable="t")  # type: ignore[call-arg, arg-type]


def _what_a_type_checker_refuses(spark: SparkSession) -> None:
    """Never called: mypy reports an ignore that it does not need."""
    read(spark, url="postgresql://h/d", dbtable="t", columns=["a"], numPartitions=4, sslmode="require")
    stream(spark, tables=["a.*"], slot="s", beforeImage=True, startFrom="now")
    read(spark, dbtabel="t")  # type: ignore[call-arg]
    read(spark, dbtable="t", startFrom="now")  # type: ignore[call-arg]
    read(spark, consistentPoint="maybe")  # type: ignore[arg-type]
    read(spark, columns=[1])  # type: ignore[list-item]
    stream(spark, dbtable="t", slot="s", failover="yes")  # type: ignore[arg-type]


def test_the_name_of_a_folder_is_that_of_the_function() -> None:
    from pg_cdc_source.stream.received import buffer

    assert buffer.__name__ == "pg_cdc_source.stream.received.buffer"
    assert pg_cdc_source.stream is stream
    assert callable(stream)
