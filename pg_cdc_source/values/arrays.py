"""Decode one-dimensional arrays: find every element of every row, then decode all elements as one column.

``array_send`` writes: number of dimensions, flag "has NULLs", the element type's oid, then per dimension length and
lower bound, then per element its length (-1: NULL) and bytes. Elements are found in one of three ways:

- An array whose size is that of ``n`` fixed-width elements without NULL has them at a constant stride.
- Otherwise the k-th elements of all arrays are found together, for k = 0, 1, 2, …
- Once few arrays are that long, each is walked alone: one array of a million elements must not cost a million
  NumPy calls.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from pg_cdc_source.values.binary import (
    Decoded,
    Decoder,
    Field,
    Fixed,
    Flags,
    Ints,
    MalformedError,
    Refused,
    bitmap,
    refusals,
    without,
)

# utils/array.h: MAXDIM.
_MAX_DIMENSIONS = 6
_HEADER_BYTES = 12
_DIMENSION_BYTES = 8
LENGTH_BYTES = 4

# A NumPy step over all arrays costs about as much as a plain Python step over so many (measured: 30 and 0.4 µs).
_FEW = 64

_LENGTH = struct.Struct(">i")


@dataclass(frozen=True, slots=True)
class Array(Decoder):
    """``array_send``: arrays of one dimension that start at 1, or empty ones.

    Spark's arrays have neither more dimensions nor another lower bound, so others are refused.
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
        if dimensions.min() < 0 or dimensions.max() > _MAX_DIMENSIONS:
            wrong = dimensions[(dimensions < 0) | (dimensions > _MAX_DIMENSIONS)][0]
            raise MalformedError(f"expected 0 to {_MAX_DIMENSIONS} dimensions, got {int(wrong)}")
        if flags.min() < 0 or flags.max() > 1:
            raise MalformedError("expected the flag 0 or 1 for NULLs, got other bits")
        unlike = values.present(element_oid != self.element_oid)
        if unlike.any():
            got = int(element_oid[unlike.argmax()])
            raise MalformedError(f"expected elements of the type with oid {self.element_oid}, got oid {got}")
        empty, line = dimensions == 0, dimensions == 1
        wrong_size = (length < _HEADER_BYTES + _DIMENSION_BYTES * dimensions) | (empty & (length != _HEADER_BYTES))
        expect_length(values, wrong_size, "the bytes of its header")
        many = dimensions > 1
        shifted = line & (lower_bound != 1)
        count = np.where(line & ~shifted, count, 0)
        if count.min() < 0:
            raise MalformedError(f"expected 0 or more elements, got {int(count.min())}")
        # Also keeps a false count from asking for more memory than the bytes received can need.
        rest = length - (_HEADER_BYTES + _DIMENSION_BYTES)
        wrong_size = np.where(count > 0, LENGTH_BYTES * count > rest, line & ~shifted & (rest != 0))
        expect_length(values, wrong_size, "the bytes of its elements")
        refused = refusals(
            (many, "an array of more than one dimension"), (shifted, "an array that does not start at 1")
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
            # A NULL would have made the array smaller, so only a longer element can have made up for it.
            wrong = strided[row_of] & (length != self.element.wire.itemsize)
            if wrong.any():
                got = int(length[wrong.argmax()])
                raise MalformedError(f"expected elements of {self.element.wire.itemsize} bytes, got {got}")
            walk &= ~strided
        rows = np.flatnonzero(walk)
        if len(rows):
            _walk(values, rows, count, offsets, first, end, start, length)
        null = length < 0
        if not null.any():
            return Field(values.buffer, start, length)
        if (null & ~has_nulls[row_of]).any():
            raise MalformedError("expected an array without NULLs, got one with")
        length[null] = 0
        return Field(values.buffer, start, length, ~null)


def walk(values: Field, first: Ints, count: Ints) -> Field:
    """Find ``count`` items, at least one in all, that stand in each value from ``first`` to its end.

    Each stands behind its length, which is -1 where it is NULL. Raises MalformedError for lengths that do not fit.
    """
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(count)))
    start, length = np.empty(int(offsets[-1]), np.int64), np.empty(int(offsets[-1]), np.int64)
    _walk(values, np.flatnonzero(count), count, offsets, first, values.start + values.length, start, length)
    null = length < 0
    if not null.any():
        return Field(values.buffer, start, length)
    length[null] = 0
    return Field(values.buffer, start, length, ~null)


def _walk(
    values: Field, rows: Ints, count: Ints, offsets: Ints, first: Ints, end: Ints, start: Ints, length: Ints
) -> None:
    """Fill ``start`` and ``length`` for the elements of ``rows``."""
    rows = rows[np.argsort(-count[rows], kind="stable")]
    lengths_at = values.buffer.at_any_byte(">i4")
    remaining, to, at, row_end = count[rows], offsets[rows], first[rows], end[rows]
    k = 0
    while (active := int(np.searchsorted(-remaining, -k))) >= _FEW:
        element_length = lengths_at[at[:active]].astype(np.int64)
        start[to[:active] + k] = at[:active] + LENGTH_BYTES
        length[to[:active] + k] = element_length
        at[:active] += LENGTH_BYTES + np.maximum(element_length, 0)
        if element_length.min() < -1 or (at[:active] > row_end[:active]).any():
            raise MalformedError("expected the elements to end with their value, got a length that does not fit")
        k += 1
    for row in range(active):
        position, limit = int(at[row]), int(row_end[row])
        starts, lengths = [], []
        for _ in range(k, int(remaining[row])):
            (one,) = _LENGTH.unpack_from(values.buffer.data, position)
            position += LENGTH_BYTES
            starts.append(position)
            lengths.append(one)
            position += max(one, 0)
            if one < -1 or position > limit:
                raise MalformedError("expected the elements to end with their value, got a length that does not fit")
        at[row] = position
        flat = slice(int(to[row]) + k, int(to[row]) + len(starts) + k)
        start[flat], length[flat] = starts, lengths
    if (at != row_end).any():
        raise MalformedError("expected the elements to end with their value, got more bytes")


def expect_length(values: Field, wrong: Flags, expected: str) -> None:
    wrong = values.present(wrong)
    if wrong.any():
        raise MalformedError(f"expected {expected}, got {int(values.length[wrong.argmax()])} bytes")
