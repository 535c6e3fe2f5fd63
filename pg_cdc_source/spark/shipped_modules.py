"""Modules that were shipped with ``addPyFile()`` or ``--py-files``, for a stream's source process.

Tasks and planning workers import them by themselves. The source process is told a directory of its own below the
driver's, in which nothing ever is, and no archives (Spark's PythonStreamingSourceRunner.scala). What was shipped lies
in the driver's.
"""

from __future__ import annotations

import sys
from pathlib import Path

_OWN = "streaming_job"
_ARCHIVES = (".zip", ".egg", ".jar")  # as SparkContext.PACKAGE_EXTENSIONS


def find_shipped_modules() -> None:
    """Let this process import what was shipped, after everything that is installed."""
    for own in [Path(entry) for entry in sys.path if Path(entry).name == _OWN]:
        archives = sorted(file for file in own.parent.glob("*") if file.suffix in _ARCHIVES)
        found = [str(path) for path in (own.parent, *archives)]
        sys.path += [path for path in found if path not in sys.path]
        # Not importlib.invalidate_caches(): it reads each archive on the path anew, and Spark's own takes 0.2 s of CPU.
        for finder in map(sys.path_importer_cache.get, found):
            if finder is not None and hasattr(finder, "invalidate_caches"):
                finder.invalidate_caches()
