"""What is done for a worker. In processes of their own: what is frozen stays so, and descriptors are looked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

_FREEZE = """
import gc, weakref
from pg_cdc_source.spark.worker import freeze_modules

class Node: pass

def garbage():
    node = Node()
    node.itself = node
    return weakref.ref(node)

before = garbage()
freeze_modules()
frozen = gc.get_freeze_count()
after, kept = garbage(), Node()
freeze_modules()
gc.collect()
print(frozen > 1_000, gc.get_freeze_count() == frozen, before() is None, after() is None)
"""

# Turns are taken until Linux puts acknowledgements off (TCP_QUICKACK is 0), as it does between Spark and its workers.
_WIRE = """
import os, socket, time
from socket import IPPROTO_TCP, TCP_NODELAY, TCP_QUICKACK
from pg_cdc_source.spark.worker import small_task

def turn():
    for one, other in ((jvm, worker), (worker, jvm)):
        one.sendall(b"x")
        other.recv(1)

lowest = os.open(os.devnull, os.O_RDONLY)
with socket.create_server(("127.0.0.1", 0)) as listening:
    jvm = socket.create_connection(listening.getsockname())
    worker, _ = listening.accept()
    elsewhere, pipe = socket.socket(), os.pipe()
for _ in range(1000):
    turn()
    if not worker.getsockopt(IPPROTO_TCP, TCP_QUICKACK):
        break
before = worker.getsockopt(IPPROTO_TCP, TCP_NODELAY), worker.getsockopt(IPPROTO_TCP, TCP_QUICKACK)
# Spark's workers have descriptors of it for each task only.
os.dup2(worker.fileno(), lowest)
with small_task():
    turn()
# Files may take their place, and stay.
os.dup2(os.open(os.devnull, os.O_RDONLY), lowest)
open_before = len(os.listdir("/proc/self/fd"))
socket.setdefaulttimeout(10)
deadline = time.monotonic() + 10
while not worker.getsockopt(IPPROTO_TCP, TCP_QUICKACK) and time.monotonic() < deadline:
    time.sleep(0.001)
kept = len(os.listdir("/proc/self/fd")) == open_before and os.get_blocking(worker.fileno())
after = bool(worker.getsockopt(IPPROTO_TCP, TCP_NODELAY)), worker.getsockopt(IPPROTO_TCP, TCP_QUICKACK)
worker.close()
with small_task():
    pass
print(*before, *after, kept, elsewhere.getsockopt(IPPROTO_TCP, TCP_NODELAY))
"""


def _run(program: str) -> list[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()


def test_modules_are_kept_out_of_collections_and_garbage_is_not() -> None:
    assert _run(_FREEZE) == ["True"] * 4


@pytest.mark.skipif(sys.platform != "linux", reason="Linux puts acknowledgements off; others are left as they are")
def test_messages_between_a_worker_and_spark_are_not_kept_back() -> None:
    assert _run(_WIRE) == ["0", "0", "True", "1", "True", "0"]
