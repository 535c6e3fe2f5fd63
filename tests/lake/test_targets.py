"""Where tables go, and which templates are refused."""

from __future__ import annotations

import pytest

from pg_cdc_source.errors import OptionError
from pg_cdc_source.lake.targets import NOT_FOR_DELTA_RS, Targets


def test_a_template_says_where_tables_and_the_ledger_are() -> None:
    targets = Targets.of("s3://lake/{table}", None)
    assert (targets["public.t"], targets["sales.t"]) == ("s3://lake/t", "s3://lake/t")
    assert targets.ledger == "s3://lake/_pgcdc"
    targets = Targets.of("/lake/{schema}/{{x}}/{table}", "/ledger")
    assert targets['"a b"."T.""x"'] == '/lake/a b/{x}/T."x'
    assert targets.ledger == "/ledger"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("/lake/{table", "is no template"),
        ("/lake/{name}", "has the placeholder {name}"),
        ("/lake/{}", "has the placeholder {}"),
        ("/lake/{table.x}", "has the placeholder {table.x}"),
        ("/lake/t", "has no {table}"),
        ("/lake/{schema}", "has no {table}"),
        ("/lake/{schema}/{table}", "say in ledger where the ledger is to be"),
        ("/lake/{table:>9}", "has the placeholder {table:>9}"),
        ("/lake/{table!r}", "has the placeholder {table!r}"),
    ],
)
def test_other_templates_are_refused(template: str, text: str) -> None:
    with pytest.raises(OptionError) as caught:
        Targets.of(template, None)
    assert text in str(caught.value)


def test_two_tables_have_two_places() -> None:
    assert Targets.of("/lake/{schema}/{table}", "/ledger").shared(["a.t", "b.t", "a.u"]) == {}
    for template, tables, text in (
        ("/lake/{table}", ["a.t", "b.t"], "one place for a.t and b.t: /lake/t"),
        ("/lake/{table}", ["a.t", 'a."T"'], 'one place for a.t and a."T": /lake/T'),
        ("/lake/{table}", ["a._pgcdc"], "one place for the ledger and a._pgcdc"),
        ("/Lake/{table}", ["a._pgcdc"], "one place for the ledger and a._pgcdc"),
        ("/lake/{table}", ['a."_PGCDC"'], "one place for the ledger and"),
        ("/lake/{schema}{table}", ["a.bc", "ab.c"], "one place for a.bc and ab.c: /lake/abc"),
    ):
        ledger = None if "{schema}" not in template else "/ledger"
        ((table, error),) = Targets.of(template, ledger).shared(tables).items()
        assert table == tables[-1]
        assert text in str(error), error


def test_names_that_lead_elsewhere_are_refused() -> None:
    targets = Targets.of("/lake/{table}", None)
    for name in ('a."../t"', 'a."t/u"', 'a.".."', 'a."."', '".."."t"', 'a."t\\u"'):
        with pytest.raises(OptionError, match="cannot be a directory's"):
            targets[name]


@pytest.mark.parametrize("letter", NOT_FOR_DELTA_RS)
def test_paths_that_delta_rs_cannot_have_are_refused(letter: str) -> None:
    in_template = {"{": "{{", "}": "}}"}.get(letter, letter)
    for template, ledger in ((f"/la{in_template}ke/{{table}}", None), ("/lake/{table}", f"/led{letter}ger")):
        with pytest.raises(OptionError, match="which no path of this format can have"):
            Targets.of(template, ledger, NOT_FOR_DELTA_RS)
        Targets.of(template, ledger)
    targets = Targets.of("/lake/{table}", None, NOT_FOR_DELTA_RS)
    with pytest.raises(
        OptionError, match="cannot be a directory's" if letter == "\\" else "in its name, which no path"
    ):
        targets[f'public."a{letter}b"']
    assert targets['public."a b:c;ü=$"'] == "/lake/a b:c;ü=$"


@pytest.mark.parametrize("table", ['public."orders${x}"', '"${env:HOME}".t'])
def test_a_name_that_spark_would_take_for_a_variable_is_refused(table: str) -> None:
    with pytest.raises(OptionError, match="which Spark takes for a variable"):
        Targets.of("/lake/{schema}/{table}", "/ledger")[table]
