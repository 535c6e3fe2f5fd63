"""How a publication lists a table, as checkpoints keep it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pg_cdc_source.postgres.attached import Attachments
from pg_cdc_source.postgres.publication.read import PublishedTable

_TEXT = re.compile(r"([^rc@pi]*)(r?c?)(?:@(\d+))?(?:p([\d.a-f]+))?(?:i(\d+))?")


@dataclass(frozen=True, slots=True)
class Entry:
    """How a publication lists a table; as text ``16394+16396/771rc@77p81.5f0ci5``.

    ``listed_by`` are its entries: the second one is that of its schema or root, and since when it has the table.
    ``flags`` has r for a row filter and c for a column list. Behind @ stands the transaction
    ``PublishedTable.attached``, behind p ``PublishedTable.partitions``, and behind i ``PublishedTable.altered`` if the
    publication for inserts has it. A table keeps its entry when names change, and gets another one with another filter
    or list (pg_publication_rel). Where all tables are published, it has none.
    """

    listed_by: tuple[str, ...]
    flags: str
    attached: int | None
    partitions: Attachments | None
    inserts_altered: int | None

    @classmethod
    def of(cls, table: PublishedTable) -> Entry:
        flags = ("r" if table.row_filter is not None else "") + ("c" if table.columns is not None else "")
        altered = table.altered if table.inserts_only else None
        return cls(table.entries, flags, table.attached, table.partitions, altered)

    @classmethod
    def parse(cls, text: str) -> Entry:
        """Read what ``str()`` writes."""
        if (found := _TEXT.fullmatch(text)) is None:
            raise ValueError(f"{text!r} is not how a publication lists a table")
        listed_by, flags, attached_xid, partitions, altered_xid = found.groups()
        attached, altered = (None if xid is None else int(xid) for xid in (attached_xid, altered_xid))
        attachments = None if partitions is None else Attachments.parse(partitions)
        return cls(tuple(listed_by.split("+")) if listed_by else (), flags, attached, attachments, altered)

    def __str__(self) -> str:
        marks = (("@", self.attached), ("p", self.partitions), ("i", self.inserts_altered))
        behind = (f"{letter}{mark}" for letter, mark in marks if mark is not None)
        return "+".join(self.listed_by) + self.flags + "".join(behind)
