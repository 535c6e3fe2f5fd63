"""Decide what becomes of a value that its column's Spark type cannot hold, and of bytes that are no value at all.

The rule is the same for COPY, for pgoutput and for the envelope's JSON. Each of them knows rows by another place (a
ctid, a change of a commit), so the error names a row of what was decoded, and the caller says where that row is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pyarrow as pa

from pg_cdc_source.errors import START_OVER, UnrepresentableError, WireError
from pg_cdc_source.options.names import quoted
from pg_cdc_source.values.decoder import OTHER_BYTES, Decoded, MalformedError
from pg_cdc_source.values.registry import Column


class RefusedValueError(Exception):
    """A value that its column's Spark type cannot hold. ``row`` counts from 0 in what was decoded together."""

    def __init__(self, column: Column, row: int, reason: str) -> None:
        super().__init__(f"{in_words(column)}, row {row} of the chunk: {reason}")
        self.column = column
        self.row = row
        self.reason = reason

    def at(self, relation: str, place: str) -> UnrepresentableError:
        """Return the error for the user: ``relation`` was read, and ``place`` says which of its rows has the value."""
        name = quoted(self.column.name)
        as_null = "unrepresentable=null makes such values NULL"
        if self.reason == OTHER_BYTES:
            # All that keeps an envelope from a value: its columns are text, and those options are not for it.
            remedy = f"{as_null}; with tables, repair the value, and where a change has it, {START_OVER}"
        else:
            remedy = f"asString={name} reads the column as text; {as_null}"
        return UnrepresentableError(f"{relation}, {in_words(self.column)}, {place}: {self.reason}", remedy=remedy)


def accept(
    before_column: str,
    unrepresentable: Literal["error", "null"],
    column: Column,
    decode: Callable[..., Decoded],
    *arguments: object,
) -> pa.Array:
    """Call ``decode`` with ``arguments`` and return its array.

    A value that the type cannot hold raises RefusedValueError, unless ``unrepresentable`` is ``null``: then it is NULL.
    Bytes that PostgreSQL cannot have sent raise WireError; ``before_column`` stands in front of the column in its text.
    """
    try:
        decoded = decode(*arguments)
    except MalformedError as malformed:
        raise WireError(f"{before_column}{in_words(column)}: {malformed}") from None
    if decoded.refused and unrepresentable == "error":
        first = min(decoded.refused, key=lambda refused: int(refused.rows[0]))
        raise RefusedValueError(column, int(first.rows[0]), first.reason)
    return decoded.array


def in_words(column: Column) -> str:
    """Return how errors name a column."""
    return f"column {quoted(column.name)} ({column.type_name})"
