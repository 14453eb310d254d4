"""How fast a language model writes with drafts of its own first layers, on instructions that it has not seen.

    python recipes/benchmarks/drafting.py MODEL --train_file train.parquet --validation_file test.parquet \\
        --layers 5 10 15 [--shortlist 8000] [--prompts 64] [--new_tokens 128]

Plain greedy decoding and `draft_with(layer)`, without and with a shortlist of the most frequent tokens of the training
completions, take turns on every prompt of the validation file, batch 1. Acceptance is the share of the model's own
greedy tokens that a layer predicts, too.
"""

import time
from collections import Counter

import numpy as np
import torch
from harness import parser, quartiles, write

from hf_descent.data.alpaca import AlpacaArguments, completion_labels, load_alpaca
from hf_descent.early_exit import draft_with
from hf_descent.evaluation import layer_profile
from hf_descent.loading import load_model, load_tokenizer
from hf_descent.readout.labels import IGNORE_INDEX


def main():
    command = parser(__doc__, shortlist=8000, prompts=64, new_tokens=128)
    command.add_argument("model", help="folder or name on the Hub")
    command.add_argument("--train_file", required=True, help="instructions whose completions are counted")
    command.add_argument("--validation_file", required=True, help="instructions to answer")
    command.add_argument("--layers", type=int, nargs="+", required=True, help="that draft, one arm each")
    options = command.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = load_model(options.model), load_tokenizer(options.model)
    files = {name: getattr(options, name) for name in ("train_file", "validation_file")}
    data = load_alpaca(AlpacaArguments(**files), tokenizer)
    rows = [completion_labels(row, tokenizer) for row in data["train"].select(range(min(4000, len(data["train"]))))]
    counts = Counter(token for row in rows for token in row["labels"] if token >= 0)
    frequent = [token for token, _ in counts.most_common(options.shortlist)]
    asked = [completion_labels(row, tokenizer) for row in data["validation"].select(range(options.prompts))]
    prompts = [row["input_ids"][: sum(label < 0 for label in row["labels"])] for row in asked]
    arms = {"plain": {}}
    for layer in options.layers:
        arms |= {f"{layer} layers": {"custom_generate": draft_with(layer)}}
        arms |= {f"{layer} layers, shortlist": {"custom_generate": draft_with(layer, frequent)}}
    settings = {"do_sample": False, "max_new_tokens": options.new_tokens, "pad_token_id": tokenizer.pad_token_id}
    seconds, wall, equal, texts = ({name: [] for name in arms} for _ in range(4))
    for prompt in prompts:
        ids = torch.tensor([prompt])
        for name, given in arms.items():
            start = time.process_time(), time.perf_counter()
            text = model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **given)[0].tolist()
            seconds[name].append(time.process_time() - start[0])
            wall[name].append(time.perf_counter() - start[1])
            texts[name].append(text[len(prompt) :])
            equal[name].append(text == prompt + texts["plain"][-1])
    written = [
        {"input_ids": p + t, "labels": [IGNORE_INDEX] * len(p) + t} for p, t in zip(prompts, texts["plain"]) if t
    ]
    acceptance = layer_profile(model, written, batch_size=1).values.tolist()
    tokens = sum(map(len, texts["plain"]))
    for name in arms:
        ratios = np.array(seconds["plain"]) / np.array(seconds[name])
        low, middle, high = quartiles(ratios)
        print(
            f"{name:24} {tokens / sum(seconds[name]):6.1f} tokens a processor second, {tokens / sum(wall[name]):6.1f} "
            f"a second; {sum(seconds['plain']) / sum(seconds[name]):.3f} times plain in all, by prompt {middle:.3f} "
            f"({low:.3f} to {high:.3f}); equal texts {sum(equal[name])} of {len(prompts)}"
        )
    print("acceptance by layer:", " ".join(f"{share:.2f}" for share in acceptance))
    facts = {"acceptance": acceptance, "tokens": tokens, "equal": equal, "options": vars(options)}
    write(options.output, processor=seconds, wall=wall, **facts)


if __name__ == "__main__":
    main()
