"""The "auto" step sizes: the geometric schedule from f_0 to the level that f_L reaches at the end of warm-up.

So the problem is one that this model can solve on this task. `descent_strength` scales the logarithm of the total
decrease asked for: 1 asks the last layer to stay at its warm-up level, 0.5 for half of that decrease.
"""

import math


# The least total decrease asked for, as f_L / f_0: without it a model that is no better than a constant at the end of
# warm-up would get alpha <= 0.
MAX_LOSS_RATIO = 0.98


def geometric_alpha(initial_loss_bound: float, final_loss: float, num_constraints: int, strength: float) -> float:
    """Step size alpha with (1 - alpha)^n = (f_L / f_0)^strength, for n constraints; in (0, 1).

    Raises:
        ValueError: `final_loss`, f_L, is not finite, or not of the sign of `initial_loss_bound`, f_0.
    """
    ratio = final_loss / initial_loss_bound
    if not math.isfinite(ratio) or ratio <= 0:
        raise ValueError(
            f"The loss at the end of warm-up is {final_loss} and f_0 is {initial_loss_bound}: no descent schedule "
            "leads from one to the other. Set `descent_alpha` and `initial_loss_bound` to numbers."
        )
    return 1.0 - min(ratio, MAX_LOSS_RATIO) ** (strength / num_constraints)
