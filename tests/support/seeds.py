"""Seeds of random tests: the same few in each run, or many new ones in `make fuzz`."""

import os
import random

from hypothesis import settings

FUZZ = "fuzz"  # profile of Hypothesis
SEED_BITS = 32


def is_fuzz() -> bool:
    """Return True in a run of `make fuzz`."""
    return bool(settings.get_current_profile_name() == FUZZ)


def seeds(few: int, many: int) -> list[int]:
    """Return a test's seeds: 0 to `few` - 1, or `many` new random seeds in `make fuzz`."""
    if not is_fuzz():
        return list(range(few))
    # All processes of a run must collect the same tests.
    chance = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))
    return [chance.getrandbits(SEED_BITS) for _ in range(many)]
