"""The command pg-cdc."""
