"""What users can set: options, names and connection strings, parsed once into frozen dataclasses."""
