"""Kernels of a step and of an evaluated batch, plain training against ours: what a GPU launches, counted without one.

    python -m recipes.benchmarks.launches [--cases bert ...] [--where] [--rounds 15 --processes 8]
        [--output launches.json]

Models of real depth and tiny width: on a GPU, small models take the time that their launches take. A kernel is an
operation of torch that computes something; views and empty memory are none. The counts repeat exactly. Multipliers are
moved on the host by Python alone, which launches nothing. A GPU makes two more copies: of losses and of weights.

With `--rounds` the time of a step is measured, too, in rounds in which plain training and ours take turns: that of
the processor or, where there is a GPU, the clock's. `gpu.py` measures the same cases there. The ratio of a process
differs from that of the next by a percent or two, since memory lies elsewhere: with `--processes` there are several,
one after another, with so many rounds each.
`--where` says in which function of this package the kernels are launched, and where Python functions are called.
"""

import argparse
import cProfile
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)


sys.path.insert(0, str(Path(__file__).parent))

from harness import ratios, take_turns, write

from hf_descent import DescentConfig, DescentTrainer
from hf_descent.models import UTConfig, UTForVideoDenoising


class Size(NamedTuple):
    """What the models of all cases have in common beside their depth."""

    width: int = 32
    heads: int = 2
    vocabulary: int = 256
    batch: int = 4
    length: int = 16  # tokens of a row
    image: int = 16  # pixels of a side
    patch: int = 4


TINY = Size()
MAX_STEPS = 1000  # of the schedule, which none reaches: what happens every hundred steps stays out
COUNTED_STEP = 3  # the first steps fill caches
TIMED_STEPS = 12

# Operations without a kernel: views, empty memory, and questions about a tensor.
_VIEWS = """
    view _unsafe_view _reshape_alias alias as_strided chunk detach detach_ diagonal expand expand_as movedim narrow
    permute select slice split split_with_sizes squeeze squeeze_ t t_ tensor_split transpose unbind unfold
    unsafe_split unsqueeze unsqueeze_ view_as real lift_fresh requires_grad_ set_ resize_
    empty empty_like empty_strided new_empty new_empty_strided
    is_same_size is_pinned numel size stride sym_size _has_compatible_shallow_copy_type
"""
WITHOUT_KERNEL = frozenset(_VIEWS.split())


# Places of kernels and of calls: those of a step itself, folders of this package, and the rest, most of it Trainer's.
MODEL = "the model's forward"
BACKWARD = "backward pass"
FOLDERS = ("readout", "losses", "constraints", "training")
OTHER = "other"


class KernelCount(TorchDispatchMode):
    """Counts the kernels of what runs inside; `functions` are those of this package that launched them."""

    def __init__(self, finds_functions: bool = False):
        super().__init__()
        self.kernels = 0
        self.functions: Counter[str] = Counter()
        self._finds_functions = finds_functions

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[-1]
        if name not in WITHOUT_KERNEL:
            self.kernels += 1
            if self._finds_functions:
                self.functions[_launching_function()] += 1
        return func(*args, **(kwargs or {}))


def _launching_function() -> str:
    """The innermost running function of this package, or of the model."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "backward" and "accelerate" in code.co_filename:
            return BACKWARD
        if any(part in code.co_filename for part in ("transformers/models/", "hf_descent/models/")):
            return MODEL
        # `_call` of the tape stands around every module.
        if "hf_descent/" in code.co_filename and code.co_name != "_call":
            return f"{code.co_filename.split('hf_descent/')[-1]}: {code.co_name}"
        frame = frame.f_back
    return "elsewhere"


class CountWindow(TrainerCallback):
    """Counts one step of training, from its beginning to that of the next, or one batch of an evaluation."""

    def __init__(self, finds_functions: bool = False):
        self.step = KernelCount(finds_functions)
        self.evaluation = KernelCount(finds_functions)
        self._batches = 0

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == COUNTED_STEP:
            self.step.__enter__()
        if state.global_step == COUNTED_STEP + 1:
            self.step.__exit__(None, None, None)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == COUNTED_STEP + 2:
            control.should_training_stop = True

    def on_prediction_step(self, args, state, control, **kwargs):
        self._batches += 1
        if self._batches == 1:
            self.evaluation.__enter__()
        if self._batches == 2:
            self.evaluation.__exit__(None, None, None)


class CallWindow(TrainerCallback):
    """Counts the calls of Python functions in one step of training, by the `places` of the functions."""

    def __init__(self):
        self.places: Counter[str] = Counter()
        self._profile = cProfile.Profile(builtins=False)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == COUNTED_STEP:
            self._profile.enable()
        if state.global_step == COUNTED_STEP + 1:
            self._profile.create_stats()
            for (path, _, _), (_, calls, *_) in self._profile.stats.items():
                self.places[_place_of_function(path)] += calls

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == COUNTED_STEP + 2:
            control.should_training_stop = True


def _place_of_function(path: str) -> str:
    """A folder of this package, a library, or the rest."""
    if "hf_descent/" in path:
        return _folder(path.split("hf_descent/")[-1])
    for library in ("torch", "transformers"):
        if f"site-packages/{library}/" in path:
            return library
    return OTHER


def _place_of_kernel(function: str) -> str:
    """The same of what `_launching_function` gives."""
    if ".py: " in function:
        return _folder(function)
    return function if function in (MODEL, BACKWARD) else OTHER


def _folder(path: str) -> str:
    folder = path.split("/")[0]
    return folder if folder in FOLDERS else OTHER


class Case(NamedTuple):
    """What is counted: a model of so many layers, the rows that it trains on, and settings of ours alone."""

    title: str
    make: Callable[[Size], tuple[torch.nn.Module, list[dict[str, Any]]]]
    asked: float | None  # the ratio of a step's kernels that is asked for
    settings: dict[str, Any] = {}
    asked_time: float | None = None  # the ratio of a step's time that is asked for
    is_bare: bool = False  # `BareTrainer` takes the place of ours


def _sentences(size: Size) -> list[dict[str, Any]]:
    mask = torch.ones(size.length, dtype=torch.long)
    ids = torch.randint(5, size.vocabulary, (16 * size.batch, size.length))
    return [
        {"input_ids": row, "attention_mask": mask, "labels": index % 2}
        for index, row in enumerate(ids)
    ]


def _texts(size: Size) -> list[dict[str, Any]]:
    return [{**row, "labels": row["input_ids"]} for row in _sentences(size)]


def _transformer(size: Size, layers: int) -> dict[str, int]:
    """The arguments that most configs share."""
    return {
        "hidden_size": size.width,
        "intermediate_size": 4 * size.width,
        "num_hidden_layers": layers,
        "num_attention_heads": size.heads,
    }


def bert(size: Size):
    config = BertConfig(vocab_size=size.vocabulary, **_transformer(size, 12))
    return BertForSequenceClassification(config), _sentences(size)


def distilbert(size: Size):
    config = DistilBertConfig(
        vocab_size=size.vocabulary,
        dim=size.width,
        hidden_dim=4 * size.width,
        n_layers=6,
        n_heads=size.heads,
    )
    return DistilBertForSequenceClassification(config), _sentences(size)


def roberta(size: Size):
    config = RobertaConfig(
        vocab_size=size.vocabulary,
        **_transformer(size, 24),
        max_position_embeddings=size.length + 4,
    )
    return RobertaForSequenceClassification(config), _sentences(size)


def vit(size: Size):
    config = ViTConfig(
        image_size=size.image,
        patch_size=size.patch,
        **_transformer(size, 12),
    )
    images = torch.rand(size.batch, 3, size.image, size.image)
    rows = [
        {"pixel_values": images[index % size.batch], "labels": index % 2}
        for index in range(16 * size.batch)
    ]
    return ViTForImageClassification(config), rows


def t5(size: Size):
    config = T5Config(
        vocab_size=size.vocabulary,
        d_model=size.width,
        d_ff=4 * size.width,
        d_kv=size.width // size.heads,
        num_layers=6,
        num_decoder_layers=6,
        num_heads=size.heads,
        decoder_start_token_id=0,
    )
    rows = [{**row, "labels": row["labels"][: size.length // 2]} for row in _texts(size)]
    return T5ForConditionalGeneration(config), rows


def llama(size: Size):
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        **_transformer(size, 32),
        num_key_value_heads=size.heads,
    )
    return LlamaForCausalLM(config), _texts(size)


def denoiser(size: Size):
    """The paper's, which has one width."""
    clips = torch.rand(16 * size.batch, 10, 256)  # [clips, frames, pixels]
    rows = [{"pixel_values": clip, "labels": clip} for clip in clips]
    return UTForVideoDenoising(UTConfig(num_hidden_layers=7)), rows


CASES = {
    "bert": Case("BERT, 12 layers", bert, 1.12, asked_time=1.10),
    "bert_bare": Case("BERT, bare", bert, None, is_bare=True),
    "distilbert": Case("DistilBERT, 6 layers", distilbert, 1.20),
    "roberta": Case("RoBERTa, 24 layers", roberta, 1.08),
    "vit": Case("ViT, 12 layers", vit, 1.15),
    "t5": Case("T5, 6 + 6 layers", t5, 1.10),
    # The default of a large vocabulary, which this one is not.
    "llama": Case(
        "Llama, 32 layers, default", llama, 1.12, {"readout_token_fraction": 0.1}, asked_time=1.15
    ),
    "llama_exact": Case("Llama, 32 layers, all tokens", llama, 1.12, asked_time=1.15),
    "ut": Case("UT denoiser, 7 layers", denoiser, 1.20, {"noise_gamma": 0.15}),
}


class BareTrainer(Trainer):
    """The least that a training on the losses of all of BERT's layers does: no constraints, no checks, no logs.

    What follows the layers runs once more, for all layers, and the weights of the losses are constant.
    """

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        states = []

        def keep(layer, given, made):
            states.append(made)

        hooks = [layer.register_forward_hook(keep) for layer in model.bert.encoder.layer]
        outputs = model(**inputs)
        for hook in hooks:
            hook.remove()

        def loss_of(hidden):
            logits = model.classifier(model.dropout(model.bert.pooler(hidden)))
            return cross_entropy(logits, inputs["labels"])

        hidden_states = torch.stack(states)  # [layers, batch, tokens, width]
        losses = torch.func.vmap(loss_of, randomness="same")(hidden_states)  # [layers]
        loss = losses.sum()
        return (loss, outputs) if return_outputs else loss


class TimedWindow(TrainerCallback):
    """The mean seconds of some steps: of the processor or, on a GPU, of the clock, without a wait between steps."""

    def __init__(self):
        self.seconds = 0.0
        self._start = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == TIMED_STEPS // 4:  # the first steps fill caches
            self._start = self._now()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == TIMED_STEPS:
            self.seconds = (self._now() - self._start) / (TIMED_STEPS - TIMED_STEPS // 4)
            control.should_training_stop = True

    def _now(self) -> float:
        if not torch.cuda.is_available():
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


def make_trainer(
    case: Case, is_plain: bool, folder: str, callback, size: Size = TINY, use_cpu: bool = True
) -> Trainer:
    """The stock `Trainer`, or ours with all layers constrained from the first step on."""
    torch.manual_seed(0)
    model, rows = case.make(size)
    settings = {
        "output_dir": folder,
        "per_device_train_batch_size": size.batch,
        "per_device_eval_batch_size": size.batch,
        "max_steps": MAX_STEPS,
        "learning_rate": 1e-5,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "log_level": "error",
        "disable_tqdm": True,
        "use_cpu": use_cpu,
    }
    data = {"train_dataset": rows, "eval_dataset": rows[: 3 * size.batch]}
    if is_plain or case.is_bare:
        trainer_class = Trainer if is_plain else BareTrainer
        trainer = trainer_class(model, TrainingArguments(**settings), callbacks=[callback], **data)
    else:
        settings.update(initial_loss_bound=10.0, dual_warmup_steps=0, **case.settings)
        trainer = DescentTrainer(model, DescentConfig(**settings), callbacks=[callback], **data)
    trainer.remove_callback(PrinterCallback)
    return trainer


def count(name: str, finds_functions: bool = False) -> dict[str, CountWindow]:
    """The kernels of a case, of "plain" training and of "ours"."""
    found = {}
    with tempfile.TemporaryDirectory() as folder, _quiet():
        for arm in ("plain", "ours"):
            found[arm] = CountWindow(finds_functions)
            trainer = make_trainer(CASES[name], arm == "plain", folder, found[arm])
            trainer.train()
            trainer.evaluate()
    return found


def count_calls(name: str) -> dict[str, CallWindow]:
    """The calls of Python functions in a step of a case, of "plain" training and of "ours"."""
    found = {}
    with tempfile.TemporaryDirectory() as folder, _quiet():
        for arm in ("plain", "ours"):
            found[arm] = CallWindow()
            make_trainer(CASES[name], arm == "plain", folder, found[arm]).train()
    return found


def time_steps(name: str, rounds: int, size: Size = TINY) -> dict[str, list[float]]:
    """Seconds of a step of "plain" training and of "ours" in each round."""
    use_cpu = not torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder, _quiet():

        def arm(is_plain):
            window = TimedWindow()
            trainer = make_trainer(CASES[name], is_plain, folder, window, size, use_cpu)

            def measure():
                trainer.train()
                return window.seconds

            return measure

        return take_turns({"plain": arm(True), "ours": arm(False)}, rounds)


def time_in_processes(name: str, rounds: int, processes: int) -> dict[str, list[float]]:
    """What `time_steps` measures in several processes, one after another; the rounds of all of them."""
    seconds = {"plain": [], "ours": []}
    for _ in range(processes):
        with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (1,)) as process:
            found = process.submit(time_steps, name, rounds).result()
        for arm, measured in found.items():
            seconds[arm] += measured
    return seconds


@contextmanager
def _quiet():
    """Without the log lines of trainers inside."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)


def facts(name: str, windows: dict[str, CountWindow]) -> dict[str, Any]:
    """The kernels of a case, by what was counted and by arm, as they stand in the results file."""
    case = CASES[name]
    counted = {
        what: {arm: getattr(window, what).kernels for arm, window in windows.items()}
        for what in ("step", "evaluation")
    }
    asked = {"asked": case.asked, "asked_time": case.asked_time}
    return {"title": case.title, **asked, **counted}


def beyond_plain(
    windows: dict[str, CountWindow], calls: dict[str, CallWindow]
) -> dict[str, dict[str, int]]:
    """What a step of ours has beyond one of plain training, by place: "kernels", and "calls" of Python functions."""
    kernels = {"plain": Counter(), "ours": Counter()}
    for arm, window in windows.items():
        for function, number in window.step.functions.items():
            kernels[arm][_place_of_kernel(function)] += number

    places = {arm: window.places for arm, window in calls.items()}
    return {"kernels": _difference(kernels), "calls": _difference(places)}


def _difference(counts: dict[str, Counter]) -> dict[str, int]:
    plain, ours = counts["plain"], counts["ours"]
    return {name: ours[name] - plain[name] for name in sorted(ours | plain)}


def print_case(found: dict[str, Any]) -> None:
    for what in ("step", "evaluation"):
        plain, ours = found[what]["plain"], found[what]["ours"]
        print(f"{found['title']}, {what}: {plain} and {ours} kernels, {ours / plain:.2f}")
    if "time" in found:
        low, middle, high = found["time"]
        print(
            f"{found['title']}: {middle:.2f} times the time ({low:.2f} to {high:.2f})", flush=True
        )


def print_functions(windows: dict[str, CountWindow]) -> None:
    """By function, the kernels of ours beyond those of plain training."""
    for what in ("step", "evaluation"):
        beyond = _difference({arm: getattr(windows[arm], what).functions for arm in windows})
        print(f"  {what}:")
        for name, kernels in sorted(beyond.items(), key=lambda item: -item[1]):
            if kernels:
                print(f"    {kernels:+6}  {name}")


def main():
    command = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    command.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    command.add_argument(
        "--where", action="store_true", help="what is beyond plain training, and where"
    )
    command.add_argument("--rounds", type=int, default=0, help="of timed steps (0: none)")
    command.add_argument(
        "--processes", type=int, default=1, help="that time the steps, by turns (1)"
    )
    command.add_argument("--output", type=Path, help="JSON file for the results")
    given = command.parse_args()
    torch.set_num_threads(1)
    cases = {}
    for name in given.cases:
        windows = count(name, given.where)
        cases[name] = facts(name, windows)
        if given.rounds:
            seconds = time_in_processes(name, given.rounds, given.processes)
            cases[name]["time"] = ratios(seconds, "plain")["ours"]
            cases[name]["rounds"] = given.rounds
            cases[name]["processes"] = given.processes
        print_case(cases[name])
        if given.where:
            cases[name]["beyond"] = beyond_plain(windows, count_calls(name))
            print_functions(windows)
            print(f"  calls of Python functions: {cases[name]['beyond']['calls']}")
    write(given.output, transformers=transformers.__version__, cases=cases)


if __name__ == "__main__":
    main()
