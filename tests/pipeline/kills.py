"""Kills a training run again and again, resumes it, and compares its end to that of a run left alone.

    python tests/pipeline/kills.py --kills 50

Children are forked, so that a kill costs no new start of python. The kill comes at a random moment (SIGKILL or SIGTERM
from outside), or by the child's own hand where it hurts most: in a forward, in the dual step, between the files of a
checkpoint, half-way through one of them, while an old checkpoint is deleted. The run must go on from a checkpoint at
least as new as the last one that was complete, and its weights and multipliers must end equal, bit for bit.
"""

import argparse
import collections
import contextlib
import io
import os
import random
import signal
import sys
import tempfile
import time
import types
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from tiny.data import classification_data
from tiny.models import bert
from tiny.training import config

from hf_descent import DescentTrainer, files
from hf_descent.constraints import state as descent_state
from hf_descent.training import checkpoints


STEPS = 24
# Site -> calls of it in a run.
SITES = {
    "forward": 3 * STEPS, "dual step": STEPS, "between files": 3 * STEPS, "half a file": 3 * STEPS,
    "deletion": STEPS - 2, "any moment": None, "any moment, SIGTERM": None,
}  # fmt: skip


def make(folder):
    args = config(
        folder, max_steps=STEPS, save_strategy="steps", save_steps=1, save_total_limit=2, noise_gamma=0.4,
        resilience=0.1, resilience_form="slack", log_level="error",
    )  # fmt: skip
    return DescentTrainer(bert(dropout=0.2), args, train_dataset=classification_data(40))


def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


class Countdown:
    """Calls `last` instead of the original at the n-th call."""

    def __init__(self, calls, last=die):
        self.calls = calls
        self.last = last

    def __call__(self, original):
        def counted(*args, **kwargs):
            self.calls -= 1
            return self.last(*args, **kwargs) if self.calls == 0 else original(*args, **kwargs)

        return counted


def half_saved(thing, file, *args, **kwargs):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    Path(file).write_bytes(buffer.getvalue()[: buffer.tell() // 2])
    die()


@contextlib.contextmanager
def half_written(path, mode="w"):
    def write(content):
        file.write(content[: len(content) // 2])
        file.flush()
        die()

    with files.atomic_write(path, mode) as file:
        yield types.SimpleNamespace(write=write)


def arm(site, call, trainer):
    """Have the n-th call at `site` kill this process."""
    if site == "forward":
        count = Countdown(call)
        for layer in trainer.model.bert.encoder.layer:
            layer.forward = count(layer.forward)
    elif site == "dual step":
        descent_state.Multipliers.step = Countdown(call)(descent_state.Multipliers.step)
    elif site == "between files":
        torch.save = Countdown(call)(torch.save)
    elif site == "half a file":
        if call % 2:
            torch.save = Countdown(call // 2 + 1, half_saved)(torch.save)
        else:
            writing = Countdown(call // 3 + 1, half_written)(files.atomic_write)
            descent_state.atomic_write = files.atomic_write = writing
    elif site == "deletion":
        rmtree = transformers.trainer_utils.shutil.rmtree

        def half_deleted(folder, *args, **kwargs):
            for file in sorted(os.listdir(folder))[::2]:
                os.remove(os.path.join(folder, file))
            die()

        transformers.trainer_utils.shutil.rmtree = Countdown(call, half_deleted)(rmtree)


def child(folder, site=None, call=0, started=None):
    """Train, from the newest complete checkpoint where there is one; write what it led to."""
    torch.set_num_threads(1)
    trainer = make(folder)
    arm(site, call, trainer)
    try:
        resume = checkpoints.newest_complete_checkpoint(str(folder))
    except ValueError:
        resume = None
    if started is not None:
        os.write(started, int(resume.rsplit("-")[-1] if resume else 0).to_bytes(4, "big"))
    trainer.train(resume_from_checkpoint=resume)
    result = {
        **trainer.model.state_dict(),
        "values": trainer.multipliers.values,
        "slacks": trainer.multipliers.slacks,
    }
    torch.save(result, folder / "final.tmp")
    os.replace(folder / "final.tmp", folder / "final.pt")


def fork(folder, **arguments):
    pid = os.fork()
    if pid == 0:
        code = 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            child(folder, **arguments)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def last_complete(folder):
    try:
        return int(checkpoints.newest_complete_checkpoint(str(folder)).rsplit("-")[-1])
    except ValueError:
        return 0


def run(kills, seed=0):
    """(kills made, runs finished equal to the straight one) by site; AssertionError where anything was lost."""
    generator = random.Random(seed)
    made = collections.Counter()
    finished = 0

    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "straight"
        start = time.monotonic()
        assert os.waitpid(fork(folder), 0)[1] == 0
        duration = time.monotonic() - start
        expected = torch.load(folder / "final.pt", weights_only=True)
        number = 0
        complete = 0
        while sum(made.values()) < kills or complete:
            folder = Path(root) / f"killed-{number}"
            site = (
                list(SITES)[sum(made.values()) % len(SITES)] if sum(made.values()) < kills else None
            )
            calls = SITES.get(site) or 1
            read, write = os.pipe()
            # Early calls, or a resumed run would be over before most of them.
            pid = fork(
                folder, site=site, call=generator.randint(1, max(1, calls // 3)), started=write
            )
            os.close(write)
            announced = os.read(read, 4)
            os.close(read)
            resumed = int.from_bytes(announced, "big") if announced else None
            assert resumed is None or resumed >= complete, (
                f"went back from step {complete} to {resumed}"
            )
            if site and site.startswith("any moment"):
                time.sleep(generator.uniform(0, duration / 2))
                os.kill(pid, signal.SIGTERM if site.endswith("SIGTERM") else signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if os.WIFSIGNALED(status):
                made[site] += 1
                complete = last_complete(folder)
                continue
            assert status == 0, f"the run after {dict(made)} failed; its traceback is above"
            final = torch.load(folder / "final.pt", weights_only=True)
            for name, value in expected.items():
                assert torch.equal(final[name], value), f"{name} differs after {dict(made)}"
            finished = finished + 1
            number = number + 1
            complete = 0

    return made, finished


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    made, finished = run(options.kills, options.seed)
    for site, count in made.items():
        print(f"{site:20} {count:3}")
    print(
        f"{sum(made.values())} kills, all resumed; {finished} runs finished, each equal to the straight one"
    )
