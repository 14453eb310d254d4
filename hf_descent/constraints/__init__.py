"""The constrained problem, the objectives, and the dual side of a run: multipliers, averages, guard and reports."""
