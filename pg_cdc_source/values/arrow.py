"""Make Arrow arrays of NumPy arrays and of byte strings in a buffer, and NumPy arrays of Arrow arrays.

``pa.array()``, ``pa.scalar()`` and ``to_numpy()`` import pandas where it is installed, which takes half a second in
each process that Spark starts. The functions here do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.values import native
from pg_cdc_source.values.decoder import Field, NotUtf8Error
from pg_cdc_source.values.ndarrays import Bytes, Flags, Ints
from pg_cdc_source.values.wire import WireBuffer

Rows = TypeVar("Rows", pa.RecordBatch, pa.Table)


def bitmap(valid: Flags | None) -> pa.Buffer | None:
    """Return flags as Arrow's bits: a validity bitmap, or the values of booleans."""
    return None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))


def fixed_array(arrow: pa.DataType, values: npt.NDArray[Any], valid: Flags | None) -> pa.Array:
    """Return an array over ``values``, which are laid out as the fixed-width type ``arrow`` has them."""
    return pa.Array.from_buffers(arrow, len(values), [bitmap(valid), pa.py_buffer(values)])


def from_numpy(values: npt.NDArray[Any]) -> pa.Array:
    """Return numbers or flags as an array without NULLs."""
    if values.dtype == np.bool_:
        return pa.Array.from_buffers(pa.bool_(), len(values), [None, bitmap(values)])
    return fixed_array(pa.from_numpy_dtype(values.dtype), np.ascontiguousarray(values), None)


def numpy_type(arrow: pa.DataType) -> np.dtype[Any]:
    """Return NumPy's type of numbers and flags. Arrow's own ``to_pandas_dtype()`` imports pandas before 26."""
    if pa.types.is_boolean(arrow):
        return np.dtype(np.bool_)
    kind = "f" if pa.types.is_floating(arrow) else "u" if pa.types.is_unsigned_integer(arrow) else "i"
    return np.dtype(f"{kind}{arrow.bit_width // 8}")


def to_numpy(array: pa.Array) -> npt.NDArray[Any]:
    """Return the numbers or flags of an array without NULLs."""
    _, data = array.buffers()
    if data is None:
        return np.zeros(0, numpy_type(array.type))
    end = array.offset + len(array)
    if pa.types.is_boolean(array.type):
        bits = np.unpackbits(np.frombuffer(data, np.uint8), count=end, bitorder="little")
        return bits[array.offset :].view(np.bool_)
    return np.frombuffer(data, numpy_type(array.type))[array.offset : end]


def in_utc(rows: Rows) -> Rows:
    """The rows with their times in UTC: Spark names the session's zone, and Python does not know all of these names."""
    fields = [
        field.with_type(pa.timestamp(field.type.unit, "UTC"))
        if pa.types.is_timestamp(field.type) and field.type.tz is not None
        else field
        for field in rows.schema
    ]
    arrays = [column.cast(field.type) for column, field in zip(rows.columns, fields, strict=True)]
    return type(rows).from_arrays(arrays, schema=pa.schema(fields))


def one_batch(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """One or more batches of one schema as one; Arrow itself does so from 19 on."""
    if len(batches) == 1:
        return batches[0]
    columns = [pa.concat_arrays(parts) for parts in zip(*(batch.columns for batch in batches), strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=batches[0].schema)


def from_texts(texts: Sequence[str]) -> pa.StringArray:
    """Return texts as an array without NULLs."""
    octets = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, octets)]).astype(np.int32)
    return pa.Array.from_buffers(pa.string(), len(texts), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(octets))])


def field_of(texts: pa.StringArray) -> Field:
    """Return where the values of an array of texts lie, for decoders."""
    texts = pa.concat_arrays([texts]) if texts.offset else texts
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int32)[: len(texts) + 1].astype(np.int64)
    valid = to_numpy(texts.is_valid()) if texts.null_count else None
    return Field(WireBuffer([b"" if data is None else data.to_pybytes()]), ends[:-1], np.diff(ends), valid)


def null(arrow: pa.DataType) -> pa.Scalar:
    """Return NULL of a type."""
    return pa.nulls(1, arrow)[0]


_IN_BOUNDS = pc.TakeOptions(boundscheck=False)


def byte_strings(values: Field, first: Ints, length: Ints) -> pa.BinaryArray:
    """Copy byte strings out of the buffer of ``values``, NULL where these are."""
    return _copied(values, first, length)[0]


def utf8_strings(values: Field, first: Ints, length: Ints) -> pa.StringArray:
    """Copy byte strings that are text, as :func:`byte_strings` does. Raises NotUtf8Error."""
    octets, is_ascii = _copied(values, first, length)
    if is_ascii:
        return pa.Array.from_buffers(pa.string(), len(octets), octets.buffers())
    return as_text(octets)


def _copied(values: Field, first: Ints, length: Ints) -> tuple[pa.Array, bool]:
    """Return byte strings, and whether they are known to be ASCII.

    With the offsets first, end, first, end, …, the buffer is an Arrow array whose even elements are the values, and
    whose odd elements are what lies between them. So one ``take`` copies all values.
    """
    n = len(first)
    if (gathered := native.gather(values.buffer.address, first, length)) is not None:
        offsets, octets, is_ascii = gathered
        buffers = [bitmap(values.valid), pa.py_buffer(offsets), pa.py_buffer(octets)]
        return pa.Array.from_buffers(pa.binary(), n, buffers), is_ascii
    offsets = np.empty(2 * n + 1, np.int32)
    offsets[0:-1:2] = first
    np.add(first, length, out=offsets[1::2], casting="unsafe")
    # Arrow checks the first and the last offset, either of which may be a NULL's.
    offsets[-1] = offsets[:-1].max(initial=0)
    both = pa.Array.from_buffers(pa.binary(), 2 * n, [None, pa.py_buffer(offsets), values.buffer.arrow])
    even = fixed_array(pa.int32(), np.arange(0, 2 * n, 2, dtype=np.int32), values.valid)
    return pc.call_function("array_take", [both, even], _IN_BOUNDS), False


def as_text(octets: pa.BinaryArray) -> pa.StringArray:
    """Return byte strings as texts. Raises NotUtf8Error."""
    try:
        return octets.cast(pa.string())
    except pa.ArrowInvalid:
        raise NotUtf8Error("expected UTF-8, got other bytes (a database in SQL_ASCII?)") from None


def content(strings: pa.BinaryArray) -> Bytes:
    """Return the bytes of all strings of :func:`byte_strings`, one behind the other."""
    _, offsets, content = strings.buffers()
    return np.frombuffer(content or b"", np.uint8)[: np.frombuffer(offsets, np.int32)[len(strings)]]
