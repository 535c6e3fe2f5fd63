"""Processes that plan wait in line, may keep their sessions for a moment, and leave no files."""

from __future__ import annotations

import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.snapshot import connections
from pg_cdc_source.snapshot.lingering import Lingering


class OpenSession:
    """Stands for a session."""

    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    monkeypatch.setattr(connections, "connect", lambda *_, **__: OpenSession())
    monkeypatch.setattr(connections, "begin_anew", lambda *_: True)
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


class Processes:
    """Processes that plan, which keep sessions for their next loads."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch, linger_seconds: float = 60.0) -> None:
        self._monkeypatch = monkeypatch
        self._kept = [Lingering(linger_seconds, connections.Planning.close) for _ in range(count)]

    def load(self, process: int, options: ConnectionOptions, max_connections: int = 100) -> OpenSession:
        self._monkeypatch.setattr(connections, "_KEPT", self._kept[process])
        with connections.planning_session(options, max_connections) as planning:
            planning.keep(max_connections)
        return cast(OpenSession, planning.session)


@pytest.mark.parametrize(("max_connections", "kept"), [(4, 0), (8, 1), (16, 4), (100, 8)])
def test_so_many_processes_keep_their_sessions(
    max_connections: int, kept: int, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes(10, monkeypatch)
    first = [processes.load(process, ConnectionOptions(), max_connections) for process in range(10)]
    again = [processes.load(process, ConnectionOptions(), max_connections) for process in range(10)]
    assert [session.closed for session in first] == [False] * kept + [True] * (10 - kept)
    assert [one is other for one, other in zip(first, again, strict=True)] == [True] * kept + [False] * (10 - kept)
    assert len(list(directory.iterdir())) == kept


def test_a_session_that_is_not_asked_for_again_is_closed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Processes(1, monkeypatch, linger_seconds=0.01).load(0, ConnectionOptions())
    deadline = time.monotonic() + 60
    while list(directory.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert session.closed


def test_a_session_for_another_server_or_one_that_was_lost_is_closed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes(1, monkeypatch)
    one, other = ConnectionOptions("dbname=one"), ConnectionOptions("dbname=other")
    first, second = processes.load(0, one), processes.load(0, other)
    assert (first.closed, second.closed) == (True, False)
    monkeypatch.setattr(connections, "begin_anew", lambda *_: False)
    assert processes.load(0, other) is not second
    assert second.closed
    assert len(list(directory.iterdir())) == 1


def test_a_session_in_which_planning_failed_is_closed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(1, monkeypatch)
    session = processes.load(0, ConnectionOptions())

    def fail() -> None:
        with connections.planning_session(ConnectionOptions(), 100) as planning:
            assert cast(Any, planning.session) is session
            planning.keep(100)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert session.closed
    assert list(directory.iterdir()) == []


def test_nothing_is_kept_where_it_could_not_be_counted(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(directory / "none"))
    assert Processes(1, monkeypatch).load(0, ConnectionOptions()).closed


def test_nothing_is_kept_where_nobody_would_delete_its_file(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_LOCAL_DIRS")
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    assert Processes(1, monkeypatch).load(0, ConnectionOptions()).closed
    assert list(directory.iterdir()) == []


def test_nothing_lingers_that_nobody_looks_after(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    lingering = Lingering(60, closed.append)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        lingering.leave("first")
        assert closed == ["first"]
    lingering.leave("second")
    assert lingering.take() == "second"
    assert closed == ["first"]
