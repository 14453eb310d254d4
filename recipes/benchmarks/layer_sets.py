"""A language model with some of its layers, before and after healing, on Alpaca's instructions.

    python recipes/benchmarks/layer_sets.py --model FOLDER --alpaca FOLDER --layers 1-15,30
    python recipes/benchmarks/layer_sets.py --model FOLDER --alpaca FOLDER --layers 1-15 --exit_head affine

The whole model reads the training rows once: what its layers before the gap and its head get is kept in `--states`, so
that a step of healing runs the layers that follow the gap alone. Loss, its ratio to that of all layers, and the share
of tokens that are predicted as by all layers, are of rows that were not trained on. A finished run is a JSON line in
`--output`.
"""

import argparse
import math
import tempfile
import time
from pathlib import Path

import torch
from datasets import load_dataset
from harness import Runs
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    TrainingArguments,
    set_seed,
)

from hf_descent.data.alpaca import completion_labels, read_instructions
from hf_descent.early_exit import HealingTrainer, keep_layers
from hf_descent.early_exit.heads import EXIT_HEADS, layers_of_exit
from hf_descent.early_exit.healing import WholeReading
from hf_descent.early_exit.layer_sets import layers_in, spans


RESULTS = Path(__file__).parent / "results" / "layer_sets.jsonl"
BATCH = 8
FEWEST_LABELS = 4
TEXTS = 20


def rows_of(file: Path, tokenizer, count: int, length: int) -> list[dict]:
    """The first rows of a file that still have labels once they are cut to `length` tokens."""
    rows = []
    for pair in read_instructions(str(file), "auto", tokenizer, ["input", "output"]):
        row = completion_labels(pair, tokenizer, length)
        if sum(label != -100 for label in row["labels"]) >= FEWEST_LABELS:
            rows.append(row)
        if len(rows) == count:
            break
    return rows


def text_rows(file: Path, tokenizer, count: int, length: int) -> list[dict]:
    """The first `count` texts of a file, cut to `length` tokens, each of which is to be predicted."""
    texts = load_dataset("parquet", data_files=str(file), split=f"train[:{count}]")["text"]
    tokens = [tokenizer(text, truncation=True, max_length=length)["input_ids"] for text in texts]
    return [{"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids} for ids in tokens]


def batches_of(rows: list[dict], collator) -> list[dict]:
    """Batches of rows of about the same length, each with its number."""
    ordered = sorted(rows, key=lambda row: len(row["input_ids"]))
    starts = range(0, len(ordered), BATCH)
    batches = [dict(collator(ordered[start : start + BATCH])) for start in starts]
    return [{**batch, "number": number} for number, batch in enumerate(batches)]


def kept_states(
    model, batches: list[dict], gaps: list[int], file: Path, bf16: bool = False
) -> list[dict]:
    """Of each batch what the head reads, and what the layers `gaps` return, in half precision; from `file`, if it is
    there. `bf16`: the model computes in bfloat16."""
    if file.exists():
        return torch.load(file, weights_only=True)

    states = []
    seen = {}

    def keep(name):
        return lambda module, args, output: seen.update({name: output.half()})

    hooks = [model.model.norm.register_forward_hook(keep("hidden"))]
    hooks += [model.model.layers[gap - 1].register_forward_hook(keep(gap)) for gap in gaps]

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        for batch in batches:
            model.model(batch["input_ids"], batch["attention_mask"], use_cache=False)
            states.append(dict(seen))
            if len(states) % 10 == 0:
                print(f"{len(states)} of {len(batches)} batches read", flush=True)

    for hook in hooks:
        hook.remove()

    torch.save(states, file)
    return states


class FromStates(HealingTrainer):
    """Takes what the whole model gives of a batch from what was kept of it."""

    def __init__(self, *args, states: list[dict], gap: int, **kwargs):
        super().__init__(*args, **kwargs)
        self._states = states
        self._gap = gap
        self._number = None

    def compute_loss(self, model, inputs, **kwargs):
        self._number = inputs.pop("number")
        return super().compute_loss(model, inputs, **kwargs)

    def read_whole(self, inputs, by_head):
        state = self._states[self._number]
        return WholeReading({"hidden": state["hidden"].float()}, state[self._gap].float())


def gap_of(layers: list[int]) -> int:
    """The last layer before the gap, or of all where none follows."""
    gaps = (place for place, layer in enumerate(layers) if layer != place + 1)
    return next(gaps, len(layers))


@torch.no_grad()
def measured(models: dict, batches: list[dict]) -> dict[str, dict]:
    """Loss of each model, its ratio to the first one's, and the share of tokens that it predicts as that one does."""
    first = next(iter(models))
    losses = dict.fromkeys(models, 0.0)
    agreed = dict.fromkeys(models, 0)
    tokens = 0
    for batch in batches:
        labels = batch["labels"][:, 1:]
        kept = labels != -100
        tokens += int(kept.sum())

        for name, model in models.items():
            hidden = model.model(batch["input_ids"], batch["attention_mask"], use_cache=False)[0]
            logits = model.lm_head(hidden[:, :-1][kept])
            chosen = logits.argmax(-1)
            if name == first:
                usual = chosen
            losses[name] += float(cross_entropy(logits, labels[kept], reduction="sum"))
            agreed[name] += int((chosen == usual).sum())

    return {
        name: {
            "loss": losses[name] / tokens,
            "ratio": losses[name] / losses[first],
            "agreement": agreed[name] / tokens,
        }
        for name in models
    }


def run(options: argparse.Namespace, layers: list[int]) -> dict:
    """The figures of the whole model, of a set of its layers, and of that set after healing, where there are steps."""
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    collator = DataCollatorForSeq2Seq(tokenizer)
    kept = layers_of_exit(layers, model.config.num_hidden_layers, options.exit_head)
    models = {"whole": model, "before": keep_layers(model, kept)}
    seconds = 0.0
    if options.steps:
        file = Path(options.alpaca) / "train.parquet"
        rows = rows_of(file, tokenizer, options.rows, options.length)
        models["after"], seconds = healed(options, model, layers, batches_of(rows, collator))

    file = Path(options.alpaca) / "test.parquet"
    tests = batches_of(rows_of(file, tokenizer, options.test_rows, options.length), collator)
    tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in tests)
    result = {**measured(models, tests), "tokens": tokens, "seconds": seconds}
    if options.text:
        rows = text_rows(Path(options.text), tokenizer, TEXTS, options.length)
        result["text"] = with_perplexity(measured(models, batches_of(rows, collator)))
    return result


def healed(
    options: argparse.Namespace, model, layers: list[int], batches: list[dict]
) -> tuple[PreTrainedModel, float]:
    """The model that was healed on the batches, and the processor seconds of its training."""
    gaps = sorted({gap_of(layers), *options.gaps})
    states = kept_states(model, batches, gaps, Path(options.states), options.bf16)

    set_seed(options.seed)
    start = time.process_time()
    with tempfile.TemporaryDirectory() as output:
        args = TrainingArguments(
            output,
            use_cpu=True,
            bf16=options.bf16,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            per_device_train_batch_size=1,  # of batches that are made
            max_steps=options.steps,
            learning_rate=options.rate,
            lr_scheduler_type="cosine",
            warmup_steps=math.ceil(0.04 * options.steps),
            logging_steps=20,
            seed=options.seed,
        )
        trainer = FromStates(
            model,
            args,
            layers=layers,
            exit_head=options.exit_head,
            train_all=options.train_all,
            token_fraction=options.token_fraction,
            train_dataset=batches,
            data_collator=lambda made: made[0],
            states=states,
            gap=gap_of(layers),
        )
        trainer.train()

    return trainer.model.eval(), time.process_time() - start


def with_perplexity(measures: dict[str, dict]) -> dict[str, dict]:
    """The measures of each model, with its perplexity."""
    return {
        name: {**measure, "perplexity": math.exp(measure["loss"])}
        for name, measure in measures.items()
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a Llama-like language model")
    parser.add_argument("--alpaca", required=True, help="folder with train and test.parquet")
    parser.add_argument("--layers", required=True, help="layers to keep, such as 1-15,30")
    parser.add_argument("--exit_head", choices=EXIT_HEADS, help="train this behind the layers")
    parser.add_argument("--train_all", action="store_true", help="train the layers below, too")
    parser.add_argument("--gaps", type=int, nargs="*", default=[], help="further gaps to keep")
    parser.add_argument("--states", help="file of what the whole model gave, to train from")
    parser.add_argument(
        "--text", help="parquet file of other texts to measure on, in a column `text`"
    )
    parser.add_argument("--bf16", action="store_true", help="read and train in bfloat16")
    parser.add_argument("--rows", type=int, default=1200)
    parser.add_argument("--test_rows", type=int, default=60)
    parser.add_argument("--length", type=int, default=128, help="most tokens of a row")
    parser.add_argument("--steps", type=int, default=600, help="of healing; 0: measure alone")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--token_fraction", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default=str(RESULTS), help="finished runs, read and added to")
    options = parser.parse_args(argv)
    if options.steps and options.states is None:
        parser.error("give `--states`, or `--steps 0`")
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    torch.set_num_threads(1)
    layers = layers_in(options.layers)
    names = ["test_rows", "length", "steps"]
    if options.steps:
        names += ["rows", "rate", "token_fraction", "seed"]
    settings = {name: getattr(options, name) for name in names}
    settings["model"] = Path(options.model).name
    settings["layers"] = spans(layers)
    if options.bf16:
        settings["bf16"] = True
    if options.text:
        settings["text"] = Path(options.text).parent.name
    if options.exit_head is not None:
        settings["exit_head"] = options.exit_head
    if options.train_all:
        settings["train_all"] = True
    result = Runs(options.output).get(settings, lambda: run(options, layers))
    for name in ("whole", "before", "after"):
        if name in result:
            print(name, result[name], flush=True)


if __name__ == "__main__":
    main()
