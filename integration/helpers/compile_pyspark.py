"""Keep PySpark's modules compiled in the archives that Spark's Python processes import them from.

    python integration/helpers/compile_pyspark.py

The archives hold source alone, and Python keeps nothing of what it compiles from one: each process that Spark starts,
five for a first query, spent most of its start with that. ``make integration`` compiles once in a virtual environment.
Nothing depends on it: tests only take longer without.
"""

from __future__ import annotations

import py_compile
import shutil
import tempfile
from pathlib import Path
from zipfile import ZipFile

import pyspark


def add_compiled(archive: Path, scratch: Path) -> None:
    """Add to the archive what each of its modules compiles to, PySpark's own tests left out."""
    code, copy = scratch / "code", scratch / "copy"
    shutil.copy(archive, copy)
    with ZipFile(copy, "a") as modules:
        names = set(modules.namelist())
        for name in sorted(names):
            if name.endswith(".py") and f"{name}c" not in names and "tests" not in name.split("/"):
                source = modules.extract(name, scratch)
                # Times in an archive are not those of the files, so that Python would take it for out of date.
                unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
                py_compile.compile(source, str(code), f"{archive}/{name}", True, invalidation_mode=unchecked)
                modules.write(code, f"{name}c")
    copy.rename(archive)


def main() -> None:
    directory = Path(pyspark.__file__).parent / "python" / "lib"
    for archive in directory.glob("*.zip"):
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            add_compiled(archive, Path(scratch))


if __name__ == "__main__":
    main()
