"""Time and peak memory of a constrained step on a language model (or classifier), as ratios to plain training.

    python recipes/benchmarks/lm_step.py                                # 8 layers, hidden 256, vocabulary 32k, CPU
    python recipes/benchmarks/lm_step.py --hidden 4096 --intermediate 14336 --layers 32 --heads 32 --kv_heads 8 \
        --vocab 128256 --batch 1 --length 2048 --bf16 --lora --arms erm exact subsampled          # Llama-3.1-8B, GPU
    python recipes/benchmarks/lm_step.py --model path/to/model --text_file texts.parquet --text_column text \
        --arms erm naive exact                                          # a trained model on real text
    python recipes/benchmarks/lm_step.py --classes 2 --vocab 1000       # a BERT classifier, its layers read by replay

Every arm trains the same model, of random weights where none is given, in a process of its own: its peak memory
is its own. Arms take turns, so that a noisy machine slows all of them. A time is the median over all timed steps; a
ratio is one of medians within a round. Processor time stands below: a busy machine disturbs it less. The floor is the
operations in matrix products at the rate of the largest one, measured in the same rounds. The start is the first step
beyond the others, in steps, less that of the stock Trainer where it takes part.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from functools import partial

import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset, load_dataset
from harness import Clock, parser, quartiles, ratios, take_turns, write
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hf_descent import DescentConfig, DescentTrainer
from hf_descent.readout.stack import inner_model


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
    "exit": "ours, default, one exit half-way",
    "erm-compiled": "stock Trainer, compiled",
    "exact-compiled": "ours, all tokens, layers compiled",
    "subsampled-compiled": "ours, default, layers compiled",
}
CHUNK = 32768  # classes at once in TRL's chunked loss, as TRL has it
DESCENT = {"initial_loss_bound": 10.0, "dual_warmup_steps": 0}  # else the package's defaults


def by_head(model, hidden, labels):
    """The loss of a layer as the model's own of the last one, with all logits."""
    if hasattr(model, "bert"):
        return F.cross_entropy(model.classifier(model.dropout(model.bert.pooler(hidden))), labels)
    logits = model.lm_head(model.model.norm(hidden))
    return model.loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size)


def rows_of(model, hidden, labels):
    """[tokens, hidden], the head's weight, and the label of each of these tokens."""
    return (
        model.model.norm(hidden)[:, :-1].flatten(0, 1),
        model.lm_head.weight,
        labels[:, 1:].flatten(),
    )


def by_torch(model, hidden, labels):
    return F.linear_cross_entropy(
        *rows_of(model, hidden, labels), options=torch.nn.LinearCrossEntropyOptions()
    )


def by_trl(model, hidden, labels):
    from trl.kernels import ChunkedLogProbFunction

    rows, weight, labels = rows_of(model, hidden, labels)
    return -ChunkedLogProbFunction.apply(rows, weight, None, labels, 1.0, CHUNK, None, 1.0, ())[
        0
    ].mean()


class NaiveTrainer(transformers.Trainer):
    """The constrained objective as anyone would write it: all hidden states, each read by `read`."""

    read = staticmethod(by_head)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        model = inner_model(model)  # that of adapters
        body, hidden_states = getattr(model, "bert", None) or model.model, []
        layers = body.encoder.layer if hasattr(body, "encoder") else body.layers
        hooks = [
            layer.register_forward_hook(lambda module, args, out: hidden_states.append(out))
            for layer in layers
        ]
        body(**{name: value for name, value in inputs.items() if name != "labels"})
        for hook in hooks:
            hook.remove()
        losses = torch.stack(
            [self.read(model, state, inputs["labels"]) for state in hidden_states]
        )  # [layers]
        return torch.linspace(0.5, 1.5, len(losses), device=losses.device) @ losses.float()


STOCK = {"erm": transformers.Trainer, "naive": NaiveTrainer}
for name, read in (("torch", by_torch), ("trl", by_trl)):
    STOCK[name] = type(name, (NaiveTrainer,), {"read": staticmethod(read)})


class StatisticsTrainer(DescentTrainer):
    """With entropy and accuracy of the last layer's tokens, which TRL logs."""

    logs_tokens = True


def build_model(options, device=None, shape=lambda config: config):
    """The model, by default on a GPU where there is one; `shape` may change the config of a random one."""
    torch.manual_seed(0)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    sizes = {
        "vocab_size": options.vocab, "hidden_size": options.hidden, "intermediate_size": options.intermediate,
        "num_hidden_layers": options.layers, "num_attention_heads": options.heads,
        "max_position_embeddings": options.length,
    }  # fmt: skip
    if options.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(
            device
        )
    elif options.classes:
        config = shape(transformers.BertConfig(**sizes, num_labels=options.classes))
        model = transformers.BertForSequenceClassification(config).to(device, dtype)
    else:
        with device:
            config = shape(transformers.LlamaConfig(**sizes, num_key_value_heads=options.kv_heads))
            model = transformers.LlamaForCausalLM(config).to(dtype)
    if options.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=6, lora_alpha=8, lora_dropout=0.05, task_type="CAUSAL_LM")
        )
    return model


def arguments(name, options):
    """The training arguments of an arm."""
    kind, _, compiled = name.partition("-")
    settings = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": options.batch, "max_steps": options.steps,
        "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no",
        "activation_checkpointing": options.checkpointing, "use_cpu": not torch.cuda.is_available(),
        "torch_compile_backend": options.compiler if compiled else None,
    }  # fmt: skip
    if kind == "sft":
        from trl import SFTConfig

        return SFTConfig(
            **settings, bf16=False, max_length=None, dataset_kwargs={"skip_prepare_dataset": True}
        )
    if kind in STOCK:
        return transformers.TrainingArguments(**settings)
    asked = (
        {"descent_alpha": None, "exit_targets": {options.layers // 2: 0.1}}
        if kind == "exit"
        else {}
    )
    return DescentConfig(
        **settings, **DESCENT | asked, readout_token_fraction=1.0 if "exact" in kind else None
    )


def build_trainer(name, options, callbacks):
    ids = token_ids(options, options.batch * options.steps)
    labels = [index % options.classes for index in range(len(ids))] if options.classes else ids
    data = Dataset.from_dict({"input_ids": ids, "labels": labels})
    common = {
        "model": build_model(options),
        "args": arguments(name, options),
        "train_dataset": data,
    }
    if name == "sft":
        from trl import SFTTrainer

        return SFTTrainer(processing_class=tokenizer(), callbacks=callbacks, **common)
    ours = StatisticsTrainer if name.endswith("+") else DescentTrainer
    return STOCK.get(name.partition("-")[0], ours)(callbacks=callbacks, **common)


def token_ids(options, rows):
    """Rows of tokens, random or of the text given."""
    if not options.text_file:
        return torch.randint(options.vocab, (rows, options.length)).tolist()
    kind = options.text_file.rsplit(".", 1)[-1].replace("jsonl", "json").replace("txt", "text")
    texts = load_dataset(kind, data_files=options.text_file, split="train")[options.text_column]
    encode, ids = transformers.AutoTokenizer.from_pretrained(options.model), []
    for text in texts:
        ids += encode(text)["input_ids"]
        if len(ids) >= rows * options.length:
            return torch.tensor(ids[: rows * options.length]).view(rows, -1).tolist()
    raise SystemExit(
        f"{options.text_file} has {len(ids)} tokens; {rows * options.length} are needed."
    )


def tokenizer():
    """SFTTrainer wants one; nothing is tokenised here."""
    from tokenizers import Tokenizer, models

    words = {"<pad>": 0, "<eos>": 1}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )


def run_arm(name, options):
    """(wall, processor) seconds of the steps after the first two; those that the first takes more; the peak of memory
    in bytes."""
    clock = Clock()
    trainer = build_trainer(name, options, [clock])
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # the model was made in float32
    trainer.train()
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    steps = clock.steps[2:]
    start = [
        first - statistics.median(others) for first, others in zip(clock.steps[0], zip(*steps))
    ]
    return {"steps": steps, "start": start, "peak": peak}


def run_floor(options):
    """Operations of the plain step and of the largest product (with a language model's head), and its seconds."""
    model = build_model(options, "meta")
    ids = torch.zeros(options.batch, options.length, dtype=torch.long, device="meta")
    with (
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),
    ):  # whose products are counted
        model(input_ids=ids, labels=ids[:, 0] if options.classes else ids).loss.backward()
    tokens = options.batch * (options.length - 1)
    largest = (
        model.bert.encoder.layer[0].intermediate.dense
        if options.classes
        else model.get_output_embeddings()
    )
    place = {"device": "cuda" if torch.cuda.is_available() else "cpu", "dtype": model.dtype}
    rows, weight = (
        torch.randn(*shape, **place) for shape in ((tokens, options.hidden), largest.weight.shape)
    )
    scores, clock = rows @ weight.t(), Clock()
    for _ in range(10):
        clock.on_step_begin(None, None, None)
        torch.mm(rows, weight.t(), out=scores)
        clock.on_step_end(None, None, None)
    return {
        "erm": counter.get_total_flops(),
        "product": 2 * tokens * weight.numel(),
        "steps": clock.steps,
    }


def rounds_of(runs, clock=0):
    """By arm and round, by wall or processor time: seconds of a step; and the start in steps of its own, less that of
    the stock Trainer where it takes part."""
    seconds = {
        name: [statistics.median(step[clock] for step in run["steps"]) for run in runs[name]]
        for name in runs
    }
    starts = {name: [run["start"][clock] for run in runs[name]] for name in runs if name != "floor"}
    plain = starts.get("erm", [0.0] * len(runs["floor"]))
    return seconds, {
        name: [(start - base) / step for start, base, step in zip(found, plain, seconds[name])]
        for name, found in starts.items()
    }


def products(options, runs, name):
    """The operations of a step of an arm, as a number of largest products."""
    floor = runs["floor"][0]
    # With the head, beyond those of the plain step; that of a classifier is too small to count.
    more = 0 if options.classes or name.startswith(("erm", "sft")) else options.layers - 1
    return floor["erm"] / floor["product"] + more * (2 if options.lora else 3)


def report(options, runs):
    arms = [name for name in runs if name != "floor"]
    baselines = [name for name in ("erm", "sft", "naive", "erm-compiled") if name in arms]
    peak = {name: statistics.median(run["peak"] for run in runs[name]) for name in arms}
    for clock, title in enumerate(("wall time", "processor time")):
        seconds, starts = rounds_of(runs, clock)
        fastest = statistics.median(seconds["floor"])
        rate = runs["floor"][0]["product"] / fastest / 1e9
        print(f"{title}: largest product at {rate:.0f} GFLOP/s; /NAME: against that arm")
        columns = "".join(f"{f'/{name}'[:7]:>8}" for name in baselines)
        print(f"{'':40} {'s a step (quartiles)':>22}{columns}  floor  start  peak MB{columns}")
        for name in arms:
            low, middle, high = quartiles(
                [step[clock] for run in runs[name] for step in run["steps"]]
            )
            share = products(options, runs, name) * fastest / middle
            floor = " " * 7 if name.startswith(("subsampled", "exit")) else f"{share:7.2f}"
            times = "".join(f"{ratios(seconds, other)[name][1]:8.2f}" for other in baselines)
            peaks = "".join(f"{peak[name] / peak[other]:8.2f}" for other in baselines)
            print(f"{ARMS[name]:40} {middle:8.3f} ({low:.3f}-{high:.3f}){times}{floor}"
                  f"{statistics.median(starts[name]):7.1f} {peak[name] / 2**20:8.0f}{peaks}")  # fmt: skip
    write(options.output, options=vars(options), runs=runs)


def main():
    sizes = {"layers": 8, "hidden": 256, "intermediate": 688, "heads": 4, "kv_heads": 4, "vocab": 32000, "batch": 4,
             "length": 256, "steps": 6, "classes": 0}  # fmt: skip
    command = parser(__doc__, **sizes)
    command.set_defaults(rounds=3)
    command.add_argument(
        "--model", help="a folder or name on the Hub; its sizes win over those above"
    )
    command.add_argument("--text_file", help="parquet, json, jsonl, csv or txt, for --model")
    command.add_argument("--text_column", default="text")
    command.add_argument("--compiler", default="inductor", help="of the compiled arms (inductor)")
    for name in ("bf16", "lora", "checkpointing"):
        command.add_argument(f"--{name}", action="store_true")
    command.add_argument("--arms", nargs="+", choices=[*ARMS, "floor"])
    command.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = command.parse_args()
    torch.set_num_threads(options.threads)
    if options.arms is None:
        every = [name for name in ARMS if "compiled" not in name]
        options.arms = ["erm", "naive", "exact"] if options.classes else every
    if options.model:
        config = transformers.AutoConfig.from_pretrained(options.model)
        options.layers, options.hidden = config.num_hidden_layers, config.hidden_size
        options.vocab = config.vocab_size
    if options.child:
        (arm,) = options.arms
        print("RESULT", json.dumps(run_floor(options) if arm == "floor" else run_arm(arm, options)))
        return

    def child(name):
        command = [sys.executable, *sys.argv, "--child", "--arms", name]  # the last --arms counts
        done = subprocess.run(command, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            raise SystemExit(f"{name} failed:\n{done.stdout}\n{done.stderr}")
        return json.loads(lines[-1].removeprefix("RESULT "))

    report(
        options,
        take_turns(
            {name: partial(child, name) for name in ("floor", *options.arms)}, options.rounds, 0
        ),
    )


if __name__ == "__main__":
    main()
