"""Print the oldest releases that pyproject.toml permits, for pip: what a cluster may have."""

from __future__ import annotations

import re
from pathlib import Path

# Clusters bring these. The others are tools.
NAMES = ("numpy", "psycopg2-binary", "pyarrow", "deltalake", "pandas")


def main() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    for name in NAMES:
        (least,) = set(re.findall(rf'"{name}>=([0-9.]+)[,"]', text))
        print(f"{name}=={least}")


if __name__ == "__main__":
    main()
