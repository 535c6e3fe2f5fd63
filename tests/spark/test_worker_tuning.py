"""What is done in Spark's workers. In processes of their own, because what is frozen stays so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux puts acknowledgements off; others are left alone")

_FREEZE = """
import gc, weakref
from pg_cdc_source.spark.worker_tuning import tune_process

class Node: pass

def garbage():
    node = Node()
    node.itself = node
    return weakref.ref(node)

before = garbage()
tune_process()
frozen = gc.get_freeze_count()
after, kept = garbage(), Node()
tune_process()
gc.collect()
print(frozen > 1_000, gc.get_freeze_count() == frozen, before() is None, after() is None)
"""

_ARCHIVES = """
import importlib, os, sys, time, zipfile
from zipimport import zipimporter
from pg_cdc_source.spark.worker_tuning import tune_process

def named(name):
    path = os.path.join(DIRECTORY, name)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("here_already.py", "")
    sys.path.append(path)
    sys.path_importer_cache[path] = zipimporter(path)
    return path

def add(path):
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("added.py", "")

def finds(path):
    importlib.invalidate_caches()
    return sys.path_importer_cache[path].find_spec("added") is not None

paths = [named(name) for name in ("pyspark.zip", "py4j-0.10.9.9-src.zip", "spark-core_2.13-4.1.4.jar", "users.zip")]
tune_process()
for path in paths:
    add(path)
print(*map(finds, paths))
"""

# A task as it runs in a worker that Spark's daemon forked for a connection, known by the names of function, file and
# variable. Turns are taken until Linux puts acknowledgements off (TCP_QUICKACK is 0), as between Spark and its workers.
_WIRE = """
import socket, time
from socket import IPPROTO_TCP, TCP_QUICKACK
from pg_cdc_source.spark.worker_tuning import small_task

def turn():
    for one, other in ((jvm, connection), (connection, jvm)):
        one.sendall(b"x")
        other.recv(1)

def is_quick(sock):
    return bool(sock.getsockopt(IPPROTO_TCP, TCP_QUICKACK))

def task():
    with small_task():
        turn()

with socket.create_server(("127.0.0.1", 0)) as listening:
    jvm = socket.create_connection(listening.getsockname())
    connection, _ = listening.accept()
for _ in range(1000):
    turn()
    if not is_quick(connection):
        break
before = is_quick(connection)
namespace = {"task": task}
exec(compile("def worker(sock, authenticated): task()", DAEMON, "exec"), namespace)
namespace["worker"](connection, True)
deadline = time.monotonic() + WAIT
while not is_quick(connection) and time.monotonic() < deadline:
    time.sleep(0.001)
print(before, is_quick(connection))
connection.close()
with small_task():
    pass
"""
_DAEMON = "/spark/python/lib/pyspark.zip/pyspark/daemon.py"


def _run(program: str, **environment: str) -> list[str]:
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    assert result.stderr == ""
    return result.stdout.split()


def _wire(daemon: str, wait_seconds: float, **environment: str) -> list[str]:
    return _run(f"DAEMON, WAIT = {daemon!r}, {wait_seconds}\n{_WIRE}", **environment)


def test_modules_are_kept_out_of_collections_and_garbage_is_not() -> None:
    assert _run(_FREEZE) == ["True"] * 4


def test_modules_are_collected_as_ever_where_tuning_is_off() -> None:
    assert _run(_FREEZE, PG_CDC_WORKER_TUNING="off") == ["False", "True", "True", "True"]


def test_archives_of_spark_are_not_read_again_and_those_of_users_are(tmp_path: Path) -> None:
    program = f"DIRECTORY = {str(tmp_path)!r}\n{_ARCHIVES}"
    assert _run(program) == ["False", "False", "False", "True"]
    for archive in tmp_path.iterdir():
        archive.unlink()
    assert _run(program, PG_CDC_WORKER_TUNING="off") == ["True"] * 4


@linux
def test_messages_between_a_worker_and_spark_are_not_kept_back() -> None:
    assert _wire(_DAEMON, 10) == ["False", "True"]


@linux
@pytest.mark.parametrize(
    ("daemon", "environment"),
    [(_DAEMON, {"PG_CDC_WORKER_TUNING": "off"}), ("/home/user/daemon.py", {})],
)
def test_a_connection_is_left_as_it_is(daemon: str, environment: dict[str, str]) -> None:
    assert _wire(daemon, 0.1, **environment) == ["False"] * 2
