"""Where the tasks of a mirror's stream write rows of a snapshot, and with which columns.

``mirror()`` tells its stream by an option that is not for users.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from pg_cdc_source.lake.shape import Shape, Shapes
from pg_cdc_source.lake.targets import Targets

# As Spark hands it over: in lower case.
FIRST_FILES = "pgcdc.first_files"


@dataclass(frozen=True, slots=True)
class FirstFiles:
    """One of ``targets``, where each table's files are beside it, and a ``directory`` for those of all tables."""

    targets: Targets | None = None
    directory: str | None = None
    shapes: Shapes = field(default_factory=Shapes)

    def directory_of(self, table: str) -> str:
        """In which directory files of a table's rows go. Raises OptionError where its name cannot be a directory's."""
        if self.targets is not None:
            return self.targets[table]
        assert self.directory is not None
        return self.directory

    def may_lack_changes(self, table: str) -> bool:
        """Whether a table is still what its mode says where the publication leaves out a kind of change."""
        return self.shapes[table].is_log

    @property
    def text(self) -> str:
        """All of it as JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def of(cls, options: Mapping[str, str]) -> FirstFiles | None:
        """Read what ``mirror()`` has set among the stream's options; None where it is not its stream."""
        if FIRST_FILES not in options:
            return None
        said = json.loads(options[FIRST_FILES])
        targets, shapes = said["targets"], said["shapes"]
        return cls(
            None if targets is None else Targets(**targets),
            said["directory"],
            Shapes(Shape.of(shapes["others"]), {name: Shape.of(shape) for name, shape in shapes["by_table"].items()}),
        )
