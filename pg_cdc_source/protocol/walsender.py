"""What a walsender wraps its messages in: XLogData around the plugin's, and keepalives between them.

The formats are in the manual under "Streaming Replication Protocol" (protocol-replication).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from pg_cdc_source.errors import WireError
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.values.ndarrays import Ints
from pg_cdc_source.values.wire import Messages

# XLogData is its tag, three numbers of 8 bytes, and the plugin's message.
XLOG_DATA, KEEPALIVE = b"wk"
HEADER_BYTES = 25
# Where an XLogData says where it begins: a change's WAL record (walsender.c: WalSndPrepareWrite).
START = slice(1, 9)
_KEEPALIVE = struct.Struct(">cQQ?")


@dataclass(frozen=True, slots=True)
class Keepalive:
    """How far the server has read the WAL and sent what there was, and whether it wants an answer now."""

    end: Lsn
    wants_answer: bool


def read_keepalive(data: bytes) -> Keepalive:
    """Read a keepalive. Raises WireError for short or long bytes."""
    if len(data) != _KEEPALIVE.size:
        raise WireError(f"replication: keepalive: expected {_KEEPALIVE.size} bytes, got {len(data)}")
    _, end, _, wants_answer = _KEEPALIVE.unpack(data)
    return Keepalive(Lsn(end), wants_answer)


def read_starts(messages: Messages) -> Ints:
    """Return where each XLogData begins."""
    starts: Ints = messages.buffer.at_any_byte(">u8")[messages.starts + START.start].astype(np.int64)
    return starts
