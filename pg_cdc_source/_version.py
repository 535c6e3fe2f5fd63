"""The version of the package, kept here alone: ``pyproject.toml`` reads it for the wheel's metadata."""

__version__ = "0.2.0.dev0"
