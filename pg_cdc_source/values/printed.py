r"""Check and cast values as their types' output functions print them (``*_out`` in PostgreSQL's source).

Logical replication sends values in this format. Every session here sets ISO dates, UTC, shortest floats and hex bytea.
Each type's text decoder stands beside its binary decoder and gives identical arrays, refusals included.

Arrow's casts parse fast, but they also take what PostgreSQL never prints (``0x10``, ``007``, ``1e5`` as a decimal,
``inf``, 1e999 as infinity). So a text is cast only after it has matched the pattern of everything that its output
function prints. Matching takes 50 to 80 ns a value and casting 10 to 40; Python code for each would take ten times as
long.

- Text that PostgreSQL cannot have printed raises :class:`~pg_cdc_source.values.decoder.MalformedError`, whose message
  does not show the text.
- More patterns tell what the Arrow type cannot hold from malformed text. They run only once some value is unusual.
- Patterns stand between ``^`` and ``$``, which in RE2 are the ends of the text, not of its lines.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.values.arrow import null, to_numpy, utf8_strings
from pg_cdc_source.values.decoder import Field, MalformedError
from pg_cdc_source.values.ndarrays import Flags


def texts(values: Field) -> pa.StringArray:
    """Return the values as they are printed. Raises NotUtf8Error."""
    return utf8_strings(values, values.start, values.length)


def matches(text: pa.Array, pattern: str) -> pa.BooleanArray:
    """Return which texts match ``pattern`` (RE2) from their first to their last character; NULL where the text is."""
    return pc.match_substring_regex(text, f"^(?:{pattern})$")


def any_of(*conditions: pa.BooleanArray) -> pa.BooleanArray:
    """Return where one of the conditions is true."""
    one, *others = conditions
    for other in others:
        one = pc.or_(one, other)
    return one


def flags(condition: pa.BooleanArray) -> Flags:
    """Return where ``condition`` is true; NULL counts as false."""
    valid = condition.is_valid()
    return to_numpy(pc.if_else(valid, condition, valid))


def expect(text: pa.Array, right: pa.BooleanArray, what: str) -> None:
    """Raise MalformedError where a text is not ``right``. The error names ``what`` was expected, and no text."""
    if right.false_count:
        first = text[pc.index(right, pa.scalar(False)).as_py()].as_py()
        raise MalformedError(f"expected the text of {what}, got {len(first)} other characters")


def cast(text: pa.Array, arrow: pa.DataType, what: str) -> pa.Array:
    """Cast texts that have matched. Raises MalformedError for one out of the type's range."""
    try:
        return text.cast(arrow)
    except pa.ArrowInvalid:
        raise MalformedError(f"expected the text of {what}, got one out of range") from None


def only(condition: pa.BooleanArray, text: pa.Array) -> pa.Array:
    """Return the texts where ``condition`` is true, and NULL elsewhere."""
    return pc.if_else(condition, text, null(text.type))
