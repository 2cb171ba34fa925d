"""Numbers of hypothesis' examples: all at night, fewer by day."""

import hypothesis

NIGHT = "night"
"""Profile of ``test/run --all``."""
_BY_DAY = 80


def examples(by_night: int) -> hypothesis.settings:
    """Return the settings of a property with this number of examples, and at most 80 by day."""
    night = hypothesis.settings.get_current_profile_name() == NIGHT
    return hypothesis.settings(max_examples=by_night if night else min(by_night, _BY_DAY))
