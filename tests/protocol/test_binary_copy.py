"""The framing of a binary COPY, and that every layout of NULLs decodes to the same rows."""

from __future__ import annotations

import struct
from typing import Any, Literal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_cdc_source.errors import TransientError, WireError
from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.protocol.binary_copy import CopyDecoder, CopyMessages, record_batch, select_order
from pg_cdc_source.protocol.refused import RefusedValueError
from pg_cdc_source.values.registry import TYPES, CatalogType, Codec, Column, plan
from pg_cdc_source.values.wire import Messages, WireBuffer

pytestmark = pytest.mark.usefixtures("accelerated")

KINDS = {pg_type.name: CatalogType(pg_type.oid) for pg_type in TYPES if pg_type.oid}
KINDS["int4[]"] = CatalogType(1007, element=KINDS["int4"], element_oid=KINDS["int4"].oid)
HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
TRAILER = b"\xff\xff"


def codecs(*columns: str) -> list[Codec]:
    """Plan columns that are written as ``int4`` or ``int4!``, which is NOT NULL."""
    return [
        plan(
            Column(f"c{i}", i, KINDS[name.rstrip("!")], name.rstrip("!"), name.endswith("!")),
            as_string=False,
            numeric_as=NumericAs("string"),
        )
        for i, name in enumerate(columns)
    ]


def row(*fields: bytes | None) -> bytes:
    parts = [struct.pack(">h", len(fields))]
    for field in fields:
        parts.append(struct.pack(">i", -1) if field is None else struct.pack(">i", len(field)) + field)
    return b"".join(parts)


def int4(value: int) -> bytes:
    return struct.pack(">i", value)


def joined(messages: list[bytes], padding: int = 0) -> Messages:
    return Messages.joined(messages, padding)


def rows_among(copy: CopyMessages, messages: list[bytes]) -> list[bytes]:
    rows = copy.rows(joined(messages))
    return [rows.octets(i) for i in range(len(rows))]


def decode(how: list[Codec], rows: list[bytes], unrepresentable: Literal["error", "null"] = "error") -> list[list[Any]]:
    decoder = CopyDecoder(how, unrepresentable)
    arrays = decoder.decode(joined(rows, decoder.padding))
    for codec, array in zip(how, arrays, strict=True):
        array.validate(full=True)
        assert array.type == codec.arrow_type
    return [array.to_pylist() for array in arrays]


# --- messages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        [HEADER, b"row 1", b"row 2", TRAILER],
        [HEADER + b"row 1", b"row 2", TRAILER],
        [HEADER[:-4] + int4(3) + b"abc" + b"row 1", b"row 2", TRAILER],
        [HEADER[:11] + int4(0xFFFF) + HEADER[15:] + b"row 1", b"row 2", TRAILER],
    ],
)
def test_header_and_trailer_are_no_rows_however_they_come(messages: list[bytes]) -> None:
    at_once = CopyMessages()
    assert rows_among(at_once, messages) == [b"row 1", b"row 2"]
    at_once.finish()
    one_by_one = CopyMessages()
    assert [row for message in messages for row in rows_among(one_by_one, [message])] == [b"row 1", b"row 2"]
    one_by_one.finish()


@pytest.mark.parametrize("messages", [[HEADER, TRAILER], [HEADER + TRAILER]])
def test_an_empty_copy_has_no_rows(messages: list[bytes]) -> None:
    copy = CopyMessages()
    assert rows_among(copy, messages) == []
    assert rows_among(copy, []) == []
    copy.finish()


@pytest.mark.parametrize("messages", [[], [HEADER], [HEADER + b"row"], [HEADER, b"row"]])
def test_a_copy_without_trailer_was_cut_off(messages: list[bytes]) -> None:
    copy = CopyMessages()
    rows_among(copy, messages)
    with pytest.raises(TransientError, match="without its trailer"):
        copy.finish()


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([b"row"], "expected a header"),
        ([b""], "expected a header"),
        ([TRAILER], "expected a header"),
        ([HEADER[:-1]], "expected a header"),
        ([b"X" + HEADER[1:]], "expected a header"),
        ([HEADER[:11] + int4(1 << 16) + HEADER[15:]], "critical flags"),
        ([HEADER[:-4] + int4(1)], "expected a header of 20 bytes"),
        ([HEADER[:-4] + int4(-1)], "expected a header of"),
    ],
)
def test_what_is_no_header_is_a_wire_error(messages: list[bytes], what: str) -> None:
    with pytest.raises(WireError, match=what):
        rows_among(CopyMessages(), messages)


def test_nothing_may_follow_the_trailer() -> None:
    copy = CopyMessages()
    rows_among(copy, [HEADER, TRAILER])
    with pytest.raises(WireError, match="after the trailer"):
        rows_among(copy, [row()])
    # A trailer among rows is a row of -1 fields.
    rows = rows_among(CopyMessages(), [HEADER, TRAILER, row(int4(1)), TRAILER])
    with pytest.raises(WireError, match="rows of 1 fields, got one of -1"):
        decode(codecs("int4"), rows)


# --- rows ----------------------------------------------------------------------------------------------------------

COLUMNS = ("text", "int4", "int8!", "int4[]", "bool", "uuid!", "jsonb", "int2!", "float8")


def test_columns_are_selected_not_null_fixed_then_fixed_then_the_rest() -> None:
    assert select_order(codecs(*COLUMNS)) == [2, 5, 7, 1, 4, 8, 0, 3, 6]
    assert select_order([]) == []


def test_arrays_come_in_the_order_of_the_columns() -> None:
    sent = row(struct.pack(">q", 8), bytes(16), struct.pack(">h", 2), int4(4), b"\1", struct.pack(">d", 0.5),
               b"text", struct.pack(">iiI", 0, 0, 23), b"\1{}")  # fmt: skip
    expected = ["text", 4, 8, [], True, "00000000-0000-0000-0000-000000000000", "{}", 2, 0.5]
    assert decode(codecs(*COLUMNS), [sent] * 3) == [[value] * 3 for value in expected]


VALUES: dict[str, Any] = {
    "int4": st.integers(-(2**31), 2**31 - 1).map(lambda n: (n, int4(n))),
    "int8": st.integers(-(2**63), 2**63 - 1).map(lambda n: (n, struct.pack(">q", n))),
    "bool": st.booleans().map(lambda b: (b, bytes([b]))),
    "text": st.text(st.characters(exclude_categories=["Cs"]), max_size=20).map(lambda t: (t, t.encode())),
    "bytea": st.binary(max_size=20).map(lambda b: (b, b)),
    "int4[]": st.lists(st.none() | st.integers(-9, 9), max_size=4).map(
        lambda items: (
            items,
            struct.pack(">iiIii", 1, 1, 23, len(items), 1)
            + b"".join(int4(-1) if n is None else int4(4) + int4(n) for n in items),
        )
    ),
}


@given(st.lists(st.tuples(st.sampled_from(list(VALUES)), st.booleans()), max_size=7), st.integers(0, 12), st.data())
def test_any_rows_decode_whatever_is_null(columns: list[tuple[str, bool]], n: int, data: st.DataObject) -> None:
    how = codecs(*[name + "!" * not_null for name, not_null in columns])
    cells = [
        [data.draw(VALUES[name] if not_null else st.none() | VALUES[name]) for name, not_null in columns]
        for _ in range(n)
    ]
    order = select_order(how)
    rows = [row(*[None if line[i] is None else line[i][1] for i in order]) for line in cells]
    expected = [[None if line[i] is None else line[i][0] for line in cells] for i in range(len(columns))]
    assert decode(how, rows) == expected
    arrays = CopyDecoder(how, "error")
    assert [[array[0].as_py() for array in arrays.decode(joined([one], arrays.padding))] for one in rows] == [
        [None if cell is None else cell[0] for cell in line] for line in cells
    ]


def test_a_null_in_a_column_declared_not_null_is_read_as_null() -> None:
    how = codecs("int4!", "int8!", "text!")
    full = row(int4(1), struct.pack(">q", 2), b"x")
    assert decode(how, [full, row(None, struct.pack(">q", 3), b"y"), row(int4(4), None, None), full]) == [
        [1, None, 4, 1],
        [2, 3, None, 2],
        ["x", "y", None, "x"],
    ]


def test_a_short_row_is_not_completed_by_the_bytes_of_the_next() -> None:
    how = codecs("int4!", "int4!")
    full = row(int4(1), int4(2))
    # The next row begins with the two bytes that are missing.
    cut = full[:-2]
    for rows in ([cut, full], [full, cut, full], [full, cut]):
        with pytest.raises(
            WireError, match=r"column c1 \(int4\): expected a value inside its row, got one 2 bytes beyond"
        ):
            decode(how, rows)


FULL = row(int4(1), int4(2), b"abc")


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (b"", "row of 2 bytes or more, got 0"),
        (b"\0", "row of 2 bytes or more, got 1"),
        (row(int4(1), int4(2)), "rows of 3 fields, got one of 2"),
        (row(int4(1), int4(2), b"abc", b""), "rows of 3 fields, got one of 4"),
        (TRAILER, "rows of 3 fields, got one of -1"),
        (FULL + b"\0", "expected rows to end after their last field, got 1 more bytes"),
        (row(int4(1)[:3], int4(2), b"abc"), r"column c0 \(int4\): expected 4 bytes, got 3"),
        (row(int4(1), int4(2) + b"\0", b"abc"), r"column c1 \(int4\): expected 4 bytes, got 5"),
        (row(int4(1), b"", b"abc"), r"column c1 \(int4\): expected 4 bytes, got 0"),
        (FULL.replace(int4(3), int4(-2)), r"column c2 \(text\): expected a length of -1 or more, got -2"),
        (
            FULL.replace(int4(3), int4(4)),
            r"column c2 \(text\): expected a value inside its row, got one 1 bytes beyond",
        ),
        (FULL.replace(int4(3), int4(2**31 - 1)), r"column c2 \(text\): expected a value inside its row"),
        (FULL[:2] + int4(2**31 - 1) + FULL[6:], r"column c0 \(int4\): expected a value inside its row"),
        *((FULL[:end], "expected") for end in range(2, len(FULL))),
    ],
)
def test_malformed_rows_are_wire_errors_wherever_they_stand(bad: bytes, what: str) -> None:
    how = codecs("int4!", "int4", "text")
    null = row(int4(1), None, None)
    for rows in ([bad], [bad, FULL], [FULL, bad], [FULL, null, bad, FULL], [FULL] * 300 + [bad] + [null] * 300):
        with pytest.raises(WireError, match=what):
            decode(how, rows, "null")


@given(st.binary(max_size=60), st.integers(0, 60), st.integers(0, 255))
def test_a_changed_byte_never_leads_outside_the_row(tail: bytes, at: int, byte: int) -> None:
    how = codecs("int4!", "text", "int4[]")
    sound = row(int4(7), b"abc", struct.pack(">iiIii", 1, 0, 23, 1, 1) + int4(4) + int4(9))
    changed = bytearray(sound)
    changed[at % len(sound)] = byte
    try:
        columns = decode(how, [sound, bytes(changed), sound], "null")
    except WireError:
        return
    assert [[column[0], column[2]] for column in columns] == [[7, 7], ["abc", "abc"], [[9], [9]]]
    with pytest.raises(WireError):
        decode(how, [sound, sound + tail + b"\0"], "null")


def test_an_unrepresentable_value_names_its_row_and_column() -> None:
    how = codecs("date!", "date")
    fine, infinite = int4(0), int4(2**31 - 1)
    rows = [row(fine, None), row(fine, fine), row(fine, infinite), row(infinite, fine)]
    with pytest.raises(RefusedValueError, match=r"column c0 \(date\), row 3 of the chunk: infinity") as refused:
        decode(how, rows)
    assert (refused.value.column.name, refused.value.row, refused.value.reason) == ("c0", 3, "infinity")
    with pytest.raises(RefusedValueError, match=r"column c1 \(date\), row 2"):
        decode(how, rows[:3])
    assert [[value is None for value in column] for column in decode(how, rows, "null")] == [
        [False, False, False, True],
        [True, False, True, False],
    ]


def test_a_chunk_beyond_32_bit_offsets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("wire", "strings"):
        monkeypatch.setattr(f"pg_cdc_source.values.{module}.MAX_OFFSET", 1000)
    WireBuffer([bytes(980)])
    with pytest.raises(ValueError, match="a chunk of 981 bytes"):
        WireBuffer([bytes(981)])
    with pytest.raises(ValueError, match="28 uuids"):
        decode(codecs("uuid"), [row(bytes(16))] * 28)


def test_chunks_join_into_one_batch() -> None:
    how = codecs("int4", "text")
    decoder = CopyDecoder(how, "error")
    schema = pa.schema([(codec.column.name, codec.arrow_type) for codec in how])
    chunks = [decoder.decode(joined([row(int4(n), None), row(None, b"x")], decoder.padding)) for n in range(3)]
    assert record_batch(chunks, schema).to_pydict() == {"c0": [0, None, 1, None, 2, None], "c1": [None, "x"] * 3}
    single = record_batch(chunks[:1], schema)
    assert single.column(0).buffers()[1].address == chunks[0][0].buffers()[1].address
