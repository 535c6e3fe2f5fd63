"""The type that ``numeric`` is read as where DECIMAL cannot hold it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from pg_cdc_source.errors import OptionError

_DECIMAL = re.compile(r"decimal\s*\(\s*(\d{1,4})\s*,\s*(\d{1,4})\s*\)", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class NumericAs:
    """The type of a ``numeric`` column whose declaration does not fit DECIMAL."""

    kind: Literal["string", "double", "decimal"]
    precision: int = 0
    scale: int = 0

    @classmethod
    def parse(cls, text: str) -> NumericAs:
        """Read ``string``, ``double`` or ``decimal(p,s)`` within Spark's bounds."""
        word = text.strip().lower()
        if word == "string":
            return cls("string")
        if word == "double":
            return cls("double")
        match = _DECIMAL.fullmatch(word)
        if match is None:
            raise OptionError(
                f"{text!r} is not a type for numeric", remedy="use string, double or decimal(p,s) such as decimal(38,9)"
            )
        precision, scale = int(match[1]), int(match[2])
        if not (1 <= precision <= 38 and scale <= precision):
            raise OptionError(
                f"decimal({precision},{scale}) does not exist in Spark",
                remedy="choose a precision from 1 to 38, and a scale that is not greater",
            )
        return cls("decimal", precision, scale)
