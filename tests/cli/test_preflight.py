"""``pg-cdc check`` without a server: what is installed, and options that cannot be meant."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest

import pg_cdc_source
from pg_cdc_source.cli.preflight.findings import Checks
from pg_cdc_source.cli.preflight.installation import check_installation
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


def with_first(directory: Path) -> dict[str, str]:
    """An environment where Python looks into a directory first."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(directory), os.environ.get("PYTHONPATH"))))}


def installed(**environment: str) -> dict[str, dict[str, str]]:
    result = pg_cdc("check", "--json", **environment)
    found = json.loads(result.stdout)
    assert (result.returncode, found["ok"]) == (0, True), result.stderr
    return {finding.pop("check"): finding for finding in found["findings"]}


def test_the_installation_is_described() -> None:
    found = installed()
    in_spark = ["formats", "workers", "pandas"]
    assert list(found) == ["package", "Python", "PySpark", "pyarrow", "psycopg2", "accelerator", *in_spark]
    assert found["package"]["text"] == f"pg-cdc-source {pg_cdc_source.__version__}"
    assert found["pyarrow"]["text"] == pyarrow.__version__
    assert " with libpq 1" in found["psycopg2"]["text"]
    assert found["accelerator"]["text"].startswith("not compiled" if native.LIBRARY is None else "compiled and in use")


def test_an_accelerator_that_was_turned_off_is_no_missing_compiler() -> None:
    found = installed(PG_CDC_ACCELERATOR="off")["accelerator"]
    assert (found["status"], found["remedy"]) == ("ok", "unset PG_CDC_ACCELERATOR to use it")
    assert found["text"].startswith("turned off by PG_CDC_ACCELERATOR=off")


def copied_without_accelerator(directory: Path) -> Path:
    package = directory / "pg_cdc_source"
    shutil.copytree(Path(str(pg_cdc_source.__file__)).parent, package, ignore=shutil.ignore_patterns("*.so"))
    return package


def test_a_checkout_has_no_accelerator(tmp_path: Path) -> None:
    package = copied_without_accelerator(tmp_path)
    found = installed(**with_first(tmp_path), PG_CDC_ACCELERATOR="")["accelerator"]
    assert found["status"] == "warning"
    assert found["text"].startswith(f"not compiled in {package}, a checkout and not an installed package")
    assert found["remedy"].startswith("install the package (pip install .)")


def test_a_pyarrow_that_reads_files_wrongly_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyarrow, "__version__", "25.0.0")
    checks = Checks()
    check_installation(checks)
    (finding,) = (finding for finding in checks.findings if finding.check == "pyarrow")
    assert (finding.status, finding.text) == ("warning", "25.0.0 reads Parquet files wrongly on ARM")


def test_an_installation_without_a_compiler_has_no_accelerator(tmp_path: Path) -> None:
    copied_without_accelerator(tmp_path)
    metadata = tmp_path / f"pg_cdc_source-{pg_cdc_source.__version__}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: pg-cdc-source\nVersion: {pg_cdc_source.__version__}\n")
    (metadata / "RECORD").write_text("pg_cdc_source/__init__.py,,\n")
    found = installed(**with_first(tmp_path), PG_CDC_ACCELERATOR="")["accelerator"]
    assert found["status"] == "warning"
    assert found["text"].startswith("not compiled: no C compiler was found")
    assert found["remedy"].startswith("install a C compiler")


def test_a_machine_without_spark_is_not_wrong(tmp_path: Path) -> None:
    (tmp_path / "pyspark.py").write_text("raise ModuleNotFoundError(name='pyspark')")
    found = installed(**with_first(tmp_path))
    assert found["PySpark"]["text"].startswith("not installed")
    assert list(found)[-1] == "accelerator"


def test_a_spark_that_is_too_old_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "pyspark.py").write_text("__version__ = '3.5.1'")
    result = pg_cdc("check", **with_first(tmp_path))
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
