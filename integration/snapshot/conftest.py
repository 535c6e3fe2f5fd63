"""Scans without Spark."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pg_cdc_source.snapshot import driver
from pg_cdc_source.snapshot.keeper import launch


@pytest.fixture
def own_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in place of Spark's JVM; keepers end with it."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        found = driver._find_process(process.pid)
        assert found is not None
        monkeypatch.setattr(launch, "driver_process", lambda: found[0])
        yield process
        process.kill()
