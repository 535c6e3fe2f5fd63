"""What the keeper and its readers tell each other, without a server."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any, cast

import pytest

from pg_cdc_source.errors import ConnectError, DefiniteError, TransientError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.postgres import connection
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.instances import Instance
from pg_cdc_source.postgres.snapshots import SnapshotSpec
from pg_cdc_source.snapshot import board, driver
from pg_cdc_source.snapshot.board import MOST_SNAPSHOTS, Request, execution_key, lasting_key
from pg_cdc_source.snapshot.driver import Process
from pg_cdc_source.snapshot.keeper import server
from pg_cdc_source.snapshot.keeper.handshake import READY, TAKEN, Settings, answer_of, read_answer
from pg_cdc_source.snapshot.keeper.identity import name_pattern, new_name

INSTANCE = Instance("2026-11-22 18:00:00.123456", "10.0.0.1:5432", False)
REQUEST = Request("17", 60.0, 20, True, "/lsn", SnapshotSpec("require", "orders_slot", 10.0))


def test_a_request_survives_its_journey() -> None:
    assert Request.from_json(REQUEST.to_json()) == REQUEST


@pytest.mark.parametrize("text", ['{"spec": {}, "later": 1}', '{"execution": "17"}', "[]", "{"])
def test_what_is_no_request_of_this_version_is_told(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a request|Expecting"):
        Request.from_json(text)


def test_a_request_is_a_comment_and_nothing_else() -> None:
    request = replace(REQUEST, lsn_file="/a */ DROP TABLE t; /* %s")
    comment = request.to_comment()
    assert comment.startswith("/* {")
    assert comment.count("*/") == 1
    assert "%" not in comment
    assert Request.from_json(comment.removeprefix("/* ").removesuffix(" */")) == request


def test_the_longest_request_fits_a_notification() -> None:
    longest = Request("9" * 19, 86400.0, 100_000, False, "/lsn" * 1000, SnapshotSpec("require", "s" * 63, 86400.0))
    assert len(longest.to_json()) < 8000


def test_names_fit_application_name() -> None:
    name = new_name("a" * 10)
    assert re.fullmatch(name_pattern("a" * 10), name)
    # Snapshot ids are two numbers of 8 hexadecimal digits and a counter: snapmgr.c, XactExportFilePath.
    for execution in (str(10**8), f"r{2**31 - 1}"):
        assert len(board.holder_name(name, execution, "00000003-0000001B-12345")) <= 63
        assert len(board.reader_name(name, execution, 2**32 - 1)) <= 63


@pytest.mark.parametrize("added", ["", " - 10.0.0.5:4711", " - [fe80::1]:4711", " - unix(17@pg"])
def test_a_reader_is_known_by_its_name_whatever_a_pooler_adds(added: str) -> None:
    for execution in ("17", f"r{2**31 - 1}"):
        for oid in (0, 2**32 - 1):
            name = board.reader_name(new_name("a" * 10), execution, oid)
            assert board.parse_reader_name(name + added) == (execution, oid)


@pytest.mark.parametrize(
    "name",
    ["pgsnapshot:k", "pgsnapshot:k:17!", "pgsnapshot:k:17:00000003-0000001B-1", "pgsnapshot:k:17?", "pgcdc:k:17?1"],
)
def test_what_is_no_reader_is_passed_over(name: str) -> None:
    assert board.parse_reader_name(name) is None


def test_no_two_executions_or_stages_have_the_same_key() -> None:
    keys = [execution_key(key, number) for key in ("7", "8", "r7") for number in (0, 1, MOST_SNAPSHOTS)]
    assert len(set(keys)) == len(keys)
    # Either number of an advisory lock's key is an integer of PostgreSQL's.
    assert all(0 <= part < 2**31 for key in [*keys, execution_key(str(2**40))] for part in key)


def test_a_stage_has_another_key_in_each_spark_context() -> None:
    contexts = (0, 5_000_000, 2**31 - 10)
    keys = [lasting_key(f"r{stage}", context) for stage in range(9) for context in contexts]
    assert len(set(keys)) == len(keys) == len({execution_key(key) for key in keys})
    assert max(map(len, keys)) <= 11
    assert lasting_key("17", contexts[1]) == "17"


def test_settings_survive_their_journey() -> None:
    connection = ConnectionOptions("postgresql://reader@localhost/shop", (("password", "secret"), ("port", "5433")))
    settings = Settings(connection, "a" * 10, Process(17, "4711"), REQUEST, INSTANCE, "/work")
    assert Settings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize("answer", [READY, TAKEN])
def test_a_keeper_that_runs_is_no_error(answer: str) -> None:
    assert read_answer(answer) is None


@pytest.mark.parametrize("error", [TransientError("too many connections"), ConnectError("no", remedy='say "yes"\nnow')])
def test_a_keeper_that_cannot_start_answers_with_its_error(error: TransientError | ConnectError) -> None:
    line = answer_of(error)
    assert "\n" not in line
    found = read_answer(line)
    assert type(found) is type(error)
    assert found.what == f"the keeper (process that holds snapshots) could not start: {error.what}"
    assert found.remedy == error.remedy


def keeper_of_a_driver(monkeypatch: pytest.MonkeyPatch, tick_seconds: float) -> server.Keeper:
    """A keeper, in this process, whose driver runs."""
    monkeypatch.setattr(server, "TICK_SECONDS", tick_seconds)
    monkeypatch.setattr(server, "AWAY", Backoff(0.01, longest_seconds=0.2))
    monkeypatch.setattr(Process, "runs", lambda _: True)
    options = ConnectionOptions("postgresql://reader@localhost/shop", ())
    return server.Keeper(Settings(options, "a" * 10, Process(17, "4711"), REQUEST, INSTANCE, "/work"))


@pytest.mark.parametrize("holds", [True, False])
def test_a_keeper_that_is_not_let_in_any_more_ends(holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has snapshots is patient, and does not come all the time: servers lock roles out."""
    monkeypatch.setattr(server, "REFUSED_SECONDS", 0.5)
    keeper = keeper_of_a_driver(monkeypatch, 0.01)
    attempts: list[str] = []

    def refused() -> bool:
        attempts.append("refused")
        raise ConnectError("no")

    monkeypatch.setattr(keeper, "open", refused)
    monkeypatch.setattr(keeper._executions, "hold_any", lambda: holds)
    keeper._lost_at = time.monotonic()
    keeper.run()
    assert (len(attempts) > 1) == holds
    assert len(attempts) < 15


def test_a_keeper_waits_for_a_server_whose_name_has_no_address_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while a server is restarted whose address goes with it."""
    keeper = keeper_of_a_driver(monkeypatch, 0.01)
    attempts: list[str] = []

    def refused(*_: object, **__: object) -> None:
        attempts.append("refused")
        if len(attempts) == 3:
            keeper.stop()
        error = ConnectError("no address")
        error.has_no_address = True
        raise error

    monkeypatch.setattr(connection, "_connect_once", refused)
    keeper.run()
    assert len(attempts) == 3


def test_a_keeper_is_back_at_once_unless_it_was_lost_just_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where planning finds no keeper, it starts another one."""
    keeper = keeper_of_a_driver(monkeypatch, 0.2)
    waited = []
    for lasted in (60.0, 0.0):
        keeper._board = cast(Any, io.StringIO())
        keeper._opened_at = began = time.monotonic() - lasted
        keeper._lose_board(TransientError("terminating connection due to administrator command"))
        waited.append(time.monotonic() - began - lasted)
    assert waited[0] < 0.2 <= waited[1]


@pytest.mark.parametrize(
    ("line", "what"), [("", "it ended at once"), ("Traceback", "its first line was not an answer")]
)
def test_a_keeper_that_gives_no_answer_is_looked_for_in_the_log(line: str, what: str) -> None:
    found = read_answer(line)
    assert type(found) is DefiniteError
    assert found.what.endswith(what)
    assert "standard error" in found.remedy


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
