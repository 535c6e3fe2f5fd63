"""What memory shall not hold: files of the driver that have no name, so that nothing stays behind, whatever ends it."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterator

from pg_cdc_source import pgoutput
from pg_cdc_source.errors import WireError

_LENGTH = struct.Struct(">I")
_XID = struct.Struct(">I")
# Written at a time, and read back at a time.
BLOCK_BYTES = 1 << 20
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
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._spill: Spill | None = None
        self._places: list[tuple[int, int]] = []
        self._rolled_back: set[int] = set()

    def append(self, data: bytes) -> None:
        """Keep one message with its header, as it came."""
        self._waiting.append(_LENGTH.pack(len(data)))
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes >= BLOCK_BYTES:
            self._spill = self._spill or Spill()
            self._places.append(self._spill.append(b"".join(self._waiting)))
            self._waiting, self._waiting_bytes = [], 0

    def roll_back(self, subxid: int) -> None:
        self._rolled_back.add(subxid)

    def messages(self) -> Iterator[bytes]:
        """The messages as they would have come outside of a stream, without the xid behind their tag."""
        for place in self._places:
            assert self._spill is not None
            yield from self._unpacked(self._spill.read(place))
        yield from self._unpacked(b"".join(self._waiting))

    def _unpacked(self, block: bytes) -> Iterator[bytes]:
        at, xid_at = 0, self._xid_at
        while at < len(block):
            (length,) = _LENGTH.unpack_from(block, at)
            at += _LENGTH.size
            data = block[at : at + length]
            at += length
            tag = data[xid_at - 1]
            if tag not in pgoutput.IN_STREAM:
                yield data
                continue
            if length < xid_at + _XID.size:
                raise WireError(f"pgoutput: {chr(tag)!r} in a stream: expected an xid, got {length} bytes")
            (xid,) = _XID.unpack_from(data, xid_at)
            if tag == pgoutput.RELATION or xid not in self._rolled_back:
                yield data[:xid_at] + data[xid_at + _XID.size :]

    def close(self) -> None:
        if self._spill is not None:
            self._spill.close()
