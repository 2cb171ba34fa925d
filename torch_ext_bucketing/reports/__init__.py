"""Reports of a compile: data, and how it is printed."""
