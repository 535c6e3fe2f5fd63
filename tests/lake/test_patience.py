"""A table that cannot be written is tried again for half a minute; those that fail behind it, not so long."""

from __future__ import annotations

import pytest

from pg_cdc_source.errors import TransientError
from pg_cdc_source.lake.bring import Patience


def test_only_the_first_table_that_fails_is_waited_for_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("pg_cdc_source.postgres.backoff.time.sleep", pauses.append)

    def failing() -> None:
        raise TransientError("the catalog has a bad moment")

    def paused(patience: Patience) -> list[float]:
        pauses.clear()
        with pytest.raises(TransientError):
            patience.retrying(failing)
        return list(pauses)

    patience = Patience()
    assert paused(patience) == pytest.approx([0.2, 0.6, 1.8, 5.4, 16.2])
    assert sum(pauses) == pytest.approx(24.2)
    for _ in range(2):
        assert paused(patience) == pytest.approx([0.2, 0.4, 0.8])
