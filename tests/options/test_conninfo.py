from __future__ import annotations

import re

import pytest
from given_options import TABLE, keywords, refused
from hypothesis import assume, example, given
from hypothesis import strategies as st
from psycopg2.extensions import make_dsn, parse_dsn

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.options.given import parse_connection_options


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


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("-c TimeZone=Europe/Berlin", "TimeZone"),
        ("-ctimezone=Europe/Berlin", "TimeZone"),
        ("-c search_path=a,b --datestyle=ISO,\\ MDY", "DateStyle"),
        ("--extra-float-digits=0", "extra_float_digits"),
        ("-c TimeZone=utc -c DateStyle=ISO,\\ YMD -c statement_timeout=0 -c search_path=timezone", None),
        ("-c work_mem=1GB -c statement_timeout=5s", "statement_timeout"),
        ("--row-security=on", "row_security"),
        ("-c TimeZone=UTC -c timezone=CET", "TimeZone"),
    ],
)
def test_a_setting_that_sessions_override_is_refused(options: str, named: str | None) -> None:
    if named is None:
        assert keywords(host="h", options=options) == {"host": "h", "options": options}
        return
    for connection in ({"host": "h", "options": options}, {"url": make_dsn(host="h", options=options)}):
        assert f"options sets {named}, which the connector sets to" in refused({**TABLE, **connection})


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
