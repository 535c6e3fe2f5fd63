"""What an installation gives: the wheel's files, its version, and a look-up shim that never raises."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

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


def test_the_version_is_that_of_the_wheel() -> None:
    assert pg_cdc_source.__version__ == importlib.metadata.version("pg-cdc-source")


def test_the_version_of_a_checkout_is_its_own() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import pg_cdc_source as p; print(p.__file__, p.__version__)"
    version = re.search('__version__ = "(.+)"', (ROOT / "pg_cdc_source" / "_version.py").read_text())
    assert version is not None
    assert run_python(code).stdout.split() == [str(ROOT / "pg_cdc_source" / "__init__.py"), version[1]]


def test_all_names_what_the_package_offers_and_nothing_else() -> None:
    names = set(pg_cdc_source.__all__)
    assert all(getattr(pg_cdc_source, name) for name in names)
    found = vars(pg_cdc_source)
    public = {name for name in found if not name.startswith("_") and not isinstance(found[name], ModuleType)}
    # The others are imported when they are used, and not kept.
    assert public - names == set()
    assert set(dir(pg_cdc_source)) == names


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
