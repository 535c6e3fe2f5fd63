r"""Check and cast values as their types' output functions print them (``*_out`` in PostgreSQL's source).

Logical replication sends values so, under the settings of every session here: ISO dates in UTC, shortest floats, hex
bytea. The decoders of these texts stand beside those of the binary format and give identical arrays, refusals included.

Arrow's casts parse fast, but they also take what PostgreSQL never prints (``0x10``, ``007``, ``1e5`` as a decimal,
``inf``, 1e999 as infinity). So a text is cast only after it has matched the pattern of all that its output function
prints. Matching takes 50 to 80 ns a value and casting 10 to 40; Python code for each would take ten times as long.

- Text that PostgreSQL cannot have printed raises :class:`~pg_cdc_source.values.decoder.MalformedError`, whose message
  does not show the text.
- What the Arrow type cannot hold is told from malformed text by more patterns, once some value is out of the ordinary.
- Patterns stand between ``^`` and ``$``, which are the ends of the text, not of its lines (RE2, not Python's ``re``).
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.values.arrow import null, to_numpy, utf8_strings
from pg_cdc_source.values.decoder import Field, MalformedError
from pg_cdc_source.values.ndarrays import Bytes, Flags, Ints


def texts(values: Field) -> pa.Array:
    return utf8_strings(values, values.start, values.length)


def matches(text: pa.Array, pattern: str) -> pa.BooleanArray:
    return pc.match_substring_regex(text, f"^(?:{pattern})$")


def any_of(*conditions: pa.BooleanArray) -> pa.BooleanArray:
    one, *others = conditions
    for other in others:
        one = pc.or_(one, other)
    return one


def flags(condition: pa.BooleanArray) -> Flags:
    """Return where ``condition`` is true; NULL is not."""
    valid = condition.is_valid()
    return to_numpy(pc.if_else(valid, condition, valid))


def expect(text: pa.Array, right: pa.BooleanArray, what: str) -> None:
    if right.false_count:
        first = text[pc.index(right, pa.scalar(False)).as_py()].as_py()
        raise MalformedError(f"expected the text of {what}, got {len(first)} characters that are none")


def cast(text: pa.Array, arrow: pa.DataType, what: str) -> pa.Array:
    try:
        return text.cast(arrow)
    except pa.ArrowInvalid:
        raise MalformedError(f"expected the text of {what}, got one that is out of its range") from None


def only(condition: pa.BooleanArray, text: pa.Array) -> pa.Array:
    return pc.if_else(condition, text, null(text.type))


def escapes(octets: Bytes) -> Ints:
    """Return where backslashes stand that escape the next byte: the first, third, … of each run of them."""
    at = np.flatnonzero(octets == ord("\\"))
    if not len(at):
        return at
    index = np.arange(len(at))
    first_of_run = np.maximum.accumulate(np.where(np.diff(at, prepend=-2) != 1, index, 0))
    escapes: Ints = at[(index - first_of_run) % 2 == 0]
    return escapes
