"""A look that is refused is repeated until the reason is no new one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pg_cdc_source.errors import AccessError, PgCdcError, SchemaChangedError, TransientError
from pg_cdc_source.stream.tables.second_look import settled


def look(*answers: str | PgCdcError) -> tuple[Callable[[], str], list[str | PgCdcError]]:
    """A look that gives these answers, one after the other; and those that are left."""
    left = list(answers)

    def answer() -> str:
        found = left.pop(0)
        if isinstance(found, PgCdcError):
            raise found
        return found

    return answer, left


def test_what_ddl_made_fail_is_seen_by_another_look() -> None:
    answer, left = look(AccessError("no relation 1"), AccessError("no relation 2"), "a plan")
    assert settled(answer) == "a plan"
    assert not left


@pytest.mark.parametrize(
    ("errors", "left_over"),
    [
        # The same again: nothing has changed meanwhile.
        ((AccessError("permission denied"), AccessError("permission denied")), 1),
        # It would go on for ever.
        (tuple(AccessError(f"no relation {i}") for i in range(3)), 1),
        ((SchemaChangedError("renamed"),), 1),
        ((TransientError("session lost"),), 1),
    ],
)
def test_what_stays_so_is_raised(errors: tuple[PgCdcError, ...], left_over: int) -> None:
    answer, left = look(*errors, "a plan")
    with pytest.raises(PgCdcError) as caught:
        settled(answer)
    assert caught.value is errors[-1]
    assert len(left) == left_over
