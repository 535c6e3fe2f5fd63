"""What gives the password of a new connection: a command or a function, bounded, and with errors that show nothing."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pg_cdc_source.errors import ConnectError, OptionError, PgCdcError, TransientError
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.postgres import passwords
from pg_cdc_source.postgres.passwords import ask_password

URL = "postgresql://me@db.example.com:5433/shop"
SECRET = "Geheim-4711"


def ask(**options: str) -> str | None:
    return ask_password(parse_connection_options({"url": URL, **options}))


def refusal(kind: type[PgCdcError], **options: str) -> str:
    with pytest.raises(PgCdcError) as caught:
        ask(**options)
    assert type(caught.value) is kind, caught.value
    assert caught.value.remedy
    assert caught.value.__cause__ is None
    assert SECRET not in str(caught.value)
    return caught.value.what


def test_nobody_is_asked_without_the_options() -> None:
    assert ask() is None


# --- a command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("printed", [SECRET, " with spaces ", "p@:/%' \\ü"])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_command_prints_the_password(printed: str, end: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes((printed + end).encode())
    assert ask(passwordCommand=f"cat {tmp_path}/token") == printed


def test_a_command_knows_where_the_connection_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOST", "elsewhere")
    told = "echo $PGHOST $PGPORT $PGUSER $PGDATABASE"
    assert ask(passwordCommand=told) == "db.example.com 5433 me shop"
    alone = parse_connection_options({"passwordCommand": told, "user": "me"})
    assert ask_password(alone) == "elsewhere 5432 me"


def test_a_command_is_run_each_time(tmp_path: Path) -> None:
    command = f"echo x >> {tmp_path}/count; wc -l < {tmp_path}/count"
    assert [(ask(passwordCommand=command) or "").strip() for _ in range(3)] == ["1", "2", "3"]


def test_a_command_reads_nothing_of_this_process() -> None:
    assert ask(passwordCommand="cat; echo read") == "read"


@pytest.mark.parametrize(("number", "kind"), [(errno.EAGAIN, TransientError), (errno.ENOENT, ConnectError)])
def test_a_shell_that_does_not_start_is_an_error(
    number: int, kind: type[PgCdcError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError(number, "does not start")

    monkeypatch.setattr(subprocess, "Popen", fail)
    assert "cannot be started on this host: does not start" in refusal(kind, passwordCommand=f"echo {SECRET}")


@pytest.mark.parametrize(
    ("command", "kind", "says"),
    [
        (f"echo {SECRET}; exit 3", TransientError, "passwordCommand failed with exit status 3"),
        (f"echo {SECRET}; kill -9 $$", TransientError, "passwordCommand was ended by signal 9"),
        (f"/nowhere/{SECRET}", ConnectError, "passwordCommand cannot be run on this host: exit status 127"),
        ("/", ConnectError, "passwordCommand cannot be run on this host: exit status 126"),
        ("true", TransientError, "passwordCommand succeeds and prints nothing"),
        (f"echo {SECRET}; echo {SECRET}", ConnectError, "passwordCommand prints more than one line"),
        (f"printf '{SECRET}\\377'", ConnectError, "passwordCommand prints what is not UTF-8"),
        (f"yes {SECRET}", ConnectError, "passwordCommand prints more than 65536 bytes"),
    ],
)
def test_an_error_of_a_command_says_what_happened_and_not_what_it_printed(
    command: str, kind: type[PgCdcError], says: str
) -> None:
    assert refusal(kind, passwordCommand=command) == says


@pytest.mark.parametrize("command", ["sleep 60", "sleep 60 & echo early", "exec >&-; sleep 60"])
def test_a_command_that_hangs_is_ended(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passwords, "SECONDS", 0.5)
    start = time.monotonic()
    assert refusal(TransientError, passwordCommand=command) == "passwordCommand did not end within 0.5 s"
    assert time.monotonic() - start < 10


# --- a function ------------------------------------------------------------------------------------------------------

MODULE = f"""
import time

class Failed(Exception):
    pass

def told(**login):
    return "{{host}} {{port}} {{user}} {{database}}".format(**login)

def fails(**login):
    raise Failed("{SECRET}")

class Tokens:
    @staticmethod
    def told(**login):
        return "{SECRET}"

empty = lambda **login: ""
octets = lambda **login: b"{SECRET}"
nul = lambda **login: "{SECRET}\\0"
hangs = lambda **login: time.sleep(30)
constant = "{SECRET}"

def exits(**login):
    raise SystemExit("{SECRET}")

def __getattr__(name):
    raise RuntimeError("{SECRET}") if name == "odd" else AttributeError(name)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    (tmp_path / "given_tokens.py").write_text(MODULE)
    (tmp_path / "broken_tokens.py").write_text(f"import json\nraise RuntimeError('{SECRET}')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "given_tokens", raising=False)
    return lambda name: f"given_tokens:{name}"


def test_a_function_is_told_where_the_connection_goes(module: Callable[[str], str]) -> None:
    assert ask(passwordProvider=module("told")) == "db.example.com 5433 me shop"
    assert ask(passwordProvider=module("Tokens.told")) == SECRET


@pytest.mark.parametrize(
    ("function", "kind", "says"),
    [
        ("fails", TransientError, "raised Failed, given_tokens.py, line 11"),
        ("exits", TransientError, "raised SystemExit, given_tokens.py, line 25"),
        ("odd", TransientError, "raised RuntimeError, given_tokens.py, line 28"),
        ("empty", ConnectError, "returned an empty text"),
        ("octets", ConnectError, "returned no text"),
        ("nul", ConnectError, "returned text with a NUL"),
        ("constant", OptionError, "names no function"),
        ("missing", OptionError, "names no function"),
    ],
)
def test_an_error_of_a_function_names_it_and_shows_nothing(
    module: Callable[[str], str], function: str, kind: type[PgCdcError], says: str
) -> None:
    assert refusal(kind, passwordProvider=module(function)) == f"passwordProvider {module(function)} {says}"


@pytest.mark.usefixtures("module")
def test_a_module_that_cannot_be_imported_is_an_error_of_the_option() -> None:
    assert "ModuleNotFoundError (module no_such_module)" in refusal(OptionError, passwordProvider="no_such_module:f")
    assert "RuntimeError, broken_tokens.py, line 2" in refusal(OptionError, passwordProvider="broken_tokens:f")


def test_a_function_that_hangs_is_left(module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passwords, "SECONDS", 0.2)
    provider = module("hangs")
    what = refusal(TransientError, passwordProvider=provider)
    assert what == f"passwordProvider {provider} gave no answer within 0.2 s"
    # Whoever asks again waits for the same call.
    for _ in range(3):
        refusal(TransientError, passwordProvider=provider)
    assert [thread.name for thread in threading.enumerate()].count("password-provider") == 1
