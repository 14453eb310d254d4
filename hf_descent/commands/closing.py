"""The last lines of a command: what was found, in one line, and which command comes next."""

from collections.abc import Iterable

from ..evaluation import LayerProfile


def verdict_lines(profiles: Iterable[LayerProfile]) -> list[str]:
    """The verdict of each profile in one line; none for a profile that knows of no constraint."""
    return [profile.certificate().headline for profile in profiles if profile.problem is not None]


def next_step(command: str, purpose: str) -> str:
    """The sentence that names the next command and says what it is for."""
    return f"Next: `hf-descent {command}` {purpose}."


def after_training(folder: str) -> str:
    """The next commands of a run."""
    steps = [
        next_step(f"exit {folder}", "measures what stopping early costs and gains"),
        next_step(f"card {folder}", "writes the model card"),
    ]
    return "\n".join(steps)
