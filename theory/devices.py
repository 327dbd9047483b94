"""What a further device is worth: to the draft as branches, to plain SD as a share of its work, and in money.

A step table is an array: step[n] is the seconds of a draft step of n branches on one device, step[0] = 0, never falling.
"""

import numpy as np
from numpy.typing import ArrayLike

from theory import check
from theory.check import FloatArray, IntArray
from theory.speed import ssd_seconds_per_token


def build_seconds(K: ArrayLike, branches: ArrayLike, catch_up: ArrayLike, step: ArrayLike, devices: ArrayLike = 1) -> FloatArray:
    """Seconds T_p = catch_up + K step[ceil(branches / devices)] of a build whose branches are shared out among draft devices. [derived]

    Broadcasts over all but the table. ValueError for more branches on a device than the table has.
    """
    table, each = check.table("step", step), np.ceil(check.non_negative("branches", branches) / check.positive("devices", devices))
    if np.any(each >= table.size):
        raise ValueError(f"branches={branches!r} on devices={devices!r}: the step table ends at {table.size - 1} branches, measure further")
    seconds = check.non_negative("catch_up", catch_up) + check.non_negative("K", K) * table[each.astype(np.intp)]
    return np.asarray(seconds)


def largest_budget(T_v: ArrayLike, K: ArrayLike, catch_up: ArrayLike, step: ArrayLike, devices: ArrayLike = 1) -> IntArray:
    """Most branches B whose build is complete when the outcome comes, build_seconds <= T_v; at most what the table tells of. [derived]

    Broadcasts over all but the table; linear in the number of devices. 0 where not even one branch is ready in time.
    """
    table, left = check.table("step", step), check.non_negative("T_v", T_v) - check.non_negative("catch_up", catch_up)
    # A build that ends with the verification to the last bit but one is in time.
    limit = left / check.positive("K", K) * (1 + 1e-12)
    each = np.maximum(np.searchsorted(table, limit, side="right") - 1, 0)
    return np.asarray(each * check.positive("devices", devices), dtype=np.intp)


def ssd_over_sd_equal_devices(
    T_v: ArrayLike,
    T_sd: ArrayLike,
    verify_scaling: ArrayLike,
    draft_scaling: ArrayLike,
    h: ArrayLike,
    T_p: ArrayLike,
    T_b: ArrayLike,
    E_hit: ArrayLike,
    E_miss: ArrayLike,
    E_sd: ArrayLike,
) -> FloatArray:
    """Speed of SSD over that of SD where SD spreads over the draft's devices too. Broadcasts. [derived]

    T_v, T_sd: seconds of verifying and of SD's drafting on the n devices of the target; verify_scaling, draft_scaling: how much faster
    both are on all n + m; h, T_p, T_b, E_*: of SSD with the target on n and the draft on m, as in Theorem 7.
    (T_v/s_v + T_sd/s_d) / E_sd against Theorem 7. Work is conserved: where both scale by (n+m)/n, a build on m devices is at least SD's
    drafting work (m T_p >= n T_sd), a miss takes no less than SD's round and no round commits more than E_sd, this is at most 1. SSD wins
    what SD loses by scaling badly.
    """
    sd = _sd_round(T_v, T_sd, verify_scaling, draft_scaling) / check.positive("E_sd", E_sd)
    return np.asarray(sd / ssd_seconds_per_token(T_v, T_p, T_b, h, E_hit, E_miss))


def least_hit_rate(
    T_v: ArrayLike,
    T_sd: ArrayLike,
    verify_scaling: ArrayLike,
    draft_scaling: ArrayLike,
    T_p: ArrayLike,
    T_b: ArrayLike,
    E_hit: ArrayLike,
    E_miss: ArrayLike,
    E_sd: ArrayLike,
) -> FloatArray:
    """The hit rate from which on SSD is as fast as SD on the same number of devices; 0 where always, inf where never. Broadcasts. [derived]

    With S = T_v/s_v + T_sd/s_d and M = max(T_v, T_p): [E_sd (T_v + T_b) - E_miss S] / [(E_hit - E_miss) S + E_sd (T_v + T_b - M)]. With
    equal E and T_p <= T_v: 1 - h <= (S - T_v) / T_b. Scalings of 1 give the condition against SD on the target's devices alone.
    """
    verify, S, tokens = check.positive("T_v", T_v), _sd_round(T_v, T_sd, verify_scaling, draft_scaling), check.positive("E_sd", E_sd)
    after_hit, after_miss = check.positive("E_hit", E_hit), check.positive("E_miss", E_miss)
    miss = verify + check.non_negative("T_b", T_b)
    lacking = tokens * miss - after_miss * S
    gained = (after_hit - after_miss) * S + tokens * (miss - np.maximum(verify, check.non_negative("T_p", T_p)))
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.where(gained > 0, lacking / gained, np.inf)
    return np.where(lacking <= 0, 0.0, np.where(rate <= 1, rate, np.inf))


def _sd_round(T_v: ArrayLike, T_sd: ArrayLike, verify_scaling: ArrayLike, draft_scaling: ArrayLike) -> FloatArray:
    verify = check.positive("T_v", T_v) / check.positive("verify_scaling", verify_scaling)
    return np.asarray(verify + check.non_negative("T_sd", T_sd) / check.positive("draft_scaling", draft_scaling))


def tokens_per_second_per_device(seconds_per_token: ArrayLike, devices: ArrayLike, batch: ArrayLike = 1) -> FloatArray:
    """Tokens a second of the whole batch over all devices, the target's and the draft's: batch / (seconds devices). Broadcasts.

    seconds_per_token: seconds between the tokens of one sequence.
    """
    return np.asarray(
        check.positive("batch", batch) / (check.positive("seconds_per_token", seconds_per_token) * check.positive("devices", devices))
    )


def cost_per_token(seconds_per_token: ArrayLike, price_per_hour: ArrayLike, batch: ArrayLike = 1) -> FloatArray:
    """Money a token: seconds price / (3600 batch), price_per_hour being that of all devices together. Broadcasts."""
    seconds = check.positive("seconds_per_token", seconds_per_token)
    return np.asarray(seconds * check.non_negative("price_per_hour", price_per_hour) / (3600 * check.positive("batch", batch)))
