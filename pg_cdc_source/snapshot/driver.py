"""Find the process of Spark's driver, and tell whether a process still runs.

Planning runs in a Python worker that the driver's JVM has forked. What has to end with the driver, as the keeper does,
holds the JVM's ``Process`` and asks it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pg_cdc_source.errors import DefiniteError


@dataclass(frozen=True, slots=True)
class Process:
    """A process. When it started tells it from a later one with the same pid."""

    pid: int
    started: str

    def runs(self) -> bool:
        found = _find_process(self.pid)
        return found is not None and found[0] == self


def _find_process(pid: int) -> tuple[Process, int, str] | None:
    """(process, parent's pid, program's name) of a pid; None for a process that has ended, as a zombie has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
        return _find_process_by_ps(pid)
    except ProcessLookupError:
        return None
    name = stat[stat.index("(") + 1 : stat.rindex(")")]
    fields = stat[stat.rindex(")") + 2 :].split()
    state, parent, started = fields[0], int(fields[1]), fields[19]
    return None if state in "ZX" else (Process(pid, started), parent, name)


def _find_process_by_ps(pid: int) -> tuple[Process, int, str] | None:
    # Systems without /proc (macOS).
    found = subprocess.run(
        ["/bin/ps", "-o", "ppid=,state=,lstart=,comm=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    if len(found) < 8 or found[1].startswith("Z"):
        return None
    return Process(pid, " ".join(found[2:7])), int(found[0]), found[7].rsplit("/", 1)[-1]


def driver_process() -> Process:
    """The driver's JVM: the nearest ancestor that runs Java.

    In a container the JVM may itself be the first process. Its Python daemons are no drivers: there are several, and
    scans of one action would not have one snapshot. So a worker of Spark's without a JVM is refused. Another process
    is of no Spark; its driver is the oldest ancestor but init.
    """
    pid = os.getppid()
    oldest = None
    while pid > 0 and (found := _find_process(pid)) is not None:
        process, parent, name = found
        if name == "java":
            return process
        if pid > 1:
            oldest = process
        pid = parent
    if oldest is None or _is_of_spark():
        raise DefiniteError(
            "the driver's process cannot be found: no process above this one runs Java",
            remedy="start Spark again if its driver has ended; where planning runs without a view of the JVM, read by "
            "open_snapshot()",
        )
    return oldest


def _is_of_spark() -> bool:
    """Whether this process is a Python worker of Spark's, or was forked by one."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.partition(".")[0] == "pyspark"
