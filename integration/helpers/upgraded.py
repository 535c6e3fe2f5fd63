"""A server, and what pg_upgrade makes of it: the tests' version, and the newest one."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from servers import SETTINGS, binaries

from pg_cdc_source.demo import embedded_postgres as embedded
from pg_cdc_source.demo.throwaway import throwaway_directory

_PROGRAMS = ("pg_controldata", "pg_checksums")
_PASSWORD = "upgraded"
# A slot whose stream has confirmed everything would lack the transactions of an autovacuum, and be refused.
_SETTINGS = {**SETTINGS, "autovacuum": "off", "fsync": "off"}
_OPTIONS = " ".join(f"-c {name}={value}" for name, value in SETTINGS.items())


def lacking() -> str | None:
    """Why this server cannot be upgraded; None where it can."""
    found = binaries()
    missing = [] if found is None else [name for name in _PROGRAMS if not (found / name).exists()]
    return f"pg_upgrade needs {' and '.join(missing)} of the old server" if missing else None


class Upgradable:
    """Two clusters of which one runs at a time: the old one until :meth:`upgrade`, then the new one."""

    def __init__(self, old: Path, new: Path) -> None:
        self._homes = {"old": old, "new": new}
        self._account = embedded._unprivileged_account()
        self._bins = {}
        for name, found in (("old", binaries()), ("new", None)):
            home = self._homes[name]
            if self._account is not None:
                shutil.chown(home, self._account)
            self._bins[name] = embedded._reachable(found or embedded._bundled_bin_dir(), home, self._account)
            embedded._initdb(self._bins[name], home, _PASSWORD, self._account)
        # From 18 on, a new cluster has checksums, and both have to have them.
        self._run(self._bins["old"] / "pg_checksums", "--enable", "--no-sync", "-D", old / "data", check=False)

    @contextlib.contextmanager
    def running(self, name: str) -> Iterator[str]:
        """Run the ``old`` or the ``new`` one, and yield the URL of its superuser."""
        with embedded._running(self._bins[name], self._homes[name], _SETTINGS, _PASSWORD, self._account) as url:
            yield url

    def upgrade(self) -> None:
        """Make the new one of the old one."""
        self._run(
            *(self._bins["new"] / "pg_upgrade", "--username", "postgres", "--no-sync"),
            *("--old-bindir", self._bins["old"], "--new-bindir", self._bins["new"]),
            *("--old-datadir", self._homes["old"] / "data", "--new-datadir", self._homes["new"] / "data"),
            *("--old-options", _OPTIONS, "--new-options", _OPTIONS),
        )

    def _run(self, *command: str | Path, check: bool = True) -> None:
        done = subprocess.run(
            [str(part) for part in command],
            user=self._account,
            cwd=self._homes["new"],
            env={**embedded._environment(), "PGPASSWORD": _PASSWORD},
            capture_output=True,
            text=True,
            check=False,
        )
        logs = [log.read_text()[-1000:] for log in (self._homes["new"] / "data").glob("pg_upgrade_output.d/*/log/*")]
        assert done.returncode == 0 or not check, "\n".join([done.stdout[-1000:], done.stderr[-1000:], *logs])


@contextlib.contextmanager
def upgradable() -> Iterator[Upgradable]:
    """Two clusters, in directories that are removed afterwards."""
    with throwaway_directory("old") as old, throwaway_directory("new") as new:
        yield Upgradable(old, new)
