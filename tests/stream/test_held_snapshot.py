"""How a stream's snapshot is shared among tasks."""

from __future__ import annotations

import pytest

from pg_cdc_source.postgres.catalog import Relation
from pg_cdc_source.snapshot.ranges import BlockRange
from pg_cdc_source.snapshot.scan import Piece, ScanRange
from pg_cdc_source.stream.first_rows.held_snapshot import _fewer

T = Relation(1, "public", "t", "r")
RANGES = [ScanRange((Piece(T, (1,), BlockRange(i * 10, i * 10 + 10)),), 7, 100) for i in range(10)]


@pytest.mark.parametrize(("most", "sizes"), [(20, [1] * 10), (10, [1] * 10), (4, [3, 3, 3, 1]), (1, [10]), (0, [10])])
def test_neighbours_share_a_task_where_each_task_carries_much(most: int, sizes: list[int]) -> None:
    found = _fewer(RANGES, most)
    assert [len(part.pieces) for part in found] == sizes
    assert [piece for part in found for piece in part.pieces] == [piece for part in RANGES for piece in part.pieces]
    assert [part.size_bytes for part in found] == [100 * size for size in sizes]
    assert {part.heaps for part in found} == {7}
    assert _fewer([], most) == []
