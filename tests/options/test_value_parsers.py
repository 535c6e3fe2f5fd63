from __future__ import annotations

import pytest
from given_options import TABLE, parse, parse_stream, refused


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64MB", 64 << 20),
        ("512kB", 512 << 10),
        ("512 KB", 512 << 10),
        ("1g", 1 << 30),
        ("4MiB", 4 << 20),
        ("1.5GB", 3 << 29),
        ("8192", 8192),
        ("65536B", 65536),
        (" 1TB ", 1 << 40),
        ("8kb", 8192),
    ],
)
def test_sizes_have_binary_units(text: str, size: int) -> None:
    assert parse(partitionBytes=text).partition_bytes == size


@pytest.mark.parametrize(
    "text", ["", "MB", "-1", "64XB", "64ib", "6_4MB", "1e6", "8191", "8.1", "33TB", "0", "٣MB", "9" * 5000, "1,5GB"]
)
def test_malformed_and_unbounded_sizes_are_refused(text: str) -> None:
    assert "option partitionBytes:" in refused({**TABLE, "partitionBytes": text})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10s", 10), ("500ms", 0.5), ("1min", 60), ("1m", 60), ("2h", 7200), ("7", 7), ("0.25", 0.25), (" 1 H ", 3600)],
)
def test_times_are_seconds_or_have_a_unit(text: str, seconds: float) -> None:
    assert parse(slotTimeout=text).slot_timeout_seconds == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "1y", "0", "25h", "inf", "nan", "9" * 5000])
@pytest.mark.parametrize("option", ["slotTimeout", "snapshotIdle"])
def test_malformed_and_unbounded_times_are_refused(option: str, text: str) -> None:
    assert f"option {option}:" in refused({**TABLE, option: text})


@pytest.mark.parametrize("text", ["0", "100001", "-1", "1.5", "", "x", "9" * 5000, "٣"])
def test_the_number_of_partitions_is_bounded(text: str) -> None:
    assert "whole number from 1 to 100000" in refused({**TABLE, "numPartitions": text})


@pytest.mark.parametrize(("text", "value"), [("true", True), ("FALSE", False), (" True ", True)])
def test_a_choice_of_two_is_true_or_false(text: str, value: bool) -> None:
    assert parse_stream(beforeImage=text).before_image is value
