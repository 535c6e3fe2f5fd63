"""What a table's commits say of a mirror's batches, where delta-rs writes it.

- Every commit says in its metadata whose it is, and which batch and step it is of.
- Two application transactions of each query are in the table's state, with the number of a batch: of the last one that
  is done, and of the last one that has begun. They are there also where the log has been cleaned up. There are no more
  of them, because every checkpoint has all that there ever were.
- Of a batch that has begun, the commits behind the version that the ledger knows say which steps are done. Where the
  log does not have all of them any more, that is an error: no step is left out or done twice.
- Two tasks that apply one batch at the same time, as where an executor is thought lost, do not both make a step:
  delta-rs lets no commit pass behind another one with the same transaction, which it has not seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import dropwhile
from typing import Any, TypeVar

from deltalake import CommitProperties, DeltaTable, Transaction

from pg_cdc_source.errors import TransientError
from pg_cdc_source.lake.bring import Mark, Step, foreign_writer_error, newest_of_ours, require_mirror_of
from pg_cdc_source.lake.shape import Shape
from pg_cdc_source.lake.shape_of_table import OF_TABLE, require_shape
from pg_cdc_source.mirrors.lakes import HOUSEKEEPING_OF_DELTA

_T = TypeVar("_T")
QUERY, BATCH, STEP = "pgcdc_query", "pgcdc_batch", "pgcdc_step"
# Whoever wants more of a table's history asks for all of it.
_RECENT = 20
_TRIES = 20  # of reading a log that somebody else is writing


def commit_of(mark: Mark, step: Step | None = None, *, behind_nobody: bool = False) -> CommitProperties:
    """Return what a commit of a batch carries; without a step, one that may be made again.

    ``behind_nobody``: the commit fails where somebody else has committed meanwhile. delta-rs lets an overwrite pass
    behind OPTIMIZE, and the files that this has written stay in the table, with all rows that were to go.
    """
    metadata = {QUERY: mark.query, BATCH: str(mark.batch)}
    retries = 0 if behind_nobody else None
    if step is None:
        return CommitProperties(custom_metadata=metadata, max_commit_retries=retries)
    # Where Delta's transactions expire (delta.setTransactionRetentionDuration), those without a time are gone at once.
    now = int(time.time() * 1000)
    done = [Transaction(_begun(mark), mark.batch, now)]
    if step.is_last:
        done.append(Transaction(mark.query, mark.batch, now))
    said = {**metadata, STEP: step.name}
    return CommitProperties(custom_metadata=said, max_commit_retries=retries, app_transactions=done)


def _begun(mark: Mark) -> str:
    return f"{mark.query}/steps"


def is_of(path: str, version: int, mark: Mark) -> bool:
    """Whether the version of a table is of this batch, or of one before.

    Where a table was moved away, another one has its path, and the numbers of its versions.
    """
    if not DeltaTable.is_deltatable(path):
        return False
    table = DeltaTable(path)
    while True:
        present = table.version()
        if present < version:
            return False
        commits = table.history(present - version + _RECENT)[present - version :]
        # delta-rs gives those as well that were made since it has loaded the table.
        table.update_incremental()
        if table.version() == present:
            break
    # Behind it there may be some of compactions. Where the log has lost them all, so it has the version.
    found = next((commit for commit in commits if QUERY in commit), None)
    return found is None or (found[QUERY] == mark.query and int(found[BATCH]) <= mark.batch)


class DeltaRsCommits:
    """The commits of the table at ``path``, which may not be there, for one batch."""

    def __init__(self, path: str, table: str, mark: Mark, shape: Shape) -> None:
        self.path = path
        self._name = table
        self._mark = mark
        self._shape = shape
        self._table = DeltaTable(path) if DeltaTable.is_deltatable(path) else None
        # The names of the batch's steps that the commits up to a version say; at first, up to that before the batch.
        self._steps: set[str] = set()
        self._read_to: int | None = None

    @property
    def table(self) -> DeltaTable:
        assert self._table is not None
        return self._table

    @property
    def exists(self) -> bool:
        return self._table is not None

    @property
    def version(self) -> int | None:
        if self._table is None:
            return None
        # Not the present one: what somebody else has committed behind it is foreign to the next batch.
        found = self._steady(self._newest_of_ours)
        if found is None:
            raise foreign_writer_error(f"{self.path} does not say any more which of its versions are this mirror's")
        return found

    def _newest_of_ours(self) -> int | None:
        history = (commit for limit in (_RECENT, None) for commit in self.table.history(limit))
        return newest_of_ours(
            (commit["version"], self._is_ours(commit), commit["operation"] in HOUSEKEEPING_OF_DELTA)
            for commit in history
        )

    def _steady(self, read: Callable[[], _T]) -> _T:
        """What ``read`` finds in the history of the table's present version.

        delta-rs gives commits as well that were made since it has loaded the table, and counts versions down from the
        one that it has loaded; so their numbers say nothing then. Raises TransientError where that goes on.
        """
        for _ in range(_TRIES):
            self.table.update_incremental()
            present = self.table.version()
            found = read()
            self.table.update_incremental()
            if self.table.version() == present:
                return found
        raise TransientError(
            f"{self.path} is changed faster than its log can be read", remedy="see who writes it all the time"
        )

    def is_done(self) -> bool:
        return self._is_at(self._mark.query)

    def has(self, step: Step) -> bool:
        if self._is_at(_begun(self._mark)) and step.name in self._steps_done():
            return True
        # Before, each step had a transaction of its own. A batch that was begun so may have to be ended.
        return self._is_at(f"{self._mark.query}/{step.name}")

    def _is_at(self, application: str) -> bool:
        if self._table is None:
            return False
        found = self._table.transaction_version(application)
        return found is not None and found >= self._mark.batch

    def _steps_done(self) -> set[str]:
        """The names of the steps of this batch that are done. Raises ForeignWriterError where nobody can tell."""
        present, commits = self._unread()
        ours = [commit for commit in commits if self._is_ours(commit)]
        is_all = len(commits) == present - (-1 if self._read_to is None else self._read_to)
        # What was committed before another batch of the same query is not of this one.
        if not is_all and all(int(commit[BATCH]) >= self._mark.batch for commit in ours):
            raise foreign_writer_error(
                f"{self.path} does not say any more which steps of batch {self._mark.batch} are done: the log has lost "
                f"commits from before version {commits[-1]['version'] if commits else present}"
            )
        self._steps |= {str(commit.get(STEP)) for commit in ours if int(commit[BATCH]) == self._mark.batch}
        self._read_to = present
        return self._steps

    def _unread(self) -> tuple[int, Sequence[Mapping[str, Any]]]:
        """The present version, and the commits up to there that have not been read."""
        return self._steady(lambda: (self.table.version(), self._history(self._read_to)))

    def _commit(self, step: Step | None = None, *, behind_nobody: bool = False) -> CommitProperties:
        return commit_of(self._mark, step, behind_nobody=behind_nobody)

    def require_ours(self, expected: int | None, *, again: bool) -> None:
        # One that was set aside may be another table by now.
        self._read_to = None if again else expected
        if self._table is None:
            if expected is not None and not again:
                raise foreign_writer_error(f"{self.path} is gone")
            return
        properties = self._table.metadata().configuration
        if properties.get(OF_TABLE) == self._name:
            require_shape(self.path, properties, self._shape)
            if again:
                return
        present = self._table.version()
        if expected is not None and present < expected:
            raise foreign_writer_error(f"{self.path} is at version {present}, and was at {expected}")
        require_mirror_of(self._name, self.path, properties.get(OF_TABLE))
        self._require_ours(self._history_since(expected))

    def require_alone(self, expected: int | None, *, again: bool) -> None:
        if self._table is not None and not again:
            # What came behind the last one is foreign to the next batch.
            self._require_ours(dropwhile(lambda commit: not self._is_ours(commit), self._history_since(expected)))

    def _history_since(self, expected: int | None) -> Sequence[Mapping[str, Any]]:
        """All commits behind a version, the newest first. Raises ForeignWriterError where the log has lost some."""
        commits = self._steady(lambda: self._history(expected))
        if expected is not None and len(commits) < self.table.version() - expected:
            raise foreign_writer_error(
                f"{self.path} does not say any more who has changed it since version {expected}: the log has lost "
                f"commits from before version {commits[-1]['version'] if commits else self.table.version()}"
            )
        return commits

    def _history(self, expected: int | None) -> Sequence[Mapping[str, Any]]:
        """The commits behind a version, the newest first."""
        behind = self.table.version() - (-1 if expected is None else expected)
        return self.table.history(behind) if behind else ()

    def _is_ours(self, commit: Mapping[str, Any]) -> bool:
        return commit.get(QUERY) == self._mark.query

    def _require_ours(self, commits: Iterable[Mapping[str, Any]]) -> None:
        for commit in commits:
            if not self._is_ours(commit) and commit["operation"] not in HOUSEKEEPING_OF_DELTA:
                raise foreign_writer_error(
                    f"{self.path} was changed by somebody else: version {commit.get('version')}, {commit['operation']}"
                )
