"""What a batch does with one table, part by part; each part becomes one commit of the lake's table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any

import pyarrow as pa

from pg_cdc_source.lake.rows_of_batch import BEGINNING, END, BatchRow, Place
from pg_cdc_source.lake.segment import COMMIT_TS, KIND, LSN, SEQ, UNCHANGED, XID, Segment, change_fields
from pg_cdc_source.lake.table_batch import TableBatch
from pg_cdc_source.lake.unfollowed import keyless_error


@dataclass(frozen=True, slots=True)
class Files:
    """Files of a snapshot's rows. ``again``: the table may have rows, in whose place they come."""

    files: Sequence[Mapping[str, Any]]
    again: bool


@dataclass(frozen=True, slots=True)
class Emptied:
    """All rows are gone, by the commit at ``lsn``."""

    lsn: int
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Rekeyed:
    """Rows are told apart by ``key`` from here on, and deleted ones that stay may have that of others."""

    key: tuple[str, ...]


Part = Files | Emptied | Rekeyed | Segment


def parts_of(batch: TableBatch) -> list[Part]:
    """Return the parts of a batch in their order. Raises SchemaChangedError for what the lake cannot do."""
    if batch.shape.is_log:
        return list(_logged(batch))
    return list(_kept(batch) if batch.shape.keeps else _replaced(batch))


def _replaced(batch: TableBatch) -> Iterator[Part]:
    """Nothing stays that PostgreSQL gives up: what comes behind takes its place in the same commit."""
    if batch.files:
        yield Files(_read(batch.files), again=batch.is_emptied)
    elif batch.is_emptied:
        yield Emptied(batch.truncates[-1].place[0])
    yield from batch.segments


def _kept(batch: TableBatch) -> Iterator[Part]:
    """Rows that are gone stay in some way, so that what stands before a TRUNCATE is done as well."""
    files = {place: _read(list(rows)) for place, rows in groupby(batch.files, attrgetter("place"))}
    events: dict[Place, Emptied | Files | None] = {place: Files(found, again=False) for place, found in files.items()}
    for row in batch.truncates:
        place = row.place
        behind = min((other for other in files if other > place), default=END)
        if row.comes_again and behind != END:
            # Rows that come anew are there as soon as those of before are gone. Deleted ones stay under their keys.
            if batch.shape.is_soft and (batch.layout is None or not batch.layout.key):
                raise keyless_error(batch.table)
            events[place] = Emptied(behind[0])
            events[behind] = Files(files[behind], again=True)
        else:
            events[place] = Emptied(place[0], row.commit_ts)
    begin, key = BEGINNING, None
    for place, part in sorted({**events, END: None}.items(), key=itemgetter(0)):
        for segment in (segment.between(begin, place) for segment in batch.segments):
            if not segment.rows.num_rows:
                continue
            if batch.shape.is_soft and batch.changes.is_rekeyed and segment.key != key:
                yield Rekeyed(segment.key)
            key = segment.key
            yield segment
        if part is not None:
            yield part
        if batch.shape.is_soft and isinstance(part, Files) and part.again and batch.layout is not None:
            # While the table was set aside, it may have got another key.
            key = batch.layout.key
            yield Rekeyed(key)
        begin = place
    # Rows of the new key may come with a later batch, which does not know that it is new.
    is_new = batch.changes.is_rekeyed or any(row.comes_again for row in batch.truncates)
    if batch.shape.is_soft and is_new and batch.layout is not None and batch.layout.key not in ((), key):
        yield Rekeyed(batch.layout.key)


def _logged(batch: TableBatch) -> Iterator[Part]:
    """All changes are one commit; a TRUNCATE is one of them."""
    if batch.files:
        yield Files(_read(batch.files), again=False)
    tables = [segment.rows for segment in batch.segments]
    if batch.truncates:
        of_table = pa.schema([]) if batch.layout is None else batch.layout.arrow_schema()
        schema = pa.schema([*of_table, *change_fields(batch.shape)])
        tables.append(pa.Table.from_pylist(list(map(_as_change, batch.truncates)), schema))
    if tables:
        yield Segment((), pa.concat_tables(tables))


def _as_change(truncate: BatchRow) -> dict[str, Any]:
    """A row of a log, which has no values."""
    lsn, seq = truncate.place
    of_commit = {COMMIT_TS: truncate.commit_ts, XID: truncate.xid}
    return {KIND: truncate.kind, LSN: lsn, SEQ: seq, **of_commit, UNCHANGED: []}


def _read(files: Sequence[BatchRow]) -> list[Mapping[str, Any]]:
    # A large table has tens of thousands of files, and most often one layout.
    layouts: dict[str | None, str | None] = {}
    return [{**row.file, "layout": layouts.setdefault(row.layout_text, row.layout_text)} for row in files]
