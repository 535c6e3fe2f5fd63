"""Bring one table of the lake to the end of a batch. What is done already is found in the table's own commits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from pg_cdc_source.errors import RESNAPSHOT, ForeignWriterError, TransientError
from pg_cdc_source.lake.columns import MirroredLayout
from pg_cdc_source.lake.compaction import compact_where_due
from pg_cdc_source.lake.parts import Emptied, Files, Rekeyed
from pg_cdc_source.postgres.backoff import Backoff


class NamedSegment(Protocol):
    """A segment of a batch. Its ``name`` says which rows it has, and is the same when the batch comes again."""

    @property
    def name(self) -> str: ...


S = TypeVar("S", bound=NamedSegment)
T = TypeVar("T")
S_contra = TypeVar("S_contra", bound=NamedSegment, contravariant=True)


def foreign_writer_error(what: str) -> ForeignWriterError:
    """Return the error for a table that somebody else has changed."""
    return ForeignWriterError(what, remedy=f"see who writes it; then {RESNAPSHOT}")


def require_mirror_of(table: str, name: str, found: str | None) -> None:
    """Raise ForeignWriterError where the lake's table ``name`` says that it is a mirror of ``found``, or of none."""
    if found != table:
        raise ForeignWriterError(
            f"{name} is not a mirror of {table}" + (f", but of {found}" if found is not None else ""),
            remedy=f"rename or drop this table of the lake; then {RESNAPSHOT}",
        )


class Patience:
    """How long the tables of a batch are tried again that cannot be written.

    Catalogs and object stores have bad moments, and of a log of changes, what is set aside is missing for good. What
    lasts for half a minute is not waited for once more by each of hundreds of tables.
    """

    def __init__(self) -> None:
        self._writing = Backoff(0.2, growth=3.0, attempts=6)

    def retrying(self, write: Callable[[], T]) -> T:
        """The result of ``write``, which is run again after a TransientError; the last one is raised."""
        try:
            return self._writing.retrying(write)
        except TransientError:
            self._writing = Backoff(0.2, attempts=4)
            raise


@dataclass(frozen=True, slots=True)
class Mark:
    """Whose batch a commit is of."""

    query: str
    batch: int


@dataclass(frozen=True, slots=True)
class Step:
    """One commit of a batch. The ``is_last`` one says that all of them are done."""

    name: str
    is_last: bool


@dataclass(slots=True)
class Work(Generic[S]):
    """What a batch has to do with one table.

    ``fills`` are what old rows have in columns that were added, by their numbers. ``is_replaced``: nothing stays of the
    rows that the lake has. A segment among the ``parts`` has changes under one key.
    """

    layout: MirroredLayout | None
    fills: Mapping[int, str | None]
    parts: Sequence[Files | Emptied | Rekeyed | S]
    is_replaced: bool


def newest_of_ours(commits: Iterable[tuple[int, bool, bool]]) -> int | None:
    """Return the version of the mirror's last commit; None where there is none.

    ``commits`` are a table's versions, the newest first; with each, whether it is the mirror's, and whether rows stay
    the same. A compaction is passed over where somebody else has changed rows before it: the next batch has to see
    that.
    """
    found = None
    for version, is_ours, keeps_rows in commits:
        if is_ours and found is None:
            found = version
        if not keeps_rows:
            if is_ours:
                return found
            found = None
    return found


class LakeTable(Protocol[S_contra]):
    """A table in one of the lake's formats, for one batch."""

    @property
    def exists(self) -> bool:
        """Whether the table is there."""

    @property
    def version(self) -> int | None:
        """The version, or the snapshot's id, of the mirror's last commit to the table; None where there is none."""

    def is_done(self) -> bool:
        """Whether the table has all of this batch, or of a later one."""

    def has(self, step: Step) -> bool:
        """Whether a commit of this batch is this step."""

    def require_ours(self, expected: int | None, *, again: bool) -> None:
        """Raise ForeignWriterError if anybody else has committed behind version ``expected`` (None: at all).

        With ``again``, all rows are replaced, so that it does not matter what others did to those that are there.
        """

    def require_alone(self, expected: int | None, *, again: bool) -> None:
        """Raise as :meth:`require_ours` does, of commits that came between this batch's."""

    def prepare(self, layout: MirroredLayout, fills: Mapping[int, str | None], *, anew: bool) -> None:
        """Give the table these columns; create it if there is none. With ``anew``, nothing of its rows stays.

        Raises SchemaChangedError where the rows that it has cannot stay.
        """

    def add_files(self, step: Step, part: Files) -> None:
        """Take over files of rows."""

    def empty(self, step: Step, part: Emptied) -> None:
        """Do what the table does with rows that are gone, to all of them."""

    def tell_apart(self, step: Step, part: Rekeyed) -> None:
        """Have no deleted row have the key of a present one, or of one that was deleted later."""

    def apply(self, step: Step, segment: S_contra) -> None:
        """Apply changes under one key."""

    def age(self, version: int | None) -> int:
        """How many commits the table had at a version; 0 where that is not known."""

    def compact(self) -> None:
        """Write small files together, in commits that say of which batch they are. Its rows stay the same."""


def steps_of(parts: Sequence[Files | Emptied | Rekeyed | NamedSegment]) -> list[Step]:
    """The steps of parts. A batch that comes again may have no files, where the rows that they had are gone by now.

    So a step is told by what it does, and not by its place.
    """
    names = []
    for i, part in enumerate(parts):
        if isinstance(part, Files | Emptied | Rekeyed):
            name = type(part).__name__.lower()
            names.append(f"{name} {sum(type(other) is type(part) for other in parts[:i])}")
        else:
            names.append(part.name)
    return [Step(name, is_last=i == len(names) - 1) for i, name in enumerate(names)]


def bring(
    table: str, lake: LakeTable[S], work: Work[S], expected: int | None, *, again: bool, compacts: bool
) -> int | None:
    """Do what is left to be done; the table's version, None where there is none.

    ``expected`` is the version that the ledger knows; ``again`` that the table was set aside. ``compacts``: its small
    files are written together where that is due.
    """
    if lake.is_done():
        lake.require_alone(expected, again=again)
        return lake.version
    lake.require_ours(expected, again=again)
    if work.layout is not None:
        lake.prepare(work.layout, work.fills, anew=work.is_replaced)
    elif not lake.exists:
        return None
    for step, part in zip(steps_of(work.parts), work.parts, strict=True):
        if lake.has(step):
            continue
        if isinstance(part, Files):
            lake.add_files(step, part)
        elif isinstance(part, Emptied):
            lake.empty(step, part)
        elif isinstance(part, Rekeyed):
            lake.tell_apart(step, part)
        else:
            lake.apply(step, part)
    lake.require_alone(expected, again=again)
    version = lake.version
    # A batch without parts is not known to be done: its compaction could end the process each time.
    if compacts and work.parts and compact_where_due(table, lake.age(expected), lake.age(version), lake.compact):
        return lake.version
    return version
