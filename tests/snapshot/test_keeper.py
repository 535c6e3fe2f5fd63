"""What the keeper and its readers tell each other, without a server."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pg_cdc_source.postgres.snapshots import SnapshotSpec
from pg_cdc_source.snapshot import board, driver, keeper
from pg_cdc_source.snapshot.board import Request
from pg_cdc_source.snapshot.driver import Process

REQUEST = Request("17", 1795230000.25, 60.0, SnapshotSpec("require", "orders_slot", 10.0))


def test_a_request_survives_its_journey() -> None:
    assert Request.from_json(REQUEST.to_json()) == REQUEST


def test_the_longest_request_fits_a_notification() -> None:
    longest = Request("9" * 19, 1e18, 86400.0, SnapshotSpec("require", "s" * 63, 86400.0))
    assert len(longest.to_json()) < 8000


def test_names_fit_application_name() -> None:
    name = keeper._base32(os.urandom(32), 10) + keeper._base32(os.urandom(4), 6)
    assert len(name) == 16
    # Snapshot ids are two numbers of 8 hexadecimal digits and a counter: snapmgr.c, XactExportFilePath.
    assert len(f"pgsnapshot:{name}:{10**8}:00000003-0000001B-12345") <= 63
    assert len(board.reader_name(name, str(10**8), 2**32 - 1)) <= 63


@pytest.mark.parametrize("reason", ["", 'it\'s 100% "gone"\n  Remedy: start again', "größer als \U0001f40d"])
def test_a_reason_survives_pg_stat_activity(reason: str) -> None:
    query = board.REASON_QUERY % (f"'{reason.encode().hex()}'", "'pgsnapshot:abc:1!'")
    assert board._reason(query) == reason or (not reason and "standard error" in board._reason(query))


def test_a_reason_that_was_cut_is_shown_as_far_as_it_goes() -> None:
    query = board.REASON_QUERY % (f"'{('x' * 600).encode().hex()}'", "''")
    assert board._reason(query[:1023]) == "x" * 507


def test_a_hidden_reason_points_to_the_log() -> None:
    assert "standard error" in board._reason("<command string not enabled>")


def test_a_process_is_told_from_a_later_one_with_its_pid() -> None:
    found = driver._find_process(os.getpid())
    assert found is not None
    assert found[0].runs()
    assert found[1] == os.getppid()
    assert not Process(os.getpid(), "0").runs()


def test_a_zombie_does_not_run() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        found = driver._find_process(child.pid)
        assert found is not None
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not found[0].runs()
    finally:
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
    assert not found[0].runs()
