"""Spark as a cluster: a standalone master with workers, and a Connect server, all in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark
from sessions import JVM_OPTIONS
from watch import wait_until

_PACKAGE = "org.apache.spark"
_HOME = Path(pyspark.__file__).parent
_START_SECONDS = 120
_LISTEN = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")


@contextmanager
def standalone_cluster(scratch: Path, workers: int = 2) -> Iterator[str]:
    """Run a master and workers of one core each, and yield the master's URL.

    Executors are started by the workers, in directories of these, and know of the driver only what Spark tells them.
    """
    with ExitStack() as stack:
        master = stack.enter_context(_daemon(scratch / "master", "deploy.master.Master", *_LISTEN))
        url = master(r"Starting Spark master at (\S+)")
        arguments = (*_LISTEN, "--cores", "1", "--memory", "1g", "--work-dir", ".", url)
        started = [
            stack.enter_context(_daemon(scratch / f"worker{number}", "deploy.worker.Worker", *arguments))
            for number in range(workers)
        ]
        for worker in started:
            worker("Successfully registered with (master)")
        yield url


@contextmanager
def connect_server(scratch: Path, master: str, given: Mapping[str, str] | None = None) -> Iterator[str]:
    """Run a Connect server whose driver is one of ``master``, with these settings; yield its URL."""
    conf = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.executor.extraJavaOptions": JVM_OPTIONS,
        "spark.executor.memory": "1g",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
        **(given or {}),
    }
    command = [
        *("deploy.SparkSubmit", "--master", master, "--class", f"{_PACKAGE}.sql.connect.service.SparkConnectServer"),
        *(part for name, value in conf.items() for part in ("--conf", f"{name}={value}")),
        "spark-internal",
    ]
    with _daemon(scratch, *command) as server:
        yield f"sc://127.0.0.1:{server(r'Spark Connect server started at: .*:([0-9]+)')}"


@contextmanager
def _daemon(directory: Path, main_class: str, *arguments: str) -> Iterator[Callable[[str], str]]:
    """Run a class of Spark's in ``directory`` until the block ends; yield what waits for a pattern in its log."""
    directory.mkdir(parents=True)
    environment = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_DAEMON_JAVA_OPTS": JVM_OPTIONS,
        # A Connect server takes its driver's memory from here, and would not start with less than half of it.
        "SPARK_DAEMON_MEMORY": "1g",
        "SPARK_HOME": str(_HOME),
        "SPARK_LOCAL_DIRS": str(directory),
        "TMPDIR": str(directory),
    }
    log = directory / "log"
    with log.open("wb") as output:
        command = [str(_HOME / "bin" / "spark-class"), f"{_PACKAGE}.{main_class}", *arguments]
        # The script becomes the JVM, so that this is the process to end.
        daemon = subprocess.Popen(command, cwd=directory, env=environment, stdout=output, stderr=output)

    def find(pattern: str) -> str:
        def look() -> re.Match[str] | None:
            text = log.read_text(errors="replace")
            assert daemon.poll() is None, text[-2000:]
            # The last line may not be there as a whole yet.
            return re.search(pattern, text[: text.rfind("\n") + 1])

        found = wait_until(look, _START_SECONDS)
        assert found is not None
        return found[1]

    try:
        yield find
    finally:
        daemon.terminate()
        try:
            daemon.wait(20)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
