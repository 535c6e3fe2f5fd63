"""Decode integers, floats and booleans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.values import native, printed
from pg_cdc_source.values.arrow import bitmap, fixed_array, from_numpy, from_texts, numpy_type
from pg_cdc_source.values.decoder import Decoded, Decoder, Field, Fixed, MalformedError
from pg_cdc_source.values.ndarrays import Flags


@dataclass(frozen=True, slots=True)
class Number(Fixed):
    """Integers and floats (``int2send``, ``int4send``, ``int8send``, ``oidsend``, ``float4send``, ``float8send``).

    Floats are copied as integers of their width, so that every bit of a NaN arrives.
    """

    arrow: pa.DataType
    wire: np.dtype[Any]
    memory: np.dtype[Any]

    def read_items(self, items: npt.NDArray[Any], valid: Flags | None) -> Decoded:
        return Decoded(fixed_array(self.arrow, items.astype(self.memory, copy=False), valid))


@dataclass(frozen=True, slots=True)
class PrintedInteger(Decoder):
    """``int2out``, ``int4out``, ``int8out``, ``oidout``."""

    arrow: pa.DataType
    range: pa.DataType  # the type's own: oid is unsigned, and Spark has no unsigned integers

    def read(self, values: Field) -> Decoded:
        memory = numpy_type(self.arrow)
        limits = np.iinfo(numpy_type(self.range))
        numbers = native.printed_integer(*values.located, int(limits.min), int(limits.max))
        if numbers is not None:
            return Decoded(fixed_array(self.arrow, numbers.astype(memory, copy=False), values.valid))
        text = printed.texts(values)
        printed.expect(text, printed.matches(text, "0|-?[1-9][0-9]*"), "an integer")
        return Decoded(printed.cast(text, self.range, "an integer").cast(self.arrow))


_FLOAT = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]*[1-9])?(?:e[+-][0-9]{2,3})?|NaN|-?Infinity"
_ZEROS_AND_INFINITIES = ("0", "-0", "Infinity", "-Infinity")


@dataclass(frozen=True, slots=True)
class PrintedFloat(Decoder):
    """``float4out``, ``float8out``: with ``extra_float_digits = 1``, the shortest digits that give the value back."""

    arrow: pa.DataType

    def read(self, values: Field) -> Decoded:
        text = printed.texts(values)
        if not native.are_printed_floats(*values.located):
            printed.expect(text, printed.matches(text, _FLOAT), "a float")
        floats = printed.cast(text, self.arrow, "a float")
        # The cast turns what is too large into infinity, and what is too small into zero.
        zero = from_numpy(np.zeros(1, numpy_type(self.arrow)))[0]
        extreme = pc.or_(pc.is_inf(floats), pc.equal(floats, zero))
        if extreme.true_count:
            named = pc.is_in(text, value_set=from_texts(_ZEROS_AND_INFINITIES))
            printed.expect(text, pc.or_(pc.invert(extreme), named), f"a float of {self.arrow.bit_width} bits")
        return Decoded(floats)


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
class PrintedBoolean(Decoder):
    """``boolout``: ``t`` or ``f``; ``bit_out`` of one bit: ``1`` or ``0``."""

    true: str = "t"
    false: str = "f"
    arrow = pa.bool_()

    def read(self, values: Field) -> Decoded:
        letter = values.buffer.at_any_byte("u1")[values.first_byte()]
        true = letter == ord(self.true)
        if values.present((values.length != 1) | ~(true | (letter == ord(self.false)))).any():
            raise MalformedError(f"expected {self.true} or {self.false}, got other text")
        bits = pa.py_buffer(np.packbits(true, bitorder="little"))
        return Decoded(pa.Array.from_buffers(self.arrow, len(true), [bitmap(values.valid), bits]))
