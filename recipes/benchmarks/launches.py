"""Kernels of a step and of an evaluated batch, plain training against ours: what a GPU launches, counted without one.

    python -m recipes.benchmarks.launches [--cases bert ...] [--where] [--rounds 3 --output launches.json]

Models of real depth and tiny width: on a GPU, small models take the time that their launches take. A kernel is an
operation of torch that computes something; views and empty memory are none. The counts repeat exactly. Multipliers are
moved on the host in NumPy, which launches nothing. A GPU makes two copies more a step: of losses and of weights.

With `--rounds` the processor time of a step is measured, too, in rounds in which plain training and ours take turns.
`--where` says in which function of this package the kernels are launched.
"""

import argparse
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
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

from harness import Clock, ratios, take_turns, write

from hf_descent import DescentConfig, DescentTrainer
from hf_descent.models import UTConfig, UTForVideoDenoising


WIDTH, HEADS, VOCABULARY = 32, 2, 256
ROWS, LENGTH, BATCH = 64, 16, 4
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
            return "backward pass"
        if any(part in code.co_filename for part in ("transformers/models/", "hf_descent/models/")):
            return "the model's forward"
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


class Case(NamedTuple):
    """What is counted: a model of so many layers, the rows that it trains on, and settings of ours alone."""

    title: str
    make: Callable[[], tuple[torch.nn.Module, list[dict[str, Any]]]]
    asked: float | None  # the ratio of a step's kernels that is asked for
    settings: dict[str, Any] = {}


def _sentences(num_rows: int = ROWS) -> list[dict[str, Any]]:
    mask = torch.ones(LENGTH, dtype=torch.long)
    ids = torch.randint(5, VOCABULARY, (num_rows, LENGTH))
    return [
        {"input_ids": row, "attention_mask": mask, "labels": index % 2}
        for index, row in enumerate(ids)
    ]


def _texts() -> list[dict[str, Any]]:
    return [{**row, "labels": row["input_ids"]} for row in _sentences()]


def bert():
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=12,
        num_attention_heads=HEADS,
    )
    return BertForSequenceClassification(config), _sentences()


def distilbert():
    config = DistilBertConfig(
        vocab_size=VOCABULARY, dim=WIDTH, hidden_dim=4 * WIDTH, n_layers=6, n_heads=HEADS
    )
    return DistilBertForSequenceClassification(config), _sentences()


def roberta():
    config = RobertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=24,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH + 4,
    )
    return RobertaForSequenceClassification(config), _sentences()


def vit():
    config = ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=12,
        num_attention_heads=HEADS,
    )
    images = torch.rand(ROWS, 3, 16, 16)
    rows = [{"pixel_values": image, "labels": index % 2} for index, image in enumerate(images)]
    return ViTForImageClassification(config), rows


def t5():
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_ff=4 * WIDTH,
        d_kv=WIDTH // HEADS,
        num_layers=6,
        num_decoder_layers=6,
        num_heads=HEADS,
        decoder_start_token_id=0,
    )
    rows = [{**row, "labels": row["labels"][: LENGTH // 2]} for row in _texts()]
    return T5ForConditionalGeneration(config), rows


def llama():
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=32,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
    )
    return LlamaForCausalLM(config), _texts()


def denoiser():
    clips = torch.rand(ROWS, 10, 256)  # [clips, frames, pixels]
    rows = [{"pixel_values": clip, "labels": clip} for clip in clips]
    return UTForVideoDenoising(UTConfig(num_hidden_layers=7)), rows


CASES = {
    "bert": Case("BERT, 12 layers", bert, 1.12),
    "distilbert": Case("DistilBERT, 6 layers", distilbert, 1.20),
    "roberta": Case("RoBERTa, 24 layers", roberta, 1.08),
    "vit": Case("ViT, 12 layers", vit, 1.15),
    "t5": Case("T5, 6 + 6 layers", t5, 1.10),
    # The default of a large vocabulary, which this one is not.
    "llama": Case("Llama, 32 layers, default", llama, 1.12, {"readout_token_fraction": 0.1}),
    "llama_exact": Case("Llama, 32 layers, all tokens", llama, 1.12),
    "ut": Case("UT denoiser, 7 layers", denoiser, 1.20, {"noise_gamma": 0.15}),
}


class TimedWindow(Clock):
    """Times some steps."""

    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        if state.global_step == TIMED_STEPS:
            control.should_training_stop = True


def make_trainer(case: Case, is_plain: bool, folder: str, callback) -> Trainer:
    """The stock `Trainer`, or ours with all layers constrained from the first step on."""
    torch.manual_seed(0)
    model, rows = case.make()
    settings = {
        "output_dir": folder,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "max_steps": MAX_STEPS,
        "learning_rate": 1e-5,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "log_level": "error",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    data = {"train_dataset": rows, "eval_dataset": rows[: 3 * BATCH]}
    if is_plain:
        trainer = Trainer(model, TrainingArguments(**settings), callbacks=[callback], **data)
    else:
        settings |= {"initial_loss_bound": 10.0, "dual_warmup_steps": 0, **case.settings}
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


def time_steps(name: str, rounds: int) -> tuple[float, float, float]:
    """Quartiles of the ratio of processor times of a step, ours to plain training's, within a round."""
    with tempfile.TemporaryDirectory() as folder, _quiet():

        def arm(is_plain):
            clock = TimedWindow()
            trainer = make_trainer(CASES[name], is_plain, folder, clock)

            def measure():
                trainer.train()
                steps = clock.steps[-TIMED_STEPS + 2 :]
                return statistics.median(processor for _, processor in steps)

            return measure

        seconds = take_turns({"plain": arm(True), "ours": arm(False)}, rounds)
    return ratios(seconds, "plain")["ours"]


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
    return {"title": case.title, "asked": case.asked, **counted}


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
        plain, ours = (getattr(windows[arm], what).functions for arm in ("plain", "ours"))
        beyond = {name: ours[name] - plain[name] for name in ours | plain}
        print(f"  {what}:")
        for name, kernels in sorted(beyond.items(), key=lambda item: -item[1]):
            if kernels:
                print(f"    {kernels:+6}  {name}")


def main():
    command = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    command.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    command.add_argument("--where", action="store_true", help="which functions launch kernels")
    command.add_argument("--rounds", type=int, default=0, help="of timed steps (0: none)")
    command.add_argument("--output", type=Path, help="JSON file for the results")
    given = command.parse_args()
    torch.set_num_threads(1)
    cases = {}
    for name in given.cases:
        windows = count(name, given.where)
        cases[name] = facts(name, windows)
        if given.rounds:
            cases[name]["time"] = time_steps(name, given.rounds)
        print_case(cases[name])
        if given.where:
            print_functions(windows)
    write(given.output, transformers=transformers.__version__, cases=cases)


if __name__ == "__main__":
    main()
