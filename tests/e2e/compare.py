"""How outputs of two engines are compared."""

from tests.e2e.engine import Completion

# Between the rounding of different tensor-parallel sizes (1e-5) and the effect of one wrong token
# in the cache (2e-2 and more; measured at 60 positions of a prompt of 1,264 tokens).
LOGPROB_TOLERANCE = 2e-3


def logprob_distance(actual: Completion, expected: Completion) -> float:
    """The largest difference of a log-probability of the tokens listed in `expected`.

    A token that `actual` does not list counts as its least likely one, so that two tokens of
    nearly equal rank may change places at the end of the list.
    """
    return max(
        abs(there - here.get(token, min(here.values())))
        for here, step in zip(actual.logprobs, expected.logprobs, strict=True)
        for token, there in step.items()
    )
