"""The last lines of a command: the result in one line, and the next command."""

from ..evaluation import Certificate, LayerProfile
from ..runs import RunFolder


def closing_lines(folder: str, profile: LayerProfile, next_steps: str) -> str:
    """The folder of the results, the verdict in one line if there are constraints, and the next steps."""
    lines = [f"Written to {folder}"]
    if profile.problem is not None:
        lines.append(profile.certificate().headline)
    lines.append(next_steps)
    return "\n".join(lines)


def verdict_of(folder: str) -> Certificate | None:
    """The verdict on a run, from its folder; `None` if there is none."""
    run = RunFolder(folder)
    for profile in run.results(LayerProfile, "layer_profile"):
        if profile.problem is not None:
            return profile.certificate()
    return next(iter(run.results(Certificate, "verdict")), None)


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
