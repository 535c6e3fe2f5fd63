"""Hold messages as they were received: one behind the other in one buffer, so that thousands are decoded together."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pg_cdc_source.values import native
from pg_cdc_source.values.ndarrays import Bytes, Ints

# Arrow's string, binary and list arrays count with 32 bits.
MAX_OFFSET = 2**31 - 1


class WireBuffer:
    """Messages in one buffer, followed by zeros that a gather reads in place of a NULL.

    ``zeros_at`` is the position of the zeros, ``address`` where the first byte lies in memory.
    """

    __slots__ = ("address", "arrow", "data", "zeros_at")

    # The longest item of a gather: an array's header has 20 bytes, a uuid 16.
    MIN_PADDING = 20

    def __init__(self, messages: Sequence[bytes], padding: int = MIN_PADDING) -> None:
        padding = max(padding, self.MIN_PADDING)
        data = b"".join([*messages, bytes(padding)])
        self._take(data, len(data) - padding)

    @classmethod
    def over(cls, data: Bytes, used: int) -> WireBuffer:
        """Take ``data`` as it is: ``used`` bytes of messages, then ``MIN_PADDING`` zeros or more."""
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
        """View the buffer as items of ``dtype``, one that starts at each byte."""
        itemsize = np.dtype(dtype).itemsize
        view: npt.NDArray[Any] = np.ndarray((len(self.data) - itemsize + 1,), dtype, self.data, strides=(1,))
        return view


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages in one buffer: the positions where each begins and ends."""

    buffer: WireBuffer
    starts: Ints
    ends: Ints

    @classmethod
    def joined(cls, messages: Sequence[bytes], padding: int = 0) -> Messages:
        """Join messages, with ``padding`` zeros or more behind them."""
        lengths = np.fromiter(map(len, messages), np.int64, len(messages))
        ends = np.cumsum(lengths)
        return cls(WireBuffer(messages, padding), ends - lengths, ends)

    @classmethod
    def of(cls, octets: bytes, ends: Ints) -> Messages:
        """Take messages that lie one behind the other in ``octets``; ``ends`` says where each ends."""
        return cls(WireBuffer([octets]), np.concatenate((np.zeros(1, np.int64), ends))[:-1], ends)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, which: slice) -> Messages:
        return Messages(self.buffer, self.starts[which], self.ends[which])

    def octets(self, i: int) -> bytes:
        """Copy one message out."""
        return bytes(self.buffer.data[self.starts[i] : self.ends[i]])


class Collected:
    """Collects messages, one by one or many at once from C, until there are enough to be taken together.

    Enough is ``most`` messages, or ``most_bytes`` bytes of them, beside those that were left when others were taken.
    """

    __slots__ = ("_data", "_drained", "_ends", "_into", "_left", "_octets", "_positions", "most", "most_bytes")

    def __init__(self, most: int, most_bytes: int) -> None:
        self.most, self.most_bytes = most, most_bytes
        self._drained = native.Drained(0, 0, None, 0)
        self._left = (0, 0)
        self._begin(most_bytes)

    def _begin(self, capacity: int) -> None:
        most = self.most + self._left[0]
        self._data = np.empty(capacity + WireBuffer.MIN_PADDING, np.uint8)
        self._ends = np.empty(most, np.int64)
        # Python writes into views several times as fast as into arrays.
        self._octets, self._positions = self._data.data, self._ends.data
        # Looked up once, not for each burst.
        self._into = (self._data.ctypes.data, capacity, self._ends.ctypes.data, most)

    def __len__(self) -> int:
        return int(self._drained.messages)

    @property
    def size_bytes(self) -> int:
        return int(self._drained.bytes)

    @property
    def left(self) -> tuple[int, int]:
        """How many of them were left when others were taken, and their bytes."""
        return self._left

    @property
    def is_full(self) -> bool:
        messages, size_bytes = self._left
        return len(self) - messages >= self.most or self.size_bytes - size_bytes >= self.most_bytes

    def append(self, message: bytes) -> None:
        """Add a message. It may be longer than the room that is left, but there must be some: see :attr:`is_full`."""
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
        """Add messages, each without its ``cut`` bytes at ``at``, while there is room; return how many were added."""
        lengths = messages.ends - messages.starts - cut
        room = np.searchsorted(np.cumsum(lengths), self.most_bytes + self._left[1] - self.size_bytes) + 1
        count = min(len(messages), self.most + self._left[0] - len(self), int(room))
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
        """Let C add messages, and return how far it has come.

        ``receive`` gets what ``pgcdc_drain`` takes last: data, capacity, ends, most, drained.
        """
        receive(*self._into, ctypes.addressof(self._drained))
        return self._drained

    def octets(self, i: int) -> memoryview:
        """Message ``i``, or that many from the end."""
        i %= len(self)
        return self._octets[self._positions[i - 1] if i else 0 : self._positions[i]]

    def take(self, leave: int = 0) -> Messages:
        """Return what was collected, and start again with the last ``leave`` of it."""
        count = len(self) - leave
        ends, left = self._ends[:count], self._ends[count : len(self)]
        used = int(ends[-1]) if count else 0
        octets = bytes(self._octets[used : self.size_bytes])
        self._data[used : used + WireBuffer.MIN_PADDING] = 0
        buffer = WireBuffer.over(self._data[: used + WireBuffer.MIN_PADDING], used)
        self._left = leave, len(octets)
        self._drained.messages, self._drained.bytes = self._left
        self._begin(self.most_bytes + len(octets))
        self._octets[: len(octets)], self._ends[:leave] = octets, left - used
        return Messages(buffer, np.concatenate((np.zeros(1, np.int64), ends))[:-1], ends)
