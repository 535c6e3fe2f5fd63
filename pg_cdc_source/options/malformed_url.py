"""Errors about a URL that cannot be read; none of them repeats a part of it.

A password with raw special characters is cut, and its rest ends up in the host, the database or the name of a
parameter. So errors name a parameter by its position and show nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.suggestions import nearest

PERCENT_ENCODE = (
    "percent-encode special characters in user and password (@ is %40, : is %3A, / is %2F, ? is %3F, & is %26, % is "
    "%25), or pass both in the options user and password"
)
_MOVED = re.compile(r"[@&=;]")


def check_address(address: str) -> None:
    """Refuse a raw character in host, port or database that shows where a password or a parameter was cut."""
    if _MOVED.search(address):
        raise OptionError("its host or database has one of @ & = ; as it stands", remedy=PERCENT_ENCODE)


def unknown_parameter(name: str, position: int, known: Collection[str]) -> OptionError:
    near = nearest(name, known)
    return OptionError(
        f"its parameter {position} is not known",
        remedy=(f"did you mean {near}? " if near else "") + f"If it is part of a password: {PERCENT_ENCODE}",
    )
