"""`hf-descent card RUN`: the model card of a run, from what was measured so far; also uploads it with the model."""

import argparse
from pathlib import Path

from huggingface_hub import HfApi

from ..hub.facts import OPTIONAL_FILES, collect, write_card
from ..runs import RunFolder
from .closing import next_step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="output folder of a run, with its weights and result files")
    parser.add_argument(
        "--model_name", help="title of the card; by default as it was, or the folder's name"
    )
    parser.add_argument("--base_model", help="id on the Hub of the model that was fine-tuned")
    parser.add_argument("--datasets", nargs="+", help="ids on the Hub of the data sets trained on")
    parser.add_argument(
        "--test_data", help="name of what the results are on, where it is not the first of these"
    )
    benchmark = "benchmark on the Hub that the results are on, a task of its eval.yaml, and a metric of the results"
    parser.add_argument(
        "--benchmark", nargs=3, metavar=("DATASET", "TASK", "METRIC"), help=benchmark
    )
    parser.add_argument("--license", help="id of the licence, such as apache-2.0")
    parser.add_argument("--language", nargs="+", help="codes of the languages, such as en")
    parser.add_argument(
        "--limits", nargs="+", help="further limits of the model, one sentence each"
    )
    parser.add_argument(
        "--push_to_hub", metavar="REPO", help="create this repository and upload the folder to it"
    )
    parser.add_argument(
        "--private", action="store_true", help="make a repository that is created private"
    )


def run(args: argparse.Namespace) -> None:
    """Writes `README.md`, `model_card.json` and figures into the folder; uploads it where asked to.

    Checkpoints, optimizer states and `training_args.bin` are not uploaded.
    """
    facts = {
        name: value
        for name, value in vars(args).items()
        if name not in ("run", "push_to_hub", "private")
    }
    repo_id = None
    if args.push_to_hub:
        collect(args.run, **facts)  # what is refused leaves no repository behind
        repo_id = (
            HfApi()
            .create_repo(args.push_to_hub, private=args.private or None, exist_ok=True)
            .repo_id
        )
    card = write_card(args.run, repo_id=repo_id, **facts)
    print(f"Written to {Path(args.run) / 'README.md'}")
    if args.push_to_hub:
        ignored = ["_*", "checkpoint-*", "runs/*", "*.tmp", "training_args.bin"]
        ignored += ["optimizer*", "scheduler*", "scaler.pt", "rng_state*"]
        if card["readout"]:  # whose numbers the uploaded model does not have
            ignored += ["*_results.json", "trainer_state.json", *RunFolder.EVALUATIONS]
        commit = HfApi().upload_folder(
            repo_id=repo_id,
            folder_path=args.run,
            commit_message="Upload model and card",
            ignore_patterns=ignored,
            delete_patterns=list(
                OPTIONAL_FILES
            ),  # of a former model; this one's, where there are any, are uploaded
        )
        print(f"Uploaded to {commit.repo_url}")
    else:
        print(next_step(f"show {args.run}", "shows what every layer predicts for a text"))
