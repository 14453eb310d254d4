"""Moved to `tiny/files.py`."""

from tiny.files import *  # noqa: F403
