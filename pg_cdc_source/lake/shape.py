"""What a table of the lake keeps of its rows (its mode), and the columns that it has for that beside PostgreSQL's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.names import QualifiedName

# No column of PostgreSQL's tables has such a number: users' begin with 1, and those of the system end with -7.
_FIRST_NUMBER = -100
DELETED_LSN = "_deleted_lsn"
_MODES = ("merge",)
_DELETES = ("hard", "soft")


@dataclass(frozen=True, slots=True)
class Shape:
    """What one table keeps. ``text`` is how the table itself says it; ``deleted`` is the column that says of a row
    whether it is deleted."""

    mode: str = "merge"
    is_soft: bool = False
    deleted: str = "_deleted"

    @property
    def text(self) -> str:
        return f"{self.mode}, soft deletes" if self.is_soft else self.mode

    @property
    def keeps(self) -> bool:
        """Whether rows stay when PostgreSQL's are gone, so that nothing that the stream says is void."""
        return self.is_soft or self.mode != REPLACED.mode

    @property
    def columns(self) -> Mapping[str, pa.DataType]:
        """The table's own columns, behind PostgreSQL's."""
        return {self.deleted: pa.bool_(), DELETED_LSN: pa.int64()} if self.is_soft else {}

    def fields(self) -> Iterator[tuple[int, pa.Field]]:
        """Yield its own columns with numbers that tell them from PostgreSQL's."""
        for place, (name, kind) in enumerate(self.columns.items()):
            yield _FIRST_NUMBER - place, pa.field(name, kind)


# Rows are PostgreSQL's present ones, and nothing else.
REPLACED = Shape()


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shape of each table, by the name that the stream has for it."""

    others: Shape = REPLACED
    by_table: Mapping[str, Shape] = field(default_factory=dict)

    @classmethod
    def of(cls, mode: str | Mapping[str, str], deletes: str, format: str) -> Shapes:
        """Read the arguments ``mode``, for all tables or by table, and ``deletes``. Raises OptionError."""
        # Iceberg has a column _deleted of its own in every table.
        deleted = "_is_deleted" if format == "iceberg" else "_deleted"
        if deletes not in _DELETES:
            raise OptionError(f"deletes={deletes!r} is none that mirror() has", remedy=f"use {' or '.join(_DELETES)}")
        modes = {"*": mode} if isinstance(mode, str) else dict(mode)
        shapes = {}
        for table, wanted in modes.items():
            if wanted not in _MODES:
                raise OptionError(f"mirror() has no mode {wanted!r}", remedy=f"use {', '.join(_MODES)}")
            name = table if table == "*" else str(QualifiedName.parse(table))
            shapes[name] = Shape(wanted, wanted == "merge" and deletes == "soft", deleted)
        return cls(shapes.pop("*", Shape("merge", deletes == "soft", deleted)), shapes)

    def __getitem__(self, table: str) -> Shape:
        return self.by_table.get(table, self.others)
