"""The literals by which a merge says where a batch's keys lie."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import pytest

from pg_cdc_source.lake.key_bounds import MOST_LISTED, KeyBounds, bounds_of
from pg_cdc_source.lake.states import States


def bounds(**keys: list[Any]) -> list[KeyBounds]:
    states = States(tuple(keys), False, pa.table(keys), ())
    return list(bounds_of(states, lambda type: pa.types.is_integer(type) or pa.types.is_string(type)))


@pytest.mark.parametrize(
    ("keys", "condition"),
    [
        ([7], "id >= 7 AND id <= 7"),
        ([9, 2, 9], "id >= 2 AND id <= 9 AND id IN (9, 2)"),
        (["b", "a", "c"], "id >= 'a' AND id <= 'c' AND id IN ('b', 'a', 'c')"),
        (["b" * 5000, "a", "c" * 5000], f"id >= 'a' AND id <= '{'c' * 5000}'"),
    ],
)
def test_keys_are_listed_where_they_are_few(keys: list[Any], condition: str) -> None:
    [found] = bounds(id=keys)
    assert found.condition("id", lambda value: repr(value)) == condition
    assert KeyBounds.read(json.loads(json.dumps(asdict(found)))) == found


@pytest.mark.parametrize(("keys", "listed"), [(MOST_LISTED, MOST_LISTED), (MOST_LISTED + 1, 0)])
def test_a_list_has_no_more_than_readers_of_statistics_take(keys: int, listed: int) -> None:
    [found] = bounds(id=list(range(keys)))
    assert (found.least, found.greatest, len(found.values)) == (0, keys - 1, listed)


def test_each_column_of_a_key_has_bounds_of_its_own_or_none() -> None:
    found = bounds(a=[1, 2], b=[1.5, 2.5], c=["x", "y"])
    assert [(of.column, of.least, of.greatest) for of in found] == [("a", 1, 2), ("c", "x", "y")]
    assert bounds(a=[]) == []
