"""Numbers of hypothesis' examples: all at night, fewer by day."""

import hypothesis

NIGHT = "night"
"""Profile of ``test/run --all``."""
_BY_DAY = 60


def by_night() -> bool:
    """Return whether this run is one of all examples."""
    return hypothesis.settings.get_current_profile_name() == NIGHT


def examples(count: int) -> hypothesis.settings:
    """Return the settings of a property with this number of examples, and at most 60 by day."""
    return hypothesis.settings(max_examples=count if by_night() else min(count, _BY_DAY))
