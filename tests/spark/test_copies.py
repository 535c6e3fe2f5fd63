"""What the processes of a read do when they do not run the same copy of the package."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle

from pg_cdc_source.errors import DefiniteError
from pg_cdc_source.spark import copies, project
from pg_cdc_source.spark.copies import Copy
from pg_cdc_source.spark.pgcdc import READER, ChangesPartition, PgCdcDataSource, SnapshotPartition
from pg_cdc_source.spark.pgsnapshot import PgSnapshotDataSource, PgSnapshotReader, RangePartition
from pg_cdc_source.values import native

HERE = Copy("1.2", "/site-packages/pg_cdc_source", "a", True)
CHECKOUT = replace(HERE, directory="/checkout/pg_cdc_source", accelerator=False)

RunAs = Callable[[Copy], None]


@pytest.fixture
def run_as(monkeypatch: pytest.MonkeyPatch) -> RunAs:
    """Make this a process that has warned of nothing yet and runs another copy."""

    def run(copy: Copy) -> None:
        monkeypatch.setattr(copies, "HERE", copy)
        monkeypatch.setattr(copies, "_warned", False)
        copies._copy_with_accelerator.cache_clear()

    monkeypatch.delenv(native.ENVIRONMENT, raising=False)
    monkeypatch.setattr(sys, "path", [])
    run(HERE)
    return run


def one_range() -> RangePartition:
    return RangePartition("source", "range")  # type: ignore[arg-type]


def sent(thing: object) -> bytes:
    """Pickle as Spark does."""
    return bytes(cloudpickle.dumps(thing))  # type: ignore[no-untyped-call]


def received(message: bytes) -> Any:
    return pickle.loads(message)  # noqa: S301


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    "sealed",
    [
        *(PgSnapshotDataSource, PgSnapshotReader, RangePartition),
        *(PgCdcDataSource, READER, SnapshotPartition, ChangesPartition),
        project._Projection,
    ],
)
def test_whatever_spark_sends_is_sealed(sealed: type) -> None:
    assert issubclass(sealed, copies.Sealed)


def test_what_is_sent_arrives_as_it_was(run_as: RunAs, caplog: pytest.LogCaptureFixture) -> None:
    assert received(sent(one_range())) == one_range()
    changes = ChangesPartition([])
    assert received(sent(changes)).payloads == []
    options = {"host": "h", "dbtable": "t", "slot": "s"}
    source = received(sent(PgCdcDataSource(options)))
    assert (type(source), source.options) == (PgCdcDataSource, options)
    assert warnings(caplog) == []


@pytest.mark.parametrize("source", [PgSnapshotDataSource, PgCdcDataSource])
def test_the_class_of_a_data_source_arrives_as_itself(source: type, run_as: RunAs) -> None:
    assert received(sent(source)) is source


def test_another_version_is_an_error_that_names_both(run_as: RunAs) -> None:
    messages = sent(one_range()), sent(PgSnapshotDataSource)
    run_as(Copy("1.3", "/opt/pg_cdc_source", "b", True))
    for message in messages:
        with pytest.raises(DefiniteError) as raised:
            received(message)
        assert raised.value.what == (
            "two versions of pg_cdc_source take part in one read: "
            "1.2 in /site-packages/pg_cdc_source on host a, and 1.3 in /opt/pg_cdc_source on host b"
        )
        assert "install the same wheel" in raised.value.remedy


def test_another_version_is_an_error_before_anything_else_is_unpickled(run_as: RunAs) -> None:
    class OfThisVersionOnly:
        def __reduce__(self) -> tuple[object, ...]:
            return pytest.fail, ("unpickled",)

    run_as(replace(HERE, version="1.1"))
    message = sent(RangePartition(OfThisVersionOnly(), "range"))  # type: ignore[arg-type]
    run_as(HERE)
    with pytest.raises(DefiniteError, match="two versions"):
        received(message)


def test_a_later_version_may_say_more_of_itself(run_as: RunAs) -> None:
    sender = {"version": "1.3", "directory": "/", "host": "a", "accelerator": True, "build": "x"}
    with pytest.raises(DefiniteError, match="two versions"):
        copies.open_object(sender, b"")


@pytest.mark.parametrize(
    ("sender", "receiver", "expected"),
    [
        (HERE, HERE, None),
        # Hosts need not look alike.
        (HERE, replace(HERE, host="b", directory="/opt/pg_cdc_source"), None),
        (CHECKOUT, replace(HERE, host="b"), None),
        (HERE, replace(HERE, directory="/opt/pg_cdc_source"), "two copies of pg_cdc_source"),
        (CHECKOUT, HERE, "two copies of pg_cdc_source"),
        (HERE, CHECKOUT, "without its C accelerator"),
        (HERE, replace(HERE, host="b", accelerator=False), "without its C accelerator"),
    ],
)
def test_another_copy_is_a_warning(
    sender: Copy, receiver: Copy, expected: str | None, run_as: RunAs, caplog: pytest.LogCaptureFixture
) -> None:
    run_as(sender)
    message = sent(one_range())
    run_as(receiver)
    for _ in range(3):
        received(message)
    if expected is None:
        assert warnings(caplog) == []
        return
    [warning] = warnings(caplog)
    assert expected in warning
    assert str(sender) in warning
    assert str(receiver) in warning
    assert "Remedy: install the same wheel" in warning


def test_an_accelerator_that_was_turned_off_is_not_missed(
    run_as: RunAs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = sent(one_range())
    monkeypatch.setenv(native.ENVIRONMENT, "off")
    run_as(replace(HERE, accelerator=False))
    received(message)
    assert warnings(caplog) == []


def test_a_copy_that_hides_one_with_an_accelerator_is_a_warning(
    run_as: RunAs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    values = tmp_path / "site-packages" / "pg_cdc_source" / "values"
    values.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "site-packages")])
    run_as(CHECKOUT)
    received(sent(one_range()))
    assert warnings(caplog) == []
    (values / "_accelerator.abi3.so").touch()
    run_as(CHECKOUT)
    received(sent(one_range()))
    [warning] = warnings(caplog)
    assert f"this copy hides the one in {values.parent}" in warning


def test_a_worker_prints_the_warning_and_what_to_do() -> None:
    program = """
import pickle
from pg_cdc_source.spark.copies import HERE, compare
from dataclasses import asdict
for _ in range(2):
    compare({**asdict(HERE), "directory": "/elsewhere"})
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stderr.count("two copies of pg_cdc_source take part in one read") == 1
    assert result.stderr.count("Remedy: install the same wheel") == 1
