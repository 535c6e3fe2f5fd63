"""Suggestions in error texts: the words there are, and the one that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def in_words(words: tuple[str, ...]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def nearest(name: str, known: Collection[str]) -> str | None:
    lowered = {candidate.lower(): candidate for candidate in sorted(known)}
    near = difflib.get_close_matches(name.lower(), lowered, n=1)
    return lowered[near[0]] if near else None
