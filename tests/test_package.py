"""What an installation gives: the wheel's files, its version, and a look-up shim that never raises."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import pg_cdc_source

ROOT = Path(__file__).parents[1]
SHIMS = {"pyspark_pgcdc": "pgcdc", "pyspark_pgsnapshot": "pgsnapshot"}
FILES = importlib.metadata.files("pg-cdc-source") or []


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    # -I: neither the working directory nor PYTHONPATH may lend a source tree.
    return subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_the_installed_wheel_is_what_is_tested() -> None:
    assert pg_cdc_source.__file__ is not None
    assert Path(pg_cdc_source.__file__).parts[-3:] == ("site-packages", "pg_cdc_source", "__init__.py")


def test_the_wheel_holds_every_module_and_nothing_else() -> None:
    packaged = {str(file) for file in FILES if file.suffix in (".py", ".typed")}
    sources = {
        str(path.relative_to(ROOT))
        for package in ("pg_cdc_source", *SHIMS)
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".typed")
    }
    assert packaged == sources


def test_the_wheel_carries_the_licence() -> None:
    assert [file.name for file in FILES if "licenses" in file.parts] == ["LICENSE"]


def test_spark_is_not_imported_with_the_package() -> None:
    result = run_python("import sys, pg_cdc_source; print('pyspark' in sys.modules)")
    assert (result.stdout, result.returncode) == ("False\n", 0), result.stderr


@pytest.mark.parametrize("module", ["spark.pgsnapshot", "spark.pgcdc"])
def test_planning_does_not_import_pandas(module: str) -> None:
    """Spark starts a process for each step of planning, in which pandas would take longer than all the rest."""
    result = run_python(f"import sys, pg_cdc_source.{module}; print('pandas' in sys.modules)")
    assert (result.stdout, result.returncode) == ("False\n", 0), result.stderr


@pytest.mark.parametrize(("shim", "name"), SHIMS.items())
def test_the_shim_offers_the_format_to_sparks_lookup(shim: str, name: str) -> None:
    result = run_python(f"import {shim}; print({shim}.DefaultSource.name())")
    assert (result.stdout, result.stderr) == (f"{name}\n", "")


@pytest.mark.parametrize(("shim", "name"), SHIMS.items())
def test_a_broken_installation_does_not_break_sparks_lookup(shim: str, name: str) -> None:
    result = run_python(
        f"import sys; sys.modules['psycopg2'] = None\nimport {shim}; print(hasattr({shim}, 'DefaultSource'))"
    )
    assert (result.stdout, result.returncode) == ("False\n", 0)
    assert f"the format {name} is not available" in result.stderr
    assert "psycopg2" in result.stderr


def test_the_command_names_its_subcommands() -> None:
    result = subprocess.run(
        [Path(sys.executable).with_name("pg-cdc"), "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert all(name in result.stdout for name in ("demo", "bench", "check", "slots"))
