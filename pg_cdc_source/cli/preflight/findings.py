"""What checks find, and how one check uses the outcome of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from pg_cdc_source.errors import OptionError, PgCdcError, ServerSetupError

T = TypeVar("T")

Status = Literal["ok", "warning", "wrong", "not done"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has found. ``remedy`` is empty if there is nothing to do."""

    check: str
    status: Status
    text: str
    remedy: str = ""


def is_right(findings: Sequence[Finding]) -> bool:
    return all(finding.status in ("ok", "warning") for finding in findings)


class NotDoneError(Exception):
    """A check cannot be done because it needs the outcome of another one, which this names."""


class ScarceError(ServerSetupError):
    """Something works now and may stop working soon."""


class Outcome(Generic[T]):
    """The value that a check has brought, if it succeeded. Calling it without one raises NotDoneError."""

    def __init__(self, check: str) -> None:
        self.check = check
        self.values: list[T] = []

    def __call__(self) -> T:
        if not self.values:
            raise NotDoneError(self.check)
        return self.values[0]


class Checks:
    """Runs checks and collects their findings."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def run(
        self, check: str, action: Callable[[], T], tell: Callable[[T], str] = str, failed: Status = "wrong"
    ) -> Outcome[T]:
        """Run one check; ``tell`` puts its value in words, ``failed`` is its status if it raises."""
        outcome: Outcome[T] = Outcome(check)
        try:
            value = action()
            self.add(check, "ok", tell(value))
            outcome.values.append(value)
        except NotDoneError as needed:
            self.add(check, "not done", f"needs the check '{needed}', which did not succeed")
        except PgCdcError as error:
            self.add_error(check, "warning" if isinstance(error, ScarceError) else failed, error)
        return outcome

    def add(self, check: str, status: Status, text: str, remedy: str = "") -> None:
        self.findings.append(Finding(check, status, text, remedy))

    def add_error(self, check: str, status: Status, error: PgCdcError) -> None:
        problems = error.problems if isinstance(error, OptionError) else ()
        for problem in problems or (error,):
            self.add(check, status, problem.what, problem.remedy)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
