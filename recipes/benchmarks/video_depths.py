"""Denoisers against depth: ERM, deep supervision and descent constraints at the same noise, over seeds.

    python recipes/benchmarks/video_depths.py --recipe video-ut --depths 3 5 7 --seeds 0 1 2 \
        -- --train_files clip.avi --test_files other.avi --split_by time --later_percentage 20 --max_steps 600

Every cell is a run of `hf-descent denoise` on the recipe, with the arguments after `--`; a run whose results exist is
not run again, so other arguments need another `--output_dir`. Prints mean and standard deviation over seeds: mean RMSE
over the test levels (0-255), RMSE at the training level, loss of the last layer and largest violation, for each split,
and in how many of the runs every layer is feasible (violation at most 0.01 f_0); a cell with fewer seeds says so.
"""

import argparse
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np

from hf_descent import cli


# The constraints that all arms are judged by are the recipe's; plain training meets them or not.
ARMS = {
    "erm": ["noise.yaml"],
    "deep_supervision": ["noise.yaml", "--objective", "deep_supervision", "--penalty_coefficient", "1"],
    "descent": ["descent.yaml"],
}
ALPHA, INITIAL_LOSS_BOUND, TOLERANCE = 0.05, 1.0, 0.01


def measure(recipe: str, arm: str, depth: int, seed: int, output_dir: Path, flags: list[str]) -> dict:
    """The results of one run, made where they are missing."""
    results = output_dir / f"{recipe}-{depth}-{arm}-{seed}"
    if not (results / "all_results.json").is_file() or "test_mean_rmse" not in _read(results):
        file, *extra = ARMS[arm]
        config = Path(__file__).parent.parent / recipe / file
        command = ["denoise", "--config", str(config), "--num_layers", str(depth), "--seed", str(seed), *extra]
        paths = ["--output_dir", str(results), "--overwrite_output_dir", "--save_strategy", "no"]
        cli.main([*command, *paths, *flags])
    return _read(results)


def violation(results: dict, split: str, depth: int) -> float:
    losses = [INITIAL_LOSS_BOUND, *(results[f"{split}_layer_loss_{layer}"] for layer in range(1, depth + 1))]
    return max(after - (1 - ALPHA) * before for before, after in pairwise(losses))


def _read(folder: Path) -> dict:
    return json.loads((folder / "all_results.json").read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="video-ut", help="folder of recipes/ with noise.yaml and descent.yaml")
    parser.add_argument("--depths", type=int, nargs="+", default=[3, 5, 7])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output_dir", type=Path, default=Path("runs/video-depths"))
    parser.add_argument("flags", nargs="*", help="after `--`: arguments of every run")
    args = parser.parse_args()
    if fixed := {"--descent_alpha", "--initial_loss_bound"}.intersection(args.flags):
        parser.error(f"{', '.join(sorted(fixed))}: all arms are judged by the recipe's constraints; leave it out.")
    if lacking := {"--later_percentage", "--test_files"}.difference(args.flags):
        parser.error(f"after `--`, {', '.join(sorted(lacking))} must be given: both splits are reported.")
    made_with = args.output_dir / f"{args.recipe}-flags.json"
    args.output_dir.mkdir(parents=True, exist_ok=True)
    if not made_with.is_file():
        made_with.write_text(json.dumps(args.flags))
    if json.loads(made_with.read_text()) != args.flags:
        parser.error(f"`--output_dir` {args.output_dir} holds runs with other arguments after `--`; give another one.")

    cells = defaultdict(list)
    for seed in args.seeds:
        for depth in args.depths:
            for arm in ARMS:
                results = measure(args.recipe, arm, depth, seed, args.output_dir, args.flags)
                for split in ("later", "test"):
                    cells[split, depth, arm].append(
                        (
                            results[f"{split}_mean_rmse"],
                            results[f"{split}_rmse@0.15"],
                            results[f"{split}_layer_loss_{depth}"],
                            violation(results, split, depth),
                        )
                    )
        print(f"| {args.recipe} after seed {seed} | mean RMSE | RMSE at 0.15 | f_L | largest violation | feasible |")
        for (split, depth, arm), values in sorted(cells.items()):
            columns = zip(np.mean(values, axis=0), np.std(values, axis=0, ddof=1 if len(values) > 1 else 0))
            text = " | ".join(f"{mean:.3f} +- {deviation:.3f}" for mean, deviation in columns)
            feasible = sum(value[-1] <= TOLERANCE for value in values)
            print(f"| {split}, L = {depth}, {arm} ({len(values)}) | {text} | {feasible} |", flush=True)


if __name__ == "__main__":
    main()
