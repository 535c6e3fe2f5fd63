from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_cdc_source.errors import DefiniteError
from pg_cdc_source.offsets import (
    ALL,
    INITIAL,
    XIDS,
    Horizon,
    Lsn,
    Member,
    Position,
    SlotIdentity,
    StreamOffset,
    end_of_timeline,
    split_names,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0/0", 0),
        ("0/1", 1),
        ("1/0", 1 << 32),
        ("16/B374D848", 0x16B374D848),
        ("16/b374d848", 0x16B374D848),
        ("0000000A/00000001", 0xA00000001),
        ("FFFFFFFF/FFFFFFFF", (1 << 64) - 1),
    ],
)
def test_an_lsn_is_read_as_postgresql_reads_it(text: str, value: int) -> None:
    assert Lsn.parse(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "/", "0", "0/", "/0", "0/0/0", "G/0", "0x1/0", "-1/0", "+1/0", " 0/0", "0/0\n", "1_0/0", "123456789/0", "٣/0"],
)
def test_a_malformed_lsn_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="is not an LSN") as refused:
        Lsn.parse(text)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize("value", [-1, 1 << 64])
def test_a_position_outside_64_bits_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        Lsn(value)


@given(st.integers(min_value=0, max_value=(1 << 64) - 1))
def test_text_and_position_are_one_to_one(value: int) -> None:
    lsn = Lsn(value)
    assert Lsn.parse(str(lsn)) == lsn
    assert f"{lsn}" == str(lsn)
    assert pickle.loads(pickle.dumps(lsn)) == lsn  # noqa: S301 - our own bytes


def test_an_lsn_prints_as_postgresql_prints_it() -> None:
    lsn = Lsn(0x16B374D848)
    assert str(lsn) == "16/B374D848"
    assert repr(lsn) == "Lsn('16/B374D848')"
    assert str(Lsn(0x100000000)) == "1/0"


def test_an_lsn_orders_and_counts_as_its_number() -> None:
    assert Lsn.parse("1/0") - Lsn.parse("0/FFFFFFFF") == 1
    assert Lsn.parse("9/0") < Lsn.parse("10/0")
    assert json.dumps(Lsn(5)) == "5"


HISTORY = """1\t0/3000158\tno recovery target specified

2\t16/B374D848\tbefore 2026-11-21 10:00:00+00 # and a # comment
# 3\t17/0\tcommented out
"""


@pytest.mark.parametrize(("timeline", "end"), [(1, "0/3000158"), (2, "16/B374D848"), (3, None), (10, None)])
def test_a_timeline_ends_where_the_history_of_a_later_one_says(timeline: int, end: str | None) -> None:
    assert end_of_timeline(HISTORY, timeline) == (None if end is None else Lsn.parse(end))


# --- positions ------------------------------------------------------------------------------------------------------


def test_positions_order_as_the_stream_does() -> None:
    ordered = [
        Position.before(100),
        Position(Lsn(100), 0),
        Position(Lsn(100), 1),
        Position(Lsn(100), 2),
        Position(Lsn(100)),
        Position(Lsn(101), 1),
    ]
    assert sorted(ordered) == ordered
    assert Position.before(101) == Position(Lsn(100))


def test_what_may_be_confirmed_is_before_the_least_commit_that_may_have_more() -> None:
    assert Position(Lsn(100)).next_lsn == 101
    assert Position(Lsn(100), 7).next_lsn == 100
    assert Position.before(100).next_lsn == 100
    assert isinstance(Position(Lsn(100)).next_lsn, Lsn)


def test_a_position_prints_its_change_where_it_stands_within_a_commit() -> None:
    assert str(Position(Lsn(0x100000002))) == "1/2"
    assert str(Position(Lsn(0x100000002), 3)) == "1/2, change at 0/3"


# --- offsets --------------------------------------------------------------------------------------------------------

IDENTITY = SlotIdentity("7342342342342342342", 1, "shop", "orders")
# Names as SQL quotes them.
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=6).map(
    lambda name: '"' + name.replace('"', '""') + '"'
)
TABLES = st.lists(st.tuples(st.just("public") | NAMES, st.just("t") | NAMES).map(".".join), max_size=4).map(tuple)
LSNS = st.integers(0, (1 << 64) - 1).map(Lsn)


ENTRIES, KEYS = st.sampled_from(["", "91+92rc@7"]), st.lists(st.text(), max_size=2).map(tuple)
MEMBERS = st.builds(Member, st.integers(1, (1 << 32) - 1), NAMES, LSNS, ENTRIES, KEYS)
XIDS_32 = st.integers(0, XIDS - 1)
OFFSETS = st.builds(
    StreamOffset,
    identity=st.text(min_size=1).map(lambda slot: SlotIdentity(IDENTITY.system, 4294967295, "größe", slot)),
    origin=LSNS,
    tables=TABLES,
    done=st.just(0),
    position=st.builds(Position, LSNS, st.just(ALL) | st.integers(0, 1 << 40)),
    publication=st.text(),
    members=st.none() | st.lists(MEMBERS, max_size=3).map(tuple),
    due=TABLES,
    gaps=TABLES,
    seen=st.none() | st.builds(Horizon, LSNS, XIDS_32, st.frozensets(XIDS_32, max_size=3)),
)


@given(OFFSETS, st.integers(0, 4), st.none() | LSNS)
def test_an_offset_comes_back_from_sparks_log_as_it_was(offset: StreamOffset, done: int, at: Lsn | None) -> None:
    if offset.tables:
        offset = replace(offset, done=min(done, len(offset.tables)), at=at)
    text = json.dumps(offset.to_json())
    again = StreamOffset.from_json(json.loads(text))
    assert again == offset
    # Spark compares texts, its own and those of a process before.
    assert json.dumps(again.to_json()) == text
    assert pickle.loads(pickle.dumps(offset)) == offset  # noqa: S301 - our own bytes


# What release 0.1.0 wrote. A checkpoint holds these texts, so they are read and written as they are for ever.
HEAD = (
    '{"version": 1, "system": "7342342342342342342", "timeline": 1, "database": "shop", "slot": "orders", '
    '"origin": "16/B374D848", '
)
MARK = "16390 iudt 16384:16391 16387:16392+16394rc"
ORIGIN = Lsn(0x16B374D848)
BEFORE = Position(Lsn(0x16B374D847))
STORED: dict[str, tuple[str, StreamOffset]] = {
    "the first of four tables": (
        HEAD + '"snapshot": {"tables": "public.a,\\"A,b\\".\\"c\\"\\"d\\",public.user,order.items", "done": 1}, '
        '"lsn": "16/B374D847"}',
        StreamOffset(IDENTITY, ORIGIN, ("public.a", '"A,b"."c""d"', "public.user", "order.items"), 1, BEFORE),
    ),
    "the first of two tables, of a known publication": (
        HEAD + '"publication": "16390 iudt 16384:16391 16387:16392+16394rc", '
        '"snapshot": {"tables": "public.a,public.b", "done": 1}, "lsn": "16/B374D847"}',
        StreamOffset(IDENTITY, ORIGIN, ("public.a", "public.b"), 1, BEFORE, MARK),
    ),
    "all tables": (
        HEAD + '"publication": "16390 iudt 16384:16391 16387:16392+16394rc", '
        '"snapshot": {"tables": "public.a,public.b", "done": 2}, "lsn": "16/B374D847"}',
        StreamOffset(IDENTITY, ORIGIN, ("public.a", "public.b"), 2, BEFORE, MARK),
    ),
    "no changes yet": (
        HEAD + '"lsn": "16/B374D847"}',
        StreamOffset(IDENTITY, ORIGIN, (), 0, BEFORE),
    ),
    "changes": (
        HEAD + '"publication": "16390 iudt 16384:16391 16387:16392+16394rc", "lsn": "17/0"}',
        StreamOffset(IDENTITY, ORIGIN, (), 0, Position(Lsn(0x1700000000)), MARK),
    ),
    "another server, and the last LSN": (
        '{"version": 1, "system": "7342342342342342343", "timeline": 3, "database": "gr\\u00f6\\u00dfe", '
        '"slot": "orders_1", "origin": "0/1", "publication": "16390 i 16384:16391@742", '
        '"lsn": "FFFFFFFF/FFFFFFFF"}',
        StreamOffset(
            SlotIdentity("7342342342342342343", 3, "größe", "orders_1"),
            Lsn(1),
            (),
            0,
            Position(Lsn((1 << 64) - 1)),
            "16390 i 16384:16391@742",
        ),
    ),
}


@pytest.mark.parametrize(("text", "offset"), STORED.values(), ids=STORED)
def test_an_offset_of_the_first_release_is_read_and_written_as_it_was(text: str, offset: StreamOffset) -> None:
    assert StreamOffset.from_json(json.loads(text)) == offset
    assert json.dumps(offset.to_json()) == text


def test_the_initial_offset_of_the_first_release_is_read_and_written_as_it_was() -> None:
    text = '{"version": 1, "lsn": "initial"}'
    assert StreamOffset.from_json(json.loads(text)) is None
    assert json.dumps(INITIAL) == text


@pytest.mark.parametrize("seq", [0, 4, 1234567])
def test_an_offset_of_the_first_release_within_a_commit_is_refused(seq: int) -> None:
    """It counted a commit's changes, which PostgreSQL may send in other numbers the next time."""
    with pytest.raises(DefiniteError, match="ended within the commit at 17/A0, by a number of changes"):
        StreamOffset.from_json(json.loads(f'{HEAD}"lsn": "17/A0", "seq": {seq}}}'))


def test_an_offset_with_tables_has_the_second_version() -> None:
    without = StreamOffset(IDENTITY, Lsn(5), (), 0, Position(Lsn(7)))
    assert without.to_json()["version"] == 1
    members = (Member(16384, "public.a", Lsn(5), "91"),)
    assert replace(without, members=members).to_json()["version"] == 2
    assert replace(without, members=members).to_json()["tables"] == [[16384, "public.a", "0/5", "91"]]
    # All of them have left, which is not the same as not to know them.
    assert replace(without, members=()).to_json()["tables"] == []


GOOD = StreamOffset(IDENTITY, Lsn(5), ("public.a", "public.b"), 1, Position(Lsn(7), 3)).to_json()


def test_an_offset_that_says_more_than_this_release_knows_is_refused() -> None:
    """It would be forgotten."""
    with pytest.raises(DefiniteError, match="says asked, owed, which this release does not know"):
        StreamOffset.from_json({**GOOD, "owed": "public.t", "asked": 1})


@pytest.mark.parametrize("version", [None, 0, 3, "1", [1]])
def test_another_releases_offset_is_refused(version: object) -> None:
    with pytest.raises(DefiniteError, match=r"has version .*, this release reads 1 and 2") as caught:
        StreamOffset.from_json({**GOOD, "version": version})
    assert "Remedy" in str(caught.value)


@pytest.mark.parametrize("missing", [name for name in GOOD if name not in ("version", "snapshot", "change")])
def test_an_offset_that_lacks_something_is_refused(missing: str) -> None:
    with pytest.raises(DefiniteError, match="not one that pgcdc wrote") as caught:
        StreamOffset.from_json({name: value for name, value in GOOD.items() if name != missing})
    assert "Remedy" in str(caught.value)


WRONG_LSNS: tuple[Any, ...] = ("", "5", "x/y", "initial", 5, None, [])
WRONG_TIMELINES: tuple[Any, ...] = ("x", None, [], {})


@pytest.mark.parametrize(
    "changed",
    [
        *({name: value} for name in ("origin", "lsn", "change") for value in WRONG_LSNS),
        *({"timeline": value} for value in WRONG_TIMELINES),
        *({"snapshot": value} for value in ("x", 1, ["a"], {"tables": "a"}, {"done": 1})),
        *({"snapshot": {"tables": value, "done": 0}} for value in (None, 5, ["a"])),
        *({"snapshot": {"tables": "a,b", "done": value}} for value in ("x", None, -1, 3)),
        *({"snapshot": {"tables": "a,b", "done": 1, "at": value}} for value in ("x", 5)),
        *({"tables": value} for value in (5, [5], [[1, "a", "0/1"]], [["x", "a", "0/1", ""]], [[1, "a", "x", ""]])),
        {"due": 5},
        {"gaps": 5},
    ],
    ids=repr,
)
def test_an_offset_with_something_else_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(DefiniteError, match="not one that pgcdc wrote"):
        StreamOffset.from_json({**GOOD, **changed})


def test_names_are_cut_at_commas_outside_of_quotes() -> None:
    assert split_names("") == []
    assert split_names('a.b,"x,y".c,"q""u,o""te".d') == ["a.b", '"x,y".c', '"q""u,o""te".d']
