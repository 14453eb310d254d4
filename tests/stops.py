"""The stops of a batch: the functions of the package that hand it on, from `compute_loss` to the losses of the layers.

    python tests/stops.py

A function counts once. The model itself, and the hooks within its forward, which it calls with its own arguments, are
none; nor is what makes statistics for the log.
"""

import contextlib
import io
import logging
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tiny.data import classification_data, language_data
from tiny.models import bert, llama
from tiny.training import config

import hf_descent
from hf_descent import DescentTrainer


PACKAGE = Path(hf_descent.__file__).parent
MOST_STOPS = 12  # of a batch in training
FOR_THE_LOG = {"_tokens", "_log_tokens"}
MODELS = {
    "replay": (bert, classification_data),
    "tiles": (llama, language_data),
}


class Watched(DescentTrainer):
    """Keeps the stops of its first batch."""

    stops = None

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.stops is not None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        self.stops = []
        watch = Watch(inputs, self.stops)
        sys.setprofile(watch)
        try:
            return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            sys.setprofile(None)


class Watch:
    """Notes each function of the package to which another one hands a batch."""

    def __init__(self, batch, stops):
        self.tensors = {id(value) for value in batch.values()}
        self.stops = stops

    def __call__(self, frame, event, argument):
        code = frame.f_code
        path = Path(code.co_filename)
        if event != "call" or code.co_name.startswith("<") or code.co_name in FOR_THE_LOG:
            return
        caller = Path(frame.f_back.f_code.co_filename)
        is_own = path.is_relative_to(PACKAGE)
        if not is_own or not (caller.is_relative_to(PACKAGE) or code.co_name == "compute_loss"):
            return
        count = code.co_argcount + code.co_kwonlyargcount
        given = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
        stop = f"{path.relative_to(PACKAGE)}:{code.co_qualname}"
        if stop not in self.stops and any(map(self.is_batch, given)):
            self.stops.append(stop)

    def is_batch(self, value):
        return isinstance(value, Mapping) and any(
            id(item) in self.tensors for item in value.values()
        )


@contextlib.contextmanager
def silence():
    """Within it, training logs and prints nothing."""
    logging.disable(logging.CRITICAL)
    nowhere = io.StringIO()
    try:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield
    finally:
        logging.disable(logging.NOTSET)


def stops_of_a_batch(kind: str, phase: str = "train") -> list[str]:
    """The functions to which the first batch is handed, in the order of their first calls.

    `phase` is the method of the trainer that reads it, "train" or "evaluate".
    """
    make_model, make_data = MODELS[kind]
    rows = make_data()
    with tempfile.TemporaryDirectory() as folder, silence():
        args = config(folder, max_steps=1)
        trainer = Watched(make_model(), args, train_dataset=rows, eval_dataset=rows)
        getattr(trainer, phase)()
    return trainer.stops


def main() -> None:
    for kind in MODELS:
        for phase in ("train", "evaluate"):
            stops = stops_of_a_batch(kind, phase)
            print(f"stops of a batch, {kind}, {phase}: {len(stops)}", *stops, sep="\n  ")


if __name__ == "__main__":
    main()
