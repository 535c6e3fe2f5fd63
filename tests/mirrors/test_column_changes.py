"""How a lake's table gets other columns, and goes on with that where a crash has ended it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
)

from pg_cdc_source.errors import SchemaChangedError
from pg_cdc_source.lake.kept_columns import is_wider
from pg_cdc_source.mirrors.column_changes import Columns

INT, TEXT = IntegerType(), StringType()


def columns(*given: tuple[int, str, Any]) -> Columns:
    fields = [StructField(name, kind) for _, name, kind in given]
    return Columns(StructType(fields), tuple(number for number, _, _ in given))


def clauses(present: Columns, wanted: Columns, names: list[str] | None = None) -> list[str]:
    found = present.changes_to(wanted, present.schema.names if names is None else names, "public.t")
    return [clause for clause, _ in found if clause is not None]


MADE = {number: f"column_{number}".ljust(64, "_") for number in (2, 3)}
BEFORE = columns((1, "id", INT), (2, "v", TEXT), (3, "w", TEXT))


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (BEFORE, []),
        (columns((1, "id", INT), (3, "w", TEXT)), ["DROP COLUMNS (`v`)"]),
        (columns((1, "id", INT), (2, "x y", TEXT), (3, "w", TEXT)), ["RENAME COLUMN `v` TO `x y`"]),
        (columns((1, "id", LongType()), (2, "v", TEXT), (3, "w", TEXT)), ["ALTER COLUMN `id` TYPE bigint"]),
        (columns(*zip((1, 2, 3, 4), ("id", "v", "w", "n"), (INT, TEXT, TEXT, INT), strict=True)),
         ["ADD COLUMNS (`n` int)"]),
        # The name of a column that is gone.
        (columns((1, "id", INT), (2, "v", TEXT), (4, "w", INT)), ["DROP COLUMNS (`w`)", "ADD COLUMNS (`w` int)"]),
        (columns((1, "id", INT), (3, "v", TEXT)), ["DROP COLUMNS (`v`)", "RENAME COLUMN `w` TO `v`"]),
        # Names among each other, and one name in another case.
        (columns((1, "id", INT), (2, "w", TEXT), (3, "v", TEXT)),
         [f"RENAME COLUMN `v` TO `{MADE[2]}`", f"RENAME COLUMN `w` TO `{MADE[3]}`",
          f"RENAME COLUMN `{MADE[2]}` TO `w`", f"RENAME COLUMN `{MADE[3]}` TO `v`"]),
        (columns((1, "id", INT), (2, "w", TEXT), (3, "x", TEXT)),
         [f"RENAME COLUMN `w` TO `{MADE[3]}`", "RENAME COLUMN `v` TO `w`", f"RENAME COLUMN `{MADE[3]}` TO `x`"]),
        (columns((1, "id", INT), (2, "V", TEXT), (3, "w", TEXT)),
         [f"RENAME COLUMN `v` TO `{MADE[2]}`", f"RENAME COLUMN `{MADE[2]}` TO `V`"]),
    ],
)  # fmt: skip
def test_columns_are_told_apart_by_their_numbers(wanted: Columns, found: list[str]) -> None:
    assert clauses(BEFORE, wanted) == found


def test_a_column_of_a_log_that_came_again_is_the_one_that_is_there() -> None:
    wanted = columns((1, "id", INT), (4, "v", TEXT), (3, "w", TEXT))
    assert clauses(BEFORE, wanted) == ["DROP COLUMNS (`v`)", "ADD COLUMNS (`v` string)"]
    assert clauses(BEFORE.renumbered(wanted), wanted) == []


@pytest.mark.parametrize(
    ("wanted", "names", "found"),
    [
        (columns((1, "id", INT), (3, "w", TEXT)), ["id", "w"], []),
        (columns((1, "id", INT), (2, "x", TEXT), (3, "w", TEXT)), ["id", "x", "w"], []),
        (columns((1, "id", INT), (2, "v", TEXT), (3, "w", TEXT), (4, "n", INT)), ["id", "v", "w", "n"], []),
        (columns((1, "id", INT), (3, "v", TEXT)), ["id", "w"], ["RENAME COLUMN `w` TO `v`"]),
        (columns((1, "id", INT), (2, "v", TEXT), (4, "w", INT)), ["id", "v"], ["ADD COLUMNS (`w` int)"]),
    ],
)  # fmt: skip
def test_what_has_been_done_is_not_done_again(wanted: Columns, names: list[str], found: list[str]) -> None:
    assert clauses(BEFORE, wanted, names) == found


@pytest.mark.parametrize(
    "wanted",
    [
        columns((1, "id", INT), (2, "w", TEXT), (4, "v", INT), (5, "n", LongType())),
        columns((1, "id", INT), (2, "w", TEXT), (3, "v", TEXT)),
        columns((1, "id", INT), (2, "W", TEXT), (3, "V", TEXT), (4, "n", INT)),
    ],
)
def test_columns_behind_each_clause_say_what_is_left(wanted: Columns) -> None:
    """Names alone do not: what is done here ends with the names of the beginning."""
    done = []
    at = BEFORE
    while at != wanted:
        clause, behind = next(at.changes_to(wanted, at.schema.names, "public.t"))
        again, same = next(at.changes_to(wanted, behind.schema.names, "public.t"))
        assert (again, same) == (None, behind)
        done.append(clause)
        at = behind
    # As many as where nothing comes between.
    assert done == clauses(BEFORE, wanted)


def test_a_type_that_a_table_cannot_take_over_is_said() -> None:
    with pytest.raises(SchemaChangedError, match=r"public\.t"):
        clauses(BEFORE, columns((1, "id", INT), (2, "v", INT), (3, "w", TEXT)))


@pytest.mark.parametrize(
    ("precision", "scale", "is_taken"), [(12, 2, True), (9, 2, False), (12, 3, False)], ids=["wider", "less", "scale"]
)
def test_a_decimal_takes_more_digits_before_the_point(precision: int, scale: int, is_taken: bool) -> None:
    before, wanted = columns((1, "d", DecimalType(10, 2))), columns((1, "d", DecimalType(precision, scale)))
    if is_taken:
        assert clauses(before, wanted) == [f"ALTER COLUMN `d` TYPE decimal({precision},{scale})"]
    else:
        with pytest.raises(SchemaChangedError):
            clauses(before, wanted)


def test_columns_come_back_from_a_property() -> None:
    assert Columns.read(BEFORE.text) == BEFORE


IDS = StructField("id", IntegerType())
SHORTS = StructField("n", ArrayType(ShortType()))
FIELDS = [IDS, StructField("v", StringType()), SHORTS]
THEIRS = Columns(StructType(FIELDS), (1, 2, 3))


@pytest.mark.parametrize(
    ("there", "of_delta", "of_iceberg"),
    [
        (FIELDS, True, True),
        ([SHORTS, IDS, StructField("v", StringType())], True, True),
        # As Iceberg keeps them.
        ([*FIELDS[:2], StructField("n", ArrayType(IntegerType()))], False, True),
        # As a catalog may have it by default.
        ([IDS, StructField("v", StringType("UNICODE")), SHORTS], True, True),
        (FIELDS[:2], False, False),
        ([*FIELDS, StructField("x", IntegerType())], False, False),
        ([IDS, StructField("x", StringType()), SHORTS], False, False),
        ([StructField("id", StringType()), *FIELDS[1:]], False, False),
        ([StructField("id", LongType()), *FIELDS[1:]], False, False),
        ([StructField("id", ShortType()), *FIELDS[1:]], False, False),
        ([StructField("id", IntegerType(), nullable=False), *FIELDS[1:]], False, False),
        ([*FIELDS[:2], StructField("n", ArrayType(ShortType(), containsNull=False))], False, False),
        ([*FIELDS[:2], StructField("n", ArrayType(IntegerType(), containsNull=False))], False, False),
    ],
)
def test_what_somebody_else_has_altered_is_told(there: Sequence[StructField], of_delta: bool, of_iceberg: bool) -> None:
    schema = StructType(list(there))
    assert THEIRS.are_those_of(schema, is_iceberg=False) == of_delta
    assert THEIRS.are_those_of(schema, is_iceberg=True) == of_iceberg


def test_a_map_takes_values_that_are_null() -> None:
    made = Columns(StructType([StructField("m", MapType(StringType(), StringType()))]), (1,))
    assert made.are_those_of(made.schema, is_iceberg=False)
    narrower = StructType([StructField("m", MapType(StringType(), StringType(), valueContainsNull=False))])
    assert not made.are_those_of(narrower, is_iceberg=False)


@pytest.mark.parametrize(
    ("was", "wanted"),
    [
        (ShortType(), IntegerType()),
        (ShortType(), LongType()),
        (IntegerType(), LongType()),
        (FloatType(), DoubleType()),
        (DecimalType(8, 2), DecimalType(10, 2)),
    ],
)
def test_what_rows_are_widened_to_a_lake_is_too(was: DataType, wanted: DataType) -> None:
    assert is_wider(to_arrow_type(was), to_arrow_type(wanted))
    (clause,) = clauses(columns((1, "id", INT), (2, "n", was)), columns((1, "id", INT), (2, "n", wanted)))
    assert clause.endswith(f"TYPE {wanted.simpleString()}")
