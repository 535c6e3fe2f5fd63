"""Decode ``vector`` and ``halfvec`` of the extension pgvector as arrays of floats."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from pg_cdc_source.values.arrow import bitmap, byte_strings, content
from pg_cdc_source.values.decoder import Decoded, Decoder, Field, MalformedError, expect_length
from pg_cdc_source.values.ndarrays import Bytes, Flags, Ints
from pg_cdc_source.values.numbers import PrintedFloat
from pg_cdc_source.values.wire import WireBuffer

_FLOATS = pa.list_(pa.field("element", pa.float32(), nullable=True))
_HEADER_BYTES = 4


def _lists(floats: pa.Array, count: Ints, valid: Flags | None) -> pa.Array:
    if not np.isfinite(floats.to_numpy(zero_copy_only=False)).all():
        raise MalformedError("expected finite numbers, got NaN or infinity")
    offsets = np.concatenate((np.zeros(1, np.int32), np.cumsum(count, dtype=np.int32)))
    return pa.Array.from_buffers(_FLOATS, len(count), [bitmap(valid), pa.py_buffer(offsets)], children=[floats])


@dataclass(frozen=True, slots=True)
class Vector(Decoder):
    """``vector_send``, ``halfvec_send``: number of dimensions, two bytes of zero, then the floats."""

    wire: np.dtype[Any]  # of one float
    arrow = _FLOATS

    def read(self, values: Field) -> Decoded:
        expect_length(values, values.length < _HEADER_BYTES, f"{_HEADER_BYTES} bytes or more")
        header = values.buffer.at_any_byte("V4")[values.first_byte()].view(">u2").reshape(-1, 2).astype(np.int64)
        count, unused = header[:, 0], header[:, 1]
        wrong = values.length != _HEADER_BYTES + self.wire.itemsize * count
        expect_length(values, wrong, f"the bytes of {int(count[wrong.argmax()])} dimensions")
        if values.present((count == 0) | (unused != 0)).any():
            raise MalformedError("expected one dimension or more and two bytes of zero, got something else")
        some = np.flatnonzero(count)
        bodies = Field(values.buffer, values.start[some] + _HEADER_BYTES, self.wire.itemsize * count[some])
        octets = content(byte_strings(bodies, bodies.start, bodies.length))
        floats = pa.array(octets.view(self.wire).astype(np.float32))
        return Decoded(_lists(floats, count, values.valid))


@dataclass(frozen=True, slots=True)
class PrintedVector(Decoder):
    """``vector_out``, ``halfvec_out``: ``[1,-2.5,3e+10]``, with the shortest digits that give each float4 back."""

    arrow = _FLOATS
    _element: PrintedFloat = field(default=PrintedFloat(pa.float32()), init=False)

    def read(self, values: Field) -> Decoded:
        n = len(values.start)
        count = np.zeros(n, np.int64)
        some = np.flatnonzero(values.present(np.ones(n, np.bool_)))
        floats = pa.array([], pa.float32())
        if len(some):
            elements, count[some] = _numbers(Field(values.buffer, values.start[some], values.length[some]))
            floats = self._element.read(elements).array
        return Decoded(_lists(floats, count, values.valid))


def _numbers(vectors: Field) -> tuple[Field, Ints]:
    """Return where the numbers of all ``vectors`` lie, and how many each has."""
    octets: Bytes = content(byte_strings(vectors, vectors.start, vectors.length))
    row_end = np.cumsum(vectors.length)
    row_start = row_end - vectors.length
    if (vectors.length < len("[0]")).any() or (octets[row_start] != ord("[")).any():
        raise MalformedError("expected numbers in brackets, got other text")
    end = np.flatnonzero((octets == ord(",")) | (octets == ord("]")))
    last = np.searchsorted(end, row_end) - 1
    brackets = np.count_nonzero(octets == ord("]"))
    if brackets != len(row_end) or (octets[row_end - 1] != ord("]")).any():
        raise MalformedError("expected numbers in brackets, got other text")
    start = np.concatenate((np.zeros(1, np.int64), end[:-1] + 1))
    start[np.concatenate((np.zeros(1, np.int64), last[:-1] + 1))] += 1
    if (start >= end).any():
        raise MalformedError("expected a number between commas, got none")
    return Field(WireBuffer([octets.tobytes()]), start, end - start), np.diff(last, prepend=-1)
