"""Every number that decides a verdict, in one place.

They were fitted on kernels known to be correct (`kimi_linear.conformance.panel`): a limit is the worst ratio
of a correct kernel with room to spare, and below the mildest bug that it has to see. They change only with
both measurements beside them.
"""

from __future__ import annotations

FORWARD_RATIO = 4.0  # an error over its rounding envelope: outputs and states
GRADIENT_RATIO = 8.0  # gradients go through twice as many products
PROBE_COEFFICIENT = 0.5  # share of a named slip found in an error: 1 where the slip is, near 0 where it is not
PROBE_BEYOND = 2.0  # a larger coefficient belongs to an error of another kind
NOISE_RATIO = 1.0  # up to here an error is indistinguishable from rounding
WRONG_RATIO = 16.0  # from here on nobody needs to ask whether it is rounding
SAMPLES = 4  # rounded runs an envelope; doubling them moved no envelope by more than a third
FLOOR = 2.0**-24  # of a tensor's largest element: below it, rows count as zero
SMALLEST = 2.0**-126  # the least normal number of fp32: compiled kernels may take what is below it for 0
PRICE_SAMPLES = 2  # the price of an algorithm is a quality number, no verdict
CASE_SECONDS = 60.0  # a case that takes longer hangs
FULL_KILLED, QUICK_KILLED = 1.0, 0.9  # of all planted bugs, by all checks and by the quick ones
ALIKE = 0.5  # cosine from which an error counts as looking like a known bug's


def word_for(ratio: float, limit: float) -> str:
    """A ratio in words, as the report prints it."""
    if ratio <= NOISE_RATIO:
        return "at the noise"
    if ratio <= limit:
        return "pass"
    return "explain" if ratio <= WRONG_RATIO else "wrong"
