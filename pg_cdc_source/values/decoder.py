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
    """Values that the Arrow type cannot hold."""

    rows: Ints
    reason: str


@dataclass(frozen=True, slots=True)
class Decoded:
    """One array, and which of its NULLs stand for values that it cannot hold."""

    array: pa.Array
    refused: tuple[Refused, ...] = ()


@dataclass(frozen=True, slots=True)
class Field:
    """Where values lie: first byte and length of each, in ascending order; a NULL has length 0."""

    buffer: WireBuffer
    start: Ints
    length: Ints
    valid: Flags | None = None  # None: there is no NULL

    def present(self, condition: Flags) -> Flags:
        """Leave the NULLs out of ``condition``."""
        return condition if self.valid is None else condition & self.valid

    @property
    def located(self) -> tuple[int, Ints, Ints, Flags | None]:
        """What functions in C take."""
        return self.buffer.address, self.start, self.length, self.valid

    def first_byte(self) -> Ints:
        """Return the positions to gather from: a NULL's is that of the zeros."""
        return self.start if self.valid is None else np.where(self.valid, self.start, self.buffer.zeros_at)


class Decoder(ABC):
    """How values of one type become an Arrow array."""

    __slots__ = ()

    arrow: pa.DataType

    @abstractmethod
    def read(self, values: Field) -> Decoded:
        """Decode at least one value."""


class Fixed(Decoder):
    """A type whose values all have the same length."""

    __slots__ = ()

    wire: np.dtype[Any]

    @abstractmethod
    def read_items(self, items: npt.NDArray[Any], valid: Flags | None) -> Decoded:
        """Decode items of the dtype ``wire``, zero where NULL."""

    def read(self, values: Field) -> Decoded:
        wrong = values.present(values.length != self.wire.itemsize)
        if wrong.any():
            got = int(values.length[wrong.argmax()])
            raise MalformedError(f"expected {self.wire.itemsize} bytes, got {got}")
        return self.read_items(values.buffer.at_any_byte(self.wire)[values.first_byte()], values.valid)


def expect_length(values: Field, wrong: Flags, expected: str) -> None:
    wrong = values.present(wrong)
    if wrong.any():
        raise MalformedError(f"expected {expected}, got {int(values.length[wrong.argmax()])} bytes")


def without(valid: Flags | None, refused: Flags) -> Flags:
    return ~refused if valid is None else valid & ~refused


def refusals(*cases: tuple[Flags, str]) -> tuple[Refused, ...]:
    return tuple(Refused(np.flatnonzero(rows), reason) for rows, reason in cases if rows.any())


_OTHER_BYTES = "bytes that are not UTF-8, which asString cannot hold either"


def refuse_other_bytes(read: Callable[[Field], Decoded], values: Field) -> Decoded:
    """Run ``read`` on values; those with text that is not UTF-8 become NULL and are reported."""
    try:
        return read(values)
    except NotUtf8Error:
        wrong = np.array([_is_not_utf_8(read, values, i) for i in range(len(values.start))])
    others = Field(values.buffer, values.start, np.where(wrong, 0, values.length), without(values.valid, wrong))
    decoded = read(others)
    return Decoded(
        decoded.array,
        (*decoded.refused, *refusals((wrong, _OTHER_BYTES))),
    )


def _is_not_utf_8(read: Callable[[Field], Decoded], values: Field, i: int) -> bool:
    one = slice(i, i + 1)
    valid = None if values.valid is None else values.valid[one]
    try:
        read(Field(values.buffer, values.start[one], values.length[one], valid))
    except NotUtf8Error:
        return True
    return False
