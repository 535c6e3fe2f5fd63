"""A transaction whose messages come before it has ended (protocol 2, "streaming"): it waits until its commit comes.

Its messages carry the xid of their subtransaction behind the tag. They wait as they came, with their headers, in blocks
of a file that is not of this module's making. When the commit comes they are read again, in their order. Rows of a
subtransaction that was rolled back are left out then. Relations are not: the server describes a relation once for the
whole transaction, whichever part of it came first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from pg_cdc_source.errors import WireError
from pg_cdc_source.protocol import pgoutput
from pg_cdc_source.protocol.walsender import HEADER_BYTES
from pg_cdc_source.values.wire import Collected, Messages

# Where the xid stands in a message, with its header before it.
XID_AT, XID_BYTES = HEADER_BYTES + 1, 4
# A block: written at a time, and read back at a time.
BLOCK_BYTES = 1 << 20
MESSAGES_PER_BLOCK = 8192

_ROWS, _IN_STREAM = list(pgoutput.ROWS), list(pgoutput.IN_STREAM)


class BlockFile(Protocol):
    """Keeps byte strings by their place."""

    def append(self, data: bytes) -> tuple[int, int]: ...

    def read(self, place: tuple[int, int]) -> bytes: ...

    def close(self) -> None: ...


class WaitingMessages:
    """Messages that wait in their order. ``new_file`` is called once a block of them is full."""

    def __init__(self, new_file: Callable[[], BlockFile], messages_per_block: int = MESSAGES_PER_BLOCK) -> None:
        self.waiting = Collected(messages_per_block, BLOCK_BYTES)
        self._new_file = new_file
        self._file: BlockFile | None = None
        self._blocks: list[tuple[tuple[int, int], int]] = []  # the place of each, and how many messages it has

    def append(self, data: bytes) -> None:
        """Add a message."""
        self.waiting.append(data)
        self.make_room()

    def make_room(self) -> None:
        """Move what waits to the file, if there is a block of it."""
        if self.waiting.is_full:
            self._file = self._file or self._new_file()
            messages = self.waiting.take()
            octets = bytes(messages.buffer.data[: messages.buffer.zeros_at])
            self._blocks.append((self._file.append(octets + messages.ends.tobytes()), len(messages)))

    @property
    def file_bytes(self) -> int:
        """What of it is in the file."""
        return sum(length for (_, length), _ in self._blocks)

    def blocks(self) -> Iterator[Messages]:
        """Take the messages in their order, many at a time."""
        for place, count in self._blocks:
            assert self._file is not None
            block = self._file.read(place)
            size_bytes = len(block) - count * np.dtype(np.int64).itemsize
            ends = np.frombuffer(block[size_bytes:], np.int64)
            yield Messages.of(block[:size_bytes], ends)
        yield self.waiting.take()

    def close(self) -> None:
        """Give up the file."""
        if self._file is not None:
            self._file.close()


class StreamedTransaction(WaitingMessages):
    """The messages of one transaction that has not committed yet.

    ``has_messages``: some are logical decoding messages. ``is_unclear``: a subtransaction was rolled back when there
    were such, and PostgreSQL does not say which were of it: with every one it sends the xid of the whole transaction
    (reorderbuffer.c: ReorderBufferApplyMessage). ``relations``: as the how many-th of the session's descriptions the
    last one of each relation came.
    """

    def __init__(self, new_file: Callable[[], BlockFile], messages_per_block: int = MESSAGES_PER_BLOCK) -> None:
        super().__init__(new_file, messages_per_block)
        self.has_messages = False
        self.relations: dict[int, int] = {}
        self.is_unclear = False
        self._rolled_back: set[int] = set()

    def roll_back(self, subxid: int) -> None:
        """Leave out the rows of a subtransaction."""
        self._rolled_back.add(subxid)
        self.is_unclear |= self.has_messages

    def parts(self) -> Iterator[Messages]:
        """Take the messages in their order: rows that follow each other together, every other message alone.

        Each has the xid of its subtransaction still, ``XID_BYTES`` at ``XID_AT``.
        """
        for block in self.blocks():
            yield from self._parts_of(block)

    def _parts_of(self, messages: Messages) -> Iterator[Messages]:
        if not len(messages):
            return
        tags = messages.buffer.at_any_byte("u1")[messages.starts + HEADER_BYTES]
        has_xid = np.isin(tags, _IN_STREAM)
        short = has_xid & (messages.ends - messages.starts < XID_AT + XID_BYTES)
        if short.any():
            i = int(short.argmax())
            length = int((messages.ends - messages.starts)[i])
            raise WireError(f"pgoutput: {chr(tags[i])!r} in a stream: expected an xid, got {length} bytes")
        is_row = np.isin(tags, _ROWS)
        if self._rolled_back:
            xids = messages.buffer.at_any_byte(">u4")[messages.starts + XID_AT]
            gone = has_xid & (tags != pgoutput.RELATION) & np.isin(xids, list(self._rolled_back))
            messages, is_row = Messages(messages.buffer, messages.starts[~gone], messages.ends[~gone]), is_row[~gone]
            if not len(messages):
                return
        # A part begins with every message that is none of a row, and with the row behind it.
        begins = np.flatnonzero(np.concatenate((np.ones(1, np.bool_), ~is_row[1:] | ~is_row[:-1]))[: len(is_row)])
        for first, end in zip(begins, [*begins[1:], len(messages)], strict=True):
            yield messages[first:end]
