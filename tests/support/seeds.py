"""How many random lives a test lives: the same few each time, or many others in `make fuzz`."""

import os
import random

from hypothesis import settings

FUZZ = "fuzz"  # the profile of hypothesis
SEED_BITS = 32


def is_fuzz() -> bool:
    """Whether this is a run of `make fuzz`."""
    return bool(settings.get_current_profile_name() == FUZZ)


def seeds(few: int, many: int) -> list[int]:
    """Values for a test's `seed`: 0 to `few`, or in `make fuzz` `many` that no run has had."""
    if not is_fuzz():
        return list(range(few))
    # All processes of a run have to collect the same tests.
    chance = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))
    return [chance.getrandbits(SEED_BITS) for _ in range(many)]
