"""Check Spark's Python processes: whether they find the formats, and run the same Python and package as this process.

Spark starts Python processes of its own. To plan, and to look formats up, it runs PYSPARK_DRIVER_PYTHON, else
PYSPARK_PYTHON, else python3 from the PATH. For tasks it runs PYSPARK_PYTHON, else python3. The checks run the same
commands and ask what they find. The findings are warnings at worst, because a cluster, or the setting
spark.pyspark.python, may choose another Python.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pg_cdc_source import __version__
from pg_cdc_source.cli.preflight.findings import Checks
from pg_cdc_source.cli.preflight.installation import package_directory
from pg_cdc_source.errors import DefiniteError
from pg_cdc_source.values import native

_SHIMS = {"pgcdc": "pyspark_pgcdc", "pgsnapshot": "pyspark_pgsnapshot"}
_PROBE_SECONDS = 60

# The look-up is Spark's own (pyspark/sql/worker/lookup_data_sources.py): it takes packages from the directories of
# sys.path only, and all at once, so one that raises hides all others.
_PROBE = """
import importlib.util, json, pkgutil, platform, sys

def look_up():
    from pyspark.sql.datasource import DataSource
    formats, broken = [], {}
    for name in sorted(module.name for module in pkgutil.iter_modules() if module.name.startswith("pyspark_")):
        try:
            module = importlib.import_module(name)
            if hasattr(module, "DefaultSource") and issubclass(module.DefaultSource, DataSource):
                formats.append(module.DefaultSource.name())
        except Exception as error:
            broken[name] = f"{type(error).__name__}: {error}"
    return {"formats": formats, "broken": broken}

def look_at_package():
    if importlib.util.find_spec("pg_cdc_source") is None:
        return {}
    from pg_cdc_source import __version__
    from pg_cdc_source.values import native
    return {"version": __version__, "accelerated": native.LIBRARY is not None}

found = {"python": platform.python_version(), "failures": []}
for look in (look_up, look_at_package):
    try:
        found.update(look())
    except Exception as error:
        found["failures"].append(f"{type(error).__name__}: {error}")
found["importable"] = [name for name in sys.argv[1:] if importlib.util.find_spec(name)]
print()
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class _Probed:
    """What a Python has told: ``version`` of the package, None if it is not there; ``formats`` that a look-up finds.

    ``importable`` are those of our look-up packages that an import finds, ``broken`` all look-up packages that raise,
    ``failures`` what else was raised, ``messages`` what was printed to stderr meanwhile.
    """

    command: str
    python: str
    importable: list[str]
    failures: list[str]
    messages: str
    version: str | None = None
    accelerated: bool = False
    formats: list[str] | None = None
    broken: Mapping[str, str] | None = None


def check_spark(checks: Checks) -> None:
    in_tasks = os.environ.get("PYSPARK_PYTHON") or "python3"
    in_planning = os.environ.get("PYSPARK_DRIVER_PYTHON") or in_tasks
    probe = functools.cache(_probe)
    checks.run("formats", lambda: _require_formats(probe(in_planning)), failed="warning")
    checks.run("workers", lambda: _require_same(probe(in_tasks)), failed="warning")
    here = Path.cwd() / "pg_cdc_source"
    if (here / "__init__.py").exists() and here.resolve() != package_directory().resolve():
        checks.add(
            "workers",
            "warning",
            f"a Spark started in this directory imports the copy of the package in {here},"
            f" not the one in {package_directory()}",
            "start Spark in another directory",
        )
    checks.run("pandas", _require_pandas, failed="warning")


def _probe(command: str) -> _Probed:
    """Run a Python as Spark does, but in an empty directory, and return what it tells."""
    program = str(Path(command).absolute()) if os.sep in command else command
    problem = ""
    with tempfile.TemporaryDirectory() as directory:
        try:
            result = subprocess.run(
                [program, "-c", _PROBE, *_SHIMS.values()],
                cwd=directory,
                env={**os.environ, "PYTHONPATH": _python_path()},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_PROBE_SECONDS,
                check=False,
            )
            messages = result.stderr.strip()
            return _Probed(command=command, messages=messages, **json.loads(result.stdout.splitlines()[-1]))
        except OSError as error:
            problem = str(error)
        except subprocess.TimeoutExpired:
            problem = f"no answer within {_PROBE_SECONDS} s"
        except (IndexError, TypeError, ValueError):
            problem = messages.splitlines()[-1] if messages else f"no answer, exit status {result.returncode}"
    raise DefiniteError(f"{command} does not run as a Python here: {problem}", remedy=_choose_this_python(command))


def _python_path() -> str:
    """PYTHONPATH as Spark extends it: its workers find PySpark even where their Python does not have it."""
    import pyspark

    home = Path(os.environ.get("SPARK_HOME") or Path(str(pyspark.__file__)).parent)
    paths = [*map(str, sorted((home / "python" / "lib").glob("*.zip"))), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, paths))


def _choose_this_python(command: str) -> str:
    """Set those of Spark's variables that choose ``command``."""
    chosen_by = [name for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON") if os.environ.get(name) == command]
    return "export " + " ".join(f"{name}={shlex.quote(sys.executable)}" for name in chosen_by or ["PYSPARK_PYTHON"])


def _install_there(command: str) -> str:
    if Path(shutil.which(command) or command).absolute() == Path(sys.executable).absolute():
        return "install the package again, with all that it depends on"
    return f"{_choose_this_python(command)}; or install pg-cdc-source {__version__} in {command}"


def _require_formats(found: _Probed) -> str:
    if found.broken:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in found.broken.items())
        raise DefiniteError(
            f"Spark's look-up in {found.command} fails, so that Spark finds no Python data source: {reasons}",
            remedy=f"repair or uninstall {', '.join(found.broken)}; or call register(spark) in each session",
        )
    missing = [name for name in _SHIMS if name not in (found.formats or ())]
    if not missing:
        return f"Spark's look-up in {found.command} finds {', '.join(_SHIMS)}"
    text = f"Spark's look-up in {found.command} does not find {', '.join(missing)}"
    if found.formats is None:
        raise DefiniteError(f"{text}: {'; '.join(found.failures)}", remedy=_install_there(found.command))
    if not all(_SHIMS[name] in found.importable for name in missing):
        raise DefiniteError(f"{text}: pg-cdc-source is not installed there", remedy=_install_there(found.command))
    if found.messages:
        # The look-up packages log what their imports raise.
        raise DefiniteError(f"{text}: {found.messages.splitlines()[-1]}", remedy=_install_there(found.command))
    raise DefiniteError(
        f"{text}: their packages can be imported but lie in no directory of sys.path, as in an editable installation",
        remedy="install the package without --editable; or call register(spark) in each session",
    )


def _require_same(found: _Probed) -> str:
    """Compare with this process, as which the driver runs."""
    command, here = found.command, platform.python_version()
    if found.python.split(".")[:2] != here.split(".")[:2]:
        text = f"{command} is Python {found.python} and this is Python {here}: Spark refuses to run tasks"
    elif found.version is None:
        reason = "; ".join(found.failures) or "it is not installed there"
        text = f"{command} (Python {found.python}) cannot import pg-cdc-source: {reason}"
    elif found.version != __version__:
        text = f"{command} has pg-cdc-source {found.version} and this is {__version__}"
    elif native.LIBRARY is not None and not found.accelerated:
        text = f"{command} has pg-cdc-source without the accelerator, so that tasks take longer"
    else:
        return f"{command}: Python {found.python} with pg-cdc-source {found.version}"
    raise DefiniteError(text, remedy=_install_there(command))


def _require_pandas() -> str:
    from pyspark.sql.pandas.utils import require_minimum_pandas_version

    remedy = 'pip install "pandas>=2.2,<3"'
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", FutureWarning)
        try:
            require_minimum_pandas_version()
        except ImportError as error:
            raise DefiniteError(f"project() cannot run: {error}", remedy=remedy) from None
    if warned:
        raise DefiniteError(f"project() may not run: {warned[0].message}", remedy=remedy)
    return f"{importlib.metadata.version('pandas')}, as project() needs it"
