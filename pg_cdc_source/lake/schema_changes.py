"""What the stream says of a table's columns within a batch, and behind which changes the lake cannot go on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pg_cdc_source.errors import RESNAPSHOT, SchemaChangedError
from pg_cdc_source.lake.columns import MirroredColumn
from pg_cdc_source.lake.rows_of_batch import BEGINNING, Place
from pg_cdc_source.lake.shape import Shape
from pg_cdc_source.offsets import split_names
from pg_cdc_source.options.names import quoted


@dataclass(slots=True)
class SchemaChanges:
    """What rows ``schema`` of one batch say of ``table``.

    ``fills`` are what old rows have in columns that were added, by their numbers; ``added`` is where these were added.
    ``is_rewritten``: what came before has other values now, and the batch does not have these. ``is_rekeyed``: rows are
    told apart by another key, behind some rows of the batch or before all of them.
    """

    table: str
    shape: Shape
    fills: dict[int, str | None] = field(default_factory=dict)
    added: dict[int, Place] = field(default_factory=dict)
    is_rewritten: bool = False
    is_rekeyed: bool = False

    def note(
        self, said: Iterable[Mapping[str, Any]], identity: str, place: Place, *, is_void: bool, is_anew: bool
    ) -> None:
        """Take in what the row at ``place`` says. Raises SchemaChangedError for what the lake cannot follow.

        ``is_void``: the rows of before are not there any more. ``is_anew``: it describes rows that come again.
        """
        said, is_past = list(said), is_void or is_anew
        for change in said:
            self._refuse(change, is_void=is_void, is_past=is_past)
            kind, attnum = change["change"], change["attnum"]
            if self.shape.is_log:
                # What it says of rows was so when they were written, and nothing is told apart by a key.
                continue
            if kind == "added" and attnum is not None:
                self.fills[attnum] = change["fill"]
                self.added[attnum] = place
            elif kind == "rewritten" and not is_past:
                self.is_rewritten = True
            elif kind == "rekeyed" and (self.shape.keeps or not is_past):
                self.is_rekeyed = True
                if not is_past and identity == "f" and change["name"] != _in_new_names(said, change["was"]):
                    # The primary key is the catalog's, which may be ahead: it may not have told rows apart here.
                    raise SchemaChangedError(
                        f"{self.table} got another key under REPLICA IDENTITY FULL: {change['name'] or 'none'} instead "
                        f"of {change['was'] or 'none'}",
                        remedy=RESNAPSHOT,
                    )

    def _refuse(self, change: Mapping[str, Any], *, is_void: bool, is_past: bool) -> None:
        """Raise SchemaChangedError for a change behind which the table cannot go on, whatever it keeps."""
        kind = change["change"]
        if kind == "renamed" and change["attnum"] is None and not is_past:
            raise SchemaChangedError(
                f"{self.table} was called {change['was']} before: the lake does not have its rows under this name",
                remedy=RESNAPSHOT,
            )
        if kind == "left" and "why" in change and not is_void:
            raise SchemaChangedError(
                f"{self.table} is not streamed any more: {change['why']}",
                remedy=f"{change['remedy']}; its rows come again then",
            )
        if kind == "gap":
            raise SchemaChangedError(f"{self.table}: {change['why']}", remedy=change["remedy"])

    def fill_of(self, column: MirroredColumn) -> str | None:
        """PostgreSQL's text of what old rows have in a column that the batch adds; None where that is NULL."""
        return self.fills.get(column.attnum or 0)

    def is_before(self, place: Place, column: MirroredColumn) -> bool:
        """Whether a row at ``place`` is from before the batch adds the column."""
        return place < self.added.get(column.attnum or 0, BEGINNING)


def _in_new_names(said: Iterable[Mapping[str, Any]], key: str) -> str:
    """What the columns of a key, as ``listed_names`` has them, are called behind the changes that one row says."""
    names = {c["was"]: c["name"] for c in said if c["change"] == "renamed" and c["attnum"] is not None}
    now = {quoted(was): quoted(name) for was, name in names.items()}
    return ", ".join(now.get(name, name) for name in map(str.strip, split_names(key)))
