"""What C gives is what NumPy gives, for sound bytes and for others, and nothing is missing without it."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pg_cdc_source.errors import WireError
from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.protocol.binary_copy import CopyDecoder
from pg_cdc_source.protocol.tuples import tags_and_oids, walk
from pg_cdc_source.values import native
from pg_cdc_source.values.decoder import Decoder, Field, MalformedError
from pg_cdc_source.values.moments import PrintedMoment
from pg_cdc_source.values.numbers import PrintedFloat, PrintedInteger
from pg_cdc_source.values.numeric import Decimal, PrintedDecimal
from pg_cdc_source.values.registry import CatalogType, Column, plan
from pg_cdc_source.values.strings import Text
from pg_cdc_source.values.wire import Collected, Messages, WireBuffer

DECODERS: dict[str, Decoder] = {
    "int2": PrintedInteger(pa.int16(), range=pa.int16()),
    "int8": PrintedInteger(pa.int64(), range=pa.int64()),
    "oid": PrintedInteger(pa.int64(), range=pa.uint32()),
    "float4": PrintedFloat(pa.float32()),
    "float8": PrintedFloat(pa.float64()),
    "date": PrintedMoment(pa.date32()),
    "timestamp": PrintedMoment(pa.timestamp("us")),
    "timestamptz": PrintedMoment(pa.timestamp("us", tz="UTC")),
    **{f"numeric({p},{s})": PrintedDecimal(pa.decimal128(p, s)) for p, s in ((1, 0), (5, 5), (18, 4), (38, 20))},
}
SOUND = {
    "int": st.integers(-(2**70), 2**70).map(str),
    "float": st.floats().map(lambda x: repr(x).replace("inf", "Infinity").replace("nan", "NaN").removesuffix(".0")),
    "decimal": st.decimals(allow_nan=False, allow_infinity=False).map(lambda d: f"{d:f}"[:60]),
    "date": st.dates().map(str),
    "timestamp": st.datetimes().map(lambda t: str(t).rstrip("0").rstrip(".") if t.microsecond else str(t)),
    "timestamptz": st.datetimes().map(lambda t: f"{t}+00"),
    "special": st.sampled_from(["NaN", "Infinity", "-Infinity", "infinity", "0044-03-15 BC", "10000-01-01", "", "-0"]),
}


def field(texts: list[str | None]) -> Field:
    octets = [b"" if text is None else text.encode() for text in texts]
    length = np.array([len(text) for text in octets], np.int64)
    valid = np.array([text is not None for text in texts])
    return Field(WireBuffer(octets), np.cumsum(length) - length, length, None if valid.all() else valid)


def outcome(read: Callable[[], Any]) -> Any:
    try:
        decoded = read()
    except (MalformedError, WireError) as error:
        return str(error)
    decoded.array.validate(full=True)
    refused = sorted((refusal.reason, refusal.rows.tolist()) for refusal in decoded.refused)
    return decoded.array.type, decoded.array.to_pylist(), refused


def both(monkeypatch: pytest.MonkeyPatch, read: Callable[[], Any]) -> tuple[Any, Any]:
    with monkeypatch.context() as patch:
        patch.setattr(native, "LIBRARY", None)
        with_numpy = outcome(read)
    return outcome(read), with_numpy


@st.composite
def broken(draw: st.DrawFn) -> str:
    """A text that is sound, or nearly."""
    text: str = draw(st.one_of(*SOUND.values()))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from(list("0123456789-+.e: NIx"))) + text[at + draw(st.integers(0, 1)) :]
    return text


@given(st.sampled_from(sorted(DECODERS)), st.lists(st.none() | broken(), min_size=1, max_size=4))
def test_texts_mean_the_same_to_c_as_to_numpy(name: str, texts: list[str | None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        with_c, with_numpy = both(patch, lambda: DECODERS[name].read(field(texts)))
    assert repr(with_c) == repr(with_numpy)


@given(st.lists(st.binary(max_size=20) | st.text(max_size=20).map(str.encode), min_size=1, max_size=4))
@example([b"plain", b"and so on, for more than one word of eight"])
@example([b"1234567", b"\xc3", b"\xa9"])  # each half of a character in a value of its own
@example([b"12345678", "é".encode()])
def test_strings_are_utf8_or_refused_with_c_as_with_numpy(values: list[bytes]) -> None:
    length = np.array([len(value) for value in values], np.int64)
    located = Field(WireBuffer(values), np.cumsum(length) - length, length)
    with pytest.MonkeyPatch.context() as patch:
        with_c, with_numpy = both(patch, lambda: Text().read(located))
    assert with_c == with_numpy
    try:
        assert with_c[1] == [value.decode() for value in values]
    except UnicodeDecodeError:
        assert "expected UTF-8" in with_c


def test_every_day_of_the_calendars_cycle_is_the_right_one() -> None:
    first = np.datetime64("1899-12-31", "D")
    days = first + np.arange(146_097 + 2)  # 400 years
    texts: list[str | None] = [*np.datetime_as_string(days).tolist(), "0001-01-01", "9999-12-31"]
    read = DECODERS["date"].read(field(texts)).array
    assert (
        native.LIBRARY is None
        or native.printed_moment(*field(texts).located, has_time=False, has_zone=False) is not None
    )
    assert read.cast(pa.int32()).to_pylist() == [*days.astype(np.int64).tolist(), -719_162, 2_932_896]


@pytest.mark.parametrize("date", ["1900-02-29", "2100-02-29", "2023-02-29", "2024-02-30", "2024-04-31", "2024-13-01"])
def test_a_day_that_does_not_exist_is_malformed(date: str) -> None:
    with pytest.raises(MalformedError):
        DECODERS["date"].read(field([date]))


NUMERIC = st.builds(
    lambda digits, weight, sign, scale, tail: (
        struct.pack(">HhHH", len(digits), weight, sign, scale)
        + b"".join(struct.pack(">H", digit) for digit in digits)
        + tail
    ),
    st.lists(st.integers(0, 10_001), max_size=12),
    st.integers(-12, 12),
    st.sampled_from([0, 0, 0x4000, 0xC000, 0xD000, 0xF000, 1]),
    st.sampled_from([0, 2, 0x3FFF, 0x4000]),
    st.sampled_from([b"", b"", b"", b"\0"]),
)


@given(
    st.sampled_from([(1, 0), (5, 5), (12, 2), (18, 4), (19, 0), (38, 0), (38, 38)]),
    st.lists(NUMERIC, min_size=1, max_size=3),
)
def test_numerics_mean_the_same_to_c_as_to_numpy(declared: tuple[int, int], values: list[bytes]) -> None:
    length = np.array([len(value) for value in values], np.int64)
    located = Field(WireBuffer(values), np.cumsum(length) - length, length)
    with pytest.MonkeyPatch.context() as patch:
        with_c, with_numpy = both(patch, lambda: Decimal(pa.decimal128(*declared)).read(located))
    assert with_c == with_numpy


CODECS = [
    plan(Column(f"c{i}", i, CatalogType(oid), "", False), as_string=False, numeric_as=NumericAs("string"))
    for i, oid in enumerate((20, 21, 23, 16, 25, 2950, 701))  # int8, int2, int4, bool, text, uuid, float8
]


def copied(seed: int) -> bytes:
    """A row of CODECS' columns in their order of selection."""
    chosen, parts = random.Random(seed), [struct.pack(">h", len(CODECS))]
    for width in (8, 2, 4, 1, 16, 8, chosen.randrange(5)):
        value = bytes([0, 1][chosen.randrange(2)] for _ in range(width))
        null = chosen.randrange(4) == 0
        parts.append(struct.pack(">i", -1) if null else struct.pack(">i", width) + value)
    return b"".join(parts)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=5), st.data())
def test_rows_mean_the_same_to_c_as_to_numpy(seeds: list[int], data: st.DataObject) -> None:
    rows = [copied(seed) for seed in seeds]
    if data.draw(st.booleans()):
        which = data.draw(st.integers(0, len(rows) - 1))
        at, byte = data.draw(st.integers(0, len(rows[which]))), data.draw(st.binary(max_size=4))
        rows[which] = rows[which][:at] + byte + rows[which][at + data.draw(st.integers(0, 4)) :]
    decoder = CopyDecoder(CODECS, "null")

    def read() -> Any:
        try:
            return [array.to_pylist() for array in decoder.decode(Messages.joined(rows, decoder.padding))]
        except WireError as error:
            return str(error)

    with pytest.MonkeyPatch.context() as patch:
        with_c = read()
        patch.setattr(native, "LIBRARY", None)
        assert repr(with_c) == repr(read())


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=4), st.integers(0, 3))
def test_images_of_rows_mean_the_same_to_c_as_to_numpy(tails: list[bytes], columns: int) -> None:
    messages = Messages.joined([b"I\0\0\0\1N" + struct.pack(">H", columns) + tail for tail in tails])

    def read() -> Any:
        starts, _, _ = tags_and_oids(messages, 0)
        try:
            found = walk(messages.buffer, starts, messages.ends, columns).new
        except WireError as error:
            return str(error)
        assert found is not None
        return [
            (f.length.tolist(), None if f.valid is None else f.valid.tolist(), None if u is None else u.tolist())
            for f, u in zip(found.fields, found.unchanged, strict=True)
        ]

    with pytest.MonkeyPatch.context() as patch:
        with_c = read()
        patch.setattr(native, "LIBRARY", None)
        assert with_c == read()


@given(st.lists(st.binary(max_size=30), max_size=12))
def test_what_is_collected_comes_as_it_went_in(messages: list[bytes]) -> None:
    collected = Collected(12, 64)
    for start in (0, len(messages)):
        for message in messages:
            collected.append(message)
        assert len(collected) == len(messages)
        assert collected.is_full == (len(messages) >= 12 or sum(map(len, messages)) >= 64)
        if messages or start:
            taken = collected.take()
            assert [taken.octets(i) for i in range(len(taken))] == messages
            assert not collected


class ScriptedCopy:
    """libpq's side of a COPY whose messages come in bursts; before some of these, nothing can be read for a while."""

    _LIBC = ctypes.CDLL(None)
    _LIBC.malloc.restype, _LIBC.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    _RELEASE = ctypes.cast(_LIBC.free, ctypes.c_void_p)

    def __init__(self, bursts: list[tuple[bool, list[bytes]]], end: int) -> None:
        self._bursts, self._end, self._ready = list(bursts), end, list[bytes]()
        self._read, self._write = os.pipe()
        self._get = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int)(
            self._get_copy_data
        )
        self._consume = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._consume_input)
        self._show_next()

    def __enter__(self) -> ScriptedCopy:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._read)
        os.close(self._write)

    def drain_all(self, capacity: int, most: int) -> tuple[list[bytes], bytes | None, int]:
        """One call: the messages, one that did not fit, and the last result."""
        data, ends, drained = np.empty(capacity, np.uint8), np.empty(most, np.int64), native.Drained(0, 0, None, 1)
        callbacks = (
            ctypes.cast(self._get, ctypes.c_void_p),
            self._RELEASE,
            ctypes.cast(self._consume, ctypes.c_void_p),
        )
        assert native.LIBRARY is not None
        native.LIBRARY.pgcdc_drain_all(
            *(None, *callbacks, self._read, 1000, data.ctypes.data, capacity, ends.ctypes.data, most),
            ctypes.byref(drained),
        )
        cuts = [0, *ends[: drained.messages].tolist()]
        waiting = None
        if drained.waiting:
            waiting = ctypes.string_at(drained.waiting, drained.result)
            self._LIBC.free(ctypes.c_void_p(drained.waiting))
        return [data[a:b].tobytes() for a, b in itertools.pairwise(cuts)], waiting, drained.result

    def _show_next(self) -> None:
        if self._bursts and not self._bursts[0][0]:
            os.write(self._write, b"x")

    def _take_next(self) -> None:
        self._ready += self._bursts.pop(0)[1]
        self._show_next()

    def _consume_input(self, connection: int) -> int:
        os.read(self._read, 1)
        self._take_next()
        return 1

    def _get_copy_data(self, connection: int, buffer: Any, asynchronous: int) -> int:
        while not asynchronous and self._bursts and not self._ready:
            if not self._bursts[0][0]:
                os.read(self._read, 1)
            self._take_next()
        if self._ready:
            message = self._ready.pop(0)
            buffer[0] = self._LIBC.malloc(len(message))
            ctypes.memmove(buffer[0], message, len(message))
            return len(message)
        return 0 if self._bursts else self._end


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.binary(min_size=1, max_size=40), max_size=5)), max_size=8),
    st.sampled_from([-1, -2]),
    st.integers(0, 60),
    st.integers(1, 7),
)
def test_messages_come_once_and_in_order_however_they_arrive(
    bursts: list[tuple[bool, list[bytes]]], end: int, capacity: int, most: int
) -> None:
    came: list[bytes] = []
    result = 1
    with ScriptedCopy(bursts, end) as copy:
        while result > 0:
            messages, waiting, result = copy.drain_all(capacity, most)
            assert len(messages) <= most
            assert sum(map(len, messages)) <= capacity
            assert waiting is None or sum(map(len, messages)) + len(waiting) > capacity
            came += messages if waiting is None else [*messages, waiting]
    assert (came, result) == ([message for _, burst in bursts for message in burst], end)


def test_it_is_compiled_where_a_compiler_is_and_can_be_turned_off() -> None:
    assert native.LIBRARY is not None or not any(map(shutil.which, ("cc", "gcc", "clang")))
    off = subprocess.run(
        [sys.executable, "-c", "from pg_cdc_source.values import native; print(native.LIBRARY)"],
        env={**os.environ, "PG_CDC_ACCELERATOR": "off"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert off.stdout == "None\n"
