"""Scans without Spark."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from pg_cdc_source.snapshot import driver
from pg_cdc_source.snapshot.keeper import launch


@pytest.fixture
def own_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in place of Spark's JVM; keepers end with it."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        found = driver._find_process(process.pid)
        assert found is not None
        monkeypatch.setattr(launch, "driver_process", lambda: found[0])
        yield
        process.kill()
