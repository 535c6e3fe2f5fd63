"""Messages of pgoutput byte for byte as the manual has them; any other bytes are a WireError and nothing else."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutated import mutated
from trials import examples

from pg_cdc_source.errors import WireError
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.protocol import pgoutput
from pg_cdc_source.protocol.pgoutput import (
    Begin,
    Commit,
    Message,
    Origin,
    RelationColumn,
    RelationMessage,
    StreamAbort,
    StreamCommit,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    read,
)

# 2024-02-03 04:05:06.789 UTC, since 2000 and since 1970.
SENT_TS = (760_248_306_789_000).to_bytes(8, "big")
TS = 1_706_933_106_789_000
LSN, LATER = 0x16_B374_D848, 0xFFFF_FFFF_FFFF_FFFF
XID = b"\xff\xff\xff\xfe"
COLUMNS = (RelationColumn(True, "id", 23, -1), RelationColumn(False, "größe", 1700, 0x000A0006))
SENT_COLUMNS = (
    b"\0\x02"
    b"\x01id\0\0\0\0\x17\xff\xff\xff\xff"
    b"\x00gr\xc3\xb6\xc3\x9fe\0\0\0\x06\xa4\x00\x0a\x00\x06"
)  # fmt: skip

# What a message says, its tag and its bytes behind that.
MESSAGES: dict[str, tuple[Any, bytes, bytes]] = {
    "Begin": (Begin(Lsn(LSN), TS, 0xFFFFFFFE), b"B", b"\0\0\0\x16\xb3\x74\xd8\x48" + SENT_TS + XID),
    "Commit": (
        Commit(0, Lsn(LSN), Lsn(LATER), TS),
        b"C",
        b"\0" + b"\0\0\0\x16\xb3\x74\xd8\x48" + b"\xff" * 8 + SENT_TS,
    ),
    "Origin": (Origin(Lsn(LSN), "näher"), b"O", b"\0\0\0\x16\xb3\x74\xd8\x48" + "näher".encode() + b"\0"),
    "Relation": (
        RelationMessage(0xFFFFFFFF, "a.b", "T", "d", COLUMNS),
        b"R",
        b"\xff\xff\xff\xff" + b"a.b\0" + b"T\0" + b"d" + SENT_COLUMNS,
    ),
    "Relation of pg_catalog": (
        RelationMessage(1, "pg_catalog", "t", "n", ()),
        b"R",
        b"\0\0\0\x01" + b"\0" + b"t\0" + b"n" + b"\0\0",
    ),
    "Type": (Type(70000, "public", "mood"), b"Y", b"\0\x01\x11\x70" + b"public\0" + b"mood\0"),
    "Type of pg_catalog": (Type(23, "pg_catalog", "int4"), b"Y", b"\0\0\0\x17" + b"\0" + b"int4\0"),
    "Truncate": (Truncate(False, True, (5, 4294967295)), b"T", b"\0\0\0\x02" + b"\x02" + b"\0\0\0\x05\xff\xff\xff\xff"),
    "Truncate, cascading": (Truncate(True, False, (5,)), b"T", b"\0\0\0\x01" + b"\x01" + b"\0\0\0\x05"),
    "Message": (
        Message(True, Lsn(LSN), "a prefix", b"\0\xff content"),
        b"M",
        b"\x01" + b"\0\0\0\x16\xb3\x74\xd8\x48" + b"a prefix\0" + b"\0\0\0\x0a" + b"\0\xff content",
    ),
    "Message, empty": (
        Message(False, Lsn(1), "", b""),
        b"M",
        b"\0" + b"\0\0\0\0\0\0\0\x01" + b"\0" + b"\0\0\0\0",
    ),
    "Stream Start": (StreamStart(0xFFFFFFFE, True), b"S", XID + b"\x01"),
    "Stream Start, again": (StreamStart(0xFFFFFFFE, False), b"S", XID + b"\0"),
    "Stream Stop": (StreamStop(), b"E", b""),
    "Stream Commit": (
        StreamCommit(0xFFFFFFFE, 0, Lsn(LSN), Lsn(LATER), TS),
        b"c",
        XID + b"\0" + b"\0\0\0\x16\xb3\x74\xd8\x48" + b"\xff" * 8 + SENT_TS,
    ),
    "Stream Abort": (StreamAbort(0xFFFFFFFE, 7), b"A", XID + b"\0\0\0\x07"),
}


def sent(name: str) -> bytes:
    _, tag, body = MESSAGES[name]
    return tag + body


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_says_what_its_bytes_mean(name: str) -> None:
    message = MESSAGES[name][0]
    assert read(sent(name)) == message
    assert read(b"any header" + sent(name), 10) == message


@pytest.mark.parametrize("name", MESSAGES)
def test_short_and_long_messages_are_refused_by_name(name: str) -> None:
    data, named = sent(name), name.split(" of ")[0].split(",")[0]
    wrong = [data[:length] for length in range(1, len(data))] + [data + b"\0", data + data]
    for one in wrong:
        with pytest.raises(WireError, match=rf"^\[WIRE\] pgoutput: {named}: expected"):
            read(one)
        # Bytes of the header are none of the message's.
        with pytest.raises(WireError, match=rf"^\[WIRE\] pgoutput: {named}: expected"):
            read(b"\0" * 25 + one, 25)


@pytest.mark.parametrize("tag", sorted(set(range(256)) - set(b"BCORYTMSEcA")))
def test_unknown_tags_and_those_of_rows_are_refused(tag: int) -> None:
    with pytest.raises(WireError, match="expected a message's tag, got"):
        read(bytes([tag]) + bytes(40))


def test_a_prefix_that_is_no_utf_8_is_nobodys() -> None:
    """A database in SQL_ASCII has texts of any bytes."""
    _, tag, body = MESSAGES["Message"]
    at = 9
    found = read(tag + body[:at] + b"\xe4" + body[at + 1 :])
    assert found.prefix == "\udce4" + MESSAGES["Message"][0].prefix[1:]


def test_names_that_nobody_needs_may_be_of_any_bytes() -> None:
    assert read(b"Y" + bytes(4) + b"public\0gr\xf6\xdfe\0").name == "gr\udcf6\udcdfe"
    assert read(b"O" + bytes(8) + b"caf\xe9\0").name == "caf\udce9"


def test_no_bytes_are_no_message() -> None:
    for data in (b"", b"header"):
        with pytest.raises(WireError, match="got nothing"):
            read(data, len(data))


@pytest.mark.parametrize(
    ("name", "at", "wrong", "expected"),
    [
        ("Commit", 1, b"\x01", "flags of at most 0, got 1"),
        ("Stream Commit", 5, b"\x80", "flags of at most 0, got 128"),
        ("Relation", 11, b"x", "replica identity d, n, f or i"),
        ("Relation", 11, b"\0", "replica identity d, n, f or i"),
        ("Relation", 12, b"\0\x03", "bytes or more"),
        ("Relation", 12, b"\0\x01", r"expected \d+ bytes, got"),
        ("Relation", 12, b"\xff\xff", "expected"),
        ("Relation", 14, b"\x02", "flags of at most 1, got 2"),
        ("Relation", 9, b"\xff", "expected UTF-8"),
        ("Truncate", 1, b"\0\0\0\x03", "expected 18 bytes or more, got 14"),
        ("Truncate", 1, b"\0\0\0\x01", "expected 10 bytes, got 14"),
        ("Truncate", 1, b"\xff\xff\xff\xff", "expected 17179869186 bytes or more, got 14"),
        ("Truncate", 5, b"\x04", "flags of at most 3, got 4"),
        ("Message", 1, b"\x02", "flags of at most 1, got 2"),
        ("Message", 19, b"\0\0\0\x0b", "bytes or more"),
        ("Message", 19, b"\0\0\0\x09", "expected 32 bytes, got 33"),
        ("Message", 19, b"\xff\xff\xff\xff", "bytes or more"),
        ("Stream Start", 5, b"\x02", "flags of at most 1, got 2"),
    ],
)
def test_wrong_bytes_within_a_message_are_refused_by_name(name: str, at: int, wrong: bytes, expected: str) -> None:
    data = sent(name)
    with pytest.raises(WireError, match=rf"^\[WIRE\] pgoutput: {name}: .*{expected}"):
        read(data[:at] + wrong + data[at + len(wrong) :])


def test_a_relation_of_the_most_columns_is_read() -> None:
    count = 1600
    body = b"".join(b"\0" + f"c{i}\0".encode() + struct.pack(">Ii", i, -1) for i in range(count))
    relation = read(b"R\0\0\0\x01s\0t\0f" + struct.pack(">H", count) + body)
    assert [column.type_oid for column in relation.columns] == list(range(count))


KNOWN = [sent(name) for name in MESSAGES]


@examples(500)
@given(st.binary(max_size=60) | mutated(KNOWN, keep=0))
def test_reading_any_bytes_raises_nothing_but_wire_errors(data: bytes) -> None:
    with contextlib.suppress(WireError):
        assert type(read(data)).__name__ in pgoutput.__dict__
