"""Decode PostgreSQL's binary format: many values at a time, from one buffer into one Arrow array.

A *decoder* knows the binary format of one type (the ``*_send`` function in PostgreSQL's source that its docstring
names). It reads a :class:`Field`: where the values of a column, or the elements of a column's arrays, lie in a
:class:`WireBuffer`.

- Every gather stays inside the buffer: positions come from checked lengths, NULLs read the zeros behind the data.
- Bytes that PostgreSQL cannot have sent raise :class:`MalformedError`; they never become a value.
- A value that the Arrow type cannot hold becomes NULL and is reported in :attr:`Decoded.refused`. Whether that is an
  error is for the caller to say.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.values import native

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

# Arrow's string, binary and list arrays count with 32 bits.
MAX_OFFSET = 2**31 - 1


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


class WireBuffer:
    """Messages joined into one buffer, with zeros behind them that a gather may read in place of a NULL."""

    __slots__ = ("address", "arrow", "data", "zeros_at")

    # What is gathered as one item at the most: an array's header (20 bytes); of the values, uuid's are the longest.
    MIN_PADDING = 20

    def __init__(self, messages: Sequence[bytes], padding: int = MIN_PADDING) -> None:
        padding = max(padding, self.MIN_PADDING)
        data = b"".join([*messages, bytes(padding)])
        self._take(data, len(data) - padding)

    @classmethod
    def over(cls, data: npt.NDArray[np.uint8], used: int) -> WireBuffer:
        """Take a buffer as it is, with ``used`` bytes of messages and zeros, ``MIN_PADDING`` or more, behind them."""
        assert len(data) - used >= cls.MIN_PADDING
        buffer = cls.__new__(cls)
        buffer._take(data, used)
        return buffer

    def _take(self, data: Any, used: int) -> None:
        if len(data) > MAX_OFFSET:
            raise ValueError(f"a chunk of {used:,} bytes is more than Arrow's 32-bit offsets reach; pass less")
        self.data = data
        self.zeros_at = used
        self.arrow = pa.py_buffer(data)
        self.address = self.arrow.address

    def at_any_byte(self, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """View the buffer as one item of ``dtype`` for every byte it could start at."""
        itemsize = np.dtype(dtype).itemsize
        view: npt.NDArray[Any] = np.ndarray((len(self.data) - itemsize + 1,), dtype, self.data, strides=(1,))
        return view


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages behind each other in one buffer: where each begins and ends."""

    buffer: WireBuffer
    starts: Ints
    ends: Ints

    @classmethod
    def joined(cls, messages: Sequence[bytes], padding: int = 0) -> Messages:
        lengths = np.fromiter(map(len, messages), np.int64, len(messages))
        ends = np.cumsum(lengths)
        return cls(WireBuffer(messages, padding), ends - lengths, ends)

    @classmethod
    def of(cls, octets: bytes, ends: Ints) -> Messages:
        """Messages that lie behind each other already."""
        return cls(WireBuffer([octets]), np.concatenate((np.zeros(1, np.int64), ends))[:-1], ends)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, which: slice) -> Messages:
        return Messages(self.buffer, self.starts[which], self.ends[which])

    def octets(self, i: int) -> bytes:
        return bytes(self.buffer.data[self.starts[i] : self.ends[i]])


class Collected:
    """Messages that come one by one, or many at once from C, until there are enough of them to be taken together."""

    __slots__ = ("_data", "_drained", "_ends", "_into", "_octets", "_positions", "most", "most_bytes")

    def __init__(self, most: int, most_bytes: int) -> None:
        self.most, self.most_bytes = most, most_bytes
        self._drained = native.Drained(0, 0, None, 0)
        self._begin(most_bytes)

    def _begin(self, capacity: int) -> None:
        self._data = np.empty(capacity + WireBuffer.MIN_PADDING, np.uint8)
        self._ends = np.empty(self.most, np.int64)
        # Python writes into views several times as fast as into arrays.
        self._octets, self._positions = self._data.data, self._ends.data
        # Looked up once, not for each burst.
        self._into = (self._data.ctypes.data, capacity, self._ends.ctypes.data, self.most)

    def __len__(self) -> int:
        return int(self._drained.messages)

    @property
    def size_bytes(self) -> int:
        return int(self._drained.bytes)

    @property
    def is_full(self) -> bool:
        return len(self) >= self.most or self.size_bytes >= self.most_bytes

    def append(self, message: bytes) -> None:
        """Add a message; not to what is full."""
        start = self.size_bytes
        end = start + len(message)
        self._make_room(end)
        self._octets[start:end] = message
        self._positions[len(self)] = end
        self._drained.messages += 1
        self._drained.bytes = end

    def _make_room(self, end: int) -> None:
        if end > len(self._data) - WireBuffer.MIN_PADDING:
            data, ends, used = self._data, self._ends, self.size_bytes
            self._begin(end)
            self._data[:used], self._ends[:] = data[:used], ends

    def extend(self, messages: Messages, at: int, cut: int) -> int:
        """Add as many of ``messages`` as there is room for, each without ``cut`` bytes at ``at``; how many."""
        lengths = messages.ends - messages.starts - cut
        room = np.searchsorted(np.cumsum(lengths), self.most_bytes - self.size_bytes) + 1
        count = min(len(messages), self.most - len(self), int(room))
        first, used = len(self), self.size_bytes
        end = used + int(lengths[:count].sum())
        self._make_room(end)
        into = self._ends[first : first + count]
        starts, ends = messages.starts[:count], messages.ends[:count]
        if native.copy_without(messages.buffer.address, starts, ends, at, cut, self._data, used, into):
            self._drained.messages += count
            self._drained.bytes = end
        else:
            for i in range(count):
                message = messages.octets(i)
                self.append(message[:at] + message[at + cut :])
        return count

    def drain(self, receive: Callable[[int, int, int, int, int], None]) -> native.Drained:
        """Let C add messages: ``receive`` gets data and its capacity, ends and their number, and how far they are."""
        receive(*self._into, ctypes.addressof(self._drained))
        return self._drained

    def take(self) -> Messages:
        """Give what was collected, and begin anew."""
        used, ends = self.size_bytes, self._ends[: len(self)]
        self._data[used : used + WireBuffer.MIN_PADDING] = 0
        buffer = WireBuffer.over(self._data[: used + WireBuffer.MIN_PADDING], used)
        self._drained.messages = self._drained.bytes = 0
        self._begin(self.most_bytes)
        return Messages(buffer, np.concatenate((np.zeros(1, np.int64), ends))[:-1], ends)


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


def bitmap(valid: Flags | None) -> pa.Buffer | None:
    return None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))


def fixed_array(arrow: pa.DataType, values: npt.NDArray[Any], valid: Flags | None) -> pa.Array:
    return pa.Array.from_buffers(arrow, len(values), [bitmap(valid), pa.py_buffer(values)])


# pa.array(), pa.scalar() and to_numpy() import pandas where it is installed, which takes half a second of each process
# that Spark starts. These do not.


def from_numpy(values: npt.NDArray[Any]) -> pa.Array:
    """Numbers or flags as an array without NULLs."""
    if values.dtype == np.bool_:
        return pa.Array.from_buffers(pa.bool_(), len(values), [None, bitmap(values)])
    return fixed_array(pa.from_numpy_dtype(values.dtype), np.ascontiguousarray(values), None)


def to_numpy(array: pa.Array) -> npt.NDArray[Any]:
    """The numbers or flags of an array without NULLs."""
    _, data = array.buffers()
    if data is None:
        return np.zeros(0, array.type.to_pandas_dtype())
    end = array.offset + len(array)
    if pa.types.is_boolean(array.type):
        bits = np.unpackbits(np.frombuffer(data, np.uint8), count=end, bitorder="little")
        return bits[array.offset :].view(np.bool_)
    return np.frombuffer(data, array.type.to_pandas_dtype())[array.offset : end]


def from_texts(texts: Sequence[str]) -> pa.Array:
    octets = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, octets)]).astype(np.int32)
    return pa.Array.from_buffers(pa.string(), len(texts), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(octets))])


def null(arrow: pa.DataType) -> pa.Scalar:
    return pa.nulls(1, arrow)[0]


def without(valid: Flags | None, refused: Flags) -> Flags:
    return ~refused if valid is None else valid & ~refused


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


@dataclass(frozen=True, slots=True)
class Number(Fixed):
    """Integers and floats (``int2send``, ``int4send``, ``int8send``, ``oidsend``, ``float4send``, ``float8send``).

    Floats are moved as integers of their width, so that every bit of a NaN arrives.
    """

    arrow: pa.DataType
    wire: np.dtype[Any]
    memory: np.dtype[Any]

    def read_items(self, items: npt.NDArray[Any], valid: Flags | None) -> Decoded:
        return Decoded(fixed_array(self.arrow, items.astype(self.memory, copy=False), valid))


@dataclass(frozen=True, slots=True)
class Boolean(Fixed):
    """``boolsend``: one byte, 0 or 1."""

    arrow = pa.bool_()
    wire = np.dtype("u1")

    def read_items(self, items: npt.NDArray[Any], valid: Flags | None) -> Decoded:
        if items.max() > 1:
            raise MalformedError(f"expected a byte 0 or 1, got {int(items.max())}")
        bits = pa.py_buffer(np.packbits(items, bitorder="little"))
        return Decoded(pa.Array.from_buffers(self.arrow, len(items), [bitmap(valid), bits]))


@dataclass(frozen=True, slots=True)
class Moment(Fixed):
    """``date_send``, ``timestamp_send``, ``timestamptz_send``: days or microseconds since 2000-01-01.

    Spark holds the years 1 to 9999 of the proleptic Gregorian calendar, which is also PostgreSQL's.
    """

    arrow: pa.DataType
    wire: np.dtype[Any]
    memory: np.dtype[Any]
    units_per_day: int

    # Days from 2000-01-01 to 1970-01-01, to 0001-01-01 and to 10000-01-01.
    EPOCH_DAY = -10_957
    FIRST_DAY = -730_119
    END_DAY_EXCLUSIVE = 2_921_940

    def read_items(self, items: npt.NDArray[Any], valid: Flags | None) -> Decoded:
        units = items.astype(self.memory, copy=False)
        first, last = self.FIRST_DAY * self.units_per_day, self.END_DAY_EXCLUSIVE * self.units_per_day - 1
        refused: tuple[Refused, ...] = ()
        if units.min() < first or units.max() > last:
            # datetime/timestamp.h: DT_NOBEGIN and DT_NOEND, the least and the greatest integer.
            limits = np.iinfo(self.memory)
            infinite = (units == limits.min) | (units == limits.max)
            outside = ((units < first) | (units > last)) & ~infinite
            refused = refusals((infinite, "infinity"), (outside, "a year outside 1 to 9999"))
            valid = without(valid, infinite | outside)
            units[~valid] = 0
        units -= self.EPOCH_DAY * self.units_per_day
        return Decoded(fixed_array(self.arrow, units, valid), refused)


def refusals(*cases: tuple[Flags, str]) -> tuple[Refused, ...]:
    return tuple(Refused(np.flatnonzero(rows), reason) for rows, reason in cases if rows.any())


_HEX_OF_BYTE = np.frombuffer(bytes(range(256)).hex().encode("ascii"), np.uint16)
_UUID_TEXT_LENGTH = 36

# The groups of digits, where they stand among the digits and in the text; the last one in two parts. As integers,
# because NumPy moves these at once and other ranges of bytes one by one.
_UUID_GROUPS = ["1", "2", "3", "4", "5", "6"]
_UUID_DIGITS, _UUID_TEXT = (
    np.dtype({"names": _UUID_GROUPS, "formats": ["u8", "u4", "u4", "u4", "u8", "u4"], "offsets": at, "itemsize": size})
    for at, size in (([0, 8, 12, 16, 20, 28], 32), ([0, 9, 14, 19, 24, 32], _UUID_TEXT_LENGTH))
)


@dataclass(frozen=True, slots=True)
class Uuid(Fixed):
    """``uuid_send``: 16 bytes, given as the text that ``uuid_out`` prints."""

    arrow = pa.string()
    wire = np.dtype("V16")

    def read_items(self, items: npt.NDArray[Any], valid: Flags | None) -> Decoded:
        n = len(items)
        if n * _UUID_TEXT_LENGTH > MAX_OFFSET:
            raise ValueError(f"{n:,} uuids are more text than Arrow's 32-bit offsets reach; pass less")
        octets = np.ascontiguousarray(items).view("u1")
        if (text := native.print_uuids(octets)) is None:
            digits = _HEX_OF_BYTE.take(octets).view(_UUID_DIGITS)
            text = np.full(n * _UUID_TEXT_LENGTH, ord("-"), np.uint8)
            groups = text.view(_UUID_TEXT)
            for group in _UUID_GROUPS:
                groups[group] = digits[group]
        offsets = np.arange(0, n * _UUID_TEXT_LENGTH + 1, _UUID_TEXT_LENGTH, dtype=np.int32)
        buffers = [bitmap(valid), pa.py_buffer(offsets), pa.py_buffer(text)]
        return Decoded(pa.Array.from_buffers(self.arrow, n, buffers))


_IN_BOUNDS = pc.TakeOptions(boundscheck=False)


def byte_strings(values: Field, first: Ints, length: Ints) -> pa.Array:
    """Copy byte strings out of the buffer. Where NULLs lie says nothing."""
    return _copied(values, first, length)[0]


def utf8_strings(values: Field, first: Ints, length: Ints) -> pa.Array:
    """Copy byte strings that are text. Raises NotUtf8Error."""
    octets, is_ascii = _copied(values, first, length)
    if is_ascii:
        return pa.Array.from_buffers(pa.string(), len(octets), octets.buffers())
    return as_text(octets)


def _copied(values: Field, first: Ints, length: Ints) -> tuple[pa.Array, bool]:
    """Byte strings, and whether they are known to be ASCII.

    Seen with the offsets first, end, first, end, …, the buffer is an Arrow array whose even elements are the values
    and whose odd ones are what lies between them, so that one ``take`` copies them all.
    """
    n = len(first)
    if (gathered := native.gather(values.buffer.address, first, length)) is not None:
        offsets, octets, is_ascii = gathered
        buffers = [bitmap(values.valid), pa.py_buffer(offsets), pa.py_buffer(octets)]
        return pa.Array.from_buffers(pa.binary(), n, buffers), is_ascii
    offsets = np.empty(2 * n + 1, np.int32)
    offsets[0:-1:2] = first
    np.add(first, length, out=offsets[1::2], casting="unsafe")
    # Arrow looks at the first and the last one, both of which may be a NULL's.
    offsets[-1] = offsets[:-1].max(initial=0)
    both = pa.Array.from_buffers(pa.binary(), 2 * n, [None, pa.py_buffer(offsets), values.buffer.arrow])
    even = fixed_array(pa.int32(), np.arange(0, 2 * n, 2, dtype=np.int32), values.valid)
    return pc.call_function("array_take", [both, even], _IN_BOUNDS), False


def as_text(octets: pa.Array) -> pa.Array:
    try:
        return octets.cast(pa.string())
    except pa.ArrowInvalid:
        raise NotUtf8Error("expected UTF-8, got other bytes (a database in SQL_ASCII?)") from None


@dataclass(frozen=True, slots=True)
class Octets(Decoder):
    """``byteasend``: the bytes themselves."""

    arrow = pa.binary()

    def read(self, values: Field) -> Decoded:
        return Decoded(byte_strings(values, values.start, values.length))


@dataclass(frozen=True, slots=True)
class Text(Decoder):
    """``textsend``, ``varcharsend``, ``bpcharsend``, ``namesend``, ``json_send``: the text in the client's encoding."""

    arrow = pa.string()

    def read(self, values: Field) -> Decoded:
        return Decoded(utf8_strings(values, values.start, values.length))


@dataclass(frozen=True, slots=True)
class Jsonb(Decoder):
    """``jsonb_send``: a version byte, then the text that ``jsonb_out`` prints."""

    arrow = pa.string()

    VERSION = 1

    def read(self, values: Field) -> Decoded:
        empty = values.present(values.length < 1)
        if empty.any():
            raise MalformedError("expected a version byte, got 0 bytes")
        version = values.buffer.at_any_byte("u1")[values.first_byte()]
        wrong = values.present(version != self.VERSION)
        if wrong.any():
            raise MalformedError(f"expected jsonb version {self.VERSION}, got {int(version[wrong.argmax()])}")
        header = np.int64(1) if values.valid is None else values.valid.astype(np.int64)
        return Decoded(utf8_strings(values, values.start + header, values.length - header))
