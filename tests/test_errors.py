from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from pg_cdc_source import errors
from pg_cdc_source.errors import DefiniteError, OptionError, PgCdcError, error_of, short_text

CLASSES = [found for _, found in inspect.getmembers(errors, inspect.isclass) if issubclass(found, PgCdcError)]
# Users match on these; a code keeps its meaning.
CODES = {
    "PgCdcError": "PGCDC",
    "TransientError": "TRANSIENT",
    "DefiniteError": "DEFINITE",
    "OptionError": "OPTION",
    "ServerFullError": "SERVER_FULL",
    "ConnectError": "CONNECT",
    "AccessError": "ACCESS",
    "ServerSetupError": "SERVER_SETUP",
    "SnapshotLostError": "SNAPSHOT_LOST",
    "SlotLostError": "SLOT_LOST",
    "SchemaChangedError": "SCHEMA_CHANGED",
    "QueryError": "QUERY",
    "UnrepresentableError": "UNREPRESENTABLE",
    "WireError": "WIRE",
    "ForeignWriterError": "FOREIGN_WRITER",
}


def by_pickle(error: PgCdcError) -> PgCdcError:
    return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]  # noqa: S301 - our own bytes


def test_codes_are_those_of_the_first_release() -> None:
    assert {found.__name__: found.code for found in CLASSES} == CODES
    assert len(set(CODES.values())) == len(CODES)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"^ {4}([│├└─ ]*)(\w+)", errors.__doc__, re.MULTILINE)
    depths = {found.__name__: len(found.__mro__) - len(PgCdcError.__mro__) for found in CLASSES}
    assert {name: len(branch) // 4 for branch, name in drawn} == depths


@pytest.mark.parametrize("again", [by_pickle, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_survives_pickling_and_copying(
    kind: type[PgCdcError], again: Callable[[PgCdcError], PgCdcError]
) -> None:
    error = kind("public.a was dropped", remedy="create it")
    found = again(error)
    assert type(found) is kind
    assert (found.what, found.remedy, found.code) == (error.what, error.remedy, error.code)
    assert str(found) == str(error) == f"[{kind.code}] public.a was dropped\n  Remedy: create it"


@pytest.mark.parametrize("again", [by_pickle, copy.copy, copy.deepcopy])
def test_an_error_for_several_problems_keeps_them(again: Callable[[PgCdcError], PgCdcError]) -> None:
    problems = [OptionError("slot is empty", remedy="give it"), OptionError("tables is empty")]
    error = OptionError("2 things are wrong", problems=problems)
    found = again(error)
    assert isinstance(found, OptionError)
    assert [(problem.what, problem.remedy) for problem in found.problems] == [
        ("slot is empty", "give it"),
        ("tables is empty", ""),
    ]
    assert str(found) == ("[OPTION] 2 things are wrong:\n- slot is empty\n  Remedy: give it\n- tables is empty")


@pytest.mark.parametrize("kind", [found for found in CLASSES if found not in (PgCdcError, OptionError)])
def test_what_has_no_remedy_of_its_own_has_that_of_its_class(kind: type[PgCdcError]) -> None:
    assert str(kind("the server is starting")) == f"[{kind.code}] the server is starting\n  Remedy: {kind.usual_remedy}"
    assert kind.usual_remedy


@pytest.mark.parametrize("kind", [found for found in CLASSES if found is not PgCdcError])
def test_an_error_is_rebuilt_from_its_code(kind: type[PgCdcError]) -> None:
    found = error_of(kind.code, "what", "remedy")
    assert type(found) is kind
    assert (found.what, found.remedy) == ("what", "remedy")


def test_a_code_of_another_version_gives_a_definite_error() -> None:
    assert type(error_of("NEW", "what")) is DefiniteError


class Thrown:
    """An error of Java's."""

    def __init__(self, text: str, cause: Thrown | None = None) -> None:
        self._text = text
        self.cause = cause

    def toString(self) -> str:  # noqa: N802
        return self._text

    def getCause(self) -> Thrown | None:  # noqa: N802
        return self.cause


def test_an_error_of_the_jvm_says_what_began_it() -> None:
    refused = Thrown("ConnectException: refused\n at line 1")
    rest = Thrown("RESTException: GET", Thrown("Wrapped", refused))
    assert short_text(SimpleNamespace(java_exception=rest)) == "RESTException: GET, caused by ConnectException: refused"
    said = Thrown("RuntimeException: ConnectException: refused", refused)
    assert short_text(SimpleNamespace(java_exception=said)) == "RuntimeException: ConnectException: refused"
    circle = Thrown("a")
    circle.cause = Thrown("b", circle)
    assert short_text(SimpleNamespace(java_exception=circle)) == "a, caused by b"
    assert short_text(OSError("no route\nat all")) == "OSError: no route"
