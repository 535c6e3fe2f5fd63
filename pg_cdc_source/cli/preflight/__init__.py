"""Find everything that would keep a read from working before it starts, and change nothing.

Each check runs the product's own code: what a snapshot or a stream would raise when it starts is raised here and
recorded as a finding. A check takes what it needs from the outcomes of other checks. If one of these failed, the check
is not done and names it. So everything that can be checked is checked, whatever else is wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from pg_cdc_source.cli.preflight.findings import Checks, Finding
from pg_cdc_source.cli.preflight.installation import check_installation
from pg_cdc_source.cli.preflight.server import reach
from pg_cdc_source.cli.preflight.snapshot import check_snapshot
from pg_cdc_source.cli.preflight.spark import check_spark
from pg_cdc_source.cli.preflight.stream import check_stream
from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.options.stream_options import parse_stream_options


def check(format_name: str | None, given: Mapping[str, str]) -> list[Finding]:
    """Check the installation and, with a format's name, a read with these options; without one, Spark's Python."""
    checks = Checks()
    has_spark = check_installation(checks)
    with contextlib.ExitStack() as stack:
        if format_name == "pgsnapshot":
            check_snapshot(reach(checks, stack, given, parse_snapshot_options))
        elif format_name == "pgcdc":
            check_stream(reach(checks, stack, given, parse_stream_options))
        elif has_spark:
            check_spark(checks)
    return checks.findings
