"""Ask for the password of a connection that is about to be opened, where the options name whom to ask.

A password of today is a token that lasts for minutes: one that is asked for once is of no use to the task that
connects an hour later. So each process asks by itself, before each connection, and hands the answer to libpq and to
nobody else. No text of an error has what a command prints or what an exception says, because either may hold it.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import queue
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

from pg_cdc_source.errors import ConnectError, OptionError, PgCdcError, TransientError
from pg_cdc_source.options.conninfo import ConnectionOptions

# A keeper has 30 s to start. The slowest clients of the clouds take some seconds.
SECONDS = 20.0
# A token of AWS has about 1 kB, one of Entra with many groups some ten.
MOST_BYTES = 64 << 10

# Where to connect, by the keyword of libpq: the variable of libpq's that says it where no option does.
_VARIABLES = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "dbname": "PGDATABASE"}


def ask_password(options: ConnectionOptions) -> str | None:
    """The password for one new connection; None where the options name nobody to ask for it.

    Raises TransientError where asking again may help, OptionError or ConnectError where it does not.
    """
    if options.password_command is not None:
        return _run(options.password_command, _login(options))
    if options.password_provider is not None:
        return _call(options.password_provider, _login(options))
    return None


def _login(options: ConnectionOptions) -> dict[str, str]:
    """Where the connection goes and as whom, by libpq's keywords, '' for what neither options nor environment say."""
    settings = options.settings()
    login = {keyword: settings.get(keyword) or os.environ.get(_VARIABLES[keyword], "") for keyword in _VARIABLES}
    return {**login, "host": login["host"] or settings.get("hostaddr", ""), "port": login["port"] or "5432"}


# --- a command -------------------------------------------------------------------------------------------------------


def _run(command: str, login: dict[str, str]) -> str:
    variables = {_VARIABLES[keyword]: value for keyword, value in login.items() if value}
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            # Standard input is Spark's in a worker. Standard error is inherited, so that what a command says there
            # comes into the log.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **variables},
        )
    except OSError as error:
        raise _start_error(error) from None
    try:
        printed = _read(process, time.monotonic() + SECONDS)
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        raise _exit_error(process.returncode)
    try:
        password = printed.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise ConnectError("passwordCommand prints what is not UTF-8", remedy=_PRINT_ONE_LINE) from None
    if "\n" in password or "\0" in password:
        raise ConnectError("passwordCommand prints more than one line", remedy=_PRINT_ONE_LINE)
    if not password:
        raise TransientError("passwordCommand succeeds and prints nothing", remedy=_PRINT_ONE_LINE)
    return password


_PRINT_ONE_LINE = "let it print the password, one line of text, and nothing else on its standard output"


def _read(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """What the command prints until it ends."""
    assert process.stdout is not None
    printed = b""
    with process.stdout as output:
        while wait([output.fileno()], max(0.0, deadline - time.monotonic())):
            data = os.read(output.fileno(), MOST_BYTES)
            printed += data
            if len(printed) > MOST_BYTES:
                raise ConnectError(f"passwordCommand prints more than {MOST_BYTES} bytes", remedy=_PRINT_ONE_LINE)
            if not data:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
                    return printed
                break
    raise TransientError(
        f"passwordCommand did not end within {SECONDS:g} s",
        remedy="run it by hand as the user of Spark's processes: it must not ask for anything, nor leave a process "
        "behind that keeps its standard output",
    )


def _start_error(error: OSError) -> PgCdcError:
    what = f"passwordCommand cannot be started on this host: {error.strerror}"
    if error.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        return TransientError(what, remedy="give this process, or its container, more memory, processes and files")
    return ConnectError(what, remedy="install /bin/sh, which runs it, or use passwordProvider")


def _exit_error(status: int) -> PgCdcError:
    if status in (126, 127):
        # The shell's own: the program is not executable, or not there.
        return ConnectError(
            f"passwordCommand cannot be run on this host: exit status {status}",
            remedy="install the program on the driver's host and on every executor's, and write its full path",
        )
    how = f"was ended by signal {-status}" if status < 0 else f"failed with exit status {status}"
    return TransientError(
        f"passwordCommand {how}", remedy="the log of this process (its standard error) has what it said about that"
    )


# --- a function ------------------------------------------------------------------------------------------------------


class _Call(threading.Thread):
    """Asks a provider. In a thread, because nothing else bounds how long somebody else's function takes."""

    def __init__(self, provider: str, login: dict[str, str]) -> None:
        super().__init__(name="password-provider", daemon=True)
        self._asked = provider, login
        self.answer: queue.SimpleQueue[str | PgCdcError] = queue.SimpleQueue()

    def run(self) -> None:
        provider, login = self._asked
        try:
            function = _find(provider)
            self.answer.put(_answer_of(provider, function, login))
        except PgCdcError as error:
            self.answer.put(error)
        except BaseException as error:
            # Such as SystemExit, or what the module's own __getattr__ raises. A thread would print all of it.
            self.answer.put(_raised(provider, error))


# Those that have not answered in time. A process may ask for months, and whoever asks next waits for one of these.
_late: dict[tuple[str, ...], list[_Call]] = {}
_late_lock = threading.Lock()


def _late_call(asked: tuple[str, ...]) -> _Call | None:
    with _late_lock:
        calls = [call for call in _late.pop(asked, ()) if call.is_alive()]
        call = calls.pop() if calls else None
        if calls:
            _late[asked] = calls
        return call


def _call(provider: str, login: dict[str, str]) -> str:
    asked = (provider, *login.values())
    call = _late_call(asked)
    if call is None:
        call = _Call(provider, login)
        call.start()
    try:
        found = call.answer.get(timeout=SECONDS)
    except queue.Empty:
        with _late_lock:
            _late.setdefault(asked, []).append(call)
        raise TransientError(
            f"passwordProvider {provider} gave no answer within {SECONDS:g} s",
            remedy="bound the waits of the function, or find out what it waits for",
        ) from None
    if isinstance(found, PgCdcError):
        raise found
    return found


def _find(provider: str) -> Callable[..., object]:
    module_name, _, names = provider.partition(":")
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:
        missing = f" (module {error.name})" if isinstance(error, ModuleNotFoundError) else ""
        raise OptionError(
            f"the module of passwordProvider {provider} cannot be imported in this process: "
            f"{type(error).__name__}{missing}{_place_of(error)}",
            remedy="install it in the Python of the driver and of every executor, or ship it with "
            "spark.sparkContext.addPyFile() before the query starts",
        ) from None
    for name in names.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        raise OptionError(
            f"passwordProvider {provider} names no function", remedy=f"define it at the top of {module_name}"
        )
    return found


def _raised(provider: str, error: BaseException) -> TransientError:
    return TransientError(
        f"passwordProvider {provider} raised {type(error).__name__}{_place_of(error)}",
        remedy="let the function log what it may show; nothing else of the exception is shown here, because it may "
        "hold a secret",
    )


def _answer_of(provider: str, function: Callable[..., object], login: dict[str, str]) -> str:
    try:
        password = function(host=login["host"], port=login["port"], user=login["user"], database=login["dbname"])
    except Exception as error:
        raise _raised(provider, error) from None
    if not isinstance(password, str) or not password or "\0" in password:
        what = "an empty text" if password == "" else "text with a NUL" if isinstance(password, str) else "no text"
        raise ConnectError(
            f"passwordProvider {provider} returned {what}", remedy="let the function return the password as a str"
        )
    return password


def _place_of(error: BaseException) -> str:
    """Where in the user's own files, or those of a library, an error was raised; empty where it is in none."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if f.filename != __file__ and "importlib" not in f.filename]
    return f", {Path(theirs[-1].filename).name}, line {theirs[-1].lineno}" if theirs else ""
