"""Which copy of the package each process runs: they have to be the same.

A read passes through several Python processes, and each of them imports the package that it finds. ::

    the user's process ──register(): a class──▶ workers that plan ──reader, partitions──▶ workers that run tasks
                       ──project(): a function──────────────────────────────────────────▶

They may find different ones. A cluster may have an old wheel on some nodes. Where Spark was started in a checkout,
its workers look in that directory first; the package they find there has no compiled accelerator, and reading takes
twice as long.

- What is sent is sealed: pickled as plain values that say which copy the sender runs, and bytes. The receiver compares
  the versions before it unpickles the bytes, because another version may not be able to.
- Another version is a DefiniteError.
- Another copy on the same host, or no accelerator where the sender has one, is a warning, once in each process. On
  another host the same version may lie in another directory.
- Spark finds the formats without ``register()`` too, and Spark 4.0 then keeps the class it found: the user's process
  sends nothing. So a worker without the accelerator looks for a copy that has it on its own path.

Warnings go to this module's logger. Unless the user configures logging in workers, Python writes them to the worker's
standard error, which Spark keeps in the log of the driver or the executor.
"""

from __future__ import annotations

import copyreg
import functools
import logging
import os
import pickle
import socket
import sys
from abc import ABCMeta
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, SupportsIndex

from pyspark import cloudpickle
from pyspark.sql.datasource import InputPartition

from pg_cdc_source._version import __version__
from pg_cdc_source.errors import DefiniteError
from pg_cdc_source.values import native

log = logging.getLogger(__name__)

_REMEDY = (
    "install the same wheel for the driver and on every host that runs executors; start Spark in another directory "
    "than a checkout, which hides the installed package from Spark's workers"
)
_SLOW = "pg_cdc_source reads about half as fast as it could, without its C accelerator: this Python worker"


@dataclass(frozen=True, slots=True)
class Copy:
    """What a process says of the copy that it runs. Fields may be added; these keep their names and types."""

    version: str
    directory: str
    host: str
    accelerator: bool

    def __str__(self) -> str:
        return f"{self.version} in {self.directory} on host {self.host}"


HERE = Copy(
    version=__version__,
    directory=str(Path(__file__).resolve().parents[1]),
    host=socket.gethostname(),
    accelerator=native.LIBRARY is not None,
)


class Sealed:
    """An object that another process may only unpickle if it runs the same version."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open_object, (asdict(HERE), self._dumps(super().__reduce_ex__(protocol)))

    def _dumps(self, content: object) -> bytes:
        # As Spark pickles: classes that nobody can import travel too.
        return bytes(cloudpickle.dumps(content))  # type: ignore[no-untyped-call]


class SealedPartition(Sealed, InputPartition):
    """A task's share of a read. A scan may have 10,000, and only values of this package: plain pickle is faster."""

    def _dumps(self, content: object) -> bytes:
        return pickle.dumps(content)


class SealedClass(ABCMeta):
    """The class of classes that are sent themselves, as those of data sources."""


def _reduce_class(cls: type) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return open_class, (asdict(HERE), cls.__module__, cls.__qualname__)


copyreg.pickle(SealedClass, _reduce_class)


# Other versions call these two by their names: name, place and arguments stay as they are.


def open_object(sender: Mapping[str, Any], content: bytes) -> Any:
    """Unpickle a sealed object if its sender runs this version."""
    compare(sender)
    make, arguments, state = pickle.loads(content)[:3]  # noqa: S301 - Spark unpickles what it is sent, too
    made = make(*arguments)
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
    elif state:
        vars(made).update(state)
    return made


def open_class(sender: Mapping[str, Any], module: str, name: str) -> Any:
    """Import a class by its name if its sender runs this version."""
    compare(sender)
    return getattr(import_module(module), name)


def compare(sender: Mapping[str, Any]) -> None:
    """Raise DefiniteError if the sender runs another version; warn once if it runs a copy that differs otherwise."""
    other = Copy(**{field: sender[field] for field in ("version", "directory", "host", "accelerator")})
    if other.version != HERE.version:
        raise DefiniteError(f"two versions of pg_cdc_source take part in one read: {other}, and {HERE}", remedy=_REMEDY)
    slow = not HERE.accelerator and os.environ.get(native.ENVIRONMENT) != "off"
    if slow and other.accelerator:
        _warn(f"{_SLOW} runs {HERE}; {other} has one")
    elif other.host == HERE.host and other.directory != HERE.directory:
        _warn(f"two copies of pg_cdc_source take part in one read: {other}, and {HERE}")
    elif slow and (hidden := _copy_with_accelerator()) is not None:
        _warn(f"{_SLOW} runs {HERE}; this copy hides the one in {hidden}, which has one")


@functools.cache
def _copy_with_accelerator() -> str | None:
    for entry in sys.path:
        package = Path(entry, "pg_cdc_source").resolve()
        if str(package) != HERE.directory and PathFinder.find_spec("_accelerator", [str(package / "values")]):
            return str(package)
    return None


_warned = False


def _warn(what: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        log.warning("%s\n  Remedy: %s", what, _REMEDY)
