"""Offsets carry the layouts that their batch needs: so a replay announces the same, and asks the catalog nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import replace

import pytest

from pg_cdc_source.errors import DefiniteError
from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.protocol.layout_match import TypeOf
from pg_cdc_source.protocol.pgoutput import RelationColumn, RelationMessage
from pg_cdc_source.protocol.table_layout import CatalogColumn, CatalogLayout, TypeFacts, from_text
from pg_cdc_source.stream.layouts.layout_history import LayoutHistory
from pg_cdc_source.values.registry import CatalogType

START = Position(Lsn(99))
OTHER = 8
ALL = frozenset((7, OTHER))


def relation(*names: str, oid: int = 7) -> RelationMessage:
    return RelationMessage(
        oid, "public", f"t{oid}", "d", tuple(RelationColumn(name == "id", name, 25, -1) for name in names)
    )


def at(lsn: int, seq: int = 1) -> Position:
    return Position(Lsn(lsn), seq)


class Catalog:
    """Counts how often it is asked. Its columns are those of the relation that it is asked for."""

    def __init__(self) -> None:
        self.asked = 0
        self.files = "file"
        self.last = 0

    def look(self, sent: RelationMessage, asks: bool, xid: int | None) -> tuple[CatalogLayout, TypeOf]:
        self.asked += 1
        columns = tuple(
            CatalogColumn("iabc".index(c.name[0]) + 1, c.name, 25, -1, nullable=True, fill=None, published=True)
            for c in sent.columns
        )
        key = ("id",)
        self.last = max(self.last, *(column.attnum for column in columns))
        layout = CatalogLayout(columns, "d", key, self.last, self.files, f"{self.files} {[c.name for c in columns]}")
        return layout, lambda oid, typmod: TypeFacts("text", CatalogType(oid), "string")


def announced(history: LayoutHistory, sent: RelationMessage, position: Position) -> list[str] | None:
    """The names of the columns and the changes that are announced."""
    text = history.describe(sent, position, ALL).announced
    if text is None:
        return None
    said = json.loads(text)
    return [c["name"] for c in said["columns"]] + [f"{c['change']} {c['name']}" for c in said["changes"]]


@pytest.fixture
def catalog() -> Catalog:
    return Catalog()


def filled(catalog: Catalog) -> LayoutHistory:
    """Of one table three layouts, from 100, 200 and 300 on; of another one from 150 on."""
    history = LayoutHistory(catalog.look)
    history.begin((), START)
    assert announced(history, relation("id", "a"), at(100)) == ["id", "a"]
    assert announced(history, relation("id", oid=OTHER), at(150)) == ["id"]
    assert announced(history, relation("id", "a", "b"), at(200)) == ["id", "a", "b", "added b"]
    assert announced(history, relation("id", "b"), at(300)) == ["id", "b", "dropped a"]
    return history


def test_a_layout_is_announced_once(catalog: Catalog) -> None:
    history = filled(catalog)
    assert announced(history, relation("id", "b"), at(310)) is None
    assert announced(history, relation("id", oid=OTHER), at(320)) is None


def test_an_offset_carries_what_its_batch_needs(catalog: Catalog) -> None:
    history = filled(catalog)

    def carried(start: Position, end: Position) -> list[tuple[int, int]]:
        return [(r.layout.oid, int(r.position.lsn)) for r in from_text(history.text(start, end, ALL))]

    assert carried(START, at(120)) == [(7, 100)]
    assert carried(START, at(200)) == [(7, 100), (OTHER, 150), (7, 200)]
    assert carried(at(200), at(250)) == [(OTHER, 150), (7, 200)]
    assert carried(at(250), at(400)) == [(OTHER, 150), (7, 200), (7, 300)]
    assert history.text(at(250), at(400), ALL) is history.text(at(260), at(500), ALL)


def test_what_a_table_costs_does_not_grow_with_their_number(catalog: Catalog) -> None:
    def seconds_each(tables: int) -> float:
        oids = frozenset(range(tables))
        history = LayoutHistory(catalog.look)
        history.begin((), START)
        began = time.process_time()
        for oid in oids:
            assert history.describe(relation("id", oid=oid), at(100 + oid), oids).announced is not None
        records = from_text(history.text(START, at(100 + tables), oids))
        history.begin(records, at(100 + tables))
        assert [history.reach(record) for record in records] == list(records)
        history.add(records)
        for oid in oids:
            assert history.describe(relation("id", oid=oid), at(100 + tables), oids).announced is None
        return (time.process_time() - began) / tables

    few = min(seconds_each(200) for _ in range(3))
    # Where each of them is looked for among all, 7.5 times as much.
    assert min(seconds_each(1_500) for _ in range(3)) < 4 * few


@pytest.mark.parametrize("start", [START, at(100), at(150, 7), at(199)])
def test_a_replay_announces_the_same_and_does_not_ask(catalog: Catalog, start: Position) -> None:
    carried = filled(catalog).text(start, at(250), ALL)
    catalog.asked, catalog.files = 0, "rewritten since"
    again = LayoutHistory(catalog.look)
    again.begin(from_text(carried), at(250))
    sent = [
        (relation("id", "a"), at(100)),
        (relation("id", oid=OTHER), at(150)),
        (relation("id", "a", "b"), at(200)),
    ]
    found = [announced(again, described, position) for described, position in sent if position > start]
    expected = [["id", "a"], ["id"], ["id", "a", "b", "added b"]]
    assert found == expected[-len(found) :]
    # A session sends every relation again before its first row; what the batch before announced is not new.
    for described, position in sent:
        if position <= start:
            assert announced(again, described, right_behind(start)) is None
    assert catalog.asked == 0
    assert announced(again, relation("id", "b"), at(300)) == ["id", "b", "dropped a", "rewritten None"]


def right_behind(position: Position) -> Position:
    return Position(position.next_lsn, 2)


def test_what_could_not_be_decoded_is_announced_again(catalog: Catalog) -> None:
    history = filled(catalog)
    assert announced(history, relation("id", "b"), at(300)) == ["id", "b", "dropped a"]


def test_a_batch_tells_which_tables_are_rewritten(catalog: Catalog) -> None:
    history = filled(catalog)
    catalog.files = "other"
    said = announced(history, relation("id", "c", oid=OTHER), at(400))
    assert said == ["id", "c", "added c", "rewritten None"]
    assert [r.layout.name for r in history.rewritten(at(350), at(400))] == ["public.t8"]
    assert history.rewritten(START, at(350)) == history.rewritten(at(400), at(500)) == ()


def test_a_snapshot_has_the_layouts_that_rows_behind_it_would_begin(catalog: Catalog) -> None:
    history = filled(catalog)
    assert announced(history, relation("id", "c"), at(400)) == ["id", "c", "dropped b", "added c", "rewritten None"]
    (record,) = (r for r in from_text(history.text(at(350), at(400), ALL)) if r.position == at(400))
    history.add([replace(record, position=at(380, 0), changes=())])
    assert announced(history, relation("id", "c"), at(400)) is None
    # It is of a time before that change.
    history.add([replace(record, position=at(360, 0), layout=replace(record.layout, files="before"), changes=())])
    assert history.at(7, at(380, 0)) is not None


def test_an_offset_carries_nothing_of_a_table_that_has_left(catalog: Catalog) -> None:
    history = filled(catalog)
    assert history.text(at(200), at(250), {OTHER}) == history.text(at(150, 2), at(199), {OTHER})
    assert [r.layout.oid for r in from_text(history.text(START, at(400), {OTHER}))] == [OTHER]
    history.keep({OTHER})
    assert [r.layout.oid for r in from_text(history.text(START, at(400), ALL))] == [OTHER]
    assert announced(history, relation("id", oid=OTHER), at(500)) is None


def test_rows_that_an_offset_has_another_layout_for_are_refused(catalog: Catalog) -> None:
    first, second = LayoutHistory(catalog.look), LayoutHistory(catalog.look)
    first.describe(relation("id", "a"), at(100), ALL)
    second.begin(from_text(first.text(START, at(200), ALL)), at(200))
    with pytest.raises(DefiniteError, match=r"public.t7: columns in the commit at 0/96 are not those that the checkp"):
        second.describe(relation("id", "b"), at(150), ALL)


def former_names(
    history: LayoutHistory, sent: RelationMessage, position: Position, oids: Collection[int] = ALL
) -> list[tuple[str, bool]]:
    changes = json.loads(history.describe(sent, position, oids).announced or "")["changes"]
    return [(c["was"], "taken" in c) for c in changes if c["change"] == "renamed"]


def test_a_renamed_table_says_whether_another_one_has_its_former_name(catalog: Catalog) -> None:
    history = LayoutHistory(catalog.look)
    history.begin((), START)
    one, other = relation("id"), relation("id", oid=OTHER)
    announced(history, one, at(100)), announced(history, other, at(100, 2))
    swapped = [replace(one, name=other.name), replace(other, name=one.name)]
    expected = [[("public.t7", False)], [("public.t8", True)]]
    assert [former_names(history, r, at(200, n)) for n, r in enumerate(swapped)] == expected
    # A batch that comes again says the same.
    again = LayoutHistory(catalog.look)
    again.begin(from_text(history.text(at(100, 2), at(300), ALL)), at(300))
    assert [former_names(again, r, at(200, n)) for n, r in enumerate(swapped)] == expected


def test_a_name_of_a_table_that_has_left_is_not_taken(catalog: Catalog) -> None:
    history = LayoutHistory(catalog.look)
    history.begin((), START)
    again = replace(relation("id", oid=OTHER), name="t7")
    announced(history, relation("id"), at(100)), announced(history, again, at(200))
    assert former_names(history, replace(again, name="other"), at(300), {OTHER}) == [("public.t7", False)]
