"""The installed command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COMMAND = str(Path(sys.executable).with_name("pg-cdc"))


def pg_cdc(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it without a terminal, so that nobody is asked."""
    result = subprocess.run(
        [COMMAND, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )
    assert "Traceback" not in result.stderr, result.stderr
    return result
