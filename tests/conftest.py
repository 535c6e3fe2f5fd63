"""What reads bytes is tested twice: with NumPy alone, and with the C accelerator where it was compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from trials import examples

from pg_cdc_source.values import native

# A busy machine is no failure.
settings.register_profile("without a clock", examples(100), deadline=None)
settings.load_profile("without a clock")

COMPILED = native.LIBRARY


@pytest.fixture(scope="module", params=["numpy", "c"] if COMPILED is not None else ["numpy"])
def accelerated(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the module's tests run with the accelerator this time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "LIBRARY", COMPILED if request.param == "c" else None)
        yield request.param == "c"
