"""What the user may say: names, options, connection strings; parsed once into frozen dataclasses."""
