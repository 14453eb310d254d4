"""What descent gives for free: models that stop early (`truncation`)."""

from .truncation import truncate


__all__ = ["truncate"]
