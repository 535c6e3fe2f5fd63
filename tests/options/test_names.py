from __future__ import annotations

import re

import pytest
from given_options import STREAM, TABLE, parse, refused, refused_stream
from hypothesis import given
from hypothesis import strategies as st

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.names import QualifiedName, TablePattern, dotted, parse_tables, quoted
from pg_cdc_source.options.stream_options import parse_stream_options


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
        # In LATIN1, these are as many bytes.
        ("ü" * 63, ("ü" * 63,)),
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
        ("x" * 64, "64 characters"),
        ("ü" * 64, "64 characters"),
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


def test_tables_with_a_minus_are_left_out_of_those_with_a_star() -> None:
    audit, log = TablePattern("public", "audit"), TablePattern("log", None)
    found = parse_tables("public.*, *, a.b, - public.audit,-log.*")
    assert found == (
        TablePattern("public", None, (audit, log)), TablePattern(None, None, (audit, log)), TablePattern("a", "b"),
    )  # fmt: skip
    assert list(map(str, found)) == ["public.*", "*", "a.b"]
    names = [("public", "orders"), ("public", "audit"), ("log", "a"), ("x", "audit")]
    assert [name for name in names if found[1].matches(*name)] == [("public", "orders"), ("x", "audit")]


@pytest.mark.parametrize(("text", "what"), [
    ("-public.a", "-public.a leaves out what no pattern has"), ("public.*, -a", "-a leaves out what no pattern has"),
    ("public.*, -other.a", "-other.a leaves out what no pattern has"), ("a.b, -a.b", "a.b is both named and left out"),
    ("-a.b, a.*, a.b", "a.b is both named and left out"), ("a.*, -a.b, -a.b", "a.b is named twice"),
    ("public.*, --a", "is not a name in SQL: it has '-'"), ("public.-a", "is not a name in SQL: it has '-'"),
    ("public.*, -", "ends where a name is expected"),
])  # fmt: skip
def test_what_is_left_out_has_to_be_there(text: str, what: str) -> None:
    with pytest.raises(OptionError, match=re.escape(what)):
        parse_tables(text)


@pytest.mark.parametrize("text", ["postgresql://u:hunter2@h/db", "a, host=h password=hunter2", "password = hunter2"])
def test_a_connection_in_place_of_a_name_is_not_repeated(text: str) -> None:
    with pytest.raises(OptionError, match="it is a URL or a connection string") as refused:
        parse_tables(text)
    assert "hunter2" not in str(refused.value)
    with pytest.raises(OptionError) as refused:
        QualifiedName.parse(text, for_query="", for_several="")
    assert "hunter2" not in str(refused.value)


@given(st.lists(st.tuples(st.none() | NAMES, st.none() | NAMES), min_size=1, max_size=4, unique=True))
def test_every_list_of_tables_survives_being_shown(patterns: list[tuple[str | None, str | None]]) -> None:
    expected = tuple(TablePattern(schema, name) for schema, name in patterns)
    assert parse_tables(",".join(map(str, expected))) == expected


def test_a_pattern_gives_its_one_table_or_none() -> None:
    assert TablePattern("a", "b").qualified == QualifiedName(("a", "b"))
    assert TablePattern(None, "b").qualified == QualifiedName(("b",))
    assert TablePattern("a", None).qualified is None


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        (TablePattern("a", "b"), [("a", "b")]),
        (TablePattern(None, "b"), [("a", "b"), ("c", "b")]),
        (TablePattern("a", None), [("a", "b"), ("a", "B c")]),
        (TablePattern("a", "B c"), [("a", "B c")]),
        (TablePattern(None, None), [("a", "b"), ("c", "b"), ("a", "B c")]),
    ],
)
def test_a_pattern_matches_tables_and_means_one_that_it_names(
    pattern: TablePattern, matches: list[tuple[str, str]]
) -> None:
    names = [("a", "b"), ("c", "b"), ("a", "B c")]
    assert [name for name in names if pattern.matches(*name)] == matches
    assert [name for name in names if pattern.means(dotted(*name))] == ([] if pattern.name is None else matches)


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
        ("x" * 64, "64 characters"),
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
