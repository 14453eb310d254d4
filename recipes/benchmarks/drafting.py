"""How fast a language model writes with drafts of its own first layers, on instructions that it has not seen.

    python recipes/benchmarks/drafting.py MODEL --train_file train.parquet --validation_file test.parquet \\
        --layers 5 10 15 [--shortlist 8000] [--prompts 64] [--new_tokens 128] [--certify 250]

Plain greedy decoding and `draft_with(layer)`, without and with a shortlist of the most frequent tokens of the training
completions, take turns on every prompt of the validation file, batch 1. Acceptance is the share of the model's own
greedy tokens that a layer predicts, too. With `--certify`, also what each layer loses on the completions of so many
rows, and the least eps for which f_layer <= (1 + eps) f_L is certified there.
"""

import math
import time
from bisect import bisect_left
from collections import Counter
from dataclasses import replace

import torch
from harness import parser, ratios, write

from hf_descent.constraints.problem import DescentProblem
from hf_descent.data.alpaca import AlpacaArguments, completion_labels, load_alpaca
from hf_descent.early_exit import draft_with
from hf_descent.evaluation import layer_profile
from hf_descent.loading import best_device, load_model, load_tokenizer
from hf_descent.readout.labels import IGNORE_INDEX


def measure(options):
    """Of each arm the processor and wall seconds of every prompt, and whether its text is that of plain decoding;
    acceptance by layer, and the number of tokens written."""
    model, tokenizer = load_model(options.model).to(best_device()), load_tokenizer(options.model)
    files = {name: getattr(options, name) for name in ("train_file", "validation_file")}
    data = load_alpaca(AlpacaArguments(**files), tokenizer)
    rows = [
        completion_labels(row, tokenizer)
        for row in data["train"].select(range(min(4000, len(data["train"]))))
    ]
    counts = Counter(token for row in rows for token in row["labels"] if token >= 0)
    frequent = [token for token, _ in counts.most_common(options.shortlist)]
    asked = [completion_labels(row, tokenizer) for row in data["validation"]]
    certified = [row for row in asked if max(row["labels"]) >= 0][: options.certify]
    prompts = [
        row["input_ids"][: sum(label < 0 for label in row["labels"])]
        for row in asked[: options.prompts]
    ]
    arms = {"plain": {}}
    for layer in options.layers:
        arms |= {f"{layer} layers": {"custom_generate": draft_with(layer)}}
        arms |= {f"{layer} layers, shortlist": {"custom_generate": draft_with(layer, frequent)}}
    settings = {
        "do_sample": False,
        "max_new_tokens": options.new_tokens,
        "pad_token_id": tokenizer.pad_token_id,
    }
    processor, wall, equal, texts = ({name: [] for name in arms} for _ in range(4))
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        for name, given in arms.items():
            start = time.process_time(), time.perf_counter()
            text = model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **given)[
                0
            ].tolist()
            processor[name].append(time.process_time() - start[0])
            wall[name].append(time.perf_counter() - start[1])
            texts[name].append(text[len(prompt) :])
            equal[name].append(text == prompt + texts["plain"][-1])
    written = [
        {"input_ids": p + t, "labels": [IGNORE_INDEX] * len(p) + t}
        for p, t in zip(prompts, texts["plain"])
        if t
    ]
    acceptance = layer_profile(model, written, batch_size=1).values.tolist()
    tokens = sum(map(len, texts["plain"]))
    found = {
        "processor": processor,
        "wall": wall,
        "equal": equal,
        "acceptance": acceptance,
        "tokens": tokens,
    }
    if certified:
        profile = layer_profile(model, certified, batch_size=1)
        found |= {"losses": profile.losses.tolist(), "accuracy": profile.values.tolist()}
        found["least_eps"] = {layer: least_eps(profile, layer) for layer in options.layers}
    return found


def least_eps(profile, layer):
    """The least eps for which f_layer <= (1 + eps) f_L is certified; infinite where the layer is not below chance."""

    def is_met(step):
        problem = DescentProblem(
            None, profile.chance, len(profile.losses), exit_targets={layer: step / 10**4}
        )
        return replace(profile, problem=problem.state_dict()).feasible

    step = bisect_left(range(10**6), True, key=is_met)
    return step / 10**4 if step < 10**6 else math.inf


def show(found):
    """Prints what `measure` found; ratios are of processor time on a CPU, where other programs may run."""
    seconds, tokens = found["wall" if torch.cuda.is_available() else "processor"], found["tokens"]
    for name, (low, middle, high) in ratios(seconds, "plain").items():
        total, of_plain = (sum(seconds[each]) for each in (name, "plain"))
        print(
            f"{name:24} {tokens / sum(found['processor'][name]):6.1f} tokens a processor second, "
            f"{tokens / sum(found['wall'][name]):6.1f} a second; takes {total / of_plain:.3f} of plain decoding in "
            f"all, by prompt {middle:.3f} ({low:.3f} to {high:.3f}); equal texts {sum(found['equal'][name])} of "
            f"{len(found['equal'][name])}"
        )
    print("acceptance by layer:", " ".join(f"{share:.2f}" for share in found["acceptance"]))
    for name in [each for each in ("losses", "accuracy") if each in found]:
        print(f"{name} by layer:", " ".join(f"{value:.4g}" for value in found[name]))
    for layer, eps in found.get("least_eps", {}).items():
        certified = (
            f"f_{layer} <= {1 + eps:.4g} f_L is"
            if math.isfinite(eps)
            else f"Nothing of layer {layer} is"
        )
        print(f"{certified} certified")


def main():
    command = parser(__doc__, shortlist=8000, prompts=64, new_tokens=128, certify=0)
    command.add_argument("model", help="folder or name on the Hub")
    command.add_argument(
        "--train_file", required=True, help="instructions whose completions are counted"
    )
    command.add_argument("--validation_file", required=True, help="instructions to answer")
    command.add_argument(
        "--layers", type=int, nargs="+", required=True, help="that draft, one arm each"
    )
    options = command.parse_args()
    torch.set_num_threads(options.threads)
    found = measure(options)
    show(found)
    write(options.output, **found, options=vars(options))


if __name__ == "__main__":
    main()
