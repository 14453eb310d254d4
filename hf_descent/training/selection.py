"""Which of several evaluated checkpoints to keep, where both the loss and the constraints count.

Two rules, by `metric_for_best_model`:

- "feasible_score": every feasible checkpoint before every infeasible one; among the feasible ones
  the least loss, among the infeasible ones the least violation. The rule where feasibility is what matters.
- "best_candidate": the least of the worse of two ranks, by loss and by violation. The rule where no checkpoint is
  quite feasible, and one that is nearly so at a much lower loss is wanted.
"""

from collections.abc import Sequence

import numpy as np
from scipy.stats import rankdata


def best_candidate(losses: Sequence[float], max_violations: Sequence[float]) -> int:
    """Index of the candidate whose worse rank, of loss and of violation, is least; the least loss among equals.

    All satisfied candidates (violation at most 0) share the first rank of violations. What is not a number comes last.

    Source: Cotter, Jiang, Sridharan (2019), Two-Player Games for Efficient Non-Convex Constrained Optimization, the
    heuristic of its experiments, as `find_best_candidate_index` in TensorFlow Constrained Optimization.

    Raises:
        ValueError: no candidates, or not one violation for each loss.
    """
    losses, violations = (
        np.nan_to_num(np.asarray(values, dtype=float), nan=np.inf, posinf=np.inf, neginf=-np.inf)
        for values in (losses, max_violations)
    )
    violations = np.maximum(violations, 0.0)
    if losses.ndim != 1 or losses.shape != violations.shape or not len(losses):
        raise ValueError(
            f"`losses` and `max_violations` have shapes {losses.shape} and {violations.shape}; give [n] each."
        )
    ranks = np.maximum(*(rankdata(values, method="min") for values in (losses, violations)))
    return int(min(range(len(losses)), key=lambda index: (ranks[index], losses[index])))
