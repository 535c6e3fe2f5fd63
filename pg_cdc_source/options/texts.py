"""Values of options as Python has them, turned into the texts that Spark hands on."""

from __future__ import annotations

from collections.abc import Mapping

from pg_cdc_source.errors import OptionError


def option_texts(options: Mapping[str, object]) -> dict[str, str]:
    """Options as texts, without those that are None; a list is its items with commas between them.

    Raises OptionError where two names differ by case alone, of which Spark would take the last.
    """
    given = {name: value for name, value in options.items() if value is not None}
    spelt: dict[str, str] = {}
    for name in given:
        if (other := spelt.setdefault(name.lower(), name)) != name:
            raise OptionError(f"the option {other} is given twice, also as {name}", remedy="give it once")
    return {name: _text(value) for name, value in given.items()}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
