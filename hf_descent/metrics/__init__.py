"""Metrics as `evaluate.Metric` modules that need no download."""
