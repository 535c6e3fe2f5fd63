from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_cdc_source.offsets import Lsn


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
