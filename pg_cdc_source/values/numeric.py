"""Decode ``numeric``: base-10,000 digits into DECIMAL."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pg_cdc_source.values import native
from pg_cdc_source.values.binary import (
    Decoded,
    Decoder,
    Field,
    Flags,
    Ints,
    MalformedError,
    fixed_array,
    refusals,
    without,
)

# numeric.c: NUMERIC_POS, NUMERIC_NEG, NUMERIC_NAN, NUMERIC_PINF, NUMERIC_NINF, NUMERIC_DSCALE_MASK.
_POSITIVE, _NEGATIVE, _NAN, _PLUS_INFINITY, _MINUS_INFINITY = 0x0000, 0x4000, 0xC000, 0xD000, 0xF000
_MAX_DISPLAY_SCALE = 0x3FFF
_HEADER_BYTES = 8

# numeric.c: NBASE, DEC_DIGITS.
_BASE = 10_000
_DIGITS_PER_POWER = 4

# Every integer of so many decimal digits fits into 64 bits.
_INT64_DIGITS = 18


class _Sum64:
    """Numbers below 10 ** 18, built digit by digit."""

    def __init__(self, n: int) -> None:
        self._value = np.zeros(n, np.int64)

    def append(self, digit: Ints, base: int) -> None:
        self._value *= base
        self._value += digit

    def words(self, negative: Flags) -> npt.NDArray[np.int64]:
        """Return Arrow's 128-bit integers, as low and high half."""
        np.negative(self._value, out=self._value, where=negative)
        return np.stack((self._value, self._value >> 63), axis=1)


class _Sum128:
    """Numbers below 10 ** 38, built digit by digit in four limbs of 32 bits, the least first."""

    _LIMB = np.int64(2**32 - 1)

    # A limb times this, and a carry on top, still fit into 64 bits.
    _MAX_FACTOR = 10**8

    def __init__(self, n: int) -> None:
        self._limbs = np.zeros((4, n), np.int64)
        self._pending = np.zeros(n, np.int64)
        self._factor = 1

    def append(self, digit: Ints, base: int) -> None:
        if self._factor * base > self._MAX_FACTOR:
            self._carry()
        self._pending = self._pending * base + digit
        self._factor *= base

    def _carry(self) -> None:
        carry = self._pending
        for limb in self._limbs:
            carry = limb * self._factor + carry
            np.bitwise_and(carry, self._LIMB, out=limb)
            carry = carry >> 32
        self._pending = np.zeros_like(self._pending)
        self._factor = 1

    def words(self, negative: Flags) -> npt.NDArray[np.int64]:
        """Return Arrow's 128-bit integers, as low and high half."""
        self._carry()
        low, high = self._limbs[0] | self._limbs[1] << 32, self._limbs[2] | self._limbs[3] << 32
        # Two's complement: the carry of the low half's increment reaches the high half only from zero.
        return np.stack(
            (np.where(negative, -low, low), np.where(negative, ~high + (low == 0), high)),
            axis=1,
        )


@dataclass(frozen=True, slots=True)
class Decimal(Decoder):
    """``numeric_send``: number of digits, weight, sign, display scale, then the digits in base 10,000.

    Digit ``i`` counts 10,000 ** (weight - i). All values are aligned at the decimal point and summed one power of
    10,000 at a time, from the greatest that the type and the values have down to the least that the type has.
    Nothing is rounded: a value with a digit outside these powers is refused.
    """

    arrow: pa.Decimal128Type

    def read(self, values: Field) -> Decoded:
        words = native.decimal(*values.located, self.arrow.precision, self.arrow.scale)
        if words is not None:
            return Decoded(fixed_array(self.arrow, words, values.valid))
        at, digits, weight, sign = _headers(values)
        integer_digits = self.arrow.precision - self.arrow.scale
        top_power = (integer_digits + 3) // _DIGITS_PER_POWER - 1
        last_power = -self.arrow.scale // _DIGITS_PER_POWER

        # PostgreSQL strips zero digits at both ends, so that weight and number of digits alone tell the extent.
        some = digits > 0
        large, fine = some & (weight > top_power), some & (weight - digits + 1 < last_power)
        digits = np.where(large | fine, 0, digits)

        first_power = min(top_power, int(weight.max()))
        narrow = _DIGITS_PER_POWER * (first_power + 1) + self.arrow.scale <= _INT64_DIGITS
        total = _Sum64(len(at)) if narrow else _Sum128(len(at))
        digit_at = values.buffer.at_any_byte(">u2")
        for power in range(first_power, last_power - 1, -1):
            index = weight - power
            # As unsigned numbers, negative ones are greater than any number of digits.
            inside = index.view(np.uint64) < digits.view(np.uint64)
            digit = digit_at[np.where(inside, at + _HEADER_BYTES + 2 * index, values.buffer.zeros_at)].astype(np.int64)
            if digit.max() >= _BASE:
                raise MalformedError(f"expected digits below {_BASE}, got {int(digit.max())}")
            if power == top_power:
                too_large = digit >= 10 ** (integer_digits - _DIGITS_PER_POWER * top_power)
                large, digit = large | too_large, np.where(too_large, 0, digit)
            if power == last_power and self.arrow.scale % _DIGITS_PER_POWER:
                kept = self.arrow.scale % _DIGITS_PER_POWER
                digit, rest = np.divmod(digit, 10 ** (_DIGITS_PER_POWER - kept))
                fine |= rest > 0
                total.append(digit, 10**kept)
            else:
                total.append(digit, _BASE)
        return self._finish(total.words(sign == _NEGATIVE), values.valid, sign, large, fine)

    def _finish(
        self, words: npt.NDArray[np.int64], valid: Flags | None, sign: Ints, large: Flags, fine: Flags
    ) -> Decoded:
        nan, infinite = sign == _NAN, (sign == _PLUS_INFINITY) | (sign == _MINUS_INFINITY)
        refused = large | fine | nan | infinite
        if not refused.any():
            return Decoded(fixed_array(self.arrow, words, valid))
        words[refused] = 0
        return Decoded(
            fixed_array(self.arrow, words, without(valid, refused)),
            refusals(
                (nan, "NaN"),
                (infinite, "infinity"),
                (large, f"more than {self.arrow.precision - self.arrow.scale} digits before the decimal point"),
                (fine & ~large, f"more than {self.arrow.scale} digits after the decimal point"),
            ),
        )


def _headers(values: Field) -> tuple[Ints, Ints, Ints, Ints]:
    """Return position, number of digits, weight and sign of each value, all checked."""
    short = values.present(values.length < _HEADER_BYTES)
    if short.any():
        raise MalformedError(f"expected {_HEADER_BYTES} bytes or more, got {int(values.length[short.argmax()])}")
    at = values.first_byte()
    header = values.buffer.at_any_byte("V8")[at].view(">u2").reshape(-1, 4).T.astype(np.int64, order="C")
    digits, weight, sign, display_scale = header
    wrong = values.present(values.length != _HEADER_BYTES + 2 * digits)
    if wrong.any():
        row = wrong.argmax()
        raise MalformedError(f"expected {_HEADER_BYTES + 2 * int(digits[row])} bytes, got {int(values.length[row])}")
    signless = sign & ~_NEGATIVE
    if signless.any() and not np.isin(sign, (_POSITIVE, _NEGATIVE, _NAN, _PLUS_INFINITY, _MINUS_INFINITY)).all():
        raise MalformedError("expected the sign of a numeric, got unknown bits")
    if display_scale.max() > _MAX_DISPLAY_SCALE:
        raise MalformedError(f"expected a display scale up to {_MAX_DISPLAY_SCALE}, got {int(display_scale.max())}")
    return at, digits, (weight ^ 0x8000) - 0x8000, sign
