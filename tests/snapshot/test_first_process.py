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


# Spark's daemon, as a platform starts it out of sight of its JVM; the worker that plans is forked by it.
DAEMON = """
import os
if os.fork() == 0:
    from pg_cdc_source.errors import DefiniteError
    from pg_cdc_source.snapshot.driver import driver_process
    try:
        print(driver_process(), flush=True)
    except DefiniteError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""


def test_a_worker_that_sees_no_jvm_finds_no_driver(tmp_path: Path) -> None:
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").touch()
    (tmp_path / "pyspark" / "daemon.py").write_text(DAEMON)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-m", "pyspark.daemon"]
    found = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False, cwd=tmp_path
    )
    assert "the driver's process cannot be found" in found.stdout, found
