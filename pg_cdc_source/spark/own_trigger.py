"""How ``mirror()`` has its query's batches cut where Spark does not tell the stream: before 4.2.

Spark 4.0 and 4.1 ask a Python stream once for all that there is with ``availableNow``, and again and again otherwise.
Which of them it is, they do not say, so that the first batch of any other query has everything. The query of a mirror
is never triggered by ``availableNow`` there, and says so by an option that is not for users. It ends itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

# As Spark hands it over: in lower case.
OWN_TRIGGER = "pgcdc.own_trigger"


class OwnTrigger(Enum):
    """What is read in batches within the limits: all that comes, or what was committed before the start."""

    ENDLESS = "endless"
    PRESENT = "present"

    @classmethod
    def of(cls, options: Mapping[str, str]) -> OwnTrigger | None:
        """Return what ``mirror()`` has set among the stream's options; None where it has set none."""
        return cls(options[OWN_TRIGGER]) if OWN_TRIGGER in options else None
