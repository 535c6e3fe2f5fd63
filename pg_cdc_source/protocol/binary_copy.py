"""Decode ``COPY … TO STDOUT (FORMAT binary)`` column by column.

Decoding row by row would cost a Python step for each value. Here thousands of rows lie in one buffer, and all rows
advance together, a column at a time: gather the lengths, gather or copy the values, step over them.

Fixed-width columns are selected first, those that are NOT NULL before the others. As long as no row has a NULL in them,
they lie at constant offsets, and one gather reads them all::

    row   count │ length value │ length value │ length value … │ length bytes │ length bytes
                └──── as long as every length is its type's ───┴── walked from here ────────

The format is in the manual under COPY, "Binary Format".

- A row ends where its message ends. Every position is checked against that before the next column is read.
- The gather is used for the columns before the first that has a NULL in any row; the others are walked. Either way,
  every length has been checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pg_cdc_source.errors import TransientError, WireError
from pg_cdc_source.protocol.refused import accept, in_words
from pg_cdc_source.values import native
from pg_cdc_source.values.decoder import Field, Fixed, refuse_other_bytes
from pg_cdc_source.values.ndarrays import Ints
from pg_cdc_source.values.registry import Codec
from pg_cdc_source.values.wire import Messages, WireBuffer

_SIGNATURE = b"PGCOPY\n\377\r\n\0"
_FLAGS_AT = len(_SIGNATURE)
_EXTENSION_LENGTH_AT = _FLAGS_AT + 4
_HEADER_BYTES = _EXTENSION_LENGTH_AT + 4
_CRITICAL_FLAGS = 0xFFFF0000
_TRAILER = b"\xff\xff"

_COUNT_BYTES = 2
_LENGTH_BYTES = 4


class CopyMessages:
    """Tells the messages of one COPY apart: first a header, then rows, then a trailer.

    Each row is a message. Servers send the header alone, or in front of the first row or of the trailer.
    """

    def __init__(self) -> None:
        self._header_seen = False
        self._trailer_seen = False

    def rows(self, messages: Messages) -> Messages:
        """Return the rows among the next messages. Raises WireError for a malformed header or messages too many."""
        rows = messages
        if len(rows) and self._trailer_seen:
            raise WireError(f"COPY: expected no message after the trailer, got {len(rows)}")
        if len(rows) and not self._header_seen:
            starts = rows.starts.copy()
            starts[0] += _header_length(rows.octets(0))
            self._header_seen = True
            rows = Messages(rows.buffer, starts, rows.ends)[int(starts[0] == rows.ends[0]) :]
        if len(rows) and rows.ends[-1] - rows.starts[-1] == len(_TRAILER) and rows.octets(-1) == _TRAILER:
            self._trailer_seen = True
            rows = rows[:-1]
        return rows

    def finish(self) -> None:
        """Raise TransientError if the trailer has not come: then the server may have had more rows to send."""
        if not self._trailer_seen:
            raise TransientError("the COPY ended without its trailer: the session was lost, or the query cancelled")


def _header_length(message: bytes) -> int:
    if len(message) < _HEADER_BYTES or not message.startswith(_SIGNATURE):
        raise WireError(f"COPY: expected a header of {_HEADER_BYTES} bytes or more, got {len(message)} other bytes")
    flags = int.from_bytes(message[_FLAGS_AT:_EXTENSION_LENGTH_AT], "big")
    if flags & _CRITICAL_FLAGS:
        raise WireError(f"COPY: expected no critical flags in the header, got {flags:#010x}")
    length = _HEADER_BYTES + int.from_bytes(message[_EXTENSION_LENGTH_AT:_HEADER_BYTES], "big")
    if length > len(message):
        raise WireError(f"COPY: expected a header of {length} bytes, got {len(message)}")
    return length


def select_order(codecs: Sequence[Codec]) -> list[int]:
    """Return the indices of ``codecs`` in the order in which their columns have to be selected."""
    return sorted(range(len(codecs)), key=lambda i: (codecs[i].width is None, not codecs[i].column.not_null))


class CopyDecoder:
    """Decodes rows whose columns were selected in the order of :func:`select_order`."""

    def __init__(self, codecs: Sequence[Codec], unrepresentable: Literal["error", "null"]) -> None:
        self._codecs = list(codecs)
        self._order = select_order(codecs)
        self._accept = partial(accept, "COPY: ", unrepresentable)
        self._fixed: list[tuple[int, Fixed]] = []
        for i in self._order:
            decoder = codecs[i].decoder
            if not isinstance(decoder, Fixed):
                break
            self._fixed.append((i, decoder))
        self._dtypes = [decoder.wire if isinstance(decoder := codecs[i].decoder, Fixed) else None for i in self._order]
        # Lengths are compared in the byte order in which they come, to constants in the same.
        self._prefix = np.dtype(
            [("count", ">i2")]
            + [
                item
                for k, (_, decoder) in enumerate(self._fixed)
                for item in ((f"length{k}", "i4"), (f"value{k}", decoder.wire))
            ]
        )
        self._prefix_lengths = np.array([decoder.wire.itemsize for _, decoder in self._fixed], ">i4").view("i4")

    @property
    def padding(self) -> int:
        """How many zeros a buffer must have behind the rows."""
        return max(self._prefix.itemsize, WireBuffer.MIN_PADDING)

    def decode(self, rows: Messages) -> list[pa.Array]:
        """Decode complete rows into one array for each codec, in the codecs' order.

        Raises WireError for malformed rows, and :class:`~pg_cdc_source.protocol.refused.RefusedValueError` for a value
        that its type cannot hold, unless such values become NULL.
        """
        if not len(rows):
            return [pa.nulls(0, codec.arrow_type) for codec in self._codecs]
        found = native.walk_copy(rows.buffer.address, rows.starts, rows.ends, self._dtypes)
        if found is None:
            return self._decode_with_numpy(rows)
        arrays: dict[int, pa.Array] = {}
        for i, (items, start, length, valid) in zip(self._order, found, strict=True):
            codec = self._codecs[i]
            if isinstance(codec.decoder, Fixed):
                arrays[i] = self._accept(codec.column, codec.decoder.read_items, items, valid)
            else:
                values = Field(rows.buffer, start, length, valid)
                arrays[i] = self._accept(codec.column, refuse_other_bytes, codec.decode, values)
        return [arrays[i] for i in range(len(self._codecs))]

    def _decode_with_numpy(self, rows: Messages) -> list[pa.Array]:
        buffer, starts, ends = rows.buffer, rows.starts, rows.ends
        shortest = int((ends - starts).min())
        if shortest < _COUNT_BYTES:
            raise WireError(f"COPY: expected a row of {_COUNT_BYTES} bytes or more, got {shortest}")
        # Gathered as opaque bytes: NumPy copies structured items field by field, which takes 20 times as long.
        prefix = buffer.at_any_byte(f"V{self._prefix.itemsize}")[starts].view(self._prefix)
        wrong = prefix["count"] != len(self._codecs)
        if wrong.any():
            got = int(prefix["count"][wrong.argmax()])
            raise WireError(f"COPY: expected rows of {len(self._codecs)} fields, got one of {got}")

        arrays: dict[int, pa.Array] = {}
        at_constant_offset, prefix_bytes = self._matching(prefix, shortest)
        for k, (i, decoder) in enumerate(self._fixed[:at_constant_offset]):
            arrays[i] = self._accept(self._codecs[i].column, decoder.read_items, prefix[f"value{k}"], None)
        self._walk(buffer, starts + prefix_bytes, ends, self._order[at_constant_offset:], arrays)
        return [arrays[i] for i in range(len(self._codecs))]

    def _matching(self, prefix: npt.NDArray[Any], shortest_row: int) -> tuple[int, int]:
        """Return how many leading columns have a value in every row, and the bytes before the next column."""
        size = _COUNT_BYTES
        for k, (_, decoder) in enumerate(self._fixed):
            next_at = size + _LENGTH_BYTES + decoder.wire.itemsize
            # Behind the end of the shortest row, the gather may have read bytes of another row.
            if next_at > shortest_row or (prefix[f"length{k}"] != self._prefix_lengths[k]).any():
                return k, size
            size = next_at
        return len(self._fixed), size

    def _walk(
        self, buffer: WireBuffer, at: Ints, ends: Ints, columns: Sequence[int], arrays: dict[int, pa.Array]
    ) -> None:
        """Decode ``columns`` into ``arrays``; the first of them begins at ``at`` in each row."""
        length_at = buffer.at_any_byte(">i4")
        for i in columns:
            length = length_at[at].astype(np.int64)
            start = at + _LENGTH_BYTES
            valid = None
            least = int(length.min())
            if least < 0:
                if least < -1:
                    raise self._wire_error(i, f"expected a length of -1 or more, got {least}")
                valid = length >= 0
                length[~valid] = 0
            at = start + length
            beyond = at - ends
            if beyond.max() > 0:
                raise self._wire_error(i, f"expected a value inside its row, got one {int(beyond.max())} bytes beyond")
            codec = self._codecs[i]
            arrays[i] = self._accept(
                codec.column, refuse_other_bytes, codec.decode, Field(buffer, start, length, valid)
            )
        if (at != ends).any():
            raise WireError(
                f"COPY: expected rows to end after their last field, got {int((ends - at).max())} more bytes"
            )

    def _wire_error(self, i: int, what: str) -> WireError:
        return WireError(f"COPY: {in_words(self._codecs[i].column)}: {what}")


def record_batch(chunks: Sequence[Sequence[pa.Array]], schema: pa.Schema) -> pa.RecordBatch:
    """Join decoded chunks, at least one, into one batch."""
    columns = zip(*chunks, strict=True)
    arrays = [column[0] if len(column) == 1 else pa.concat_arrays(column) for column in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
