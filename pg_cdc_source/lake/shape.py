"""What a table of the lake keeps of its rows (its mode), and the columns that it has for that beside PostgreSQL's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pyarrow as pa

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.names import QualifiedName, parse_columns_of_tables
from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.protocol.layout import CHANGE_FIELDS, COMMIT_TS_TYPE

# No column of PostgreSQL's tables has such a number: users' begin with 1, and those of the system end with -6.
_FIRST_NUMBER = -100
DELETED_LSN = "_deleted_lsn"
VALID_FROM, VALID_TO = "_valid_from", "_valid_to"
VALID_FROM_TS, VALID_TO_TS = "_valid_from_ts", "_valid_to_ts"
_VERSIONS: Mapping[str, pa.DataType] = {
    VALID_FROM: pa.int64(),
    VALID_TO: pa.int64(),
    VALID_FROM_TS: COMMIT_TS_TYPE,
    VALID_TO_TS: COMMIT_TS_TYPE,
}
# Columns that tables of a format have themselves, which nobody can read then.
_OF_TABLES: Mapping[str, frozenset[str]] = {
    "iceberg": frozenset(
        ("_file", "_pos", "_deleted", "_spec_id", "_partition", "_row_id", "_last_updated_sequence_number")
    ),
}
# And those that a merge has while it runs, by Spark, Delta Lake or delta-rs.
_OF_MERGES: Mapping[str, frozenset[str]] = {
    "iceberg": frozenset(("__row_operation", "__row_id", "__row_from_source", "__row_from_target")),
    "delta": frozenset(
        ("_metadata", "_row_id_", "_file_name_", "_row_dropped_", "_source_row_present_", "_target_row_present_")
    ),
    "deltalake": frozenset(("__delta_rs_source", "__delta_rs_target", "__delta_rs_operation")),
}
_MODES = ("merge", "append", "history")
_DELETES = ("hard", "soft")
_CHANGES = ("evolve", "additive", "fail")
_JSON_AS = ("string", "variant")
_UNREPRESENTABLE = ("error", "null")
Unrepresentable = Literal["error", "null"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What one table keeps.

    ``text`` is how the table itself says it; ``deleted`` is the column that says of a row whether it is deleted.
    """

    mode: str = "merge"
    is_soft: bool = False
    deleted: str = "_deleted"
    on_schema_change: str = "evolve"
    json_as: str = "string"
    format: str = ""
    as_string: tuple[str, ...] = ()  # columns
    numeric_as: str = "string"
    unrepresentable: Unrepresentable = "error"

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Shape:
        """Read what ``dataclasses.asdict`` has made of one, by way of JSON."""
        return cls(**{**said, "as_string": tuple(said["as_string"])})

    @property
    def text(self) -> str:
        said = f"{self.mode}, soft deletes" if self.is_soft else self.mode
        return f"{said}, JSON as variant" if self.has_variants else said

    @property
    def has_variants(self) -> bool:
        """Whether the table has ``json`` and ``jsonb`` as VARIANT. What is staged for it has their texts."""
        return self.json_as == "variant"

    @property
    def staged(self) -> Shape:
        """The shape of rows that are staged for the table."""
        return replace(self, json_as="string")

    @property
    def keeps(self) -> bool:
        """Whether rows stay when PostgreSQL's are gone, so that nothing that the stream says is void."""
        return self.is_soft or not self.is_merge

    @property
    def is_merge(self) -> bool:
        """Whether a row of the table is a row of PostgreSQL in its last state."""
        return self.mode == "merge"

    @property
    def is_log(self) -> bool:
        """Whether every change is a row."""
        return self.mode == "append"

    @property
    def has_versions(self) -> bool:
        """Whether every state of a row is one."""
        return self.mode == "history"

    @property
    def keeps_columns(self) -> bool:
        """Whether columns stay that PostgreSQL has dropped."""
        return not self.is_merge or self.on_schema_change == "additive"

    @property
    def columns(self) -> Mapping[str, pa.DataType]:
        """The table's own columns, behind PostgreSQL's."""
        if self.is_log:
            return {field.name: field.type for field in CHANGE_FIELDS}
        if self.has_versions:
            return _VERSIONS
        return {self.deleted: pa.bool_(), DELETED_LSN: pa.int64()} if self.is_soft else {}

    @property
    def reserved(self) -> frozenset[str]:
        """Names that no column of PostgreSQL's can have in the table, in lower case."""
        of_merges = frozenset[str]() if self.is_log else _OF_MERGES.get(self.format, frozenset())
        return _OF_TABLES.get(self.format, frozenset()) | of_merges

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
    def of(
        cls,
        mode: str | Mapping[str, str],
        deletes: str,
        format: str,
        on_schema_change: str = "evolve",
        json_as: str = "string",
        as_string: str = "",
        numeric_as: str = "string",
        unrepresentable: str = "error",
    ) -> Shapes:
        """Read the arguments of ``mirror``; ``mode`` is for all tables, or by table. Raises OptionError."""
        # Iceberg has a column _deleted of its own in every table.
        deleted = "_is_deleted" if format == "iceberg" else "_deleted"
        if deletes not in _DELETES:
            raise OptionError(f"deletes={deletes!r} is none that mirror() has", remedy=f"use {' or '.join(_DELETES)}")
        if on_schema_change not in _CHANGES:
            raise OptionError(
                f"onSchemaChange={on_schema_change!r} is none that mirror() has", remedy=f"use {', '.join(_CHANGES)}"
            )
        if json_as not in _JSON_AS:
            raise OptionError(f"jsonAs={json_as!r} is none that mirror() has", remedy=f"use {' or '.join(_JSON_AS)}")
        if json_as == "variant" and format == "deltalake":
            raise OptionError(
                "jsonAs=variant: the format deltalake cannot write VARIANT", remedy="use the format delta or iceberg"
            )
        if unrepresentable not in _UNREPRESENTABLE:
            raise OptionError(
                f"unrepresentable={unrepresentable!r} is none that mirror() has",
                remedy=f"use {' or '.join(_UNREPRESENTABLE)}",
            )
        if NumericAs.parse(numeric_as).kind == "double":
            # Rows that PostgreSQL tells apart would have one key.
            raise OptionError("numericAs=double is none that mirror() has", remedy="use string or decimal(p,s)")
        of_all = Shape(
            on_schema_change=on_schema_change,
            deleted=deleted,
            json_as=json_as,
            format=format,
            numeric_as=numeric_as,
            unrepresentable=unrepresentable,  # type: ignore[arg-type]
        )
        modes = {"*": mode} if isinstance(mode, str) else dict(mode)
        shapes = {}
        for table, wanted in modes.items():
            if wanted not in _MODES:
                raise OptionError(f"mirror() has no mode {wanted!r}", remedy=f"use {', '.join(_MODES)}")
            name = table if table == "*" else _full_name(table)
            is_soft = wanted == "merge" and deletes == "soft"
            shapes[name] = replace(of_all, mode=wanted, is_soft=is_soft)
        others = shapes.pop("*", replace(of_all, is_soft=deletes == "soft"))
        for table, columns in (parse_columns_of_tables(as_string) if as_string else {}).items():
            shapes[table] = replace(shapes.get(table, others), as_string=columns)
        return cls(others, shapes)

    @property
    def digest(self) -> str:
        """Tells whether the tables are to keep the same as others were. A metastore may not take a longer text."""
        others = self.others.text
        texts = {table: shape.text for table, shape in self.by_table.items() if shape.text != others}
        texts["*"] = others
        return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()

    def __getitem__(self, table: str) -> Shape:
        return self.by_table.get(table, self.others)


def _full_name(table: str) -> str:
    """Return a table's name as the stream has it. Raises OptionError where it lacks the schema."""
    name = QualifiedName.parse(table, for_several="give each table its own mode")
    if len(name.parts) != 2:
        raise OptionError(
            f"the mode of {table}: a table is named with its schema here",
            remedy=f"write schema.table, as in public.{name.parts[-1]}",
        )
    return str(name)
