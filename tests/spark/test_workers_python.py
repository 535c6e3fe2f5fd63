"""A Python of Spark's that lacks the package is named, with what to set."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.errors import PySparkAttributeError

from pg_cdc_source.spark.register import register
from pg_cdc_source.spark.workers_python import warn_of_other_python


def warned(caplog: pytest.LogCaptureFixture, command: str, includes: tuple[str, ...] = ()) -> str:
    context = SimpleNamespace(pythonExec=command, _python_includes=list(includes))
    warn_of_other_python(cast(Any, SimpleNamespace(sparkContext=context)))
    return caplog.text


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """A Python without packages, whatever PYTHONPATH says."""
    path = tmp_path / "python3"
    path.write_text(f'#!/bin/sh\ncd / && exec {sys.executable} -I -S "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_a_python_without_the_package_is_named(caplog: pytest.LogCaptureFixture, bare: str) -> None:
    said = warned(caplog, bare)
    assert f"with {bare}, which does not have pg_cdc_source" in said
    assert f"set the variable PYSPARK_PYTHON={sys.executable} before Spark starts" in said


def test_registering_the_formats_looks(caplog: pytest.LogCaptureFixture, bare: str) -> None:
    class Session:
        sparkContext = SimpleNamespace(pythonExec=bare)  # noqa: N815 - Spark's name
        dataSource = SimpleNamespace(register=lambda _: None)  # noqa: N815

    register(cast(Any, Session()))
    assert "which does not have pg_cdc_source" in caplog.text


def test_nothing_is_said_where_the_package_is_found_or_may_come_later(
    caplog: pytest.LogCaptureFixture, bare: str, tmp_path: Path
) -> None:
    same = tmp_path / "same"
    same.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    same.chmod(0o755)
    assert warned(caplog, sys.executable) == ""
    assert warned(caplog, str(same)) == ""
    assert warned(caplog, bare, includes=("package.zip",)) == ""
    assert warned(caplog, str(tmp_path / "none")) == ""


def test_nothing_is_said_of_a_server_of_connect(caplog: pytest.LogCaptureFixture) -> None:
    class Connect:
        @property
        def sparkContext(self) -> Any:  # noqa: N802 - Spark's name
            raise PySparkAttributeError(errorClass="JVM_ATTRIBUTE_NOT_SUPPORTED", messageParameters={"attr_name": ""})

    warn_of_other_python(cast(Any, Connect()))
    assert caplog.text == ""
