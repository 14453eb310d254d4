"""Every test and benchmark that a GPU answers, and which targets hold; README.md has what it said of an H200.

    python -m recipes.benchmarks.gpu --output results

writes `results.md` and `results.json`, with the card's name, in 8 minutes at most, a time for each case. What fails
or runs out of time is named with its error. Ratios are those within a round, in which all arms take turns. Without a
GPU, or with `--toy`, the figures say nothing.
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
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch


sys.path.insert(0, str(Path(__file__).parent))

import classifier_step
import evaluation_cost
import lm_step
from harness import ratios, report, take_turns, write
from lm_step import ARMS

from hf_descent.planning import PlannedModel


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
}
LORA |= {"batch": 1, "length": 2048, "steps": 10, "rounds": 2, "bf16": True, "lora": True}
CHECKPOINTED = LORA | {"batch": 2, "steps": 6, "checkpointing": True}
COMPILED = LORA | {"layers": 4}  # the stock Trainer compiles all layers as one
BERT = {"model": "bert", "layers": 12, "hidden": 768, "batch": 32, "length": 128, "vocab": 30522}
REPLAYED = BERT | {"steps": 6, "rounds": 20, "arms": ["descent"]}
UT = {
    "model": "ut",
    "layers": 7,
    "batch": 64,
    "steps": 6,
    "rounds": 20,
    "arms": ["erm+noise", "descent+noise"],
}
EVALUATED = BERT | {"samples": 128, "rounds": 2}
EVALUATED_LM = EVALUATED | {"model": "llama", "vocab": 8192, "samples": 64}
REST = {"classes": 0, "model": None, "text_file": None, "compiler": "inductor"}
REST |= dict.fromkeys(("bf16", "lora", "checkpointing", "processor_time"), False) | {"output": None}
TOY = {
    "layers": 2,
    "hidden": 32,
    "intermediate": 64,
    "heads": 2,
    "kv_heads": 2,
    "vocab": 300,
    "compiler": "aot_eager",
}
TOY |= {
    "batch": 2,
    "length": 16,
    "steps": 4,
    "samples": 4,
    "rounds": 1,
}
TIMES = {"subsampled": 1.2, "exact": 3.2}  # a step of ERM
MEMORY, START, PLAN = 1.02, 3.0, 0.1  # times the peak of ERM; steps; part of the measured peak
SHARE = 0.7  # of the measured rate of matrix products, in the exact step


def target(what, value, limit, at_least=False):
    """What is asked, the figure or `None` where it was not measured, and whether it holds or `None`."""
    holds = None if value is None else value >= limit if at_least else value <= limit
    return f"{what} {'>=' if at_least else '<='} {limit:g}", value, holds


def tests(chosen):
    """Outcomes of the tests that can follow the device; by name where one fails, or time runs out in it."""
    words = f"-m pytest -v -n {min(6, os.cpu_count())} --disable-warnings".split()
    command = [sys.executable, *words, "-m", "", "-k", chosen, *TESTS]
    asked = {
        "TESTS_ON_DEVICE": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "COLUMNS": "999",
    }  # reasons in full
    with tempfile.TemporaryFile("w+") as log:
        with suppress(TimeoutError):
            subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, env=os.environ | asked)
        log.seek(0)
        text = log.read()
    reasons = dict(re.findall(r"^(?:FAILED|ERROR) \S+?::(.+?) - (.*)$", text, re.M))
    found = dict.fromkeys(re.findall(r"^tests/\S+?::(.+?) *$", text, re.M), "did not end")
    found |= {
        name: said.lower()
        for said, name in re.findall(r"%\] ([A-Z]+) tests/\S+?::(.+?) *$", text, re.M)
    }
    fail = {name for name, label in found.items() if label not in ("passed", "skipped")}
    outcomes = Counter()
    for name, label in found.items():
        outcomes[
            f"{name} {label}: {reasons.get(name)}"
            if name in fail
            else f"{name.partition('[')[0]} {label}"
        ] += 1
    if not outcomes:
        raise RuntimeError(f"No test ran: {text[-2000:]}")
    print(*(f"{count:4} {said}" for said, count in outcomes.items()), sep="\n")
    return [target("tests that fail", len(fail), 0)], {}


def free():
    """Gives the memory of earlier models back, which their trainers hold in circles."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.compiler.reset()


def attempt(name, options):
    """What `lm_step.py` measures of an arm, or the error that it ends with: an arm may need too much memory."""
    free()
    try:
        return lm_step.run_floor(options) if name == "floor" else lm_step.run_arm(name, options)
    except TimeoutError:
        raise
    except Exception as error:
        return repr(error)[:200]


def planned_peaks(options):
    """Bytes of each arm by `hf-descent plan`."""
    ids = torch.arange(options.batch * options.length).view(options.batch, -1) % 7
    batch, args = (
        {"input_ids": ids, "labels": ids},
        {name: lm_step.arguments(name, options) for name in TIMES},
    )
    args["erm"] = replace(args["exact"], objective="erm")
    model = PlannedModel(
        lambda shape: lm_step.build_model(options, torch.get_default_device(), shape), batch
    )
    return {name: model.step(batch, each).memory.total() for name, each in args.items()}


def language_steps(options, arms):
    """Steps of a language model: time, memory as measured and as planned, share of the rate of products, and start."""
    planned = planned_peaks(options)
    turns = take_turns(
        {name: partial(attempt, name, options) for name in ("floor", *arms)}, options.rounds
    )
    failed = {
        name: error for name, found in turns.items() for error in found if isinstance(error, str)
    }
    print(*(f"{ARMS.get(name, name)} failed: {error}" for name, error in failed.items()), sep="\n")
    runs = {name: found for name, found in turns.items() if name not in failed}
    lm_step.report(options, runs)
    (seconds, starts), asked, on_gpu = lm_step.rounds_of(runs), [], torch.cuda.is_available()
    peaks = {
        name: statistics.median(run["peak"] for run in runs[name]) if on_gpu else None
        for name in starts
    }
    for name in [name for name in planned if name in runs]:
        arm, peak, plan = ARMS[name], peaks[name], planned[name]
        asked.append(
            target(
                f"{arm}: plan of {plan / 2**30:.1f} GiB off by", peak and abs(plan / peak - 1), PLAN
            )
        )
        if name in TIMES:
            asked.append(target(f"{arm}: step / ERM", ratios(seconds, "erm")[name][1], TIMES[name]))
            asked.append(target(f"{arm}: memory / ERM", peak and peak / peaks["erm"], MEMORY))
            asked.append(target(f"{arm}: start in steps", statistics.median(starts[name]), START))
    if "exact" in runs and not options.checkpointing:  # what is computed again is not counted
        products = lm_step.products(options, runs, "exact")
        share = products * statistics.median(
            a / b for a, b in zip(seconds["floor"], seconds["exact"])
        )
        asked.append(
            target(f"{ARMS['exact']}: of the rate of products", share, SHARE, at_least=True)
        )
    return asked, {"runs": runs}


def paired(options, script, arm, quartile, limit):
    """Arms that take turns; of the ratios of one to the first the quartile (1 to 3) is limited."""
    seconds, starts = script.measure(options)
    baseline, what = next(iter(seconds)), {2: "median", 3: "upper quartile"}[quartile]
    report(seconds, baseline)
    asked = [
        target(f"{arm} / {baseline}, {what}", ratios(seconds, baseline)[arm][quartile - 1], limit)
    ]
    asked += (
        [target(f"{arm}: start in steps", statistics.median(starts[arm]), START)] if starts else []
    )
    return asked, {"seconds": seconds, "starts": starts}


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

    def case(seconds, measure, sizes, *given):
        return seconds, partial(
            measure, argparse.Namespace(**REST | sizes | (TOY if toy else {})), *given
        )

    main_arms, compiled = (
        ["erm", *TIMES],
        ["erm", "erm-compiled", "subsampled", "subsampled-compiled"],
    )
    classifier = classifier_step, "descent", 3, 1.03
    found = {
        "Tests on the device": (90, partial(tests, given.tests)),
        "Llama 3.1 8B shape, LoRA, bfloat16": case(
            115, language_steps, LORA, [*main_arms, "torch", "trl"]
        ),
        "The same, checkpointed": case(75, language_steps, CHECKPOINTED, main_arms),
        "4 of these layers, compiled": case(60, language_steps, COMPILED, compiled),
        "BERT base, 32 rows, read by replay": case(25, paired, REPLAYED, *classifier),
        "BERT base, 256 rows": case(
            25, paired, REPLAYED | {"batch": 256, "rounds": 4}, *classifier
        ),
        "UT denoiser": case(20, paired, UT, classifier_step, "descent+noise", 2, 1.08),
        "Evaluation of a classifier": case(
            17, paired, EVALUATED, evaluation_cost, "all layers", 2, 1.3
        ),
        "Evaluation of a language model": case(
            18, paired, EVALUATED_LM, evaluation_cost, "all layers", 2, 2.0
        ),
    }
    return found


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
    toy = given.toy or not torch.cuda.is_available()
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    lines, results = [], {}
    summary = ["| case | target | measured | holds |", "|---|---|---|---|"]
    for title, (seconds, measure) in cases(given, toy).items():
        free()
        printed = io.StringIO()
        try:
            with redirect_stdout(printed), deadline(seconds * given.minutes / MINUTES):
                asked, facts = measure()
            results[title] = {"targets": asked, **facts}
        except Exception as error:  # the other cases' figures are worth having
            asked, results[title] = [], {"error": repr(error)}
            print(f"Failed: {error!r}", file=printed)
        said = re.sub(r"^[{[].*\n", "", printed.getvalue(), flags=re.M)  # without what trainers log
        lines += ["", f"## {title}", "", "```", said.strip(), "```"]
        for what, value, holds in asked:
            figure = "not measured" if value is None else f"{value:.3g}"
            summary.append(
                f"| {title} | {what} | {figure} | {'' if holds is None else 'yes' if holds else 'NO'} |"
            )
    head = f"# {card}, torch {torch.__version__}{', toy sizes' if toy else ''}"
    print(text := "\n".join([head, "", *summary, *lines, ""]))
    given.output.with_suffix(".md").write_text(text)
    write(given.output.with_suffix(".json"), cases=results)


if __name__ == "__main__":
    main()
