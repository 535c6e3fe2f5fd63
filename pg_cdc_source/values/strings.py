"""Decode text, json, jsonb, bytea and uuid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pg_cdc_source.values import native, printed
from pg_cdc_source.values.arrow import bitmap, byte_strings, content, utf8_strings
from pg_cdc_source.values.decoder import Decoded, Decoder, Field, Fixed, MalformedError
from pg_cdc_source.values.ndarrays import Flags
from pg_cdc_source.values.wire import MAX_OFFSET


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


@dataclass(frozen=True, slots=True)
class Octets(Decoder):
    """``byteasend``: the bytes themselves."""

    arrow = pa.binary()

    def read(self, values: Field) -> Decoded:
        return Decoded(byte_strings(values, values.start, values.length))


_DIGITS = bytes(range(256)).hex().encode("ascii")


def _bytes_of_hex(digits: bytes) -> npt.NDArray[np.uint16]:
    """Return for each integer of 16 bits the byte whose two digits it is in memory; 256 where it is none."""
    octets = np.full(2**16, 256, np.uint16)
    octets[np.frombuffer(digits, np.uint16)] = np.arange(256)
    return octets


_BYTE_OF_LOWER_CASE, _BYTE_OF_UPPER_CASE = _bytes_of_hex(_DIGITS), _bytes_of_hex(_DIGITS.upper())


@dataclass(frozen=True, slots=True)
class PrintedOctets(Decoder):
    r"""``byteaout`` under ``bytea_output = hex``: ``\x`` and two lower-case digits for every byte.

    PostGIS's ``LWGEOM_out`` and ``geography_out``: no prefix, and digits in upper case.
    """

    prefix: str = "\\x"
    upper_case: bool = False
    arrow = pa.binary()

    def read(self, values: Field) -> Decoded:
        skipped = len(self.prefix)
        wrong = (values.length < skipped) | ((values.length - skipped) % 2 == 1)
        octet, at = values.buffer.at_any_byte("u1"), values.first_byte()
        for k, letter in enumerate(self.prefix):
            wrong |= octet[at + k] != ord(letter)
        if values.present(wrong).any():
            before = f"{self.prefix} and " if self.prefix else ""
            raise MalformedError(f"expected {before}two digits for every byte, got other text")
        header = np.int64(skipped) if values.valid is None else skipped * values.valid.astype(np.int64)
        digits = byte_strings(values, values.start + header, values.length - header)
        table = _BYTE_OF_UPPER_CASE if self.upper_case else _BYTE_OF_LOWER_CASE
        octets = table[content(digits).view(np.uint16)]
        if len(octets) and octets.max() > 255:
            case = "upper" if self.upper_case else "lower"
            raise MalformedError(f"expected hexadecimal digits in {case} case, got other characters")
        offsets = np.frombuffer(digits.buffers()[1], np.int32)[: len(digits) + 1] // 2
        buffers = [bitmap(values.valid), pa.py_buffer(offsets), pa.py_buffer(octets.astype(np.uint8))]
        return Decoded(pa.Array.from_buffers(self.arrow, len(digits), buffers))


_HEX_OF_BYTE = np.frombuffer(bytes(range(256)).hex().encode("ascii"), np.uint16)
_UUID_TEXT_LENGTH = 36

# The groups of digits: their places among the 32 digits and in the text; the last group is in two parts. They are
# integers because NumPy copies an integer at once, but other ranges of bytes one by one.
_UUID_GROUPS = ["1", "2", "3", "4", "5", "6"]
_UUID_DIGITS, _UUID_TEXT = (
    np.dtype({"names": _UUID_GROUPS, "formats": ["u8", "u4", "u4", "u4", "u8", "u4"], "offsets": at, "itemsize": size})
    for at, size in (([0, 8, 12, 16, 20, 28], 32), ([0, 9, 14, 19, 24, 32], _UUID_TEXT_LENGTH))
)


@dataclass(frozen=True, slots=True)
class Uuid(Fixed):
    """``uuid_send``: 16 bytes, which become the text that ``uuid_out`` prints."""

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


@dataclass(frozen=True, slots=True)
class PrintedUuid(Decoder):
    """``uuid_out``: the text itself."""

    arrow = pa.string()

    def read(self, values: Field) -> Decoded:
        text = printed.texts(values)
        printed.expect(text, printed.matches(text, "[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}"), "a uuid")
        return Decoded(text)
