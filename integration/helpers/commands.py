"""The command: as it is installed, and in this process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from pg_cdc_source.cli.app import app

COMMAND = str(Path(sys.executable).with_name("pg-cdc"))


def pg_cdc(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it in this process, without a terminal: there are many, and each process would import everything again."""
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return subprocess.CompletedProcess(arguments, result.exit_code, result.stdout, result.stderr)


def pg_cdc_installed(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it as a user does, without a terminal, so that nobody is asked."""
    result = subprocess.run(
        [COMMAND, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )
    assert "Traceback" not in result.stderr, result.stderr
    return result
