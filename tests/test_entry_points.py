"""What is started by its name: ``python -m`` modules, and every module's import."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import pg_cdc_source

RESULTS = str(Path(__file__).parents[1] / "docs" / "benchmarks" / "results.json")
NOWHERE = "postgresql://u@127.0.0.1:1/x"


def run_python(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=120, check=False)


def test_every_module_can_be_imported() -> None:
    modules = [module.name for module in pkgutil.walk_packages(pg_cdc_source.__path__, "pg_cdc_source.")]
    modules = [name for name in modules if not name.endswith("._accelerator")]  # no module of Python's
    result = run_python(
        "-c", "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]", *modules
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_the_schedule_prints_the_tables_of_the_documentation() -> None:
    result = run_python("-m", "pg_cdc_source.bench.schedule", RESULTS)
    assert (result.returncode, result.stderr) == (0, "")
    assert "| executors of 4 cores, their CPU alone | one table | 1,000 tables |" in result.stdout


@pytest.mark.parametrize(
    ("module", "arguments", "given", "told"),
    [
        ("bench.to_arrow", ("pgsnapshot", "t"), NOWHERE, "cannot connect to PostgreSQL at 127.0.0.1:1/x as u"),
        ("bench.writer", ('["SELECT $1"]', "1", "1"), NOWHERE, "OperationalError: connection to server"),
        ("snapshot.keeper", (), "no settings", "JSONDecodeError"),
    ],
)
def test_the_process_starts_and_says_what_it_lacks(
    module: str, arguments: tuple[str, ...], given: str, told: str
) -> None:
    result = run_python("-m", f"pg_cdc_source.{module}", *arguments, given=given)
    assert result.returncode == 1
    assert told in result.stderr
