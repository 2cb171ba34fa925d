"""Which parameters share a unit, and in which order they are packed."""
