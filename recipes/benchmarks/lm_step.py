"""Time and peak memory of a constrained step on a language model (or classifier), as ratios to plain training.

    python recipes/benchmarks/lm_step.py                                # 8 layers, hidden 256, vocabulary 32k, CPU
    python recipes/benchmarks/lm_step.py --hidden 4096 --intermediate 14336 --layers 32 --heads 32 --kv_heads 8 \
        --vocab 128256 --batch 1 --length 2048 --bf16 --lora --arms erm exact subsampled          # Llama-3.1-8B, GPU
    python recipes/benchmarks/lm_step.py --model path/to/model --text_file texts.parquet --text_column text \
        --arms erm naive exact                                          # a trained model on real text
    python recipes/benchmarks/lm_step.py --classes 2 --vocab 1000       # a BERT classifier, its layers read by replay

All figures come from one run. Every arm trains the same model, of random weights where none is given, in a process of
its own, so that its peak memory is its own; the arms take turns round by round, so that a noisy machine slows all of
them. A figure is the median over all timed steps, from the trainer's `on_step_begin` to its `on_step_end`: forward,
backward, optimizer and dual step. Processor time of the same steps stands below wall time: a busy machine disturbs it
less (with `--threads 1` least). The floor is the count of operations in matrix products divided by the rate of the
largest one, measured in the same rounds.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
import transformers
from torch.utils.flop_counter import FlopCounterMode

from hf_descent import DescentConfig, DescentTrainer


ARMS = {
    "erm": "stock Trainer",
    "sft": "stock SFTTrainer",
    "naive": "naive constrained step",
    "torch": "naive, by torch's linear_cross_entropy",
    "trl": "naive, by TRL's chunked loss",
    "exact": "ours, all tokens",
    "exact+": "ours, all tokens, TRL's metrics",
    "subsampled": "ours, default",
    "subsampled+": "ours, default, TRL's metrics",
}
CHUNK = 32768  # classes at once in TRL's chunked loss, as TRL has it
DESCENT = {"descent_alpha": 0.05, "initial_loss_bound": 10.0, "dual_warmup_steps": 0, "negative_weights": "keep"}


class Clock(transformers.TrainerCallback):
    """Wall and processor seconds of each step."""

    def __init__(self):
        self.steps = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.start = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.steps.append((time.perf_counter() - self.start[0], time.process_time() - self.start[1]))


def parts(model):
    """The layers, and the loss of a hidden state."""
    if hasattr(model, "bert"):
        return model.bert.encoder.layer, lambda hidden, labels: F.cross_entropy(
            model.classifier(model.dropout(model.bert.pooler(hidden))), labels
        )
    return model.model.layers, lambda hidden, labels: model.loss_function(
        logits=model.lm_head(model.model.norm(hidden)), labels=labels, vocab_size=model.config.vocab_size
    )


class NaiveTrainer(transformers.Trainer):
    """The constrained objective as anyone would write it: all hidden states, all logits."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        layers, read = parts(model)
        hidden_states = []
        hooks = [
            layer.register_forward_hook(lambda module, args, output: hidden_states.append(output)) for layer in layers
        ]
        outputs = model(**inputs)
        for hook in hooks:
            hook.remove()
        losses = [read(state, inputs["labels"]) for state in hidden_states[:-1]]
        losses = torch.stack([*losses, outputs.loss])  # [layers]
        return torch.linspace(0.5, 1.5, len(losses), device=losses.device) @ losses


class FusedTrainer(transformers.Trainer):
    """As [`NaiveTrainer`], with a loss that makes no logits at once in the place of head and cross-entropy."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels, head, hidden_states = inputs["labels"][:, 1:].flatten(), model.lm_head.weight, []
        hooks = [
            layer.register_forward_hook(lambda module, args, output: hidden_states.append(output))
            for layer in model.model.layers
        ]
        model.model(**{name: value for name, value in inputs.items() if name != "labels"})
        for hook in hooks:
            hook.remove()
        states = [model.model.norm(state)[:, :-1].flatten(0, 1) for state in hidden_states]  # [tokens, hidden] each
        losses = torch.stack([self.loss(state, head, labels) for state in states])  # [layers]
        return torch.linspace(0.5, 1.5, len(losses), device=losses.device) @ losses


class TorchTrainer(FusedTrainer):
    def loss(self, hidden, head, labels):
        return F.linear_cross_entropy(hidden, head, labels, options=torch.nn.LinearCrossEntropyOptions())


class TRLTrainer(FusedTrainer):
    def loss(self, hidden, head, labels):
        from trl.kernels import ChunkedLogProbFunction

        return -ChunkedLogProbFunction.apply(hidden, head, None, labels, 1.0, CHUNK, None, 1.0, ())[0].mean()


class StatisticsTrainer(DescentTrainer):
    """With entropy and accuracy of the last layer's tokens, which TRL logs."""

    logs_tokens = True


def build_model(options):
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    if options.classes:
        config = transformers.BertConfig(
            vocab_size=options.vocab, hidden_size=options.hidden, intermediate_size=options.intermediate,
            num_hidden_layers=options.layers, num_attention_heads=options.heads, num_labels=options.classes,
            max_position_embeddings=options.length,
        )  # fmt: skip
        model = transformers.BertForSequenceClassification(config).to(device, dtype)
    elif options.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(device)
    else:
        config = transformers.LlamaConfig(
            vocab_size=options.vocab, hidden_size=options.hidden, intermediate_size=options.intermediate,
            num_hidden_layers=options.layers, num_attention_heads=options.heads, num_key_value_heads=options.kv_heads,
            max_position_embeddings=options.length,
        )  # fmt: skip
        with device:
            model = transformers.LlamaForCausalLM(config).to(dtype)
    if options.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=6, lora_alpha=8, lora_dropout=0.05, task_type="CAUSAL_LM"))
    return model


def build_trainer(name, options, callbacks):
    from datasets import Dataset

    settings = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": options.batch, "max_steps": options.steps,
        "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no",
        "activation_checkpointing": options.checkpointing, "use_cpu": not torch.cuda.is_available(),
    }  # fmt: skip
    ids = token_ids(options, options.batch * options.steps)
    labels = [index % options.classes for index in range(len(ids))] if options.classes else ids
    data = Dataset.from_dict({"input_ids": ids, "labels": labels})
    common = {"model": build_model(options), "train_dataset": data, "callbacks": callbacks}
    if name == "sft":
        from trl import SFTConfig, SFTTrainer

        kwargs = {"bf16": False, "max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}
        return SFTTrainer(args=SFTConfig(**settings, **kwargs), processing_class=tokenizer(options.vocab), **common)
    stock = {"erm": transformers.Trainer, "naive": NaiveTrainer, "torch": TorchTrainer, "trl": TRLTrainer}
    if trainer_class := stock.get(name):
        return trainer_class(args=transformers.TrainingArguments(**settings), **common)
    fraction = {"readout_token_fraction": None if "subsampled" in name else 1.0}
    trainer_class = StatisticsTrainer if name.endswith("+") else DescentTrainer
    return trainer_class(args=DescentConfig(**settings, **DESCENT, **fraction), **common)


def token_ids(options, rows):
    """Rows of tokens, random or of the text given."""
    if not options.text_file:
        return torch.randint(options.vocab, (rows, options.length)).tolist()
    from datasets import load_dataset

    kind = options.text_file.rsplit(".", 1)[-1].replace("jsonl", "json").replace("txt", "text")
    texts = load_dataset(kind, data_files=options.text_file, split="train")[options.text_column]
    encode, ids = transformers.AutoTokenizer.from_pretrained(options.model), []
    for text in texts:
        ids += encode(text)["input_ids"]
        if len(ids) >= rows * options.length:
            return torch.tensor(ids[: rows * options.length]).view(rows, -1).tolist()
    raise SystemExit(f"{options.text_file} has {len(ids)} tokens; {rows * options.length} are needed.")


def tokenizer(vocab):
    """SFTTrainer wants one; nothing is tokenised here."""
    from tokenizers import Tokenizer, models

    words = {"<pad>": 0, "<eos>": 1}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "<pad>")), pad_token="<pad>", eos_token="<eos>"
    )


def run_arm(name, options):
    """Seconds of the steps after the first two, and the peak memory of the process in bytes."""
    clock = Clock()
    trainer = build_trainer(name, options, [clock])
    trainer.train()
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"steps": clock.steps[2:], "peak": peak}


def run_floor(options):
    """Operations of the plain step, operations of the largest product (with a language model's head), and its rate."""
    model = build_model(options)
    ids = torch.randint(options.vocab, (options.batch, options.length), device=model.device)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids[:, 0] % options.classes if options.classes else ids).loss.backward()
    tokens = options.batch * (options.length - 1)
    rows = torch.randn(tokens, options.hidden, device=model.device, dtype=model.dtype)
    largest = model.bert.encoder.layer[0].intermediate.dense if options.classes else model.get_output_embeddings()
    weight = largest.weight.detach()
    scores, product, seconds = rows @ weight.t(), 2 * tokens * weight.numel(), []
    for _ in range(10):
        start = time.perf_counter(), time.process_time()
        torch.mm(rows, weight.t(), out=scores)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    return {"erm": counter.get_total_flops(), "product": product, "seconds": seconds}


def report(options, arms, floors):
    plain, product = floors[0]["erm"], floors[0]["product"]
    # With the head, beyond those of the plain step; that of a classifier is too small to count.
    products = 0 if options.classes else (options.layers - 1) * (2 if options.lora else 3)
    peak = {name: statistics.median(run["peak"] for run in runs) for name, runs in arms.items()}
    for clock, title in enumerate(("wall time", "processor time")):
        rate = product / statistics.median(pair[clock] for floor in floors for pair in floor["seconds"])
        floor = {name: (plain + (0 if name in ("erm", "sft") else products * product)) / rate for name in arms}
        print(f"{title}: largest product at {rate / 1e9:.0f} GFLOP/s, so the floor of reading all layers is "
              f"{(plain + products * product) / rate:.3f} s")  # fmt: skip
        columns = "  / ERM  / SFT /naive floor/  peak MB  / ERM  / SFT"
        print(f"{'':42} {'s a step (quartiles)':>22} {columns}")
        seconds = {name: [step[clock] for run in runs for step in run["steps"]] for name, runs in arms.items()}
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        for name, values in seconds.items():

            def ratio(figures, other, name=name):
                return f"{figures[name] / figures[other]:6.2f}" if other in figures else f"{'':6}"

            low, _, high = statistics.quantiles(values, n=4)
            share = f"{'':6}" if "subsampled" in name else f"{floor[name] / medians[name]:6.2f}"
            print(f"{ARMS[name]:42} {medians[name]:8.3f} ({low:.3f}-{high:.3f}) {ratio(medians, 'erm')} "
                  f"{ratio(medians, 'sft')} {ratio(medians, 'naive')} {share} {peak[name] / 2**20:8.0f} "
                  f"{ratio(peak, 'erm')} {ratio(peak, 'sft')}")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sizes = {"layers": 8, "hidden": 256, "intermediate": 688, "heads": 4, "kv_heads": 4, "vocab": 32000, "batch": 4,
             "length": 256, "steps": 6, "rounds": 3, "threads": 2}  # fmt: skip
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", help="a folder or name on the Hub; its sizes win over those above")
    parser.add_argument("--text_file", help="parquet, json, jsonl, csv or txt, for --model")
    parser.add_argument("--text_column", default="text")
    for name in ("bf16", "lora", "checkpointing"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--classes", type=int, default=0, help="of a BERT classifier in the language model's place")
    parser.add_argument("--arms", nargs="+", choices=[*ARMS, "floor"])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.arms is None:
        options.arms = ["erm", "naive", "exact"] if options.classes else list(ARMS)
    if options.model:
        config = transformers.AutoConfig.from_pretrained(options.model)
        options.layers, options.hidden, options.vocab = (
            config.num_hidden_layers, config.hidden_size, config.vocab_size,
        )  # fmt: skip
    if options.child:
        (arm,) = options.arms
        print("RESULT", json.dumps(run_floor(options) if arm == "floor" else run_arm(arm, options)))
        return

    runs = {name: [] for name in ["floor", *options.arms]}
    for _ in range(options.rounds):
        for name in runs:
            command = [sys.executable, *sys.argv, "--child", "--arms", name]  # the last --arms counts
            done = subprocess.run(command, capture_output=True, text=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if not lines:
                raise SystemExit(f"{name} failed:\n{done.stdout}\n{done.stderr}")
            runs[name].append(json.loads(lines[-1].removeprefix("RESULT ")))
    report(options, runs, runs.pop("floor"))


if __name__ == "__main__":
    main()
