"""Reports of a compile: data and text."""
