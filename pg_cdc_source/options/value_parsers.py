"""Parsers of options' values: each reads the text of one value, or raises OptionError with the accepted forms."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.names import MAX_NAME_BYTES, QualifiedName, check_characters
from pg_cdc_source.options.suggestions import in_words

# Binary units, as in postgresql.conf: 1kB is 1024 bytes.
_SIZE_UNITS = {unit: 1 << 10 * power for power, unit in enumerate(("", "k", "m", "g", "t"))}
# The number of digits is bounded, because int() raises an error of its own for thousands of them.
_NUMBER = r"(\d{1,18}(?:\.\d{1,18})?)"
_SIZE = re.compile(_NUMBER + r"\s*(?:([kmgt])i?)?b?", re.IGNORECASE | re.ASCII)
_DURATION_UNITS = {
    "": Fraction(1),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
_DURATION = re.compile(_NUMBER + r"\s*(ms|s|min|m|h|d|)", re.IGNORECASE | re.ASCII)
_SLOT_NAME = re.compile(r"[a-z0-9_]{1,63}", re.ASCII)
# The prefix of logical decoding messages that ask the stream itself for something.
OWN_PREFIX = "pgcdc"
_SNAPSHOT_ID = re.compile(r"[0-9A-F]+(?:-[0-9A-F]+)+", re.ASCII)


def size(least: str, most: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = _bytes(text)
        if not _bytes(least) <= value <= _bytes(most):
            raise OptionError(f"{text.strip()} is out of bounds", remedy=f"choose a size from {least} to {most}")
        return value

    return parse


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise OptionError(
            f"{text!r} is not a size", remedy="write bytes as a number, or with a unit: 512kB, 64MB, 1GB (1kB is 1024)"
        )
    return int(Fraction(match[1]) * _SIZE_UNITS[(match[2] or "").lower()])


def duration(least: str, most: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = _seconds(text)
        if not _seconds(least) <= value <= _seconds(most):
            raise OptionError(f"{text.strip()} is out of bounds", remedy=f"choose a time from {least} to {most}")
        return value

    return parse


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise OptionError(
            f"{text!r} is not a time", remedy="write seconds as a number, or with a unit: 500ms, 10s, 2min, 1h"
        )
    return float(Fraction(match[1]) * _DURATION_UNITS[match[2].lower()])


def whole_number(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        digits = text.strip()
        if not (re.fullmatch(r"\d{1,18}", digits, re.ASCII) and least <= int(digits) <= most):
            raise OptionError(f"{text!r} is not a whole number from {least} to {most}", remedy="write it in digits")
        return int(digits)

    return parse


def one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        for choice in choices:
            if text.strip().lower() == choice.lower():
                return choice
        raise OptionError(f"{text!r} is not a choice", remedy=f"use {in_words(choices)}")

    return parse


def boolean(text: str) -> bool:
    return one_of(("true", "false"))(text) == "true"


def not_blank(text: str) -> str:
    if not text.strip():
        raise OptionError("it is empty", remedy="give it a value or leave the option out")
    return text


def condition(text: str) -> str:
    # Without what stands before it, the places in PostgreSQL's errors would be others than in the user's program.
    return not_blank(text).rstrip()


def slot_name(text: str) -> str:
    if not _SLOT_NAME.fullmatch(text):
        raise OptionError(
            f"{text!r} is not a name for a replication slot",
            remedy="use 1 to 63 lower-case letters, digits and underscores",
        )
    return text


def publication_name(text: str) -> str:
    not_blank(text)
    if len(text) > 1 and text[0] == text[-1] == '"':
        raise OptionError(f"{text} is in quotes", remedy="write the publication's name without quotes, as it is stored")
    length = len(text.encode())
    if length > MAX_NAME_BYTES:
        raise OptionError(
            f"{text!r} has {length} bytes, PostgreSQL's names have {MAX_NAME_BYTES} at most",
            remedy="write the publication's name as the catalog holds it",
        )
    return text


def message_prefixes(text: str) -> tuple[str, ...]:
    not_blank(text)
    check_characters(text)
    prefixes = tuple(prefix.strip() for prefix in text.split(","))
    for prefix in prefixes:
        if not prefix:
            raise OptionError(
                f"{text!r} has a prefix that is empty", remedy="separate prefixes by one comma: outbox,audit"
            )
        if prefix == OWN_PREFIX:
            raise OptionError(
                f"the prefix {OWN_PREFIX} is reserved: its messages ask the stream for something, and are no rows",
                remedy="leave it out; choose another prefix for messages of your own",
            )
        if prefixes.count(prefix) > 1:
            raise OptionError(f"the prefix {prefix} is named twice", remedy="name it once")
    return prefixes


def streamed_table(text: str) -> QualifiedName:
    return QualifiedName.parse(
        text, for_query="name the table it reads: streams take no query", for_several="use the option tables"
    )


def snapshot_id(text: str) -> str:
    if not _SNAPSHOT_ID.fullmatch(text.strip()):
        raise OptionError(
            f"{text!r} is not the id of an exported snapshot",
            remedy="pass what pg_export_snapshot() returned, such as 00000003-0000001B-1",
        )
    return text.strip()


def password(text: str) -> str:
    return text


def importable_function(text: str) -> str:
    module, colon, function = text.strip().partition(":")
    if not colon or not all(name.isidentifier() for name in f"{module}.{function}".split(".")):
        raise OptionError(
            # What somebody may write here by mistake is a password.
            "what is given does not name a function that can be imported",
            remedy="write module:function, as a.b:token",
        )
    return text.strip()
