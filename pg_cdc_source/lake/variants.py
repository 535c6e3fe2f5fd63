"""Which JSON a VARIANT holds as it is.

Spark's ``parse_json`` makes doubles of numbers that a decimal cannot hold, and question marks of half a surrogate pair.
It fails for duplicate keys and deep nesting. All of it is found before, so that one column's value sets its table aside
by name and nothing is altered silently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import pyarrow as pa

from pg_cdc_source.errors import RESNAPSHOT, UnrepresentableError
from pg_cdc_source.lake.columns import MirroredColumn
from pg_cdc_source.protocol.refused import in_words

# Of Spark's decimals.
_DIGITS = 38
# Jackson, by which Spark parses, has a limit of 1,000.
_LEVELS = 500
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def require_exact(table: str, column: MirroredColumn, texts: pa.Array, place: Callable[[int], str]) -> None:
    """Raise UnrepresentableError for a text that a VARIANT would not hold as it is; ``place`` says where one is."""
    for row, text in enumerate(texts.to_pylist()):
        reason = None if text is None else refusal(text)
        if reason is not None:
            raise UnrepresentableError(
                f"{table}, {in_words(column.codec.column)}, {place(row)}: VARIANT cannot hold JSON with {reason}",
                remedy="give the row another value in PostgreSQL, or mirror the table with jsonAs=string into another "
                f"target; then {RESNAPSHOT}",
            )


class _Refused(Exception):  # noqa: N818 - ends a search, and is no error
    pass


def refusal(text: str) -> str | None:
    """Say what JSON has that a VARIANT does not hold; None for nothing."""
    if _depth(text) > _LEVELS:
        return f"more than {_LEVELS} levels"
    try:
        json.loads(text, object_pairs_hook=_distinct, parse_int=_number, parse_float=_number)
    except _Refused as refused:
        return str(refused)
    if "\\u" in text and any(map(_is_half, _strings(text))):
        return "half a surrogate pair"
    return None


def _distinct(pairs: Sequence[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    if len(names) != len(set(names)):
        raise _Refused("a duplicate key")


def _number(text: str) -> None:
    is_plain = "e" not in text.lower()
    if is_plain and len(text) <= _DIGITS:
        return
    try:
        number = Decimal(text)
    except InvalidOperation:
        # The exponent is beyond what Decimal has.
        raise _Refused(f"a number of more than {_DIGITS} digits") from None
    exponent = int(number.as_tuple().exponent)
    is_decimal = is_plain and len(number.as_tuple().digits) <= _DIGITS and -exponent <= _DIGITS
    if not is_decimal and Decimal(repr(float(text))) != number:
        raise _Refused(f"a number of more than {_DIGITS} digits")


def _depth(text: str) -> int:
    if text.count("[") + text.count("{") <= _LEVELS:
        return 0
    depth = deepest = 0
    for character in _STRING.sub("", text):
        depth += (character in "[{") - (character in "]}")
        deepest = max(deepest, depth)
    return deepest


def _strings(text: str) -> Sequence[str]:
    return [json.loads(found) for found in _STRING.findall(text)]


def _is_half(value: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in value)
