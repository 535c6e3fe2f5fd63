"""Where a batch's keys lie, as literals in the condition of a merge: files that can have none of them are not read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.lake.states import States

# Iceberg compares files' statistics with 200 values of a list, delta-rs with 20.
MOST_LISTED = 200
_MOST_CHARACTERS = 10_000


@dataclass(frozen=True, slots=True)
class KeyBounds:
    """The least and the greatest value of a key's column, and all values where they are few."""

    column: str
    least: Any
    greatest: Any
    values: tuple[Any, ...] = ()

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> KeyBounds:
        """Read what ``asdict`` and JSON have made of one."""
        return cls(said["column"], said["least"], said["greatest"], tuple(said["values"]))

    def condition(self, column: str, literal: Callable[[Any], str]) -> str:
        """The condition in SQL, where the column is called ``column``."""
        condition = f"{column} >= {literal(self.least)} AND {column} <= {literal(self.greatest)}"
        if self.values:
            # Beside the range, because not every reader of statistics takes lists.
            condition += f" AND {column} IN ({', '.join(map(literal, self.values))})"
        return condition


def bounds_of(states: States, bounded: Callable[[pa.DataType], bool]) -> Iterator[KeyBounds]:
    """Bounds of each column of the key that has one of the ``bounded`` types."""
    for name in states.key:
        keys = states.rows[name]
        if len(keys) and bounded(keys.type):
            ends = pc.min_max(keys).as_py()
            yield KeyBounds(name, ends["min"], ends["max"], _few(pc.unique(keys)))


def _few(values: pa.Array) -> tuple[Any, ...]:
    # One is what the range says already; two may lie far apart.
    if not 1 < len(values) <= MOST_LISTED:
        return ()
    if pa.types.is_string(values.type) and pc.sum(pc.utf8_length(values)).as_py() > _MOST_CHARACTERS:
        return ()
    return tuple(values.to_pylist())
