"""Positions in the write-ahead log."""

from __future__ import annotations

import re
from typing import SupportsInt

_LSN_TEXT = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")
_LSN_END_EXCLUSIVE = 1 << 64


class Lsn(int):
    """A WAL position: an ``int`` of 64 bits that prints as PostgreSQL prints ``pg_lsn``."""

    __slots__ = ()

    def __new__(cls, position: SupportsInt) -> Lsn:
        value = int(position)
        if not 0 <= value < _LSN_END_EXCLUSIVE:
            raise ValueError(f"{value} is not a WAL position: it does not fit in 64 bits without a sign")
        return super().__new__(cls, value)

    @classmethod
    def parse(cls, text: str) -> Lsn:
        """Read ``16/B374D848``: two hexadecimal numbers of up to eight digits, as ``pg_lsn_in`` takes them."""
        match = _LSN_TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not an LSN such as '16/B374D848'")
        return cls(int(match[1], 16) << 32 | int(match[2], 16))

    def __str__(self) -> str:
        return f"{self >> 32:X}/{self & 0xFFFFFFFF:X}"

    def __repr__(self) -> str:
        return f"Lsn('{self}')"
