"""Decode one-dimensional arrays: find every element of every row, then decode all elements as one column.

``array_send`` writes: number of dimensions, flag "has NULLs", the element type's oid, then per dimension length and
lower bound, then per element its length (-1: NULL) and bytes. An array whose size is that of ``n`` fixed-width elements
without NULL has them at a constant stride; the elements of others are walked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.values import printed
from pg_cdc_source.values.arrow import bitmap, byte_strings, content
from pg_cdc_source.values.decoder import (
    Decoded,
    Decoder,
    Field,
    Fixed,
    MalformedError,
    Refused,
    expect_length,
    refusals,
    without,
)
from pg_cdc_source.values.escapes import find_escapes, remove_escapes
from pg_cdc_source.values.items import LENGTH_BYTES, walk_into
from pg_cdc_source.values.ndarrays import Bytes, Flags, Ints
from pg_cdc_source.values.wire import WireBuffer

# utils/array.h: MAXDIM.
_MAX_DIMENSIONS = 6
_HEADER_BYTES = 12
# text, varchar and bpchar, whose values are the same bytes: pg_type.dat
_TEXTS = (25, 1043, 1042)
_DIMENSION_BYTES = 8


@dataclass(frozen=True, slots=True)
class Array(Decoder):
    """``array_send``: arrays of one dimension with the lower bound 1, and empty ones.

    Spark's arrays have neither more dimensions nor another lower bound, so all others are refused.
    """

    element: Decoder
    element_oid: int
    arrow: pa.DataType = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrow", pa.list_(pa.field("element", self.element.arrow, nullable=True)))

    def read(self, values: Field) -> Decoded:
        count, has_nulls, refused = self._headers(values)
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(count)))
        valid = values.valid
        for refusal in refused:
            rows = np.zeros(len(count), np.bool_)
            rows[refusal.rows] = True
            valid = without(valid, rows)
        if offsets[-1]:
            elements = self._elements(values, count, offsets, has_nulls)
            decoded = self.element.read(elements)
            refused += tuple(
                Refused(np.searchsorted(offsets, refusal.rows, side="right") - 1, f"an element: {refusal.reason}")
                for refusal in decoded.refused
            )
            children = decoded.array
        else:
            children = pa.nulls(0, self.element.arrow)
        buffers = [bitmap(valid), pa.py_buffer(offsets.astype(np.int32))]
        return Decoded(pa.Array.from_buffers(self.arrow, len(count), buffers, children=[children]), refused)

    def _headers(self, values: Field) -> tuple[Ints, Flags, tuple[Refused, ...]]:
        """Return how many elements each row has, which rows may have NULL elements, and the rows refused."""
        at, length, buffer = values.first_byte(), values.length, values.buffer
        expect_length(values, length < _HEADER_BYTES, f"{_HEADER_BYTES} bytes or more")
        header = buffer.at_any_byte("V20")[at].view(">i4").reshape(-1, 5).T.astype(np.int64, order="C")
        dimensions, flags, element_oid, count, lower_bound = header
        element_oid &= 0xFFFFFFFF  # the only number without a sign
        if dimensions.min() < 0 or dimensions.max() > _MAX_DIMENSIONS:
            wrong = dimensions[(dimensions < 0) | (dimensions > _MAX_DIMENSIONS)][0]
            raise MalformedError(f"expected 0 to {_MAX_DIMENSIONS} dimensions, got {int(wrong)}")
        if flags.min() < 0 or flags.max() > 1:
            raise MalformedError("expected the flag 0 or 1 for NULLs, got other bits")
        # What an extension has written may say another type than the column's, and PostgreSQL reads it all the same.
        alike = _TEXTS if self.element_oid in _TEXTS else (self.element_oid,)
        unlike = values.present(~np.isin(element_oid, alike))
        empty, line = dimensions == 0, dimensions == 1
        wrong_size = (length < _HEADER_BYTES + _DIMENSION_BYTES * dimensions) | (empty & (length != _HEADER_BYTES))
        expect_length(values, wrong_size, "the bytes of its header")
        many = dimensions > 1
        # An empty one that was an int2vector begins at 0, and is printed as any other.
        shifted = line & (lower_bound != 1) & (count != 0)
        is_read = line & ~shifted & ~unlike
        count = np.where(is_read, count, 0)
        if count.min() < 0:
            raise MalformedError(f"expected 0 or more elements, got {int(count.min())}")
        # This also keeps a false count from asking for more memory than the received bytes can need.
        rest = length - (_HEADER_BYTES + _DIMENSION_BYTES)
        wrong_size = np.where(count > 0, LENGTH_BYTES * count > rest, is_read & (rest != 0))
        expect_length(values, wrong_size, "the bytes of its elements")
        refused = refusals(
            (many, "an array of more than one dimension"),
            (shifted & ~unlike, "an array whose lower bound is not 1"),
            (unlike & ~many, "an array whose elements are not of the column's type"),
        )
        return count, flags == 1, refused

    def _elements(self, values: Field, count: Ints, offsets: Ints, has_nulls: Flags) -> Field:
        row_of = np.repeat(np.arange(len(count)), count)
        first = values.start + (_HEADER_BYTES + _DIMENSION_BYTES)
        end = values.start + values.length
        start, length = np.empty(len(row_of), np.int64), np.empty(len(row_of), np.int64)
        walk = count > 0
        if isinstance(self.element, Fixed):
            stride = LENGTH_BYTES + self.element.wire.itemsize
            strided = walk & (first + stride * count == end)
            start[:] = (first - stride * offsets[:-1])[row_of] + stride * np.arange(len(row_of)) + LENGTH_BYTES
            at = np.where(strided[row_of], start - LENGTH_BYTES, values.buffer.zeros_at)
            length[:] = values.buffer.at_any_byte(">i4")[at]
            # A NULL has no bytes, so the array has this size with one only if another element is too long.
            wrong = strided[row_of] & (length != self.element.wire.itemsize)
            if wrong.any():
                got = int(length[wrong.argmax()])
                raise MalformedError(f"expected elements of {self.element.wire.itemsize} bytes, got {got}")
            walk &= ~strided
        rows = np.flatnonzero(walk)
        if len(rows):
            walk_into(values, rows, count, offsets, first, end, start, length)
        null = length < 0
        if not null.any():
            return Field(values.buffer, start, length)
        if (null & ~has_nulls[row_of]).any():
            raise MalformedError("expected an array without NULLs, got a NULL element")
        length[null] = 0
        return Field(values.buffer, start, length, ~null)


# What a byte can be outside quotes, other than a part of an element. White space is what array_isspace (arrayfuncs.c)
# accepts.
_ENDS, _MISPLACED, _QUOTES = 1, 2, 3


def _roles(delimiter: str) -> Bytes:
    roles = np.zeros(256, np.uint8)
    roles[[ord(delimiter), ord("}")]] = _ENDS
    roles[list(b"{\\ \t\n\r\v\f")] = _MISPLACED
    roles[ord('"')] = _QUOTES
    return roles


_NULL = np.frombuffer(b"NULL", np.uint32)[0]
_LOWER_CASE = np.frombuffer(b"    ", np.uint32)[0]
_BOUNDS = r"\[-?[0-9]+:-?[0-9]+\]"
_SHIFTED = r"(?s)\[(?:-[0-9]+|0|[2-9][0-9]*|1[0-9]+):-?[0-9]+\]=\{[^{].*\}"
_OF_MORE_DIMENSIONS = rf"(?s)(?:(?:{_BOUNDS}){{2,6}}=)?\{{\{{.*\}}\}}"


@dataclass(frozen=True, slots=True)
class PrintedArray(Decoder):
    r"""``array_out``: ``{1,NULL,"a \"b\" \\ c"}``, with ``[2:3]=`` in front where the lower bound is not 1.

    An element is quoted if it is empty, reads NULL in any case, or has a brace, comma, quote, backslash or white space.
    Within quotes, a backslash precedes each quote and backslash. A few types have another delimiter than the comma
    (box: ``;``, PostGIS: ``:``). All arrays are split at once. Each byte behind the first brace either belongs to an
    element or ends one, and the next element begins behind it, even if that is in the next row::

        {1,NULL,3}{"a,b"}
         1,NULL,3} "a,b"}
          ↑    ↑ ↑      ↑   bytes outside quotes that end an element
    """

    element: Decoder
    delimiter: str = ","
    arrow: pa.DataType = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrow", pa.list_(pa.field("element", self.element.arrow, nullable=True)))

    def read(self, values: Field) -> Decoded:
        n = len(values.start)
        special, refused = _special(values)
        valid = without(values.valid, special) if refused else values.valid
        # Of all others, only {} has two bytes.
        some = values.present((values.length > 2) & ~special)
        count = np.zeros(n, np.int64)
        children = pa.nulls(0, self.element.arrow)
        if some.any():
            bodies = Field(values.buffer, values.start[some] + 1, values.length[some] - 1)
            elements, count[some] = _split(bodies, self.delimiter)
            decoded = self.element.read(elements)
            row_of = np.repeat(np.arange(n), count)
            refused += tuple(
                Refused(row_of[refusal.rows], f"an element: {refusal.reason}") for refusal in decoded.refused
            )
            children = decoded.array
        offsets = np.concatenate((np.zeros(1, np.int32), np.cumsum(count, dtype=np.int32)))
        buffers = [bitmap(valid), pa.py_buffer(offsets)]
        return Decoded(pa.Array.from_buffers(self.arrow, n, buffers, children=[children]), refused)


def _special(values: Field) -> tuple[Flags, tuple[Refused, ...]]:
    """Return which rows are arrays that Spark cannot hold, and why. All others begin with one brace."""
    if values.present(values.length < 2).any():
        raise MalformedError("expected an array in braces, got a shorter text")
    octet, at = values.buffer.at_any_byte("u1"), values.first_byte()
    first, second = octet[at], octet[at + 1]
    special = values.present((first != ord("{")) | (second == ord("{")))
    if values.present(~special & (values.length == 2) & (second != ord("}"))).any():
        raise MalformedError("expected an array in braces, got two other characters")
    if not special.any():
        return special, ()
    rows = np.flatnonzero(special)
    text = printed.texts(Field(values.buffer, values.start[rows], values.length[rows]))
    many, shifted = printed.matches(text, _OF_MORE_DIMENSIONS), printed.matches(text, _SHIFTED)
    printed.expect(text, pc.or_(many, shifted), "an array")
    reasons = (
        (printed.flags(many), "an array of more than one dimension"),
        (printed.flags(shifted), "an array whose lower bound is not 1"),
    )
    return special, tuple(Refused(rows[refusal.rows], refusal.reason) for refusal in refusals(*reasons))


def _split(bodies: Field, delimiter: str) -> tuple[Field, Ints]:
    """Return all elements of ``bodies``, and how many each body has. A body is an array without its first brace."""
    octets, row_end = content(byte_strings(bodies, bodies.start, bodies.length)), np.cumsum(bodies.length)
    if (octets[row_end - 1] != ord("}")).any():
        raise MalformedError("expected a brace at the end of an array, got another character")
    role = _roles(delimiter).take(octets)
    escapes, escaped = find_escapes(octets)
    role[escaped] = 0
    at = np.flatnonzero(role)
    role = role[at]
    quote = role == _QUOTES
    # True from an opening quote on, false from a closing one on.
    inside = np.bitwise_xor.accumulate(quote.view(np.uint8)).view(np.bool_)
    if (~inside & (role == _MISPLACED)).any():
        raise MalformedError("expected braces, backslashes and white space only within quotes, got one outside")
    ends = np.flatnonzero(~inside & (role == _ENDS))
    end = at[ends]
    last = np.flatnonzero(octets[end] == ord("}"))
    # An unpaired quote would hide the brace behind it.
    if not np.array_equal(end[last] + 1, row_end):
        raise MalformedError("expected one closing brace at the end and quotes in pairs, got something else")
    start = np.concatenate((np.zeros(1, np.int64), end[:-1] + 1))
    if (start == end).any():
        raise MalformedError("expected an element between delimiters, got none")
    # With one pair for each element that begins with a quote, there is no quote elsewhere.
    quoted = octets[start] == ord('"')
    pairs = np.count_nonzero(quote) == 2 * np.count_nonzero(quoted)
    if not pairs or (at[ends[quoted] - 1] + 1 != end[quoted]).any():
        raise MalformedError("expected quotes around whole elements, got one elsewhere")
    octets, start, end = remove_escapes(octets, escapes, start + quoted, end - quoted)
    return _with_nulls(WireBuffer([octets.tobytes()]), start, end - start, quoted), np.diff(last, prepend=-1)


def _with_nulls(buffer: WireBuffer, start: Ints, length: Ints, quoted: Flags) -> Field:
    """Return the elements, of which those that read NULL without quotes are NULL."""
    four = np.flatnonzero(~quoted & (length == len("NULL")))
    words = buffer.at_any_byte("u4")[start[four]]
    null = four[(words | _LOWER_CASE) == (_NULL | _LOWER_CASE)]
    if not len(null):
        return Field(buffer, start, length)
    if (buffer.at_any_byte("u4")[start[null]] != _NULL).any():
        raise MalformedError("expected NULL in capitals or in quotes, got other letters")
    valid = np.ones(len(start), np.bool_)
    valid[null], length[null] = False, 0
    return Field(buffer, start, length, valid)
