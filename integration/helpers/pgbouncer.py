"""A pgbouncer in front of a server."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg2
import pytest
from psycopg2.extensions import make_dsn, parse_dsn

START_SECONDS = 60


@contextlib.contextmanager
def pgbouncer(db: str, pool_mode: str, *, add_host: bool = False) -> Iterator[str]:
    """Run one on the loopback interface that pools as ``pool_mode`` says; yields what leads through it to ``db``.

    With ``add_host``, it adds the client's address to the name that a session is opened with.
    """
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        pytest.fail("pgbouncer is missing: apt-get install pgbouncer")
    login = parse_dsn(db)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home = Path(tempfile.mkdtemp(prefix="pg_cdc_source-pgbouncer-"))
    settings = home / "pgbouncer.ini"
    settings.write_text(
        "[databases]\n"
        f"pooled = host={login['host']} port={login['port']} dbname={login['dbname']} user={login['user']}"
        f" password={login['password']}\n"
        "[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
        f"pool_mode = {pool_mode}\ndefault_pool_size = 20\napplication_name_add_host = {int(add_host)}\n"
    )
    # It refuses to run as root.
    account = "nobody" if os.geteuid() == 0 else None
    if account is not None:
        shutil.chown(home, account)
        shutil.chown(settings, account)
    with (home / "log").open("wb") as log:
        process = subprocess.Popen([program, str(settings)], user=account, cwd=home, stdout=log, stderr=log)
    url = make_dsn(host="127.0.0.1", port=port, dbname="pooled", user=login["user"], password="not asked for")
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                psycopg2.connect(url).close()
                break
            except psycopg2.OperationalError as error:
                assert process.poll() is None, (home / "log").read_text()
                if time.monotonic() > deadline:
                    raise AssertionError((home / "log").read_text()) from error
                time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(home)
