"""The constrained problem: constraints, multipliers, objectives, the automatic schedule, the dual side of a run."""
