"""Comparison of two engines' outputs."""

from tests.e2e.engine import Completion

# Between the rounding of different tensor-parallel sizes (1e-5) and the effect of one wrong token
# in the cache (2e-2 and more; measured at 60 positions of a prompt of 1,264 tokens).
LOGPROB_TOLERANCE = 2e-3


def logprob_distance(actual: Completion, expected: Completion) -> float:
    """Return the largest difference of a log-probability, over tokens listed in `expected`.

    A token missing from `actual` counts as the least likely token listed there. So two tokens of
    nearly equal rank may swap places at the end of the list.
    """
    return max(
        abs(there - here.get(token, min(here.values())))
        for here, step in zip(actual.logprobs, expected.logprobs, strict=True)
        for token, there in step.items()
    )
