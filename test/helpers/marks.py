"""Mark cases of tests."""

from typing import Any

import pytest


def at_night(*values: Any, **options: Any) -> Any:
    """Return a case that runs every night, and with ``test/run --all``; another one runs by day."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)
