"""The driver's JVM may be the first process of a container, as in ``docker run apache/spark …/spark-submit …``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The JVM (process 1) starts two of Spark's Python daemons, each of which forks a worker that plans.
JVM = """
import os, subprocess
daemon = '''
import os, sys
if os.fork() == 0:
    from pg_cdc_source.snapshot.driver import driver_process
    print(driver_process().pid, flush=True)
    os._exit(0)
os.wait()
'''
assert os.getpid() == 1
for _ in range(2):
    subprocess.run([sys.executable, "-c", daemon], check=True)
"""


def test_the_driver_may_be_the_first_process_of_a_container(tmp_path: Path) -> None:
    java = tmp_path / "java"
    java.symlink_to(sys.executable)
    program = JVM.replace("sys.executable", repr(sys.executable))
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    found = subprocess.run(
        [*unshare, str(java), "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    if "unshare:" in found.stderr:
        pytest.skip(found.stderr)
    assert found.stdout.split() == ["1", "1"], found.stderr
