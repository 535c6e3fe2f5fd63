"""Values of options as Python has them, turned into the texts that Spark hands on."""

from __future__ import annotations

from collections.abc import Mapping


def option_texts(options: Mapping[str, object]) -> dict[str, str]:
    """Options as texts, without those that are None; a list is its items with commas between them."""
    return {name: _text(value) for name, value in options.items() if value is not None}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
