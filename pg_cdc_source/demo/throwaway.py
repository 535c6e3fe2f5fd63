"""A directory that goes when this process does, also when it is killed, and with it a server whose data is in there."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pg_cdc_source.postgres.backoff import Backoff

_REMOVE_SECONDS = 10.0

# It reads a line, or to the end of a pipe that this process holds open. By then the directory is gone, unless this was
# killed. A server without its directory would go on for a minute.
_AFTER_US = """
read -r _
tries=0
while [ -d "$0" ] && [ "$tries" -lt 100 ]; do
    [ -f "$0/data/postmaster.pid" ] && kill -QUIT "$(head -n 1 "$0/data/postmaster.pid")"
    rm -rf "$0" || sleep 0.1
    tries=$((tries + 1))
done
"""


@contextmanager
def throwaway_directory(purpose: str) -> Iterator[Path]:
    """Make a directory, and remove it when the block ends, or this process.

    A server that runs in it has its files in ``data``.
    """
    home = Path(tempfile.mkdtemp(prefix=f"pg_cdc_source-{purpose}-"))
    with contextlib.ExitStack() as stack:
        if (shell := shutil.which("sh")) is not None:
            # In a session of its own, so that Ctrl-C does not reach it.
            watch = subprocess.Popen(
                [shell, "-c", _AFTER_US, str(home)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            # A line, because a process that was forked meanwhile may hold the pipe open.
            stack.callback(watch.communicate, b"\n")
        stack.callback(remove, home)
        yield home


def remove(directory: Path) -> None:
    """Remove a directory, where processes that are about to end may still write."""
    for _ in Backoff(0.1, growth=1, within_seconds=_REMOVE_SECONDS).polls():
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            break
