"""What may be read instead of a table: a SELECT, or a sub-select as users of Spark's JDBC source write it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.names import QualifiedName
from pg_cdc_source.options.value_parsers import condition


@dataclass(frozen=True, slots=True)
class Query:
    """SQL that the user has ``written``: all of a SELECT in the option query, or what it reads FROM in dbtable."""

    option: Literal["query", "dbtable"]
    written: str

    @property
    def sql(self) -> str:
        return self.written if self.option == "query" else f"SELECT * FROM {self.written}"


def select(text: str) -> Query:
    return Query("query", _without_semicolon(text))


_AS_QUERY = "pass it in the option query, or in parentheses: (SELECT …) AS t"
# A name, and an alias or a join behind it.
_FROM_ITEM = re.compile(r'\s*(?:"[^"]*"|[^\s"(])+\s+(?:as|(?:\w+\s+)*join)\s', re.IGNORECASE)


def table_or_subselect(text: str) -> QualifiedName | Query:
    """A table's name, or ``(SELECT …) AS t``."""
    if text.lstrip().startswith("("):
        return Query("dbtable", _without_semicolon(text))
    if _FROM_ITEM.match(text):
        raise OptionError(f"{text!r} is more than a table's name", remedy=_AS_QUERY)
    return QualifiedName.parse(text, for_query=_AS_QUERY)


def _without_semicolon(text: str) -> str:
    return condition(text.rstrip().removesuffix(";"))
