"""What is done for the process that runs this code."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: what is frozen stays so.
_PROGRAM = """
import gc, weakref
from pg_cdc_source.processes import freeze_modules

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


def test_modules_are_kept_out_of_collections_and_garbage_is_not() -> None:
    found = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True"] * 4
