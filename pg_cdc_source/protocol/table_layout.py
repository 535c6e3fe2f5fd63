"""What the columns of a table are from some row of the stream on, and what changed in them there.

A Relation message says names, types and keys. What a column's number is, whether it may be NULL and what old rows got
for a column that was added is only in the catalog, which may be ahead of the commit by any time. So it is looked up
once, when a layout arrives, and then kept in the stream's offsets: a batch that is replayed has the same rows.
"""

from __future__ import annotations

import base64
import functools
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.options.names import QualifiedName
from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.protocol.layout import StreamedTable
from pg_cdc_source.protocol.pgoutput import RelationColumn, RelationMessage
from pg_cdc_source.values import registry
from pg_cdc_source.values.registry import CatalogType, Column

ChangeKind = Literal["added", "dropped", "renamed", "retyped", "rekeyed", "rewritten"]
# A column's name, type and type modifier.
Sent = tuple[str, int, int]

_AS_TEXT = NumericAs("string")


@dataclass(frozen=True, slots=True)
class TypeFacts:
    """What a type with its modifier is: as format_type() prints it, as the catalog has it, Spark's name."""

    name: str
    type: CatalogType
    spark: str


@dataclass(frozen=True, slots=True)
class CatalogColumn:
    """A column as the catalog has it now. ``fill``: what rows from before the column was added have, as text."""

    attnum: int
    name: str
    type_oid: int
    typmod: int
    nullable: bool
    fill: str | None
    published: bool

    @property
    def sent(self) -> Sent:
        return self.name, self.type_oid, self.typmod


@dataclass(frozen=True, slots=True)
class CatalogLayout:
    """A table's columns as the catalog has them now, in their order.

    ``key``: the columns that tell rows apart: those of the replica identity; under FULL, the primary key. ``last`` is
    the greatest number that a column ever had. ``files`` differs after a rewrite, TRUNCATE, VACUUM FULL or CLUSTER;
    ``altered`` differs after DDL of columns. Both together: a rewrite by DDL. ``primary`` is the oid of the primary
    key's constraint, which is another one where the key was away. ``insides`` is what the texts of values depend on
    besides their types; see :func:`has_other_texts`.
    """

    columns: tuple[CatalogColumn, ...]
    identity: str
    key: tuple[str, ...]
    last: int
    files: str
    altered: str
    primary: int | None = None
    insides: str = ""


@dataclass(frozen=True, slots=True)
class LayoutColumn:
    """A column as rows of the stream have it. ``attnum`` None: the catalog did not know the column any more."""

    name: str
    attnum: int | None
    type_name: str
    type_oid: int
    typmod: int
    type: CatalogType
    spark: str
    nullable: bool
    key: bool

    @property
    def sent(self) -> Sent:
        return self.name, self.type_oid, self.typmod


@dataclass(frozen=True, slots=True)
class TableLayout:
    """A table as rows of the stream have it.

    ``last``, ``files``, ``altered``, ``primary``: see CatalogLayout; None: not known.
    ``insides``, too; empty where they are not known.
    """

    oid: int
    name: str
    identity: str  # pg_class.relreplident
    columns: tuple[LayoutColumn, ...]
    last: int | None
    files: str | None
    altered: str | None
    primary: int | None = None
    insides: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns if column.key)

    def as_sent(self) -> RelationMessage:
        """The Relation message of rows that have this layout."""
        schema, name = QualifiedName.parse(self.name).parts
        columns = tuple(RelationColumn(self.identity == "f" or c.key, *c.sent) for c in self.columns)
        return RelationMessage(self.oid, schema, name, self.identity, columns)

    def is_sent_as(self, columns: Sequence[RelationColumn]) -> bool:
        """Whether rows with these columns have this layout, as far as a Relation message tells."""
        return [column.sent for column in self.columns] == [sent_of(column) for column in columns]

    def as_streamed(self) -> StreamedTable:
        """The table whose rows have this layout, every value as PostgreSQL's text."""
        columns = [Column(c.name, c.attnum or 0, c.type, c.type_name, not c.nullable) for c in self.columns]
        return StreamedTable(
            self.oid,
            self.name,
            tuple(registry.plan(column, as_string=True, numeric_as=_AS_TEXT) for column in columns),
            tuple((c.type_oid, c.typmod) for c in self.columns),
            self.key,
            self.identity,
        )


@dataclass(frozen=True, slots=True)
class LayoutChange:
    """What changed in a layout.

    ``name`` is the column's, ``was`` its old name or type; of ``rekeyed``, both are the key's columns. ``attnum`` None:
    the change is of the table, or the column's number is not known. ``fill``: what rows from before have in a column
    that was added, as text, None for NULL.
    """

    change: ChangeKind
    attnum: int | None = None
    name: str | None = None
    was: str | None = None
    fill: str | None = None


@dataclass(frozen=True, slots=True)
class LayoutRecord:
    """A layout that rows of its table have from ``position`` on, and what changed there."""

    position: Position
    layout: TableLayout
    changes: tuple[LayoutChange, ...]

    @property
    def is_rewritten(self) -> bool:
        """Whether the rows from before are others now, so that all rows of the table have to come again."""
        return any(change.change == "rewritten" for change in self.changes)

    @property
    def former_name(self) -> str | None:
        """What the table was called before; None where it has not another name here."""
        return next((c.was for c in self.changes if c.change == "renamed" and c.attnum is None), None)

    def to_object(self, *, former_name_taken: bool = False) -> str:
        """Return the JSON object that a row of the stream brings."""
        columns = [
            {
                "name": c.name,
                "attnum": c.attnum,
                "type": c.type_name,
                "type_oid": c.type_oid,
                "spark": c.spark,
                "nullable": c.nullable,
                "key": c.key,
            }
            for c in self.layout.columns
        ]
        changes = [
            {"change": c.change, "attnum": c.attnum, "name": c.name, "was": c.was, "fill": c.fill}
            | ({"taken": True} if former_name_taken and c.change == "renamed" and c.attnum is None else {})
            for c in self.changes
        ]
        return json.dumps({"columns": columns, "changes": changes}, ensure_ascii=False, separators=(",", ":"))


def sent_of(column: RelationColumn) -> Sent:
    return column.name, column.type_oid, column.typmod


def has_other_texts(known: str, now: str) -> bool:
    """Whether values that are stored have other texts than when the ``insides`` of their types were ``known``.

    These are types with what they have inside, as ``16400ex1f3a…`` and ``16410c1,2``: hashes of an enum's labels, each
    with that of the transaction that wrote it, of which some may come behind the others; and the numbers of a composite
    type's attributes. Without the ``x`` an earlier release has written the labels' hashes alone.
    """
    insides = dict(map(_split_inside, now.split()))
    for oid, was in map(_split_inside, known.split()):
        # A type that is not used any more has no values.
        inside = insides.get(oid, was)
        if was.startswith("e") and not was.startswith("ex"):
            inside = _labels_of(inside)
        if not inside.startswith(was) if was.startswith("e") else inside != was:
            return True
    return False


def without_writers(insides: str) -> str:
    """Return ``insides`` with the labels of enums alone: pg_upgrade writes them anew."""
    return " ".join(oid + _labels_of(inside) for oid, inside in map(_split_inside, insides.split()))


def _labels_of(inside: str) -> str:
    return "e" + "".join(inside[i : i + 6] for i in range(2, len(inside), 12)) if inside.startswith("ex") else inside


def _split_inside(text: str) -> tuple[str, str]:
    digits = len(text) - len(text.lstrip("0123456789"))
    return text[:digits], text[digits:]


# --- in offsets -------------------------------------------------------------------------------------------------------


def to_text(records: Iterable[LayoutRecord]) -> str:
    """Return records as a text for an offset; the same records give the same text."""
    items = [
        [
            *(int(record.position.lsn), record.position.seq),
            *(record.layout.oid, record.layout.name, record.layout.identity),
            *(record.layout.last, record.layout.files, record.layout.altered),
            [_plain(column) for column in record.layout.columns],
            [(c.change, c.attnum, c.name, c.was, c.fill) for c in record.changes],
            *_rest_of(record.layout),
        ]
        for record in records
    ]
    if not items:
        return ""
    plain = json.dumps(items, ensure_ascii=False, separators=(",", ":")).encode()
    return base64.b64encode(zlib.compress(plain, 9)).decode()


def _rest_of(layout: TableLayout) -> list[Any]:
    """What earlier releases did not write, where there is something to write."""
    if layout.insides:
        return [layout.primary, layout.insides]
    return [] if layout.primary is None else [layout.primary]


def _plain(c: LayoutColumn) -> tuple[Any, ...]:
    type = registry.plain_type(c.type)
    return c.name, c.attnum, c.type_name, c.type_oid, c.typmod, type, c.spark, c.nullable, c.key


# Offsets are read several times for a batch.
@functools.lru_cache(maxsize=4)
def from_text(text: str) -> tuple[LayoutRecord, ...]:
    """Read what :func:`to_text` has written. Raises ValueError for other text."""
    if not text:
        return ()
    try:
        items: list[list[Any]] = json.loads(zlib.decompress(base64.b64decode(text, validate=True)))
        return tuple(
            LayoutRecord(
                Position(Lsn(lsn), seq),
                TableLayout(oid, name, identity, tuple(map(_column, columns)), last, files, altered, *rest),
                tuple(LayoutChange(*c) for c in changes),
            )
            for lsn, seq, oid, name, identity, last, files, altered, columns, changes, *rest in items
        )
    except (zlib.error, TypeError, ValueError) as error:
        raise ValueError(f"layouts of tables: {type(error).__name__}") from None


def _column(values: list[Any]) -> LayoutColumn:
    name, attnum, type_name, type_oid, typmod, found, *rest = values
    return LayoutColumn(name, attnum, type_name, type_oid, typmod, registry.catalog_type(found), *rest)
