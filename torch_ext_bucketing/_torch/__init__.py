"""Private torch APIs, one module per idea. Nothing here knows of the rest of the package."""
