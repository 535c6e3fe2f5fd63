"""``pg-cdc check`` without a server: what is installed, and options that cannot be meant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest

from pg_cdc_source.values import native

COMMAND = str(Path(sys.executable).with_name("pg-cdc"))


def pg_cdc(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def installed(**environment: str) -> dict[str, str]:
    result = pg_cdc("check", "--json", **environment)
    found = json.loads(result.stdout)
    assert (result.returncode, found["ok"]) == (0, True), result.stderr
    return {finding["check"]: finding["text"] for finding in found["findings"]}


def test_the_installation_is_described() -> None:
    found = installed()
    assert list(found) == ["package", "Python", "PySpark", "pyarrow", "psycopg2", "accelerator"]
    assert found["pyarrow"] == pyarrow.__version__
    assert " with libpq 1" in found["psycopg2"]
    assert found["accelerator"].startswith("not compiled" if native.LIBRARY is None else "compiled")
    assert "Nothing is wrong." in pg_cdc("check").stdout


def test_an_accelerator_that_was_turned_off_is_no_missing_compiler() -> None:
    assert installed(PG_CDC_ACCELERATOR="off")["accelerator"].startswith("turned off by PG_CDC_ACCELERATOR=off")


def test_a_machine_without_spark_is_not_wrong(tmp_path: Path) -> None:
    (tmp_path / "pyspark.py").write_text("raise ModuleNotFoundError(name='pyspark')")
    assert installed(PYTHONPATH=str(tmp_path))["PySpark"].startswith("not installed")


def test_a_spark_that_is_too_old_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "pyspark.py").write_text("__version__ = '3.5.1'")
    result = pg_cdc("check", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert "Remedy: install 4.0 or later" in result.stdout


@pytest.mark.parametrize(
    "given",
    [
        # The option's name was forgotten, or the equals sign.
        ("pgcdc", "-o", "postgresql://u:Geheim@h/db?sslmode=require"),
        ("pgcdc", "-o", "Geheim"),
        ("pgcdc", "-o", "password=Geheim", "-o", "password=Geheim"),
        # Of no format.
        ("-o", "password=Geheim"),
        ("jdbc", "-o", "password=Geheim"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_and_not_repeated(given: tuple[str, ...]) -> None:
    result = pg_cdc("check", *given)
    assert result.returncode == 2, result.stdout
    assert "Geheim" not in result.stdout + result.stderr


def test_every_option_that_is_wrong_is_named_with_its_remedy() -> None:
    result = pg_cdc("check", "pgcdc", "-o", "url=postgresql://u:Geheim@h:x/db", "-o", "slot=A", "--json")
    assert result.returncode == 1
    assert "Geheim" not in result.stdout
    found = [f for f in json.loads(result.stdout)["findings"] if f["check"] == "options"]
    for finding, part in zip(
        found, ("option url: ", "option slot: ", "neither dbtable nor tables is given"), strict=True
    ):
        assert part in finding["text"]
        assert finding["remedy"]
