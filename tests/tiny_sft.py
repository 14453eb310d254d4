"""Moved to `tiny/sft.py`."""

from tiny.sft import *  # noqa: F403
