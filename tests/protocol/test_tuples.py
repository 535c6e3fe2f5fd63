"""The walk over messages of rows finds every value where it lies, for random messages and for broken ones."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutated import mutated
from trials import examples

from pg_cdc_source.errors import WireError
from pg_cdc_source.protocol.tuples import Rows, Tuples, tags_and_oids, walk
from pg_cdc_source.values.wire import Messages, WireBuffer

pytestmark = pytest.mark.usefixtures("accelerated")

# A value: text, None for NULL, UNCHANGED for one that did not travel.
UNCHANGED = 0
Value = bytes | int | None
Image = Sequence[Value]


def image(tag: bytes, values: Image) -> bytes:
    forms = {None: b"n", UNCHANGED: b"u"}
    return (
        tag
        + struct.pack(">H", len(values))
        + b"".join(b"t" + struct.pack(">I", len(v)) + v if isinstance(v, bytes) else forms[v] for v in values)
    )


def insert(new: Image, *, oid: int = 9) -> bytes:
    return b"I" + struct.pack(">I", oid) + image(b"N", new)


def update(new: Image, old: tuple[bytes, Image] | None = None, *, oid: int = 9) -> bytes:
    return b"U" + struct.pack(">I", oid) + (image(*old) if old else b"") + image(b"N", new)


def delete(tag: bytes, old: Image, *, oid: int = 9) -> bytes:
    return b"D" + struct.pack(">I", oid) + image(tag, old)


def walked(messages: Sequence[bytes], columns: int, *, header: int = 0) -> Rows:
    joined = Messages.joined([b"w" * header + message for message in messages])
    starts, _, _ = tags_and_oids(joined, header)
    return walk(joined.buffer, starts, joined.ends, columns)


def values(tuples: Tuples | None) -> list[list[Value]]:
    """The images, row by row."""
    if tuples is None:
        return []
    columns = []
    for field, toast in zip(tuples.fields, tuples.unchanged, strict=True):
        column: list[Value] = []
        for i, (start, length) in enumerate(zip(field.start.tolist(), field.length.tolist(), strict=True)):
            assert 0 <= start <= start + length <= field.buffer.zeros_at
            here = field.valid is None or bool(field.valid[i])
            missing = toast is not None and bool(toast[i])
            assert not (here and missing)
            assert here or length == 0
            column.append(field.buffer.data[start : start + length] if here else UNCHANGED if missing else None)
        columns.append(column)
    return [list(row) for row in zip(*columns, strict=True)]


# The bytes by hand, so that an error of `image` would show.
BY_HAND = [
    b"I\0\0\0\x09N\0\x03t\0\0\0\x021\xffnt\0\0\0\0",
    b"U\0\0\0\x09N\0\x03t\0\0\0\x012un",
    b"U\0\0\0\x09K\0\x03t\0\0\0\x012nnN\0\x03t\0\0\0\x013nu",
    b"U\0\0\0\x09O\0\x03t\0\0\0\x013t\0\0\0\x01xnN\0\x03t\0\0\0\x014ut\0\0\0\x01y",
    b"D\0\0\0\x09K\0\x03t\0\0\0\x014nn",
    b"D\0\0\0\x09O\0\x03nt\0\0\0\0t\0\0\0\x01z",
]
MADE = [
    insert([b"1\xff", None, b""]),
    update([b"2", UNCHANGED, None]),
    update([b"3", None, UNCHANGED], (b"K", [b"2", None, None])),
    update([b"4", UNCHANGED, b"y"], (b"O", [b"3", b"x", None])),
    delete(b"K", [b"4", None, None]),
    delete(b"O", [None, b"", b"z"]),
]


def test_every_kind_of_row_is_found() -> None:
    assert MADE == BY_HAND
    rows = walked(BY_HAND, 3)
    assert bytes(rows.kind) == b"IUUUDD"
    assert rows.has_old.tolist() == [False, False, True, True, True, True]
    assert rows.has_new.tolist() == [True, True, True, True, False, False]
    assert rows.old_is_full.tolist() == [False, False, False, True, False, True]
    assert values(rows.new) == [
        [b"1\xff", None, b""],
        [b"2", UNCHANGED, None],
        [b"3", None, UNCHANGED],
        [b"4", UNCHANGED, b"y"],
    ]
    assert values(rows.old) == [[b"2", None, None], [b"3", b"x", None], [b"4", None, None], [None, b"", b"z"]]


def test_rows_that_still_have_the_xid_of_a_stream_are_refused() -> None:
    messages = [message[:1] + b"\xff\xff\xff\xfe" + message[1:] for message in BY_HAND]
    for message in messages:
        with pytest.raises(WireError, match=r"pgoutput: (Insert|Update|Delete): expected"):
            walked([message], 3)


def test_tags_and_oids_are_behind_the_headers() -> None:
    messages = [b"x" * 25 + insert([], oid=1), b"x" * 25 + delete(b"K", [b"1"], oid=0xFFFFFFFF)]
    joined = Messages.joined(messages)
    starts, tags, oids = tags_and_oids(joined, 25)
    assert [joined.buffer.data[start:end] for start, end in zip(starts, joined.ends, strict=True)] == [
        m[25:] for m in messages
    ]
    assert (bytes(tags), oids.tolist()) == (b"ID", [1, 0xFFFFFFFF])


@pytest.mark.parametrize("columns", [0, 1600])
def test_tables_without_columns_and_of_the_most_are_walked(columns: int) -> None:
    row = [[b"%d" % i, None, b"", UNCHANGED][i % 4] for i in range(columns)]
    rows = walked([insert(row), update(row, (b"O", row)), delete(b"O", row)], columns)
    assert values(rows.new) == [row] * 2 * (columns > 0)
    assert values(rows.old) == [row] * 2 * (columns > 0)


NAME = {ord("I"): "Insert", ord("U"): "Update", ord("D"): "Delete"}


@pytest.mark.parametrize("which", range(len(BY_HAND)))
def test_short_and_long_rows_are_refused_by_name(which: int) -> None:
    message, width = BY_HAND[which], 5
    wrong = [message[:length] for length in range(width, len(message))]
    wrong += [message + b"\0", message + b"n", message + message[width:], message + message]
    for one in wrong:
        # Another message before or behind it, whose bytes a reader without bounds would take.
        for messages in ([one], [one, message], [message, one], [message, one, message]):
            with pytest.raises(WireError, match=rf"^\[WIRE\] pgoutput: {NAME[message[0]]}: expected"):
                walked(messages, 3)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (b"I\0\0\0\x09" + image(b"K", [b"1"]), "Insert: expected the tag of a row's image"),
        (b"I\0\0\0\x09" + image(b"O", [b"1"]), "Insert: expected the tag of a row's image"),
        (b"I\0\0\0\x09" + image(b"X", [b"1"]), "Insert: expected the tag of a row's image"),
        (b"I\0\0\0\x09" + image(b"K", [b"1"]) + image(b"N", [b"1"]), "Insert: expected the tag of a row's image"),
        (b"D\0\0\0\x09" + image(b"N", [b"1"]), "Delete: expected the tag of a row's image"),
        (b"D\0\0\0\x09" + image(b"k", [b"1"]), "Delete: expected the tag of a row's image"),
        (delete(b"K", [b"1"]) + image(b"N", [b"1"]), "Delete: expected to end"),
        (b"U\0\0\0\x09" + image(b"n", [b"1"]), "Update: expected the tag of a row's image"),
        (b"U\0\0\0\x09" + image(b"K", [b"1"]), "Update: expected a new row"),
        (b"U\0\0\0\x09" + image(b"K", [b"1"]) + image(b"O", [b"1"]), "Update: expected a new row"),
        (b"U\0\0\0\x09" + image(b"N", [b"1"]) + image(b"N", [b"1"]), "Update: expected to end"),
        (b"X\0\0\0\x09" + image(b"N", [b"1"]), "expected Insert, Update or Delete"),
        (b"T\0\0\0\x09" + image(b"N", [b"1"]), "expected Insert, Update or Delete"),
        (insert([]), "Insert: expected 1 columns, as its Relation message says"),
        (insert([b"1", b"2"]), "Insert: expected 1 columns"),
        (delete(b"K", [b"1", b"2"]), "Delete: expected 1 columns"),
        (update([b"1"], (b"K", [b"1", None])), "Update: expected 1 columns"),
        (update([b"1", None], (b"K", [b"1"])), "Update: expected 1 columns"),
        (b"I\0\0\0\x09N\xff\xfft\0\0\0\x011", "Insert: expected 1 columns"),
        (b"I\0\0\0\x09N\0\x01b\0\0\0\x011", "Insert: expected a column's form"),
        (b"I\0\0\0\x09N\0\x01T\0\0\0\x011", "Insert: expected a column's form"),
        (b"I\0\0\0\x09N\0\x01t\xff\xff\xff\xff", "Insert: expected a length of 0 or more"),
        (b"I\0\0\0\x09N\0\x01t\x80\0\0\x001", "Insert: expected a length of 0 or more"),
        (b"I\0\0\0\x09N\0\x01t\x7f\xff\xff\xff1", "Insert: expected a value that ends with its message"),
        (b"I\0\0\0\x09N\0\x01t\0\0\0\x021", "Insert: expected a value that ends with its message"),
        (b"I\0\0\0\x09N\0\x01t\0\0\0\x0012", "Insert: expected to end"),
    ],
)
def test_wrong_bytes_within_a_row_are_refused_by_name(message: bytes, expected: str) -> None:
    good = [insert([b"1"]), delete(b"K", [None])]
    for messages in ([message], [*good, message], [message, *good]):
        with pytest.raises(WireError, match=rf"^\[WIRE\] pgoutput: .*{expected}"):
            walked(messages, 1)


# --- any bytes ------------------------------------------------------------------------------------------------------


@examples(500)
@given(
    st.lists(st.binary(min_size=5, max_size=40) | mutated(BY_HAND, keep=5), min_size=1, max_size=5),
    st.integers(0, 4),
)
def test_walking_any_bytes_raises_nothing_but_wire_errors(messages: list[bytes], columns: int) -> None:
    try:
        rows = walked(messages, columns)
    except WireError:
        return
    # What is taken for rows is: each message holds its images and nothing else.
    news, olds = iter(values(rows.new)), iter(values(rows.old))
    for i, message in enumerate(messages):
        old = image(b"O" if rows.old_is_full[i] else b"K", next(olds, [])) if rows.has_old[i] else b""
        new = image(b"N", next(news, [])) if rows.has_new[i] else b""
        assert message[5:] == old + new


VALUES = st.none() | st.just(UNCHANGED) | st.binary(max_size=5)


@st.composite
def row_messages(draw: st.DrawFn) -> tuple[int, list[tuple[bytes, tuple[bytes, Image] | None, Image | None]]]:
    columns = draw(st.integers(0, 4))
    row = st.lists(VALUES, min_size=columns, max_size=columns)
    old = st.tuples(st.sampled_from([b"K", b"O"]), row)
    one = (
        st.tuples(st.just(b"I"), st.none(), row)
        | st.tuples(st.just(b"U"), st.none() | old, row)
        | st.tuples(st.just(b"D"), old, st.none())
    )
    return columns, draw(st.lists(one, min_size=1, max_size=8))


@given(row_messages(), st.integers(0, 30))
def test_what_is_written_is_found(
    table: tuple[int, list[tuple[bytes, tuple[bytes, Image] | None, Image | None]]], header: int
) -> None:
    columns, given_rows = table
    messages = [
        tag + b"\0\0\0\x09" + (image(*old) if old else b"") + (b"" if new is None else image(b"N", new))
        for tag, old, new in given_rows
    ]
    rows = walked(messages, columns, header=header)
    assert bytes(rows.kind) == b"".join(tag for tag, _, _ in given_rows)
    if columns:
        assert values(rows.old) == [list(old[1]) for _, old, _ in given_rows if old]
        assert values(rows.new) == [list(new) for _, _, new in given_rows if new is not None]
    assert rows.old_is_full.tolist() == [bool(old and old[0] == b"O") for _, old, _ in given_rows]


def test_positions_beyond_31_bits_do_not_wrap() -> None:
    """The greatest lengths, one after the other, must not add up to a place within the message."""
    message = b"I\0\0\0\x09N\0\x02t\x7f\xff\xff\xff" + b"t\x7f\xff\xff\xff" * 3
    with pytest.raises(WireError, match="a value that ends with its message"):
        walked([message], 2)
    buffer = WireBuffer([message])
    starts, ends = np.array([0]), np.array([len(message)])
    with pytest.raises(WireError):
        walk(buffer, starts, ends, 1)
