"""What ``mirror()`` tells its stream of its query's trigger, by an option that is not for users.

Spark 4.0 and 4.1 ask a Python stream once for all that there is with ``availableNow``, and again and again otherwise.
Which of them it is, they do not say, so that the first batch of any other query has everything. The query of a mirror
is never triggered by ``availableNow`` there, and says so. It ends itself.

No trigger of Spark's waits for more rows unless enough are there: with ``processingTime``, a backlog of many batches
takes an interval for each of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

# As Spark hands it over: in lower case.
OWN_TRIGGER = "pgcdc.own_trigger"


@dataclass(frozen=True, slots=True)
class OwnTrigger:
    """What is read in batches within the limits: all that comes, or with ``once`` what was committed before the start.

    A batch that is not full comes ``interval`` seconds after the last one at the earliest.
    """

    once: bool = False
    interval: float = 0.0

    @property
    def text(self) -> str:
        """All of it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, options: Mapping[str, str]) -> OwnTrigger | None:
        """Return what ``mirror()`` has set among the stream's options; None where it has set none."""
        return cls(**json.loads(options[OWN_TRIGGER])) if OWN_TRIGGER in options else None
