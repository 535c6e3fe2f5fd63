"""No password is ever shown, whatever form it is given in and whatever it is made of."""

from __future__ import annotations

import pickle
import re
from urllib.parse import quote, quote_plus, unquote

import psycopg2
import pytest
from given_options import TABLE, keywords, parse, refused
from hypothesis import example, given
from hypothesis import strategies as st
from psycopg2.extensions import parse_dsn

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.options.libpq_keywords import LIBPQ_KEYWORDS, ONLY_IN_URL, SECRET_KEYWORDS


def libpq_knows(keyword: str) -> bool:
    try:
        parse_dsn(f"{keyword}=''")
    except psycopg2.ProgrammingError:
        return False
    return True


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


@given(RAW_PASSWORDS)
@example(f"a:{CORE}")
@example(f"?{CORE}")
@example(f"a@{CORE}")
@example(f"@{CORE}")
@example(f"a/{CORE}")
@example(f"a#{CORE}%41")
def test_an_uri_is_refused_or_its_password_arrives_whole(password: str) -> None:
    try:
        found = parse_connection_options({"url": f"postgresql://u:{password}@h:5432/d"}).settings()
    except OptionError:
        return
    whole = {"user": "u", "password": unquote(password), "host": "h", "port": "5432", "dbname": "d"}
    assert found == whole


@pytest.mark.parametrize("keyword", sorted(SECRET_KEYWORDS))
def test_every_secret_keyword_is_masked(keyword: str) -> None:
    if keyword in ONLY_IN_URL:
        assert CORE not in refused({**TABLE, keyword: CORE})
    else:
        assert CORE not in repr(parse_connection_options({keyword: CORE}))
        # Spark's own, spark.redaction.regex.
        assert re.search("(?i)secret|password|token|access[.]?key", keyword)
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
