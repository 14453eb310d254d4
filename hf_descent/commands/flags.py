"""The flags of the plain tools, apart from what they run: their `--help` needs neither torch nor transformers."""

import argparse


def demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output_dir", default="demo", help="folder for the comparison and the runs"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run of each model per seed"
    )
    parser.add_argument("--max_steps", type=int, default=1200, help="optimizer steps of each run")
    parser.add_argument(
        "--paper",
        action="store_true",
        help="constrain as the paper does, not by the package's defaults",
    )


def compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="[GROUP=]RUN",
        help="folders of evaluated runs. Name groups before `=`; without names, runs that differ in their last number "
        "(the seed) are a group",
    )
    parser.add_argument(
        "--baseline", help="the group to compare with; the first one where not given"
    )
    parser.add_argument(
        "--confidence",
        type=float,
        default=0.95,
        help="probability that all intervals are right at once",
    )
    parser.add_argument(
        "--output_dir", default="comparison", help="folder for comparison.json and the figures"
    )


def export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", help="output folder of a run, or a name on the Hub; adapters are merged"
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--layer", type=int, help="keep the layers from 1 up to this one")
    which.add_argument(
        "--layers", nargs="+", metavar="LAYER", help="keep just these, as in 1-3,6 or 1 2 3 6"
    )
    parser.add_argument(
        "--output_dir", required=True, help="folder for the checkpoint, new or empty"
    )
    parser.add_argument(
        "--format",
        choices=("transformers", "onnx"),
        default="transformers",
        help="a checkpoint for `from_pretrained`, or a graph for ONNX Runtime (no cache of keys and values)",
    )


def show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        help="text classifier or causal language model: a run's folder, or a name on the Hub",
    )
    parser.add_argument(
        "--port", type=int, help="port on this machine; by default the first free one from 7860 on"
    )


def card(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="output folder of a run, with its weights and result files")
    parser.add_argument(
        "--model_name", help="title of the card; by default as it was, or the folder's name"
    )
    parser.add_argument("--base_model", help="id on the Hub of the model that was fine-tuned")
    parser.add_argument("--datasets", nargs="+", help="ids on the Hub of the training data sets")
    parser.add_argument(
        "--test_data", help="name of the test data; by default the first of `--datasets`"
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
