"""Where the tables of a ledger stand behind a batch: their versions, and which are set aside."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pg_cdc_source.lake.ledger import LedgerRow
from pg_cdc_source.lake.targets import Targets

log = logging.getLogger(__name__)

# Ledgers have this text, so it stays as it is.
_CATCHING_UP = "its first rows were read again after a crash, and are not all as of one point before the position "


def catching_up(through: int) -> str:
    """What the ledger says of a table whose rows had to be read again after a crash and could not be turned back.

    Each is as of some point up to the position ``through``. It is nobody's to mend.
    """
    return f"{_CATCHING_UP}{through}"


def caught_up_at(why: str) -> int | None:
    """Where a table that is catching up will have caught up; None for one that is set aside for another reason."""
    return int(why.removeprefix(_CATCHING_UP)) if why.startswith(_CATCHING_UP) else None


class Standing:
    """Begins where ``start`` says. Outcomes are rows of ``OUTCOME_SCHEMA``."""

    def __init__(self, start: LedgerRow) -> None:
        self._start = start
        self.versions = dict(start.tables)
        self.set_aside = dict(start.set_aside)

    def behind(self, outcomes: Sequence[Mapping[str, Any]], lsn: int, targets: Targets) -> None:
        """Take in what became of each table of a batch that ends at ``lsn``."""
        for outcome in outcomes:
            self._take(outcome)
        last = {outcome["table"]: (outcome["lsn"], outcome["seq"]) for outcome in outcomes}
        for gone in [gone for outcome in outcomes for gone in outcome["gone"]]:
            since = gone["lsn"], gone["seq"]
            # Another one may have come under the name.
            if last.get(gone["table"], since) <= since:
                self._leave(gone["table"])
        for table in [table for table, why in self.set_aside.items() if _is_over(why, lsn)]:
            del self.set_aside[table]
        self._require_own_places(targets)

    def _take(self, outcome: Mapping[str, Any]) -> None:
        table, error = outcome["table"], outcome["error"]
        if error is not None:
            if self.set_aside.get(table) != error:
                log.error("%s is set aside: %s", table, error)
            self.set_aside[table] = error
        elif outcome["version"] is not None:
            self.versions[table] = outcome["version"]
            if table in self.set_aside and caught_up_at(self.set_aside[table]) is None:
                del self.set_aside[table]
                log.info("%s is taken up again", table)
            if outcome["through"]:
                self.set_aside[table] = catching_up(outcome["through"])

    def _leave(self, table: str) -> None:
        self.set_aside.pop(table, None)
        if self.versions.pop(table, None) is not None:
            log.info("%s is not streamed any more: the lake keeps its rows, mirror_at() leaves it out", table)

    def _require_own_places(self, targets: Targets) -> None:
        """Raise OptionError where two of the first tables have one place. A later one does not stop the others."""
        before = self._start.tables
        for table, error in targets.shared([*before, *sorted(self.versions.keys() - before.keys())]).items():
            if not before:
                raise error
            log.error("%s is set aside: %s", table, error)
            self.set_aside[table] = str(error)
            self.versions.pop(table, None)


def _is_over(why: str, lsn: int) -> bool:
    """Whether a table has caught up with its rows."""
    at = caught_up_at(why)
    return at is not None and lsn >= at
