"""What a table's commits say of a batch, where a crash has ended it and the history may be cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pg_cdc_source.errors import ForeignWriterError
from pg_cdc_source.lake.bring import Mark, Step
from pg_cdc_source.lake.shape import REPLACED
from pg_cdc_source.lake.shape_of_table import OF_TABLE
from pg_cdc_source.mirrors import spark_commits
from pg_cdc_source.mirrors.spark_commits import ANEW_STEP, COLUMNS_STEP, Commit, SparkCommits

EMPTIED, FILES = Step("emptied 0", is_last=False), Step("files 0", is_last=False)


class Table(SparkCommits):
    """A table of which these commits are left, the present one first."""

    housekeeping = frozenset(("replace",))

    def __init__(self, commits: Sequence[Commit], expected: int | None) -> None:
        self._left = list(commits)
        spark: Any = None
        super().__init__(spark, "lake.t", "public.t", Mark("q", 7), expected, REPLACED)

    def present(self, properties: Mapping[str, str]) -> int | None:
        return self._left[0].version

    def commits(self, limit: int | None) -> list[Commit]:
        return self._left[:limit]

    def committed(self) -> int | None:
        raise NotImplementedError

    def follows(self, version: int, before: int) -> bool:
        raise NotImplementedError

    def sign(self, text: str, number: int | None) -> None:
        raise NotImplementedError

    def age(self, version: int | None) -> int:
        raise NotImplementedError


def commit(version: int, batch: int, step: str) -> Commit:
    said = {"query": "q", "batch": batch, "step": step, "last": False}
    return Commit(version, version - 1 if version else None, "append", said)


FOREIGN = Commit(14, 13, "replace", {})


@pytest.fixture(autouse=True)
def _no_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_commits, "read_properties", lambda spark, name: {})


@pytest.mark.parametrize("behind", [[], [FOREIGN]])
@pytest.mark.parametrize("expected", [10, None])
def test_a_batch_of_which_commits_have_expired_is_not_guessed_at(expected: int | None, behind: list[Commit]) -> None:
    table = Table([*behind, commit(13, 7, "files 0")], expected)
    with pytest.raises(ForeignWriterError, match=r"which steps of batch 7 are done: .* before version 13 has expired"):
        table.has(EMPTIED)


@pytest.mark.parametrize(
    ("commits", "expected", "done"),
    [
        ([(12, 7, "files 0"), (11, 7, "emptied 0"), (10, 6, "files 0")], 10, [True, True]),
        # What the ledger knows is gone, and what followed it is there.
        ([(12, 7, "files 0"), (11, 7, "emptied 0")], 10, [True, True]),
        # The ledger knows an older version, because the table was set aside since.
        ([(12, 7, "files 0"), (11, 7, "emptied 0"), (10, 6, "files 0")], 3, [True, True]),
        ([(12, 7, "files 0"), (11, 7, ANEW_STEP)], 3, [False, True]),
        ([(1, 7, "files 0"), (0, 7, "columns")], None, [False, True]),
        ([(14, 6, "files 0")], 3, [False, False]),
    ],
)
def test_what_is_done_is_found_where_the_commits_lead_to_what_was_before(
    commits: list[tuple[int, int, str]], expected: int | None, done: list[bool]
) -> None:
    table = Table([commit(*one) for one in commits], expected)
    assert [table.has(step) for step in (EMPTIED, FILES)] == done


@pytest.mark.parametrize(
    ("commits", "begun"),
    [
        ([(13, 7, "files 0")], True),
        ([(13, 7, ANEW_STEP)], True),
        ([(13, 7, COLUMNS_STEP)], False),
        ([(13, 6, "files 0")], False),
    ],
)
def test_a_batch_that_has_begun_does_not_begin_the_table_anew(commits: list[tuple[int, int, str]], begun: bool) -> None:
    assert Table([commit(*one) for one in commits], 12).has_begun() == begun


def test_a_history_of_somebody_else_alone_says_that_nothing_is_done() -> None:
    assert not Table([FOREIGN], 10).has(FILES)


@pytest.mark.parametrize("twice", [(14, 7, "files 0"), (14, 6, "files 0")])
def test_another_driver_of_the_mirror_is_noticed(twice: tuple[int, int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_commits, "read_properties", lambda spark, name: {OF_TABLE: "public.t"})

    def numbered(version: int, batch: int, step: str) -> Commit:
        plain = commit(version, batch, step)
        return replace(plain, said={**plain.said, "number": 0})

    first = [numbered(13, 7, "files 0"), commit(12, 6, "files 0")]
    Table(first, 12).require_ours(12, again=False)
    table = Table([numbered(*twice), *first], 12)
    with pytest.raises(
        ForeignWriterError, match=r"another driver of this mirror: version 1[34] has step files 0 of batch"
    ):
        table.require_ours(12, again=False)


@pytest.mark.parametrize(
    ("commits", "expected"),
    [
        # A table that has left and comes back: the ledger does not know it.
        ([(13, 7, "append"), (12, 6, "append")], None),
        # Delta's own compaction says what the commit before it does.
        ([(13, 7, "optimize"), (12, 7, "append")], 11),
    ],
)
def test_commits_that_are_no_other_drivers_are_taken(
    commits: list[tuple[int, int, str]], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_commits, "read_properties", lambda spark, name: {OF_TABLE: "public.t"})
    monkeypatch.setattr(Table, "housekeeping", frozenset(["optimize"]))
    said = {"query": "q", "step": "files 0", "last": False, "number": 0}
    found = [Commit(version, version - 1, how, {**said, "batch": batch}) for version, batch, how in commits]
    Table(found, expected).require_ours(expected, again=False)


def test_a_table_that_was_restored_is_no_other_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_commits, "read_properties", lambda spark, name: {OF_TABLE: "public.t"})
    said = {"query": "q", "batch": 6, "step": "files 0", "last": False, "number": 0}
    with pytest.raises(ForeignWriterError, match="was restored"):
        Table([Commit(12, 11, "append", said)], 13).require_ours(13, again=False)
