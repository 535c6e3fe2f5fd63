"""What a batch does with one table, part by part; each part becomes one commit of the lake's table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import Any

import pyarrow as pa

from pg_cdc_source.lake.batch_of_table import CHANGE_NAMES, UNCHANGED, Segment, TableBatch, keyless_error
from pg_cdc_source.lake.rows_of_batch import BEGINNING, END, Place, comes_again, place_of
from pg_cdc_source.lake.shape import Shape


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


def parts_of(batch: TableBatch, shape: Shape) -> list[Part]:
    """Return the parts of a batch in their order. Raises SchemaChangedError for what the lake cannot do."""
    if shape.is_log:
        return list(_logged(batch))
    return list(_kept(batch, shape) if shape.keeps else _replaced(batch))


def _replaced(batch: TableBatch) -> Iterator[Part]:
    """Nothing stays that PostgreSQL gives up: what comes behind takes its place in the same commit."""
    if batch.files:
        yield Files(_read(batch.files), again=batch.is_emptied)
    elif batch.is_emptied:
        yield Emptied(place_of(batch.truncates[-1])[0])
    yield from batch.segments


def _kept(batch: TableBatch, shape: Shape) -> Iterator[Part]:
    """Rows that are gone stay in some way, so that what stands before a TRUNCATE is done as well."""
    files = {place: _read(list(rows)) for place, rows in groupby(batch.files, place_of)}
    events: dict[Place, Emptied | Files | None] = {place: Files(found, again=False) for place, found in files.items()}
    for row in batch.truncates:
        place = place_of(row)
        behind = min((other for other in files if other > place), default=END)
        if comes_again(row) and behind != END:
            # Rows that come anew are there as soon as those of before are gone. Deleted ones stay under their keys.
            if shape.is_soft and (batch.layout is None or not batch.layout.key):
                raise keyless_error(batch.table)
            events[place] = Emptied(behind[0])
            events[behind] = Files(files[behind], again=True)
        else:
            events[place] = Emptied(place[0], row["_commit_ts"])
    begin, key = BEGINNING, None
    for place, part in sorted({**events, END: None}.items(), key=itemgetter(0)):
        for segment in (segment.between(begin, place) for segment in batch.segments):
            if not segment.rows.num_rows:
                continue
            if shape.is_soft and batch.is_rekeyed and segment.key != key:
                yield Rekeyed(segment.key)
            key = segment.key
            yield segment
        if part is not None:
            yield part
        if shape.is_soft and isinstance(part, Files) and part.again and batch.layout is not None:
            # While the table was set aside, it may have got another key.
            key = batch.layout.key
            yield Rekeyed(key)
        begin = place
    # Rows of the new key may come with a later batch, which does not know that it is new.
    is_new = batch.is_rekeyed or any(comes_again(row) for row in batch.truncates)
    if shape.is_soft and is_new and batch.layout is not None and batch.layout.key not in ((), key):
        yield Rekeyed(batch.layout.key)


def _logged(batch: TableBatch) -> Iterator[Part]:
    """All changes are one commit; a TRUNCATE is one of them."""
    if batch.files:
        yield Files(_read(batch.files), again=False)
    tables = [segment.rows for segment in batch.segments]
    if batch.truncates:
        of_table = pa.schema([]) if batch.layout is None else batch.layout.arrow_schema()
        schema = pa.schema([*of_table, *batch.change_fields()])
        # Not its other fields: the table may have a column called ``rows`` or ``layout``.
        of_changes = {name: padded for name, padded in CHANGE_NAMES.items() if padded != UNCHANGED}
        rows = [{padded: row[name] for name, padded in of_changes.items()} for row in batch.truncates]
        tables.append(pa.Table.from_pylist([{**row, UNCHANGED: []} for row in rows], schema))
    if tables:
        yield Segment((), pa.concat_tables(tables))


def _read(files: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    # A large table has tens of thousands of files, and most often one layout.
    layouts: dict[str, str] = {}
    return [{**json.loads(row["after"]), "layout": layouts.setdefault(row["layout"], row["layout"])} for row in files]
