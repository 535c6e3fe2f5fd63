"""Which servers have which defects."""

from __future__ import annotations

import pytest

from pg_cdc_source.postgres.minor_versions import SERVER_DEFECTS, STALE_PUBLICATION, defects_of, newest_known


@pytest.mark.parametrize(
    ("version", "count"),
    [
        (170004, 2),  # stale publications, WAL removed
        (170005, 2),  # memory, WAL removed
        (170006, 0),
        (160003, 3),
        (160004, 2),
        (150014, 0),
        (150005, 4),  # and old rows
        (150001, 5),  # and column lists
        (160001, 4),
        (140002, 4),
        (130021, 2),
        (130022, 0),
        (180000, 0),
        (190001, 0),
    ],
)
def test_a_server_has_the_defects_of_its_minor_version(version: int, count: int) -> None:
    assert len(defects_of(version)) == count


def test_the_version_of_may_2025_has_another_defect_than_those_before_it() -> None:
    assert STALE_PUBLICATION.is_in(170004)
    assert not STALE_PUBLICATION.is_in(170005)
    (memory,) = (defect for defect in SERVER_DEFECTS if "memory" in defect.effect)
    assert [version for version in (160008, 160009, 160010) if memory.is_in(version)] == [160009]


def test_no_defect_is_in_the_version_that_is_recommended() -> None:
    assert newest_known(170002) == "17.6"
    for version in (130000, 140000, 150000, 160000, 170000):
        major, minor = newest_known(version).split(".")
        assert defects_of(int(major) * 10000 + int(minor)) == []
