"""Decode dates and timestamps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pg_cdc_source.values import native, printed
from pg_cdc_source.values.arrow import fixed_array
from pg_cdc_source.values.decoder import Decoded, Decoder, Field, Fixed, Refused, refusals, without
from pg_cdc_source.values.ndarrays import Flags


@dataclass(frozen=True, slots=True)
class Moment(Fixed):
    """``date_send``, ``timestamp_send``, ``timestamptz_send``: days or microseconds since 2000-01-01.

    Spark holds the years 1 to 9999 of the proleptic Gregorian calendar, which is also PostgreSQL's.
    """

    arrow: pa.DataType
    wire: np.dtype[Any]
    memory: np.dtype[Any]
    units_per_day: int

    # Days from 2000-01-01 to 1970-01-01, to 0001-01-01 and to 10000-01-01.
    EPOCH_DAY = -10_957
    FIRST_DAY = -730_119
    END_DAY_EXCLUSIVE = 2_921_940

    def read_items(self, items: npt.NDArray[Any], valid: Flags | None) -> Decoded:
        units = items.astype(self.memory, copy=False)
        first, last = self.FIRST_DAY * self.units_per_day, self.END_DAY_EXCLUSIVE * self.units_per_day - 1
        refused: tuple[Refused, ...] = ()
        if units.min() < first or units.max() > last:
            # datetime/timestamp.h: DT_NOBEGIN and DT_NOEND, the least and the greatest integer.
            limits = np.iinfo(self.memory)
            infinite = (units == limits.min) | (units == limits.max)
            outside = ((units < first) | (units > last)) & ~infinite
            refused = refusals((infinite, "infinity"), (outside, "a year outside 1 to 9999"))
            valid = without(valid, infinite | outside)
            units[~valid] = 0
        units -= self.EPOCH_DAY * self.units_per_day
        return Decoded(fixed_array(self.arrow, units, valid), refused)


_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LONG_YEAR = "[1-9][0-9]{4,6}"
_MONTH_AND_DAY = "-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])"
_TIME_OF_DAY = r" (?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{0,5}[1-9])?"


@dataclass(frozen=True, slots=True)
class PrintedMoment(Decoder):
    """``date_out``, ``timestamp_out``, ``timestamptz_out`` under ``DateStyle = ISO`` and ``TimeZone = UTC``.

    Years have four digits or more. Years before year 1 are counted backwards and end with `` BC``.
    """

    arrow: pa.DataType

    def read(self, values: Field) -> Decoded:
        has_time = pa.types.is_timestamp(self.arrow)
        units = native.printed_moment(
            *values.located, has_time=has_time, has_zone=has_time and self.arrow.tz is not None
        )
        if units is not None:
            return Decoded(fixed_array(self.arrow, units if has_time else units.astype(np.int32), values.valid))
        text = printed.texts(values)
        rest = _MONTH_AND_DAY
        if has_time:
            rest += _TIME_OF_DAY + (r"\+00" if self.arrow.tz else "")
        what = "a date" if self.arrow == pa.date32() else "a timestamp"
        ordinary = printed.matches(text, _YEAR + rest)
        if not ordinary.false_count:
            return Decoded(printed.cast(text, self.arrow, what))
        infinite = printed.matches(text, "-?infinity")
        outside = printed.matches(text, f"{_LONG_YEAR}{rest}|{_YEAR}{rest} BC")
        printed.expect(text, printed.any_of(ordinary, infinite, outside), what)
        moments = printed.cast(printed.only(ordinary, text), self.arrow, what)
        return Decoded(
            moments,
            refusals((printed.flags(infinite), "infinity"), (printed.flags(outside), "a year outside 1 to 9999")),
        )
