"""Round times of a draft that builds its cache in steps and looks for the outcome between them.

A build is one catch-up step (the last drafted token is fed) and K steps in which all branches advance by a token. If the outcome
comes earlier, the step under way is ended and the build given up; on a hit the branch is then completed alone.
"""

import numpy as np
from numpy.typing import ArrayLike

from theory import check
from theory.check import FloatArray


def tokens_built(T_v: ArrayLike, K: ArrayLike, catch_up: ArrayLike, step: ArrayLike) -> FloatArray:
    """Tokens, 0..K, that each branch has when the draft notices an outcome T_v seconds after the build began. Broadcasts.

    catch_up, step: seconds of the catch-up step and of a step of all branches. With 0 tokens no outcome can hit. [derived]
    """
    left = check.non_negative("T_v", T_v) - check.non_negative("catch_up", catch_up)
    return np.asarray(np.clip(np.ceil(left / check.positive("step", step)), 0, check.non_negative("K", K)))


def notice_seconds(T_v: ArrayLike, K: ArrayLike, catch_up: ArrayLike, step: ArrayLike) -> FloatArray:
    """Seconds from the arrival of the outcome to the end of the step under way, 0 once the build is complete. Broadcasts. [derived]"""
    end = check.non_negative("catch_up", catch_up) + tokens_built(T_v, K, catch_up, step) * check.positive("step", step)
    return np.asarray(np.maximum(end - check.non_negative("T_v", T_v), 0))


def interrupted_round_seconds(
    T_v: ArrayLike, K: ArrayLike, catch_up: ArrayLike, step: ArrayLike, single_step: ArrayLike, T_b: ArrayLike
) -> tuple[FloatArray, FloatArray]:
    """Exact seconds of a round whose outcome hits, and of one that misses, for constant step times. Broadcasts.

    T_v: seconds from answer to outcome as the draft sees them; single_step: seconds of a step of one branch. A hit lasts at most
    max(T_v, T_p), T_p = catch_up + K step, and less where single_step < step. [derived]
    """
    noticed = check.non_negative("T_v", T_v) + notice_seconds(T_v, K, catch_up, step)
    missing = check.non_negative("K", K) - tokens_built(T_v, K, catch_up, step)
    hit = noticed + missing * check.non_negative("single_step", single_step)
    return np.asarray(hit), np.asarray(noticed + check.non_negative("T_b", T_b))
