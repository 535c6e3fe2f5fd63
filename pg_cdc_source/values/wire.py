"""Hold messages as they came: behind each other in one buffer, to be collected, walked and decoded together."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pg_cdc_source.values import native
from pg_cdc_source.values.ndarrays import Ints

# Arrow's string, binary and list arrays count with 32 bits.
MAX_OFFSET = 2**31 - 1


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
