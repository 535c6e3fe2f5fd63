"""What a table's commits say of a mirror's batches, where Spark's SQL writes it.

Every commit says the query, the batch and the step it is of, so what a crash has left half done is found in the table's
history, and done once.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile, zip_longest
from typing import Any, ClassVar

from pyspark.sql import SparkSession

from pg_cdc_source.errors import RESNAPSHOT, ForeignWriterError, TransientError
from pg_cdc_source.lake.bring import Mark, Step, foreign_writer_error, newest_of_ours, require_mirror_of
from pg_cdc_source.lake.shape import Shape
from pg_cdc_source.lake.shape_of_table import OF_TABLE, require_shape
from pg_cdc_source.mirrors.catalog_tables import read_properties

# Steps that are not of the batch's changes: columns that change, a table that begins anew, and small files that are
# written together.
COLUMNS_STEP, ANEW_STEP, COMPACT_STEP = "columns", "anew", "compact"
# Behind the name of a step: its keys are deleted before its rows come.
KEYS_SUFFIX = ", keys"
# A batch has few steps; whoever wants more of a table's history asks for all of it.
RECENT = 30


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit of the table, with what it says of the batch that it is of, and the version that it was made of."""

    version: int
    parent: int | None
    operation: str
    said: Mapping[str, Any]


class SparkCommits(ABC):
    """The commits of a table, which may not be there, for one batch, in a session of its own.

    ``name`` is as SQL has it.
    """

    # What may be done to a mirrored table by others: its rows stay the same.
    housekeeping: ClassVar[frozenset[str]]

    def __init__(
        self,
        spark: SparkSession,
        name: str,
        table: str,
        mark: Mark,
        expected: int | None,
        shape: Shape,
    ) -> None:
        """``expected`` is the version that the ledger knows."""
        self._spark = spark
        self._name = name
        self._table = table
        self._mark = mark
        self._shape = shape
        self._said = read_properties(spark, name)
        self._text = ""  # what the session's next commits say
        self._number: int | None = None  # of the last step
        # Where nobody has committed since the ledger's row, nothing of this batch is done, and nothing is foreign.
        is_as_left = expected is not None and self._said is not None and self.present(self._said) == expected
        self._found: list[Commit] | None = [] if is_as_left or self._said is None else None
        self._version = expected if is_as_left else None
        self._expected = expected
        self._may_have_others = not is_as_left  # between the commits of this batch

    # --- what a format has of its own ---------------------------------------------------------------------------------

    @abstractmethod
    def present(self, properties: Mapping[str, str]) -> int | None:
        """The table's present version, with as little work as there is."""

    @abstractmethod
    def commits(self, limit: int | None) -> list[Commit]:
        """The table's commits, the present one first, at most ``limit`` of them."""

    @abstractmethod
    def committed(self) -> int | None:
        """The version of the session's last commit, where that can be told with little work."""

    @abstractmethod
    def follows(self, version: int, before: int) -> bool:
        """Whether nothing was committed or altered between two versions, where that can be told with little work."""

    @abstractmethod
    def sign(self, text: str, number: int | None) -> None:
        """Have the session's next commits say ``text``; ``number`` is that of their step, if it has one."""

    @abstractmethod
    def age(self, version: int | None) -> int:
        """How many commits the table had at a version; 0 where that is not known."""

    def only_says(self, operation: str) -> bool:
        """Whether an operation of somebody else's has left all columns as they were, as a comment does."""
        return False

    def alters(self, version: int, before: int) -> bool:
        """Whether a column has another one's place since the version before, where altering columns makes no commit."""
        return False

    # --- what has been done -------------------------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        return self._said is not None

    @property
    def version(self) -> int | None:
        if self._version is None:
            # Not the present one: what somebody else has committed behind it is foreign to the next batch.
            commits = (commit for limit in (RECENT, None) for commit in self.commits(limit))
            self._version = newest_of_ours(
                (commit.version, self._is_ours(commit), commit.operation in self.housekeeping) for commit in commits
            )
        return self._version

    @property
    def _commits(self) -> list[Commit]:
        """The recent commits when the batch began: at least those since the version that the ledger knows."""
        if self._found is None:
            self._found = self.commits(RECENT)
            if all(commit.version != self._expected for commit in self._found):
                self._found = self.commits(None)
        return self._found

    def is_done(self) -> bool:
        return any(
            commit.said["last"] and commit.said["batch"] >= self._mark.batch for commit in self._of_query(self._commits)
        )

    def has(self, step: Step) -> bool:
        self._require_all_steps()
        return any(
            commit.said["step"] == step.name and commit.said["batch"] == self._mark.batch
            for commit in self._of_query(self._commits)
        )

    def has_begun(self) -> bool:
        """Whether the table was begun anew in this batch, or got rows of it."""
        return any(
            commit.said["batch"] == self._mark.batch
            and (commit.said["step"] == ANEW_STEP or _is_numbered(commit.said["step"]))
            for commit in self._of_query(self._commits)
        )

    def _require_all_steps(self) -> None:
        """Raise ForeignWriterError where only some of the batch's commits are left: a step would be done twice."""
        commits = self._commits
        ours = list(self._of_query(commits))
        if not ours or commits[-1].parent in (None, -1):
            return
        is_cut = all(commit.said["batch"] >= self._mark.batch for commit in ours)
        is_cut &= all(commit.said["step"] != ANEW_STEP for commit in ours)
        if is_cut and all(self._expected not in (commit.version, commit.parent) for commit in commits):
            raise foreign_writer_error(
                f"{self._name} does not say any more which steps of batch {self._mark.batch} are done: its history "
                f"from before version {commits[-1].version} has expired"
            )

    def _of_query(self, commits: Iterable[Commit]) -> Iterable[Commit]:
        return filter(self._is_ours, commits)

    def _is_ours(self, commit: Commit) -> bool:
        return commit.said.get("query") == self._mark.query

    def require_ours(self, expected: int | None, *, again: bool) -> None:
        if self._said is None:
            if expected is not None and not again:
                raise foreign_writer_error(f"{self._name} is gone")
            return
        require_mirror_of(self._table, self._name, self._said.get(OF_TABLE))
        require_shape(self._name, self._said, self._shape)
        if again:
            return
        if self._version is not None:
            return
        # Where the recent commits do not lead there, all of them may.
        if not self._leads_to(self._commits, expected) and not self._leads_to(self.commits(None), expected):
            raise self._restored()

    def require_alone(self, expected: int | None, *, again: bool) -> None:
        if not self._may_have_others or again:
            return
        for limit in (RECENT, None):
            # What came behind the last one is foreign to the next batch.
            commits = list(dropwhile(lambda commit: not self._is_ours(commit), self.commits(limit)))
            if self._leads_to(commits, expected):
                return
        raise self._restored()

    def _restored(self) -> ForeignWriterError:
        return foreign_writer_error(
            f"{self._name} was restored, or written anew by somebody else, or its history has expired"
        )

    def _leads_to(self, commits: Sequence[Commit], expected: int | None) -> bool:
        behind: list[Commit] = []
        if not self._lead_to(commits, expected, behind):
            return False
        # Where a format passes over no commit that was made before, two drivers may make one each.
        steps: list[Mapping[str, Any]] = []
        for commit in behind:
            # Delta's own compaction behind a commit says the same.
            if "number" not in commit.said or commit.operation in self.housekeeping:
                continue
            # A table that comes back has the steps of earlier batches.
            is_late = expected is not None and commit.said["batch"] < self._mark.batch
            if commit.said in steps or is_late:
                raise foreign_writer_error(
                    f"{self._name} was changed by another driver of this mirror: version {commit.version} has step "
                    f"{commit.said['step']} of batch {commit.said['batch']} once more"
                )
            steps.append(commit.said)
        return True

    def _lead_to(self, commits: Sequence[Commit], expected: int | None, behind: list[Commit]) -> bool:
        """Whether ``commits`` go back to the version that is expected. ``behind`` gets this query's behind it."""
        for commit, before in zip_longest(commits, commits[1:]):
            if commit.version == expected:
                return True
            if self._is_ours(commit):
                behind.append(commit)
                # Of a batch before, what the ledger knows would have come first: it is gone.
                if commit.said["step"] == ANEW_STEP and commit.said["batch"] >= self._mark.batch:
                    return True
            elif commit.operation not in self.housekeeping and not self.only_says(commit.operation):
                raise foreign_writer_error(
                    f"{self._name} was changed by somebody else: version {commit.version}, {commit.operation}"
                )
            # Between two commits of its columns, the batch has altered them itself.
            is_altering = before is not None and commit.said.get("step") == COLUMNS_STEP and commit.said == before.said
            if before is not None and not is_altering and self.alters(commit.version, before.version):
                raise foreign_writer_error(
                    f"{self._name} was changed by somebody else: a column was dropped or renamed, and another one has "
                    f"its name, before version {commit.version}"
                )
            # It may have expired itself.
            if expected is not None and commit.parent == expected:
                return True
        # What was done would be among them.
        return expected is None and (not commits or any(self._of_query(commits)))

    def _note_commit(self) -> None:
        """Take in the session's last commit."""
        before, self._version = self._version, self.committed()
        if before is None or self._version is None or not self.follows(self._version, before):
            self._may_have_others = True

    def _note_step(self, step: Step) -> None:
        """Take in the commit of a step. Raises TransientError where there is none, and the table has none either.

        The batch goes on from what the table has then. Without the step, those that follow would stand on nothing.
        """
        self._note_commit()
        if self._version is not None or not _is_numbered(step.name):
            return
        said = read_said(self._text)
        if not any(commit.said == said for limit in (RECENT, None) for commit in self.commits(limit)):
            raise TransientError(
                f"{self._name} has no commit of the step {step.name} of batch {self._mark.batch}, which was made: "
                "somebody else applies the batch as well, or the table's history has expired",
                remedy=f"see who does; then {RESNAPSHOT}",
            )

    def _signed(self, step: str, *, is_last: bool = False) -> str:
        said = {"query": self._mark.query, "batch": self._mark.batch, "step": step, "last": is_last}
        number = self._next_number() if _is_numbered(step) else None
        text = json.dumps(said if number is None else {**said, "number": number}, separators=(",", ":"))
        self.sign(text, number)
        self._text = text
        return text

    def _next_number(self) -> int:
        """A number for a step: greater than those of all steps of the batch that are done."""
        if self._number is None:
            ours = (commit.said for commit in self._of_query(self._commits))
            done = (said.get("number", -1) for said in ours if said["batch"] == self._mark.batch)
            self._number = max(done, default=-1)
        self._number += 1
        return self._number


def _is_numbered(step: str) -> bool:
    """Whether a step is done once. Keys are deleted once more: the rows that come behind may be others each time."""
    return step not in (COLUMNS_STEP, ANEW_STEP, COMPACT_STEP) and not step.endswith(KEYS_SUFFIX)


def read_said(text: str | None) -> Mapping[str, Any]:
    """Read what a commit says of the batch that it is of; nothing where it is not of a mirror."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) and found.keys() >= {"query", "batch", "step", "last"} else {}
