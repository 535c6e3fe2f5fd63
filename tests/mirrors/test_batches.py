"""What Spark calls with a mirror's batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pg_cdc_source.errors import DefiniteError
from pg_cdc_source.lake.targets import Targets
from pg_cdc_source.mirrors import batches
from pg_cdc_source.mirrors.batches import Batches


class PanicException(BaseException):
    """As that of delta-rs: no Exception."""


@pytest.mark.parametrize("error", [PanicException("out of bounds"), KeyboardInterrupt(), ValueError("other")])
def test_a_panic_is_an_error_that_reaches_spark(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """py4j passes on nothing else, and the JVM would wait for an answer for ever."""
    monkeypatch.setattr(batches, "query_of", lambda batch, checkpoint: "query")
    monkeypatch.setattr(batches, "errors_of_jvm", lambda spark: ())

    class Ledger:
        def last(self, **_: Any) -> None:
            raise error

    lake: Any = SimpleNamespace(ledger=Ledger(), try_to_read=None)
    apply = Batches("/checkpoint", Targets.of("/lake/{table}", None), "", "delta", lambda spark: lake, None, lake)
    batch: Any = SimpleNamespace(sparkSession=None)
    wanted = DefiniteError if isinstance(error, PanicException) else type(error)
    with pytest.raises(wanted) as caught:
        apply(batch, 7)
    if wanted is DefiniteError:
        assert "batch 7: PanicException: out of bounds" in str(caught.value)
