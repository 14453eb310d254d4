"""The benchmarks that a GPU answers, in one process on one card, and which targets hold. Not run on a GPU yet.

    python -m recipes.benchmarks.gpu --output results

writes `results.md` and `results.json`, with the card's name. Without a GPU, or with `--toy`, all sizes are tiny and
the figures say nothing. A case that fails is named with its error; the others go on. Arms take turns round by round,
each with a model of its own, as in `lm_step.py`; rounds end where the minutes do.
"""

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path

import torch


sys.path.insert(0, str(Path(__file__).parent))

from harness import quartiles, write
from lm_step import ARMS, run_arm, run_floor


LLAMA = {"layers": 32, "hidden": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256}
LORA = {**LLAMA, "batch": 1, "length": 2048, "steps": 10, "bf16": True, "lora": True}
BERT = {"layers": 12, "hidden": 768, "intermediate": 3072, "heads": 12, "vocab": 30522, "batch": 32, "length": 128}
CASES = {  # sizes, and arms
    "Llama 3.1 8B shape, LoRA, bfloat16": (LORA, ("erm", "subsampled", "exact")),
    "the same, checkpointed": (LORA | {"batch": 2, "steps": 6, "checkpointing": True}, ("erm", "subsampled", "exact")),
    "BERT base, a classifier read by replay": (BERT | {"steps": 22, "classes": 2}, ("erm", "exact")),
    "torch's operator in place of the tiles": (LORA, ("erm", "exact", "torch")),
    "TRL's loss in place of the tiles": (LORA, ("erm", "exact", "trl")),
}
TOY = {"layers": 2, "hidden": 32, "intermediate": 64, "heads": 2, "kv_heads": 2, "vocab": 300}
TOY |= {"batch": 2, "length": 16, "steps": 4}
REST = {"classes": 0, "model": None, "text_file": None, "bf16": False, "lora": False, "checkpointing": False}
MEMORY, START = 1.02, 3.0  # times the peak of ERM; steps
TIMES = {"subsampled": 1.2, "exact": 3.2}  # a step of ERM
SHARE = 0.7  # of the measured rate of matrix products, in the exact step
REPLAYED = 1.03  # a step of ERM, at the upper quartile


def run_case(options, arms, rounds, deadline):
    """What `lm_step.py` measures of each arm, a list of rounds, and of the floor."""
    runs = {name: [] for name in ("floor", *arms)}
    for number in range(rounds):
        if number and time.monotonic() > deadline:
            break
        for name, found in runs.items():
            gc.collect()  # the model before, which its trainer holds in a circle
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            found.append(run_floor(options) if name == "floor" else run_arm(name, options))
    return runs


def figures(options, runs):
    """By arm: seconds of a step with quartiles, ratios to ERM in a round, share of the rate of products, start in
    steps beyond ERM's."""
    product, plain = runs["floor"][0]["product"], runs["floor"][0]["erm"]
    rate = product / statistics.median(wall for run in runs["floor"] for wall, _ in run["steps"])
    # With the head, beyond those of the plain step.
    more = 0 if options.classes else (options.layers - 1) * (2 if options.lora else 3) * product
    found, steps = {}, {}
    for name in list(runs)[1:]:
        low, middle, high = quartiles([wall for run in runs[name] for wall, _ in run["steps"]])
        steps[name] = [statistics.median(wall for wall, _ in run["steps"]) for run in runs[name]]
        times = [step / base for step, base in zip(steps[name], steps["erm"])]
        starts = [run["start"] - base["start"] / ratio for run, base, ratio in zip(runs[name], runs["erm"], times)]
        peak = statistics.median(run["peak"] for run in runs[name]) if torch.cuda.is_available() else None
        found[name] = {
            "seconds": middle, "quartiles": (low, high), "times": quartiles(times)[1],
            "times_at_most": quartiles(times)[2], "peak": peak,
            "memory": peak and peak / found.get("erm", {"peak": peak})["peak"],
            "share": None if name == "subsampled" else (plain + (name != "erm") * more) / rate / middle,
            "start": statistics.median(starts),
        }  # fmt: skip
    return found


def targets(options, found):
    """(what is asked, the figure or `None` where it was not measured, whether it holds or `None`)."""
    exact, asked = found["exact"], []
    if options.classes:
        asked.append((f"step, upper quartile <= {REPLAYED} ERM", exact["times_at_most"], REPLAYED, 1))
    else:
        for name in sorted(TIMES.keys() & found.keys()):
            asked.append((f"{ARMS[name]}: step <= {TIMES[name]} ERM", found[name]["times"], TIMES[name], 1))
        share = None if options.checkpointing else exact["share"]  # what is computed again is not counted
        asked.append((f"{ARMS['exact']}: >= {SHARE} of the rate of products", share, SHARE, -1))
    for name in sorted(TIMES.keys() & found.keys()):
        asked.append((f"{ARMS[name]}: memory <= {MEMORY} ERM", found[name]["memory"], MEMORY, 1))
        asked.append((f"{ARMS[name]}: start <= {START:g} steps", found[name]["start"], START, 1))
    return [
        (what, value, None if value is None else sign * value <= sign * limit) for what, value, limit, sign in asked
    ]


def markdown(title, options, found):
    """A case's tables: the arms, then the targets."""
    lines = [
        f"## {title}", "", f"{options.batch} x {options.length} tokens; {torch.get_num_threads()} threads.", "",
        "| step | s (quartiles) | ERM = 1 | of the rate of products | start, steps | peak GiB | ERM = 1 |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, each in found.items():
        low, high = each["quartiles"]
        peak = [None if each["peak"] is None else each["peak"] / 2**30, each["memory"]]
        cells = [each["times"], each["share"], each["start"], *peak]
        cells = " | ".join("" if cell is None else f"{cell:.2f}" for cell in cells)
        lines.append(f"| {ARMS[name]} | {each['seconds']:.4f} ({low:.4f} to {high:.4f}) | {cells} |")
    lines += ["", "| target | measured | holds |", "|---|---|---|"]
    for what, value, holds in targets(options, found):
        value = "not measured" if value is None else f"{value:.2f}"
        lines.append(f"| {what} | {value} | {'' if holds is None else 'yes' if holds else 'NO'} |")
    return lines


def main():
    command = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    command.add_argument("--output", type=Path, default=Path("gpu"), help="results, without an ending (gpu)")
    command.add_argument("--minutes", type=float, default=7.0, help="after which no further round begins (7)")
    command.add_argument("--rounds", type=int, default=2, help="at most (2)")
    command.add_argument("--toy", action="store_true", help="toy sizes, as on a machine without a GPU")
    given = command.parse_args()
    toy = given.toy or not torch.cuda.is_available()
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    deadline = time.monotonic() + 60 * given.minutes
    lines, results = [f"# {card}, torch {torch.__version__}{', toy sizes' if toy else ''}", ""], {}
    for title, (sizes, arms) in CASES.items():
        options = argparse.Namespace(**REST | sizes | (TOY if toy else {}))
        try:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{given.minutes:g} minutes were over")
            runs = run_case(options, arms, given.rounds, deadline)
            found = figures(options, runs)
            results[title] = {"options": vars(options), "figures": found, "targets": targets(options, found)}
            lines += [*markdown(title, options, found), ""]
        except Exception as error:  # the other cases' figures are worth having
            results[title] = {"error": repr(error)}
            lines += [f"## {title}", "", f"Failed: {error!r}", ""]
    print(text := "\n".join(lines))
    given.output.with_suffix(".md").write_text(text)
    write(given.output.with_suffix(".json"), cases=results)


if __name__ == "__main__":
    main()
