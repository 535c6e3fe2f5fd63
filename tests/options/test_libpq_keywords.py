from __future__ import annotations

import ctypes

import psycopg2
import pytest

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.declared import OPTIONS
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.options.libpq_keywords import LIBPQ_KEYWORDS, PASSED_KEYWORDS, SECRET_KEYWORDS


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


@pytest.mark.parametrize("keyword", sorted(LIBPQ_KEYWORDS))
def test_the_keywords_that_pass_through_are_those_that_are_documented(keyword: str) -> None:
    declared = {option.name for option in OPTIONS if option.group == "connection"}
    if keyword in PASSED_KEYWORDS:
        assert keyword not in declared
        assert parse_connection_options({keyword: "1"}).keywords == ((keyword, "1"),)
    elif keyword not in declared:
        with pytest.raises(OptionError, match=f"the option {keyword} cannot be set"):
            parse_connection_options({keyword: "1"})
