"""Say what a decoder takes and gives: values of one type that lie in a buffer, and one Arrow array of them.

A *decoder* knows one format of one type (the ``*_send`` or ``*_out`` function in PostgreSQL's source that its docstring
names). It reads a :class:`Field`: where the values of a column, or the elements of a column's arrays, lie in a
:class:`~pg_cdc_source.values.wire.WireBuffer`.

- Every gather stays inside the buffer: positions come from checked lengths, NULLs read the zeros behind the data.
- Bytes that PostgreSQL cannot have sent raise :class:`MalformedError`; they never become a value.
- A value that the Arrow type cannot hold becomes NULL and is reported in :attr:`Decoded.refused`. The caller decides
  whether that is an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pg_cdc_source.values.ndarrays import Flags, Ints
from pg_cdc_source.values.wire import WireBuffer


class MalformedError(Exception):
    """Bytes that PostgreSQL cannot have sent for this type; the text says what was expected and what came."""


class NotUtf8Error(MalformedError):
    """Text that is not UTF-8: only a database in SQL_ASCII sends it."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Values that the Arrow type cannot hold: their places in the array, ascending and at least one, and why."""

    rows: Ints
    reason: str


@dataclass(frozen=True, slots=True)
class Decoded:
    """One array, and which of its NULLs stand for values that its type cannot hold."""

    array: pa.Array
    refused: tuple[Refused, ...] = ()


@dataclass(frozen=True, slots=True)
class Field:
    """Where values lie, in ascending order: the position of the first byte, and the length in bytes.

    A NULL has length 0, and may lie anywhere.
    """

    buffer: WireBuffer
    start: Ints
    length: Ints
    valid: Flags | None = None  # None: there is no NULL

    def present(self, condition: Flags) -> Flags:
        """Leave the NULLs out of ``condition``."""
        return condition if self.valid is None else condition & self.valid

    @property
    def located(self) -> tuple[int, Ints, Ints, Flags | None]:
        """Return what functions in C take: address of the buffer, start, length, valid."""
        return self.buffer.address, self.start, self.length, self.valid

    def first_byte(self) -> Ints:
        """Return the positions to gather from; that of a NULL is the zeros'."""
        return self.start if self.valid is None else np.where(self.valid, self.start, self.buffer.zeros_at)


class Decoder(ABC):
    """How values of one type in one format become an Arrow array of the type ``arrow``."""

    __slots__ = ()

    arrow: pa.DataType

    @abstractmethod
    def read(self, values: Field) -> Decoded:
        """Decode at least one value. Raises MalformedError."""


class Fixed(Decoder):
    """A type whose values all have the length of the dtype ``wire``."""

    __slots__ = ()

    wire: np.dtype[Any]

    @abstractmethod
    def read_items(self, items: npt.NDArray[Any], valid: Flags | None) -> Decoded:
        """Decode items of the dtype ``wire``, in its byte order or this machine's; they are zero where NULL.

        ``valid`` is None where nothing is NULL. Raises MalformedError.
        """

    def read(self, values: Field) -> Decoded:
        wrong = values.present(values.length != self.wire.itemsize)
        if wrong.any():
            got = int(values.length[wrong.argmax()])
            raise MalformedError(f"expected {self.wire.itemsize} bytes, got {got}")
        return self.read_items(values.buffer.at_any_byte(self.wire)[values.first_byte()], values.valid)


def expect_length(values: Field, wrong: Flags, expected: str) -> None:
    """Raise MalformedError where a value that is not NULL has a ``wrong`` length."""
    wrong = values.present(wrong)
    if wrong.any():
        raise MalformedError(f"expected {expected}, got {int(values.length[wrong.argmax()])} bytes")


def without(valid: Flags | None, refused: Flags) -> Flags:
    """Return ``valid`` with the refused values NULL as well."""
    return ~refused if valid is None else valid & ~refused


def refusals(*cases: tuple[Flags, str]) -> tuple[Refused, ...]:
    """Return the cases that have rows; a case is a flag for each row and the reason."""
    return tuple(Refused(np.flatnonzero(rows), reason) for rows, reason in cases if rows.any())


OTHER_BYTES = "bytes that are not UTF-8"


def refuse_other_bytes(read: Callable[[Field], Decoded], values: Field) -> Decoded:
    """Call ``read`` with ``values``; those with text that is not UTF-8 become NULL and are reported as refused."""
    try:
        return read(values)
    except NotUtf8Error:
        wrong = np.array([_is_not_utf_8(read, values, i) for i in range(len(values.start))])
    others = Field(values.buffer, values.start, np.where(wrong, 0, values.length), without(values.valid, wrong))
    decoded = read(others)
    return Decoded(
        decoded.array,
        (*decoded.refused, *refusals((wrong, OTHER_BYTES))),
    )


def _is_not_utf_8(read: Callable[[Field], Decoded], values: Field, i: int) -> bool:
    one = slice(i, i + 1)
    valid = None if values.valid is None else values.valid[one]
    try:
        read(Field(values.buffer, values.start[one], values.length[one], valid))
    except NotUtf8Error:
        return True
    return False
