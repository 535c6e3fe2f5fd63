"""``pg-cdc check`` without a format: what Spark's Python processes would find, in real ones that are doctored."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from pg_cdc_source import __version__
from pg_cdc_source.cli.preflight.findings import Checks, Finding, is_right
from pg_cdc_source.cli.preflight.spark import check_spark
from pg_cdc_source.values import native

Look = Callable[..., dict[str, Finding]]

USE_THIS = f"export PYSPARK_PYTHON={sys.executable}"


def doctored_python(directory: Path, code: str = "") -> str:
    """A Python that has what this one has, and runs ``code`` first."""
    venv.create(directory)
    packages = Path(sysconfig.get_path("purelib", "posix_prefix", {"base": str(directory), "platbase": str(directory)}))
    (packages / "as_this_one.pth").write_text("\n".join(path for path in sys.path if path))
    (packages / "sitecustomize.py").write_text(code)
    return str(directory / "bin" / "python")


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    """Check with PYSPARK_PYTHON set, in an empty directory; the findings by name."""

    def run(python: str, **environment: str) -> dict[str, Finding]:
        # Of this process, because each would import everything again; what Spark would run is a process of its own.
        monkeypatch.delenv("PYSPARK_DRIVER_PYTHON", raising=False)
        for name, text in {"PYSPARK_PYTHON": python, **environment}.items():
            monkeypatch.setenv(name, text)
        monkeypatch.chdir(tmp_path)
        checks = Checks()
        check_spark(checks)
        assert is_right(checks.findings), "a warning is no failure"
        return {finding.check: finding for finding in checks.findings}

    return run


def test_this_python_finds_the_formats_and_is_the_same(look: Look) -> None:
    found = look(sys.executable)
    assert [found[name].status for name in ("formats", "workers", "pandas")] == ["ok"] * 3, found
    assert found["formats"].text == f"Spark's look-up in {sys.executable} finds pgcdc, pgsnapshot"
    assert found["workers"].text.endswith(f"with pg-cdc-source {__version__}")


def test_a_python_that_is_not_there_is_told(look: Look, tmp_path: Path) -> None:
    found = look(str(tmp_path / "no_such_python"))
    for name in ("formats", "workers"):
        assert found[name].status == "warning"
        assert "does not run as a Python here: " in found[name].text
        assert found[name].remedy == USE_THIS


def test_a_driver_python_that_is_a_notebook_hides_the_formats(look: Look) -> None:
    found = look(sys.executable, PYSPARK_DRIVER_PYTHON="true")
    assert (found["formats"].status, found["workers"].status) == ("warning", "ok")
    assert found["formats"].text == "true does not run as a Python here: no answer, exit status 0"
    assert found["formats"].remedy == f"export PYSPARK_DRIVER_PYTHON={sys.executable}"


def test_a_python_without_the_package_is_told(look: Look, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare")
    python = str(tmp_path / "bare" / "bin" / "python")
    found = look(python)
    assert f"{python} (Python {'.'.join(map(str, sys.version_info[:3]))}) cannot import" in found["workers"].text
    assert "does not find pgcdc, pgsnapshot: " in found["formats"].text
    for name in ("formats", "workers"):
        assert found[name].status == "warning"
        assert found[name].remedy == f"{USE_THIS}; or install pg-cdc-source {__version__} in {python}"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import platform; platform.python_version = lambda: '3.9.1'", "is Python 3.9.1 and this is Python 3."),
        ("import pg_cdc_source; pg_cdc_source.__version__ = '9.9'", "has pg-cdc-source 9.9 and this is "),
        pytest.param(
            "import os; os.environ['PG_CDC_ACCELERATOR'] = 'off'",
            "has pg-cdc-source without the accelerator",
            marks=pytest.mark.skipif(native.LIBRARY is None, reason="not compiled here"),
        ),
    ],
)
def test_workers_that_differ_are_told(look: Look, tmp_path: Path, code: str, told: str) -> None:
    python = doctored_python(tmp_path / "venv", code)
    found = look(python)
    assert (found["workers"].status, found["formats"].status) == ("warning", "ok"), found
    assert found["workers"].text.startswith(f"{python} {told}")
    assert found["workers"].remedy.startswith(USE_THIS)


@pytest.mark.parametrize(
    ("code", "told", "remedy"),
    [
        (
            "import pkgutil; every = list(pkgutil.iter_modules())\n"
            "pkgutil.iter_modules = lambda: [one for one in every if not one.name.startswith('pyspark_pg')]",
            "does not find pgcdc, pgsnapshot: their packages can be imported but lie in no directory of sys.path",
            "install the package without --editable; or call register(spark)",
        ),
        (
            "import sys; sys.modules['psycopg2'] = None",
            "is not available: ModuleNotFoundError: import of psycopg2 halted",
            USE_THIS,
        ),
        (
            "import sys, pathlib; sys.path.append(str(pathlib.Path(__file__).parent / 'more'))",
            "fails, so that Spark finds no Python data source: pyspark_broken (ValueError: out of order)",
            "repair or uninstall pyspark_broken; or call register(spark)",
        ),
    ],
    ids=["editable", "shims do not import", "another package is broken"],
)
def test_what_hides_the_formats_from_spark_is_told(
    look: Look, tmp_path: Path, code: str, told: str, remedy: str
) -> None:
    python = doctored_python(tmp_path / "venv", code)
    (sitecustomize,) = tmp_path.rglob("sitecustomize.py")
    more = sitecustomize.with_name("more")
    more.mkdir()
    (more / "pyspark_broken.py").write_text("raise ValueError('out of order')")
    found = look(python)["formats"]
    assert found.status == "warning"
    assert told in found.text
    assert found.remedy.startswith(remedy)


def test_a_copy_in_the_working_directory_is_told(look: Look, tmp_path: Path) -> None:
    (tmp_path / "pg_cdc_source").mkdir()
    (tmp_path / "pg_cdc_source" / "__init__.py").touch()
    found = look(sys.executable)["workers"]
    assert found.status == "warning"
    assert f"imports the copy of the package in {tmp_path / 'pg_cdc_source'}" in found.text
    assert found.remedy == "start Spark in another directory"


def test_project_without_pandas_is_told(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    found = look(sys.executable)["pandas"]
    assert found.status == "warning"
    assert found.text.startswith("project() cannot run: ")
    assert found.remedy == 'pip install "pandas>=2.2,<3"'


def test_the_command_prints_these_findings_and_succeeds(tmp_path: Path) -> None:
    environment = {**os.environ, "PYSPARK_PYTHON": str(tmp_path / "no_such_python")}
    command = [str(Path(sys.executable).with_name("pg-cdc")), "check"]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "\nwarning  workers     " in result.stdout
    assert f"Remedy: {USE_THIS}\n" in result.stdout
    assert result.stdout.endswith("\nNothing is wrong.\n")
