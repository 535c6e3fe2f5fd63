"""The columns of a lake's table and PostgreSQL's numbers of them, and how a table gets others."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DecimalType,
    IntegerType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    VariantType,
)

from pg_cdc_source.errors import SchemaChangedError
from pg_cdc_source.lake.columns import MirroredLayout
from pg_cdc_source.lake.kept_columns import numbers_in_log, other_type_remedy, places_among, with_kept
from pg_cdc_source.lake.shape import REPLACED, Shape
from pg_cdc_source.mirrors.catalog_names import backquoted
from pg_cdc_source.spark.edge import spark_schema

# To what Delta and Iceberg widen a type where the files stay as they are.
_WIDER = {("smallint", "int"), ("smallint", "bigint"), ("int", "bigint"), ("float", "double")}


def _takes(there: DataType, ours: DataType, *, is_iceberg: bool) -> bool:
    """Whether a column of a lake's table is as it is made for ours, and takes NULL wherever ours may have one."""
    if isinstance(there, ArrayType) and isinstance(ours, ArrayType):
        return there.containsNull and _takes(there.elementType, ours.elementType, is_iceberg=is_iceberg)
    if isinstance(there, MapType) and isinstance(ours, MapType):
        values, our_values = there.valueType, ours.valueType
        return (
            there.valueContainsNull
            and _takes(there.keyType, ours.keyType, is_iceberg=is_iceberg)
            and _takes(values, our_values, is_iceberg=is_iceberg)
        )
    if isinstance(there, StructType) and isinstance(ours, StructType):
        return there.names == ours.names and all(
            field.nullable and _takes(field.dataType, our.dataType, is_iceberg=is_iceberg)
            for field, our in zip(there, ours, strict=True)
        )
    if isinstance(there, StringType) and isinstance(ours, StringType):
        # A catalog may give its strings a collation.
        return True
    # Iceberg has no shorter integer.
    return there == ours or (is_iceberg and isinstance(ours, ShortType) and isinstance(there, IntegerType))


@dataclass(frozen=True)
class Columns:
    """A table's columns in their order; ``numbers`` are pg_attribute.attnum, 0 where PostgreSQL did not know it."""

    schema: StructType
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, layout: MirroredLayout, shape: Shape = REPLACED) -> Columns:
        """Return the columns that a layout has in the lake."""
        own = dict(shape.fields())
        schema = spark_schema(pa.schema([*layout.arrow_schema(), *own.values()]))
        if shape.has_variants:
            are_json = {column.name for column in layout.columns if column.is_json}
            schema = StructType([StructField(f.name, VariantType()) if f.name in are_json else f for f in schema])
        return cls(schema, (*(column.attnum or 0 for column in layout.columns), *own))

    @classmethod
    def read(cls, text: str) -> Columns:
        """Read what ``text`` says."""
        said = json.loads(text)
        return cls(StructType.fromJson(said["schema"]), tuple(said["numbers"]))

    @property
    def text(self) -> str:
        """The columns as JSON, for the table's property."""
        return json.dumps({"schema": self.schema.jsonValue(), "numbers": self.numbers}, separators=(",", ":"))

    def are_those_of(self, schema: StructType, *, is_iceberg: bool) -> bool:
        """Whether a table with this schema has these columns as they are made for it, in any order."""
        there = StructType(sorted(schema, key=lambda field: field.name))
        return _takes(there, StructType(sorted(self.schema, key=lambda field: field.name)), is_iceberg=is_iceberg)

    def described(self) -> list[tuple[int, str, str]]:
        """Each column's number, name and type."""
        fields = zip(self.numbers, self.schema, strict=True)
        return [(number, field.name, field.dataType.simpleString()) for number, field in fields]

    def places_of(self, others: Columns) -> list[int | None]:
        """Which of these columns each of ``others`` is, None for none."""
        return places_among(*(these.numbered() for these in (others, self)))

    def numbered(self) -> list[tuple[int, str]]:
        """Each column's number and name."""
        return list(zip(self.numbers, self.schema.names, strict=True))

    def renumbered(self, wanted: Columns) -> Columns:
        """Return these columns of a log with the numbers that those have which come again among the ``wanted`` ones."""
        return Columns(self.schema, tuple(numbers_in_log(wanted.numbered(), self.numbered())))

    def with_kept(self, present: Columns, table: str, shape: Shape) -> Columns:
        """Return these columns, and those of the ``present`` ones that PostgreSQL has dropped."""
        ours, theirs = (list(zip(these.numbers, these.schema, strict=True)) for these in (self, present))
        found = with_kept(table, shape, ours, theirs)
        return Columns._of(found)

    def changes_to(
        self, wanted: Columns, names: Collection[str], table: str, shape: Shape = REPLACED
    ) -> Iterator[tuple[str | None, Columns]]:
        """Yield clauses of ALTER TABLE that make these columns the ``wanted`` ones, and the columns behind each.

        ``names`` are those that the table has now: a crash may have come right behind the first clause, which is None
        then. Raises SchemaChangedError.
        """
        places = self.places_of(wanted)
        fields, has = list(zip(self.numbers, self.schema, strict=True)), {*names}
        stay = [field for i, field in enumerate(fields) if i in places]
        if dropped := {field.name for i, (_, field) in enumerate(fields) if i not in places}:
            clause = _clause("DROP", [backquoted(name) for name in self.schema.names if name in dropped & has])
            yield clause, Columns._of(stay)
            has -= dropped

        def rename(at: int, name: str) -> tuple[str | None, Columns]:
            number, was = stay[at]
            stay[at] = number, StructField(name, was.dataType)
            clause = f"RENAME COLUMN {backquoted(was.name)} TO {backquoted(name)}" if was.name in has else None
            has.discard(was.name)
            has.add(name)
            return clause, Columns._of(stay)

        ends = {stay.index(fields[i]): field for i, field in zip(places, wanted.schema, strict=True) if i is not None}
        renamed = {at: field.name for at, field in ends.items() if field.name != stay[at][1].name}
        # Names are the same in any case. Columns that change theirs among each other make room first, under names that
        # no column of PostgreSQL can have.
        taken = {name.lower() for name in renamed.values()}
        for at in renamed:
            if stay[at][1].name.lower() in taken:
                yield rename(at, f"column_{stay[at][0]}".ljust(64, "_"))
        for at, field in ends.items():
            was = stay[at][1].dataType
            if was != field.dataType and not _is_wider(was.simpleString(), field.dataType):
                raise SchemaChangedError(
                    f"{table}: the type of column {field.name} was changed from {was.simpleString()} to "
                    f"{field.dataType.simpleString()}, which the lake's table cannot take over",
                    remedy=other_type_remedy(shape),
                )
            if at in renamed:
                yield rename(at, field.name)
            if was != field.dataType:
                stay[at] = stay[at][0], field
                # Nothing happens where the column has the type already.
                yield f"ALTER COLUMN {backquoted(field.name)} TYPE {field.dataType.simpleString()}", Columns._of(stay)
        if added := [field for field, place in zip(wanted.schema, places, strict=True) if place is None]:
            lacking = [field for field in added if field.name not in has]
            clause = _clause("ADD", [f"{backquoted(field.name)} {field.dataType.simpleString()}" for field in lacking])
            yield clause, wanted

    @classmethod
    def _of(cls, fields: Sequence[tuple[int, StructField]]) -> Columns:
        return cls(StructType([field for _, field in fields]), tuple(number for number, _ in fields))

    @property
    def variants(self) -> list[str]:
        """The columns that are VARIANT. Staged rows have their texts."""
        return [field.name for field in self.schema if isinstance(field.dataType, VariantType)]

    def parsed(self, rows: DataFrame) -> DataFrame:
        """Return rows with values of VARIANT where they have texts of them."""
        texts = [name for name in self.variants if name in rows.columns]
        texts = [name for name in texts if isinstance(rows.schema[name].dataType, StringType)]
        return with_columns(rows, {name: F.parse_json(F.col(backquoted(name))) for name in texts})

    def projected(self, rows: DataFrame, written: Columns) -> DataFrame:
        """Return rows that were written with other columns with these; NULL in what was added since."""
        found = []
        for field, place in zip(self.schema, written.places_of(self), strict=True):
            if place is None and field.name in written.schema.names:
                place = written.schema.names.index(field.name)
            rows_have = F.lit(None) if place is None else F.col(backquoted(written.schema[place].name))
            is_variant = isinstance(field.dataType, VariantType) and place is not None
            typed = F.parse_json(rows_have) if is_variant else rows_have.cast(field.dataType)
            found.append(typed.alias(field.name))
        return rows.select(found)


def with_columns(rows: DataFrame, columns: Mapping[str, Column]) -> DataFrame:
    """Return rows with these columns, which may be none: Spark Connect asks for one at least."""
    return rows.withColumns(dict(columns)) if columns else rows


def _clause(what: str, columns: Sequence[str]) -> str | None:
    return f"{what} COLUMNS ({', '.join(columns)})" if columns else None


def _is_wider(was: str, wanted: object) -> bool:
    if isinstance(wanted, DecimalType) and was.startswith("decimal("):
        precision, scale = map(int, was[len("decimal(") : -1].split(","))
        return wanted.scale == scale and wanted.precision >= precision
    return (was, getattr(wanted, "simpleString", str)()) in _WIDER
