"""A ledger of delta-rs is read quickly, however many batches there were."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path

from pg_cdc_source.lake.ledger import LedgerRow
from pg_cdc_source.mirrors.delta_rs_ledger import DeltaRsLedger


def test_a_ledger_has_a_checkpoint_after_ten_commits(tmp_path: Path) -> None:
    ledger = DeltaRsLedger(str(tmp_path / "_pgcdc"))
    ledger.create("lake/{table}")
    now = datetime.now(timezone.utc)
    rows = [LedgerRow("q", batch_id, batch_id, None, now, {}, {}, True) for batch_id in range(11)]
    for row in rows:
        ledger.append(row)
    assert json.loads((tmp_path / "_pgcdc/_delta_log/_last_checkpoint").read_text())["version"] >= 9
    assert ledger.last() == rows[-1]
    assert ledger.last(4) == rows[4]
