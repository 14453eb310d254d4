"""Every test and benchmark that a GPU answers, and which targets hold; README.md has what it said of an H200.

    python -m recipes.benchmarks.gpu --output results

writes `results.md` and `results.json`, with the card's name and the commit, in 8 minutes at most, a time for each
case, small models first. What fails or runs out of time is named with its error. Ratios are those within a round, in
which all arms take turns. Models whose kernels `launches.py` counts are timed in their tiny width and in a real one.
Without a GPU, or with `--toy`, the figures say nothing.
"""

import argparse
import gc
import io
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from pathlib import Path

import torch


sys.path.insert(0, str(Path(__file__).parent))

import classifier_step
import evaluation_cost
import launches
import lm_step
from harness import commit, ratios, report, take_turns, write
from lm_step import ARMS


ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/test_devices.py",
    "tests/readout/test_linear_cross_entropy.py::test_losses_and_gradients_are_the_naive_ones",
    "tests/readout/test_linear_cross_entropy.py::test_bfloat16_accumulates_in_float32",
    "tests/readout/test_linear_cross_entropy.py::test_weights_beyond_the_range_of_float16",
    "tests/pipeline/test_resume.py::test_resumed_equals_straight",
    "tests/pipeline/test_trainer_parts.py::test_gradient_checkpointing_changes_nothing",
    "tests/pipeline/test_trainer_parts.py::test_bf16_autocast_follows_full_precision",
    "tests/losses/test_tiled_losses.py::test_steps_follow_the_replay",
    "tests/test_trainer.py::test_compiled_layers_train_as_plain_ones_and_resume",
)
MINUTES = 8.0
LORA = {
    "layers": 32,
    "hidden": 4096,
    "intermediate": 14336,
    "heads": 32,
    "kv_heads": 8,
    "vocab": 128256,
    "batch": 1,
    "length": 2048,
    "steps": 10,
    "rounds": 2,
    "bf16": True,
    "lora": True,
}
CHECKPOINTED = {**LORA, "batch": 2, "steps": 6, "checkpointing": True}
COMPILED = {**LORA, "layers": 4}  # the stock Trainer compiles all layers as one
BERT = {"model": "bert", "layers": 12, "hidden": 768, "batch": 32, "length": 128, "vocab": 30522}
REPLAYED = {**BERT, "steps": 6, "rounds": 20, "arms": ["descent"]}
LARGE_BATCH = {**REPLAYED, "batch": 256, "rounds": 4}
UT = {
    "model": "ut",
    "layers": 7,
    "batch": 64,
    "steps": 6,
    "rounds": 20,
    "arms": ["erm+noise", "descent+noise"],
}
EVALUATED = {**BERT, "samples": 128, "rounds": 2}
EVALUATED_LM = {**EVALUATED, "model": "llama", "vocab": 8192, "samples": 64}
REST = {
    "classes": 0,
    "model": None,
    "text_file": None,
    "compiler": "inductor",
    "bf16": False,
    "lora": False,
    "checkpointing": False,
    "processor_time": False,
    "output": None,
}
TOY = {
    "layers": 2,
    "hidden": 32,
    "intermediate": 64,
    "heads": 2,
    "kv_heads": 2,
    "vocab": 300,
    "compiler": "aot_eager",
    "batch": 2,
    "length": 16,
    "steps": 4,
    "samples": 4,
    "rounds": 1,
}
# The cases of launches.py: as their kernels are counted, and in the width of published models.
COUNTED = tuple(name for name, case in launches.CASES.items() if not case.is_bare)
BASE = launches.Size(
    width=768, heads=12, vocabulary=30522, batch=32, length=128, image=224, patch=16
)
AT_REAL_WIDTH = ("distilbert", "roberta", "vit", "t5")  # the others have cases of their own
TIMES = {"subsampled": 1.1, "exact": 3.2}  # a step of ERM
MEMORY, START = 1.02, 3.0  # times the peak of ERM; steps
SHARE = 0.7  # of the measured rate of matrix products, in the exact step


def target(what, value, limit, at_least=False):
    """What is asked, the figure or `None` where it was not measured, and whether it holds or `None`."""
    sign = "<="
    holds = None
    if at_least:
        sign = ">="
    if value is not None:
        holds = value == limit or (value > limit) == at_least
    return f"{what} {sign} {limit:g}", value, holds


def tests(chosen):
    """Outcomes of the tests that can follow the device; by name where one fails, or time runs out in it."""
    words = f"-m pytest -v -n {min(6, os.cpu_count())} --disable-warnings".split()
    command = [sys.executable, *words, "-m", "", "-k", chosen, *TESTS]
    environment = {
        **os.environ,
        "TESTS_ON_DEVICE": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "COLUMNS": "999",  # reasons in full
    }
    with tempfile.TemporaryFile("w+") as log:
        with suppress(TimeoutError):
            subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, env=environment)
        log.seek(0)
        text = log.read()

    outcomes = dict.fromkeys(re.findall(r"^tests/\S+?::(.+?) *$", text, re.M), "did not end")
    for said, name in re.findall(r"%\] ([A-Z]+) tests/\S+?::(.+?) *$", text, re.M):
        outcomes[name] = said.lower()
    if not outcomes:
        raise RuntimeError(f"No test ran: {text[-2000:]}")

    reasons = dict(re.findall(r"^(?:FAILED|ERROR) \S+?::(.+?) - (.*)$", text, re.M))
    failures = [name for name, said in outcomes.items() if said not in ("passed", "skipped")]
    counts = Counter()
    for name, said in outcomes.items():
        if name in failures:
            counts[f"{name} {said}: {reasons.get(name)}"] += 1
        else:
            counts[f"{name.partition('[')[0]} {said}"] += 1
    for said, count in counts.items():
        print(f"{count:4} {said}")

    return [target("tests that fail", len(failures), 0)], {}


def free():
    """Gives the memory of earlier models back, which their trainers hold in circles."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.compiler.reset()


def attempt(name, options):
    """What `lm_step.py` measures of an arm, or the error that it ends with: an arm may need too much memory."""
    free()
    try:
        if name == "floor":
            return lm_step.run_floor(options)
        return lm_step.run_arm(name, options)
    except TimeoutError:
        raise
    except Exception as error:
        return repr(error)[:200]


def language_steps(options, arms):
    """Steps of a language model: time, memory, share of the rate of products, and start."""
    turns = take_turns(
        {name: partial(attempt, name, options) for name in ("floor", *arms)}, options.rounds
    )
    runs = {}
    for name, found in turns.items():
        errors = [result for result in found if isinstance(result, str)]
        if errors:
            print(f"{ARMS.get(name, name)} failed: {errors[-1]}")
        else:
            runs[name] = found
    lm_step.report(options, runs)

    seconds, starts = lm_step.rounds_of(runs)
    asked = memory_targets(runs)
    for name in TIMES:
        if name in runs:
            step = ratios(seconds, "erm")[name][1]
            start = statistics.median(starts[name])
            asked.append(target(f"{ARMS[name]}: step / ERM", step, TIMES[name]))
            asked.append(target(f"{ARMS[name]}: start in steps", start, START))
    if "exact" in runs and not options.checkpointing:  # what is computed again is not counted
        products = lm_step.products(options, runs, "exact")
        rates = [floor / step for floor, step in zip(seconds["floor"], seconds["exact"])]
        share = products * statistics.median(rates)
        asked.append(
            target(f"{ARMS['exact']}: of the rate of products", share, SHARE, at_least=True)
        )

    return asked, {"runs": runs}


def memory_targets(runs):
    """Peaks of memory against plain training's; on a CPU they are not measured."""
    peaks = {}
    for name in ("erm", *TIMES):
        if name in runs and torch.cuda.is_available():
            peaks[name] = statistics.median(run["peak"] for run in runs[name])

    asked = []
    for name in TIMES:
        if name not in runs:
            continue
        growth = None
        if name in peaks:
            growth = peaks[name] / peaks["erm"]
        asked.append(target(f"{ARMS[name]}: memory / ERM", growth, MEMORY))

    return asked


def paired(options, script, arm, quartile, limit):
    """Arms that take turns; of the ratios of one to the first the quartile (1 to 3) is limited."""
    seconds, starts = script.measure(options)
    baseline = next(iter(seconds))
    report(seconds, baseline)
    what = {2: "median", 3: "upper quartile"}[quartile]
    ratio = ratios(seconds, baseline)[arm][quartile - 1]
    asked = [target(f"{arm} / {baseline}, {what}", ratio, limit)]
    if starts:
        asked.append(target(f"{arm}: start in steps", statistics.median(starts[arm]), START))
    return asked, {"seconds": seconds, "starts": starts}


def counted_cases(names, size, rounds):
    """Steps of the models whose kernels `launches.py` counts: their time is to grow no more than the count was to."""
    asked = []
    seconds = {}
    for name in names:
        title = launches.CASES[name].title
        free()
        try:
            seconds[name] = launches.time_steps(name, rounds, size)
        except TimeoutError:
            if not seconds:
                raise
            print(f"{title}: out of time")
            break
        print(f"{title}:")
        report(seconds[name], "plain")
        ratio = ratios(seconds[name], "plain")["ours"][1]
        asked.append(target(f"{title}, median", ratio, launches.CASES[name].asked))

    return asked, {"seconds": seconds}


@contextmanager
def deadline(seconds):
    """TimeoutError inside after `seconds`; again 10 s later, where something has taken the first for its own."""

    def stop(*_):
        raise TimeoutError(f"{seconds:.0f} s were over")

    if seconds <= 0:
        stop()
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 10.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def cases(given, toy):
    """By title: the seconds that a case has, and what measures it."""

    def case(seconds, measure, sizes, *arguments):
        values = {**REST, **sizes}
        if toy:
            values.update(TOY)
        return seconds, partial(measure, argparse.Namespace(**values), *arguments)

    def counted(seconds, names, size):
        if toy:
            return seconds, partial(counted_cases, names[:2], launches.TINY, 1)
        return seconds, partial(counted_cases, names, size, 3)

    trainers = ["erm", *TIMES]
    compiled = ["erm", "erm-compiled", "subsampled", "subsampled-compiled"]
    classifier = (classifier_step, "descent", 2, 1.1)
    return {
        "Tests on the device": (80, partial(tests, given.tests)),
        "BERT base, 32 rows, read by replay": case(25, paired, REPLAYED, *classifier),
        "BERT base, 256 rows": case(25, paired, LARGE_BATCH, *classifier),
        "UT denoiser": case(20, paired, UT, classifier_step, "descent+noise", 2, 1.2),
        "Models whose kernels are counted, width 32": counted(45, COUNTED, launches.TINY),
        "Some of them, width 768": counted(50, AT_REAL_WIDTH, BASE),
        "Llama 3.1 8B shape, LoRA, bfloat16": case(
            105, language_steps, LORA, [*trainers, "torch", "trl"]
        ),
        "The same, checkpointed": case(60, language_steps, CHECKPOINTED, trainers),
        "4 of these layers, compiled": case(35, language_steps, COMPILED, compiled),
        "Evaluation of a classifier": case(
            17, paired, EVALUATED, evaluation_cost, "all layers", 2, 1.3
        ),
        "Evaluation of a language model": case(
            18, paired, EVALUATED_LM, evaluation_cost, "all layers", 2, 2.0
        ),
    }


def measured(seconds, measure):
    """What a case measures within its time: its targets, the facts, and what it printed. An error is a fact, too."""
    printed = io.StringIO()
    asked = []
    try:
        with redirect_stdout(printed), deadline(seconds):
            asked, facts = measure()
        results = {"targets": asked, **facts}
    except Exception as error:  # the other cases' figures are worth having
        results = {"error": repr(error)}
        print(f"Failed: {error!r}", file=printed)

    said = re.sub(r"^[{[].*\n", "", printed.getvalue(), flags=re.M)  # without what trainers log
    return asked, results, said.strip()


def summary_line(title, what, value, holds):
    """A line of the table of targets."""
    figure = "not measured"
    if value is not None:
        figure = f"{value:.3g}"
    verdict = {None: "", True: "yes", False: "NO"}[holds]
    return f"| {title} | {what} | {figure} | {verdict} |"


def main():
    command = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    command.add_argument(
        "--output", type=Path, default=Path("gpu"), help="results, without an ending (gpu)"
    )
    command.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"for all cases ({MINUTES:g})"
    )
    command.add_argument(
        "--toy", action="store_true", help="toy sizes, as on a machine without a GPU"
    )
    command.add_argument("--tests", default="", help="which tests, as pytest's `-k` (all)")
    given = command.parse_args()
    has_gpu = torch.cuda.is_available()
    head = f"# CPU, torch {torch.__version__}, toy sizes"
    if has_gpu:
        head = f"# {torch.cuda.get_device_name()}, torch {torch.__version__}"
        if given.toy:
            head += ", toy sizes"

    lines = []
    results = {}
    summary = ["| case | target | measured | holds |", "|---|---|---|---|"]
    for title, (seconds, measure) in cases(given, given.toy or not has_gpu).items():
        free()
        asked, results[title], said = measured(seconds * given.minutes / MINUTES, measure)
        lines += ["", f"## {title}", "", "```", said, "```"]
        summary += [summary_line(title, *facts) for facts in asked]
        # After each case: what is known outlives a machine that is taken away.
        text = "\n".join([head, "", *summary, *lines, ""])
        given.output.with_suffix(".md").write_text(text)
        write(given.output.with_suffix(".json"), commit=commit(), cases=results)

    print(text)


if __name__ == "__main__":
    main()
