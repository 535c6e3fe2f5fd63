"""Columns that stay when PostgreSQL has dropped them."""

from __future__ import annotations

import pyarrow as pa
import pytest

from pg_cdc_source.errors import SchemaChangedError
from pg_cdc_source.lake.kept_columns import is_wider, numbers_in_log, places_among, require_allowed, with_kept
from pg_cdc_source.lake.shape import Shape

LOG, VERSIONS = Shape("append"), Shape("history")


def columns(*given: tuple[int, str]) -> list[tuple[int, pa.Field]]:
    return [(number, pa.field(name, pa.string())) for number, name in given]


def test_dropped_columns_stay_behind_the_others() -> None:
    for shape in (LOG, VERSIONS):
        found = with_kept("t", shape, columns((1, "id"), (3, "c")), columns((1, "i"), (2, "b"), (-100, "own")))
        assert found == columns((1, "id"), (3, "c"), (2, "b"), (-100, "own"))


def test_a_name_that_comes_again_is_the_same_column_in_a_log() -> None:
    present = [(1, "id"), (2, "v"), (5, "gone"), (-100, "own")]
    assert numbers_in_log([(1, "id"), (3, "v")], present) == [1, 3, 5, -100]
    assert numbers_in_log([(1, "v"), (3, "id")], present) == [1, 2, 5, -100]
    with pytest.raises(SchemaChangedError, match="column v has the name of one that was dropped"):
        with_kept("t", VERSIONS, columns((1, "id"), (3, "v")), columns((1, "id"), (2, "v")))
    # A column that has been there all along cannot be two.
    with pytest.raises(SchemaChangedError, match="column v has the name of one that was dropped"):
        with_kept("t", LOG, columns((1, "v")), columns((1, "id"), (2, "v")))


@pytest.mark.parametrize(("was", "now"), [(2, 0), (0, 2), (0, 0)])
def test_a_column_whose_number_was_not_known_is_told_by_its_name(was: int, now: int) -> None:
    # Several are.
    wanted = columns((1, "id"), (now, "v"), (0, "w"))
    present = columns((1, "id"), (was, "v"), (-100, "own"), (0, "x"))
    assert with_kept("t", VERSIONS, wanted, present) == [*wanted, *present[2:]]
    # A log is not written anew for a number.
    assert with_kept("t", LOG, wanted, present) == [*present[:2], wanted[2], *present[2:]]


@pytest.mark.parametrize(
    ("wanted", "places"),
    [
        ([(1, "id"), (2, "a"), (3, "b")], [0, 1, 2]),
        ([(3, "a"), (2, "b")], [2, 1]),
        ([(0, "b"), (0, "a"), (4, "c")], [2, 1, None]),
        # What has the number is the column, whatever another one is called.
        ([(2, "c"), (0, "a"), (0, "b")], [1, None, 2]),
        ([(4, "a")], [None]),
    ],
)
def test_columns_are_told_by_their_numbers_first(wanted: list[tuple[int, str]], places: list[int | None]) -> None:
    assert places_among(wanted, [(1, "id"), (2, "a"), (3, "b")]) == places


def test_types_that_have_all_values_of_another() -> None:
    assert is_wider(pa.int16(), pa.int64())
    assert is_wider(pa.float32(), pa.float64())
    assert is_wider(pa.decimal128(8, 2), pa.decimal128(10, 2))
    for was, wanted in (
        (pa.int64(), pa.int32()),
        (pa.int32(), pa.string()),
        (pa.int64(), pa.float64()),
        (pa.decimal128(8, 2), pa.decimal128(10, 3)),
    ):
        assert not is_wider(was, wanted)


@pytest.mark.parametrize(
    ("wanted", "additive", "fail"),
    [
        ([(1, "id", "int"), (2, "v", "string")], None, None),
        # PostgreSQL did not know the number any more.
        ([(0, "id", "int"), (0, "v", "string")], None, None),
        ([(1, "id", "int"), (2, "v", "string"), (3, "w", "int")], None, "w was added"),
        ([(1, "id", "int")], None, "v was dropped"),
        ([(1, "id", "int"), (2, "w", "string")], "v is called w", "v is called w"),
        ([(1, "id", "bigint"), (2, "v", "string")], "id is bigint and was int", "id is bigint and was int"),
    ],
)
def test_changes_that_are_not_taken_over(
    wanted: list[tuple[int, str, str]], additive: str | None, fail: str | None
) -> None:
    present = [(1, "id", "int"), (2, "v", "string")]
    require_allowed("t", Shape(), wanted, present)
    for name, refused in (("additive", additive), ("fail", fail)):
        shape = Shape(on_schema_change=name)
        if refused is None:
            require_allowed("t", shape, wanted, present)
            continue
        with pytest.raises(SchemaChangedError, match=f"={name} does not take over: {refused}") as caught:
            require_allowed("t", shape, wanted, present)
        assert "onSchemaChange=evolve" in caught.value.remedy


def test_a_column_that_stays_is_no_change_to_a_log() -> None:
    require_allowed(
        "t", Shape("append", on_schema_change="fail"), [(1, "id", "int")], [(1, "id", "int"), (2, "v", "x")]
    )
