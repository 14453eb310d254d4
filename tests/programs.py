"""Programs that tests start."""

import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[1]


def python(*words, **settings):
    """What an interpreter prints that is started with these words; it has to end well."""
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, check=False, **settings
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
