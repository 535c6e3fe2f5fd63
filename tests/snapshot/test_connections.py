"""Processes that plan wait in line, and leave no files."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.snapshot import connections


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    monkeypatch.setattr(connections, "connect", lambda *_, **__: SimpleNamespace(close=lambda: None))
    return tmp_path


@pytest.mark.parametrize(("max_connections", "at_once"), [(None, 2), (4, 1), (100, 4)])
def test_so_many_plan_at_once_and_leave_no_file(max_connections: int | None, at_once: int, directory: Path) -> None:
    # Threads stand for processes: a lock belongs to the descriptor, and each opens the files anew.
    counted, planning, most = threading.Lock(), 0, 0

    def plan(_: int) -> None:
        nonlocal planning, most
        with connections.planning_session(ConnectionOptions(), max_connections):
            with counted:
                planning += 1
                most = max(most, planning)
            time.sleep(0.002)
            with counted:
                planning -= 1

    with ThreadPoolExecutor(8) as processes:
        list(processes.map(plan, range(60)))
    assert most == at_once
    assert list(directory.iterdir()) == []


def test_a_file_that_a_killed_process_has_left_does_not_hold_up(directory: Path) -> None:
    for _ in range(2):
        with connections.planning_session(ConnectionOptions(), 4):
            [left] = directory.iterdir()
        left.touch()
    with connections.planning_session(ConnectionOptions(), 4):
        pass
    assert list(directory.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_passed_over(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(directory / "none"))
    with connections.planning_session(ConnectionOptions(), None):
        pass
    assert "does not wait in line" in caplog.text
