"""What memory shall not hold: files of the driver that have no name, so that nothing stays behind, whatever ends it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import numpy as np

from pg_cdc_source.errors import WireError
from pg_cdc_source.protocol import pgoutput
from pg_cdc_source.values.wire import Collected, Messages

XID_BYTES = 4
_ROWS, _IN_STREAM = list(pgoutput.ROWS), list(pgoutput.IN_STREAM)
# Written at a time, and read back at a time.
BLOCK_BYTES = 1 << 20
MESSAGES_PER_BLOCK = 8192
FILE_BYTES = 64 << 20


class Spill:
    """Byte strings by their place. ``users`` counts those that are still needed; the owner keeps the count."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="pg_cdc_source-spill-")  # noqa: SIM115 - closed with its owner
        self._end = 0
        self.users = 0

    @property
    def is_large(self) -> bool:
        """Whether the next byte string should go to another file: a file can only be given up as a whole."""
        return self._end >= FILE_BYTES

    def append(self, data: bytes) -> tuple[int, int]:
        place = self._end, len(data)
        self._file.seek(self._end)
        self._file.write(data)
        self._file.flush()
        self._end += len(data)
        return place

    def read(self, place: tuple[int, int]) -> bytes:
        at, length = place
        return os.pread(self._file.fileno(), length, at)

    def close(self) -> None:
        self._file.close()


class StreamedTransaction:
    """A transaction whose messages come before it has ended (protocol 2, "streaming").

    Rows of a subtransaction that was rolled back are left out when it is read again. Relations are not: the server
    describes a relation once for the whole transaction, whichever part of it came first.
    """

    def __init__(self, header_bytes: int) -> None:
        self._xid_at = header_bytes + 1
        self.waiting = Collected(MESSAGES_PER_BLOCK, BLOCK_BYTES)  # messages with their headers, as they came
        self._spill: Spill | None = None
        self._places: list[tuple[tuple[int, int], int]] = []  # of blocks, and how many messages each has
        self._rolled_back: set[int] = set()

    def append(self, data: bytes) -> None:
        self.waiting.append(data)
        self.make_room()

    def make_room(self) -> None:
        """Move what waits to a file, if there is much of it."""
        if self.waiting.is_full:
            self._spill = self._spill or Spill()
            messages = self.waiting.take()
            octets = bytes(messages.buffer.data[: messages.buffer.zeros_at])
            self._places.append((self._spill.append(octets + messages.ends.tobytes()), len(messages)))

    def roll_back(self, subxid: int) -> None:
        self._rolled_back.add(subxid)

    def parts(self) -> Iterator[Messages]:
        """The messages in their order: rows that follow each other in one piece, every other message alone.

        Each has the xid of its subtransaction still, 4 bytes at :attr:`xid_at`.
        """
        for place, count in self._places:
            assert self._spill is not None
            block = self._spill.read(place)
            size_bytes = len(block) - count * np.dtype(np.int64).itemsize
            ends = np.frombuffer(block[size_bytes:], np.int64)
            yield from self._parts_of(Messages.of(block[:size_bytes], ends))
        yield from self._parts_of(self.waiting.take())

    @property
    def xid_at(self) -> int:
        return self._xid_at

    def _parts_of(self, messages: Messages) -> Iterator[Messages]:
        if not len(messages):
            return
        tags = messages.buffer.at_any_byte("u1")[messages.starts + (self._xid_at - 1)]
        has_xid = np.isin(tags, _IN_STREAM)
        short = has_xid & (messages.ends - messages.starts < self._xid_at + XID_BYTES)
        if short.any():
            i = int(short.argmax())
            length = int((messages.ends - messages.starts)[i])
            raise WireError(f"pgoutput: {chr(tags[i])!r} in a stream: expected an xid, got {length} bytes")
        is_row = np.isin(tags, _ROWS)
        if self._rolled_back:
            xids = messages.buffer.at_any_byte(">u4")[messages.starts + self._xid_at]
            gone = has_xid & (tags != pgoutput.RELATION) & np.isin(xids, list(self._rolled_back))
            messages, is_row = Messages(messages.buffer, messages.starts[~gone], messages.ends[~gone]), is_row[~gone]
            if not len(messages):
                return
        # A part begins with every message that is none of a row, and with the row behind it.
        begins = np.flatnonzero(np.concatenate((np.ones(1, np.bool_), ~is_row[1:] | ~is_row[:-1]))[: len(is_row)])
        for first, end in zip(begins, [*begins[1:], len(messages)], strict=True):
            yield messages[first:end]

    def close(self) -> None:
        if self._spill is not None:
            self._spill.close()
