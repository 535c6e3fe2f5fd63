"""Which points of a mirror's ledger are looked at, where all of them would take long."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

T = TypeVar("T")


def some_of(points: Sequence[T], most: int, also: Collection[int] = ()) -> list[T]:
    """The first and the last points, others between them by a stride, and those with the indices ``also``."""
    ends = most // 3
    middle = range(ends, len(points) - ends, max(1, -(-(len(points) - 2 * ends) // (most - 2 * ends))))
    wanted = {*range(ends), *middle, *range(len(points) - ends, len(points)), *also}
    return [point for i, point in enumerate(points) if i in wanted]
