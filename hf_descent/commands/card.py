"""`hf-descent card RUN`: the model card of a run, from what was measured so far; also uploads it with the model."""

import argparse
from pathlib import Path

from huggingface_hub import HfApi

from ..hub.facts import OLD_FILES, collect, write_card
from ..loading import is_text_model
from ..runs import RunFolder
from .closing import next_step


def run(args: argparse.Namespace) -> None:
    """Write `README.md`, `model_card.json` and figures into the folder, and upload it if asked to.

    Checkpoints, optimizer states and `training_args.bin` are not uploaded.
    """
    facts = dict(vars(args))
    for name in ("run", "push_to_hub", "private"):
        facts.pop(name)

    repo_id = None
    if args.push_to_hub:
        collect(args.run, **facts)  # raises before a repository is made
        # `None` leaves it to the settings of the account.
        private = True if args.private else None
        repo_id = HfApi().create_repo(args.push_to_hub, private=private, exist_ok=True).repo_id

    card = write_card(args.run, repo_id=repo_id, **facts)
    print(f"Written to {Path(args.run) / 'README.md'}")
    if "verdict" in card:
        headline = card["verdict"]["headline"]
        print(f"The card begins with the verdict on the constraints of the run:\n{headline}")
    if args.push_to_hub:
        ignored = ["_*", "checkpoint-*", "runs/*", "*.tmp", "training_args.bin"]
        ignored += ["optimizer*", "scheduler*", "scaler.pt", "rng_state*"]
        if card["readout"]:  # the uploaded model does not have the numbers of this readout
            ignored += ["*_results.json", "trainer_state.json", *RunFolder.EVALUATIONS]
        commit = HfApi().upload_folder(
            repo_id=repo_id,
            folder_path=args.run,
            commit_message="Upload model and card",
            ignore_patterns=ignored,
            delete_patterns=list(OLD_FILES),
        )
        print(f"Uploaded to {commit.repo_url}")
    elif is_text_model(args.run):
        print(next_step(f"show {args.run}", "shows what every layer predicts for a text"))
    else:
        print(next_step(f"card {args.run} --push_to_hub NAME", "uploads the model with its card"))
