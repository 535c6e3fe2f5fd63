"""The inner loops in C, where they were compiled; everything works without them.

``_accelerator.c`` is compiled when the package is built with a compiler at hand. What it does is done by NumPy as well,
and whatever is out of the ordinary is left to NumPy: each function here gives None, or False, where its caller has to go
the other way. So results do not depend on it. ``PG_CDC_ACCELERATOR=off`` in the environment turns it off.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_ENVIRONMENT = "PG_CDC_ACCELERATOR"


class Drained(ctypes.Structure):
    """How far receiving has come; see ``struct drained``."""

    _fields_ = (
        ("messages", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("waiting", ctypes.c_void_p),
        ("result", ctypes.c_int64),
    )


class _Column(ctypes.Structure):
    _fields_ = (
        ("width", ctypes.c_int64),
        ("values", ctypes.c_void_p),
        ("start", ctypes.c_void_p),
        ("length", ctypes.c_void_p),
        ("valid", ctypes.c_void_p),
        ("nulls", ctypes.c_int64),
    )


def _load() -> ctypes.CDLL | None:
    if os.environ.get(_ENVIRONMENT) == "off":
        return None
    spec = importlib.util.find_spec("pg_cdc_source._accelerator")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    for name, result, arguments in (
        (
            "drain",
            None,
            [pointer, pointer, pointer, ctypes.c_int, pointer, number, pointer, number, ctypes.POINTER(Drained)],
        ),
        ("walk_copy", ctypes.c_int, [pointer, pointer, pointer, number, ctypes.POINTER(_Column), number]),
        ("gather", None, [pointer, pointer, pointer, number, pointer, pointer]),
        ("decimal", ctypes.c_int, [*[pointer] * 4, number, ctypes.c_int, ctypes.c_int, pointer]),
    ):
        function = getattr(library, f"pgcdc_{name}")
        function.restype, function.argtypes = result, arguments
    return library


LIBRARY = _load()


def address_of(data: Any) -> int:
    """Where the bytes of a buffer lie."""
    where: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return where


def _at(array: npt.NDArray[Any]) -> int:
    where: int = array.__array_interface__["data"][0]
    return where


class Walked:
    """One column of rows that were walked: values of one width in this machine's order of bytes, or where they lie."""

    __slots__ = ("length", "start", "valid", "values")

    def __init__(self, rows: int, dtype: np.dtype[Any] | None) -> None:
        self.values = self.start = self.length = np.empty(0, np.int64)
        if dtype is None:
            self.start, self.length = np.empty(rows, np.int64), np.empty(rows, np.int64)
        else:
            self.values = np.empty(rows, dtype.newbyteorder("="))
        self.valid: npt.NDArray[np.bool_] | None = np.empty(rows, np.bool_)


def walk_copy(
    data: int, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], dtypes: Sequence[np.dtype[Any] | None]
) -> list[Walked] | None:
    """Find the values of rows of a binary COPY; ``dtypes`` has one of each column, None where the width varies.

    None where there is something that only NumPy's way can tell.
    """
    assert LIBRARY is not None
    found = [Walked(len(starts), dtype) for dtype in dtypes]
    columns = (_Column * len(found))(
        *(
            (0 if dtype is None else dtype.itemsize, _at(w.values), _at(w.start), _at(w.length), _at(w.valid), 0)  # type: ignore[arg-type]
            for w, dtype in zip(found, dtypes, strict=True)
        )
    )
    if LIBRARY.pgcdc_walk_copy(data, _at(starts), _at(ends), len(starts), columns, len(found)):
        return None
    for walked, column in zip(found, columns, strict=True):
        if not column.nulls:
            walked.valid = None
    return found


def gather(
    data: int, start: npt.NDArray[np.int64], length: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Copy byte strings behind each other: their offsets, one more than there are, and their bytes."""
    assert LIBRARY is not None
    offsets, octets = np.empty(len(start) + 1, np.int32), np.empty(int(length.sum()), np.uint8)
    LIBRARY.pgcdc_gather(data, _at(start), _at(length), len(start), _at(offsets), _at(octets))
    return offsets, octets


def decimal(
    data: int,
    start: npt.NDArray[np.int64],
    length: npt.NDArray[np.int64],
    valid: npt.NDArray[np.bool_] | None,
    precision: int,
    scale: int,
) -> npt.NDArray[np.int64] | None:
    """Numerics as integers of 128 bits, low and high half; None where a value does not fit or is malformed."""
    assert LIBRARY is not None
    words = np.empty((len(start), 2), np.int64)
    refused = LIBRARY.pgcdc_decimal(
        data, _at(start), _at(length), None if valid is None else _at(valid), len(start), precision, scale, _at(words)
    )
    return None if refused else words
