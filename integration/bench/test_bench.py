"""The benchmark runs: with Spark and without, missing peers by name, and nothing stays behind."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import tempfile
from pathlib import Path

from commands import COMMAND
from watch import wait_until

from pg_cdc_source.bench import peers
from pg_cdc_source.values import native


def processes_of(scratch: str) -> list[str]:
    """What runs with ``scratch`` as its directory for temporary files."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"TMPDIR={scratch}".encode() in environ.read_bytes().split(b"\0"):
                found.append(environ.parent.name)
        except OSError:
            continue
    return found


def test_a_quick_run_measures_all_contenders_and_leaves_nothing(tmp_path: Path) -> None:
    # Not pytest's directory: the server runs as another account, which must be able to look in.
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o755)
        command = [COMMAND, "bench", "--quick", "--json"]
        result = subprocess.run(
            [*command, "--rows", "2000", "--out", str(tmp_path), "--only", "arrow", "--only", "limit"],
            env={**os.environ, "TMPDIR": scratch},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        wait_until(lambda: not processes_of(scratch))
        assert list(Path(scratch).iterdir()) == []
    found = json.loads(result.stdout)
    assert json.loads((tmp_path / "results.json").read_text()) == found
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "arrow.png", "limit.png"}
    arrow, limit = found["questions"]

    have = {name for name, (modules, _) in peers.ARROW_PEERS.items() if all(map(importlib.util.find_spec, modules))}
    without = "pgsnapshot with its accelerator" if native.LIBRARY is None else None
    numpy_alone = set() if without else {"pgsnapshot, NumPy alone"}
    assert set(arrow["contenders"]) == {"pgsnapshot", *numpy_alone, *have}
    assert {missing["name"] for missing in arrow["missing"]} == (set(peers.ARROW_PEERS) - have) | ({without} - {None})
    for contender in arrow["contenders"].values():
        (measured,) = contender["rounds"]
        assert measured["rows"] == 2000
        assert 0 < measured["client_cpu_s"] < 60
        assert 20 < measured["peak_rss_mb"] < 1000

    ours, least = (limit["contenders"][name]["rounds"][0] for name in ("pgsnapshot", "the limit"))
    assert ours["wall_s"] > 0
    assert 0 <= least["server_cpu_s"] <= 2 * least["wall_s"]
    target = limit["targets"][0]
    assert target["value"]["median"] == ours["wall_s"] / least["wall_s"]
