"""Call the inner loops in ``_accelerator.c``, where that was compiled.

It is compiled when the package is built and a compiler is there. NumPy does the same work where it was not, and also
wherever a value is out of the ordinary: the functions here then return None (or False), and the caller runs its NumPy
code. So results do not depend on the accelerator. ``PG_CDC_ACCELERATOR=off`` in the environment turns it off.

Arguments named ``start``, ``length`` and ``valid`` are those of a :class:`~pg_cdc_source.values.decoder.Field`, and
``data`` is the address of its buffer.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pg_cdc_source.values.ndarrays import Bytes, Flags, Ints

ENVIRONMENT = "PG_CDC_ACCELERATOR"
_POINTER, _NUMBER, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_FIELD = (_POINTER, _POINTER, _POINTER, _POINTER, _NUMBER)  # data, start, length, valid, rows


class Drained(ctypes.Structure):
    """How far receiving has come: ``struct drained`` of ``_accelerator.c``."""

    _fields_ = (("messages", _NUMBER), ("bytes", _NUMBER), ("waiting", _POINTER), ("result", _NUMBER))


class _Column(ctypes.Structure):
    _fields_ = (
        ("width", _NUMBER),
        ("values", _POINTER),
        ("start", _POINTER),
        ("length", _POINTER),
        ("valid", _POINTER),
        ("nulls", _NUMBER),
    )


class _TupleColumn(ctypes.Structure):
    _fields_ = (
        ("start", _POINTER),
        ("length", _POINTER),
        ("valid", _POINTER),
        ("unchanged", _POINTER),
        ("without_text", _NUMBER),
        ("not_sent", _NUMBER),
    )


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "drain": (
        None,
        (
            *(_POINTER, _POINTER, _POINTER, _INT, _POINTER, _NUMBER),  # connection, get, free, async, tags, tag_at
            *(_POINTER, _NUMBER, _POINTER, _NUMBER, _POINTER),  # data, capacity, ends, most, drained
        ),
    ),
    "drain_all": (
        None,
        (
            *(_POINTER, _POINTER, _POINTER, _POINTER),  # connection, get, free, consume
            *(_INT, _NUMBER),  # socket, pause_ns
            *(_POINTER, _NUMBER, _POINTER, _NUMBER, _POINTER),  # data, capacity, ends, most, drained
        ),
    ),
    "walk_copy": (_INT, (_POINTER, _POINTER, _POINTER, _NUMBER, _POINTER, _NUMBER)),
    "walk_tuples": (_INT, (_POINTER, _POINTER, _POINTER, _NUMBER, _POINTER, _NUMBER)),
    "copy_without": (
        None,
        (_POINTER, _POINTER, _POINTER, _NUMBER, _NUMBER, _NUMBER, _POINTER, _NUMBER, _POINTER),
    ),
    "gather": (_INT, (_POINTER, _POINTER, _POINTER, _NUMBER, _POINTER, _POINTER)),
    "uuid": (None, (_POINTER, _NUMBER, _POINTER)),
    "decimal": (_INT, (*_FIELD, _INT, _INT, _POINTER)),
    "printed_integer": (_INT, (*_FIELD, _NUMBER, _NUMBER, _POINTER)),
    "printed_decimal": (_INT, (*_FIELD, _INT, _INT, _POINTER)),
    "printed_moment": (_INT, (*_FIELD, _INT, _INT, _POINTER)),
    "printed_float": (_INT, _FIELD),
}


def _load() -> ctypes.CDLL | None:
    if os.environ.get(ENVIRONMENT) == "off":
        return None
    spec = importlib.util.find_spec("pg_cdc_source.values._accelerator")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, f"pgcdc_{name}")
        function.restype, function.argtypes = result, arguments
    return library


LIBRARY = _load()


def _at(array: npt.NDArray[Any] | None) -> int | None:
    return None if array is None else array.__array_interface__["data"][0]


def walk_copy(
    data: int, starts: Ints, ends: Ints, dtypes: Sequence[np.dtype[Any] | None]
) -> list[tuple[npt.NDArray[Any], Ints, Ints, Flags | None]] | None:
    """Find the values of rows of a binary COPY; return (values, start, length, valid) of each column.

    ``dtypes`` has the dtype of each column of fixed width: its values are copied out, in this machine's byte order, and
    start and length are empty. Where it has None, start and length are found, and values are empty. ``valid`` is None
    where nothing is NULL.
    """
    if LIBRARY is None:
        return None
    rows, nothing = len(starts), np.empty(0, np.int64)
    found = [
        (nothing, np.empty(rows, np.int64), np.empty(rows, np.int64), np.empty(rows, np.bool_))
        if dtype is None
        else (np.empty(rows, dtype.newbyteorder("=")), nothing, nothing, np.empty(rows, np.bool_))
        for dtype in dtypes
    ]
    columns = (_Column * len(found))(
        *(
            _Column(0 if dtype is None else dtype.itemsize, *map(_at, arrays), 0)
            for arrays, dtype in zip(found, dtypes, strict=True)
        )
    )
    if LIBRARY.pgcdc_walk_copy(data, _at(starts), _at(ends), rows, columns, len(found)):
        return None
    return [
        (values, start, length, valid if column.nulls else None)
        for (values, start, length, valid), column in zip(found, columns, strict=True)
    ]


def walk_tuples(
    data: int, at: Ints, ends: Ints, count: int
) -> tuple[list[tuple[Ints, Ints, Flags | None, Flags | None]], Ints] | None:
    """Find the values of images of rows (TupleData of pgoutput) that begin at ``at``.

    Return (start, length, valid, unchanged) of each of ``count`` columns, and where each image ends. ``valid`` is None
    where every value was sent, ``unchanged`` where none was left out because it is TOASTed.
    """
    if LIBRARY is None:
        return None
    rows, after = len(at), at.copy()
    found = [
        (np.empty(rows, np.int64), np.empty(rows, np.int64), np.empty(rows, np.bool_), np.empty(rows, np.bool_))
        for _ in range(count)
    ]
    columns = (_TupleColumn * count)(*(_TupleColumn(*map(_at, arrays), 0, 0) for arrays in found))
    ends = np.ascontiguousarray(ends)
    if LIBRARY.pgcdc_walk_tuples(data, _at(after), _at(ends), rows, columns, count):
        return None
    return [
        (start, length, valid if column.without_text else None, unchanged if column.not_sent else None)
        for (start, length, valid, unchanged), column in zip(found, columns, strict=True)
    ], after


def copy_without(data: int, starts: Ints, ends: Ints, at: int, cut: int, out: Bytes, used: int, out_ends: Ints) -> bool:
    """Copy messages behind the ``used`` bytes of ``out``, each without its ``cut`` bytes at ``at``; fill in their ends.

    Return False where that is left to the caller.
    """
    if LIBRARY is None:
        return False
    starts, ends = np.ascontiguousarray(starts), np.ascontiguousarray(ends)
    LIBRARY.pgcdc_copy_without(data, _at(starts), _at(ends), len(starts), at, cut, _at(out), used, _at(out_ends))
    return True


def gather(data: int, start: Ints, length: Ints) -> tuple[npt.NDArray[np.int32], Bytes, bool] | None:
    """Copy byte strings one behind the other; return offsets, bytes, and whether all bytes are ASCII.

    There is one offset more than there are strings.
    """
    total = int(length.sum())
    # Each length is within the buffer, but the same bytes may be wanted several times.
    if LIBRARY is None or total > np.iinfo(np.int32).max:
        return None
    offsets, octets = np.empty(len(start) + 1, np.int32), np.empty(total, np.uint8)
    start, length = np.ascontiguousarray(start), np.ascontiguousarray(length)
    is_ascii = LIBRARY.pgcdc_gather(data, _at(start), _at(length), len(start), _at(offsets), _at(octets))
    return offsets, octets, bool(is_ascii)


def print_uuids(octets: Bytes) -> Bytes | None:
    """Print UUIDs of 16 bytes each as texts of 36 bytes each."""
    if LIBRARY is None:
        return None
    count = len(octets) // 16
    text = np.empty(36 * count, np.uint8)
    LIBRARY.pgcdc_uuid(_at(octets), count, _at(text))
    return text


def _values(
    name: str, shape: tuple[int, ...], data: int, start: Ints, length: Ints, valid: Flags | None, *arguments: int
) -> Ints | None:
    if LIBRARY is None:
        return None
    out = np.empty(shape, np.int64)
    start, length = np.ascontiguousarray(start), np.ascontiguousarray(length)
    valid = None if valid is None else np.ascontiguousarray(valid)
    function = getattr(LIBRARY, f"pgcdc_{name}")
    refused = function(data, _at(start), _at(length), _at(valid), len(start), *arguments, _at(out))
    return None if refused else out


def decimal(
    data: int, start: Ints, length: Ints, valid: Flags | None, precision: int, scale: int, *, printed: bool = False
) -> Ints | None:
    """Decode numerics, binary or ``printed``, as integers of 128 bits; return low and high half of each."""
    name = "printed_decimal" if printed else "decimal"
    return _values(name, (len(start), 2), data, start, length, valid, precision, scale)


def printed_integer(
    data: int, start: Ints, length: Ints, valid: Flags | None, least: int, greatest: int
) -> Ints | None:
    """Decode printed integers from ``least`` to ``greatest``."""
    return _values("printed_integer", (len(start),), data, start, length, valid, least, greatest)


def printed_moment(
    data: int, start: Ints, length: Ints, valid: Flags | None, *, has_time: bool, has_zone: bool
) -> Ints | None:
    """Decode printed dates as days since 1970, or timestamps as microseconds."""
    return _values("printed_moment", (len(start),), data, start, length, valid, has_time, has_zone)


def are_printed_floats(data: int, start: Ints, length: Ints, valid: Flags | None) -> bool:
    """Return whether all are printed floats. False only says that the caller has to check."""
    if LIBRARY is None:
        return False
    start, length = np.ascontiguousarray(start), np.ascontiguousarray(length)
    valid = None if valid is None else np.ascontiguousarray(valid)
    return not LIBRARY.pgcdc_printed_float(data, _at(start), _at(length), _at(valid), len(start))
