"""When small files of a table are written together, and what comes of it where that fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from pg_cdc_source.lake.bring import Step, Work, bring, newest_of_ours
from pg_cdc_source.lake.compaction import COMMITS, compact_where_due


@dataclass(frozen=True, slots=True)
class Changes:
    name: str


MERGES = Work[Any](None, {}, [Changes("some"), Changes("others")], is_replaced=False)


class _Killed(BaseException):
    """Ends a batch as a killed process does."""


@dataclass
class Table:
    """A table whose every commit is a version."""

    version: int
    error: BaseException | None = None
    last: Step | None = None
    compacted: list[int] = field(default_factory=list)
    exists: bool = True

    def is_done(self) -> bool:
        return self.last is not None and self.last.is_last

    def has(self, step: Step) -> bool:
        return self.last == step

    def require_ours(self, expected: int | None, *, again: bool) -> None:
        pass

    def require_alone(self, expected: int | None, *, again: bool) -> None:
        pass

    def apply(self, step: Step, segment: Changes) -> None:
        self.version += 1
        self.last = step

    def age(self, version: int | None) -> int:
        return version or 0

    def compact(self) -> None:
        self.compacted.append(self.version)
        self.version += 1
        if self.error is not None:
            raise self.error

    def bring(self, work: Work[Any] = MERGES, *, expected: int, compacts: bool = True) -> int | None:
        return bring("public.t", self, work, expected, again=False, compacts=compacts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "now", "is_due"),
    [(0, 1, False), (0, COMMITS - 1, False), (COMMITS - 1, COMMITS, True), (COMMITS, COMMITS + 1, False),
     (COMMITS - 1, 3 * COMMITS, True), (COMMITS + 9, 2 * COMMITS + 1, True), (7, 7, False)],
)  # fmt: skip
def test_it_is_due_when_commits_pass_a_multiple(before: int, now: int, is_due: bool) -> None:
    calls: list[int] = []
    assert compact_where_due("t", before, now, lambda: calls.append(1)) == is_due
    assert bool(calls) == is_due


def test_it_follows_the_last_commit_of_a_batch() -> None:
    table = Table(COMMITS - 1)
    # Whoever reads at the version of the ledger's row reads the new files.
    assert table.bring(expected=COMMITS - 1) == COMMITS + 2
    assert table.compacted == [COMMITS + 1]


def test_it_can_be_switched_off() -> None:
    table = Table(COMMITS - 1)
    assert table.bring(expected=COMMITS - 1, compacts=False) == COMMITS + 1
    assert table.compacted == []


def test_a_batch_that_is_done_is_not_compacted_again() -> None:
    table = Table(COMMITS - 1, _Killed())
    with pytest.raises(_Killed):
        table.bring(expected=COMMITS - 1)
    assert table.bring(expected=COMMITS - 1) == COMMITS + 2
    assert len(table.compacted) == 1


def test_a_batch_without_parts_is_not_compacted() -> None:
    table = Table(COMMITS)
    assert table.bring(Work(None, {}, [], is_replaced=False), expected=COMMITS - 1) == COMMITS
    assert table.compacted == []


def test_what_it_fails_of_is_said_and_is_not_the_batchs(caplog: pytest.LogCaptureFixture) -> None:
    table = Table(COMMITS - 1, OSError("no room"))
    assert table.bring(expected=COMMITS - 1) == COMMITS + 2
    assert "small files of public.t stay for now: OSError: no room" in caplog.text


OURS, OUR_COMPACTION, THEIRS, THEIR_COMPACTION = (True, False), (True, True), (False, False), (False, True)


@pytest.mark.parametrize(
    ("commits", "newest"),
    [
        ([], None),
        ([OURS], 0),
        ([OURS, OUR_COMPACTION, OUR_COMPACTION], 2),
        ([OURS, THEIR_COMPACTION, OUR_COMPACTION], 2),
        ([OURS, OUR_COMPACTION, THEIR_COMPACTION], 1),
        ([OURS, THEIRS], 0),
        ([OURS, THEIRS, OUR_COMPACTION], 0),
        ([OURS, OUR_COMPACTION, THEIRS, OUR_COMPACTION], 1),
        ([OUR_COMPACTION], 0),
        ([THEIRS], None),
    ],
)
def test_a_compaction_does_not_hide_what_somebody_else_has_changed(
    commits: list[tuple[bool, bool]], newest: int | None
) -> None:
    assert newest_of_ours([(version, *commits[version]) for version in reversed(range(len(commits)))]) == newest
