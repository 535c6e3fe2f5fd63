"""Decode ``numeric`` into DECIMAL, or as the nearest double: base-10,000 digits in binary, decimal digits in text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.values import native, printed
from pg_cdc_source.values.arrow import fixed_array, null
from pg_cdc_source.values.decoder import Decoded, Decoder, Field, MalformedError, refusals, without
from pg_cdc_source.values.ndarrays import Flags, Ints

# numeric.c: NUMERIC_POS, NUMERIC_NEG, NUMERIC_NAN, NUMERIC_PINF, NUMERIC_NINF, NUMERIC_DSCALE_MASK.
_POSITIVE, _NEGATIVE, _NAN, _PLUS_INFINITY, _MINUS_INFINITY = 0x0000, 0x4000, 0xC000, 0xD000, 0xF000
_MAX_DISPLAY_SCALE = 0x3FFF
_HEADER_BYTES = 8

# numeric.c: NBASE, DEC_DIGITS.
_BASE = 10_000
_DIGITS_PER_POWER = 4

# Every integer of so many decimal digits fits into 64 bits with a sign.
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
    """Numbers below 10 ** 38, built digit by digit in four limbs of 32 bits, the least significant first."""

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

    Digit ``i`` is worth 10,000 ** (weight - i). All values are aligned at the decimal point and summed one power of
    10,000 at a time, from the greatest that both the type and the values have down to the least that the type has.
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

        # PostgreSQL strips zero digits at both ends, so weight and number of digits tell which powers a value has.
        some = digits > 0
        large, fine = some & (weight > top_power), some & (weight - digits + 1 < last_power)
        digits = np.where(large | fine, 0, digits)

        first_power = min(top_power, int(weight.max()))
        narrow = _DIGITS_PER_POWER * (first_power + 1) + self.arrow.scale <= _INT64_DIGITS
        total = _Sum64(len(at)) if narrow else _Sum128(len(at))
        digit_at = values.buffer.at_any_byte(">u2")
        for power in range(first_power, last_power - 1, -1):
            index = weight - power
            # As an unsigned number, a negative index is greater than any number of digits.
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


_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?"


@dataclass(frozen=True, slots=True)
class PrintedDecimal(Decoder):
    """``numeric_out``, into a DECIMAL that holds the value exactly or not at all."""

    arrow: pa.Decimal128Type

    def read(self, values: Field) -> Decoded:
        words = native.decimal(*values.located, self.arrow.precision, self.arrow.scale, printed=True)
        if words is not None:
            return Decoded(fixed_array(self.arrow, words, values.valid))
        text = printed.texts(values)
        whole, scale = self.arrow.precision - self.arrow.scale, self.arrow.scale
        integer = f"(?:0|[1-9][0-9]{{0,{whole - 1}}})" if whole else "0"
        fits = printed.matches(text, rf"-?{integer}(?:\.[0-9]{{1,{scale}}})?" if scale else f"-?{integer}")
        if not fits.false_count:
            return Decoded(self._exactly(text))
        nan, infinite = printed.matches(text, "NaN"), printed.matches(text, "-?Infinity")
        number = printed.matches(text, _NUMBER)
        printed.expect(text, printed.any_of(number, nan, infinite), "a numeric")
        large = printed.matches(text, rf"-?[1-9][0-9]{{{whole}}}.*")
        fine = pc.and_not(printed.matches(text, rf"[^.]*\.[0-9]{{{scale}}}0*[1-9].*"), large)
        # Zeros behind the type's last digit do not change a value.
        zeros = rf"(\.[0-9]{{{scale}}})0+$" if scale else r"()\.0+$"
        trimmed = pc.replace_substring_regex(text, pattern=zeros, replacement=r"\1")
        return Decoded(
            self._exactly(printed.only(pc.and_not(number, pc.or_(large, fine)), trimmed)),
            refusals(
                (printed.flags(nan), "NaN"),
                (printed.flags(infinite), "infinity"),
                (printed.flags(large), f"more than {whole} digits before the decimal point"),
                (printed.flags(fine), f"more than {scale} digits after the decimal point"),
            ),
        )

    def _exactly(self, text: pa.Array) -> pa.Array:
        printed.expect(text, pc.invert(printed.matches(text, r"-[0.]+")), "a numeric")
        return printed.cast(text, self.arrow, "a numeric")


@dataclass(frozen=True, slots=True)
class PrintedDouble(Decoder):
    """``numeric_out``, as the nearest double.

    Not ``::float8``: PostgreSQL ends the whole COPY with an error where a numeric is too large for it.
    """

    arrow = pa.float64()

    def read(self, values: Field) -> Decoded:
        text = printed.texts(values)
        printed.expect(text, printed.matches(text, f"{_NUMBER}|NaN|-?Infinity"), "a numeric")
        try:
            doubles = text.cast(self.arrow)
        except pa.ArrowInvalid:
            # Arrow parses only so many digits.
            doubles = pa.array([None if item is None else float(item) for item in text.to_pylist()], self.arrow)
        infinite = pc.is_inf(doubles)
        if not infinite.true_count:
            return Decoded(doubles)
        too_large = pc.and_not(infinite, pc.ends_with(text, "Infinity")).fill_null(False)
        array = pc.if_else(too_large, null(self.arrow), doubles)
        return Decoded(array, refusals((printed.flags(too_large), "too large for a double")))
