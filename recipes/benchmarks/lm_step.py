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
RESULT = "RESULT "  # begins the line with what a process measured
DESCENT = {"initial_loss_bound": 10.0, "dual_warmup_steps": 0}  # else the package's defaults


def by_head(model, hidden, labels):
    """The loss of a layer as the model's own of the last one, with all logits."""
    if hasattr(model, "bert"):
        pooled = model.bert.pooler(hidden)
        return F.cross_entropy(model.classifier(model.dropout(pooled)), labels)
    logits = model.lm_head(model.model.norm(hidden))
    return model.loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size)


def rows_of(model, hidden, labels):
    """[tokens, hidden], the head's weight, and the label of each of these tokens."""
    rows = model.model.norm(hidden)[:, :-1].flatten(0, 1)
    return rows, model.lm_head.weight, labels[:, 1:].flatten()


def by_torch(model, hidden, labels):
    rows, weight, labels = rows_of(model, hidden, labels)
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(rows, weight, labels, options=options)


def by_trl(model, hidden, labels):
    from trl.kernels import ChunkedLogProbFunction

    rows, weight, labels = rows_of(model, hidden, labels)
    log_probs, *_ = ChunkedLogProbFunction.apply(
        rows, weight, None, labels, 1.0, CHUNK, None, 1.0, ()
    )
    return -log_probs.mean()


class NaiveTrainer(transformers.Trainer):
    """The constrained objective as anyone would write it: all hidden states, each read by `read`."""

    read = staticmethod(by_head)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        model = inner_model(model)  # that of adapters
        labels = inputs["labels"]
        hidden_states = states_of_layers(model, inputs)
        losses = [self.read(model, state, labels) for state in hidden_states]
        losses = torch.stack(losses).float()  # [layers]
        weights = torch.linspace(0.5, 1.5, len(losses), device=losses.device)
        return weights @ losses


def states_of_layers(model, inputs):
    """What each layer returns in one forward pass without the head."""
    if hasattr(model, "bert"):
        body = model.bert
        layers = body.encoder.layer
    else:
        body = model.model
        layers = body.layers

    states = []

    def keep(module, args, output):
        states.append(output)

    hooks = [layer.register_forward_hook(keep) for layer in layers]
    body(**{name: value for name, value in inputs.items() if name != "labels"})
    for hook in hooks:
        hook.remove()

    return states


class TorchTrainer(NaiveTrainer):
    read = staticmethod(by_torch)


class TRLTrainer(NaiveTrainer):
    read = staticmethod(by_trl)


STOCK = {
    "erm": transformers.Trainer,
    "naive": NaiveTrainer,
    "torch": TorchTrainer,
    "trl": TRLTrainer,
}


class StatisticsTrainer(DescentTrainer):
    """With entropy and accuracy of the last layer's tokens, which TRL logs."""

    logs_tokens = True


# ---- models, arguments, data ----


def build_model(options, device=None):
    """The model, by default on a GPU where there is one."""
    torch.manual_seed(0)
    device = device_of(device)
    dtype = torch.float32
    if options.bf16:
        dtype = torch.bfloat16

    if options.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
        model = model.to(device)
    elif options.classes:
        config = transformers.BertConfig(**sizes_of(options), num_labels=options.classes)
        model = transformers.BertForSequenceClassification(config).to(device, dtype)
    else:
        config = transformers.LlamaConfig(**sizes_of(options), num_key_value_heads=options.kv_heads)
        with device:
            model = transformers.LlamaForCausalLM(config).to(dtype)

    if options.lora:
        model = with_adapters(model)
    return model


def device_of(name):
    """The device of this name; without one a GPU where there is one."""
    if name is not None:
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("cpu")


def sizes_of(options):
    """The arguments that the configurations of random models share."""
    return {
        "vocab_size": options.vocab,
        "hidden_size": options.hidden,
        "intermediate_size": options.intermediate,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "max_position_embeddings": options.length,
    }


def with_adapters(model):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=6, lora_alpha=8, lora_dropout=0.05, task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def arguments(name, options):
    """The training arguments of an arm."""
    kind, _, compiled = name.partition("-")
    settings = stock_settings(options)
    if compiled:
        settings["torch_compile_backend"] = options.compiler

    if kind == "sft":
        return sft_config(settings)
    if kind in STOCK:
        return transformers.TrainingArguments(**settings)

    settings.update(DESCENT)
    if kind == "exit":
        settings.update(descent_alpha=None, exit_targets={options.layers // 2: 0.1})
    if "exact" in kind:
        settings["readout_token_fraction"] = 1.0
    return DescentConfig(**settings)


def stock_settings(options):
    """The arguments that every arm has."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": options.batch,
        "max_steps": options.steps,
        "activation_checkpointing": options.checkpointing,
        "use_cpu": not torch.cuda.is_available(),
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
    }


def sft_config(settings):
    from trl import SFTConfig

    own = {"bf16": False, "max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}
    return SFTConfig(**settings, **own)


def build_trainer(name, options, callbacks):
    """The trainer of an arm, with a model and rows of its own."""
    ids = token_ids(options, options.batch * options.steps)
    labels = ids
    if options.classes:
        labels = [index % options.classes for index in range(len(ids))]

    common = {
        "model": build_model(options),
        "args": arguments(name, options),
        "train_dataset": Dataset.from_dict({"input_ids": ids, "labels": labels}),
        "callbacks": callbacks,
    }
    if name == "sft":
        from trl import SFTTrainer

        return SFTTrainer(processing_class=tokenizer(), **common)
    return trainer_class(name)(**common)


def trainer_class(name):
    kind, _, _ = name.partition("-")
    if kind in STOCK:
        return STOCK[kind]
    if name.endswith("+"):
        return StatisticsTrainer
    return DescentTrainer


def token_ids(options, rows):
    """Rows of tokens, random or of the text given."""
    if not options.text_file:
        return torch.randint(options.vocab, (rows, options.length)).tolist()

    needed = rows * options.length
    encode = transformers.AutoTokenizer.from_pretrained(options.model)
    ids = []
    for text in texts_of(options):
        ids += encode(text)["input_ids"]
        if len(ids) >= needed:
            return torch.tensor(ids[:needed]).view(rows, -1).tolist()
    raise SystemExit(f"{options.text_file} has {len(ids)} tokens; {needed} are needed.")


def texts_of(options):
    ending = options.text_file.rsplit(".", 1)[-1]
    kind = {"jsonl": "json", "txt": "text"}.get(ending, ending)
    data = load_dataset(kind, data_files=options.text_file, split="train")
    return data[options.text_column]


def tokenizer():
    """SFTTrainer wants one; nothing is tokenised here."""
    from tokenizers import Tokenizer, models

    words = {"<pad>": 0, "<eos>": 1}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )


# ---- measuring ----


def run_arm(name, options):
    """(wall, processor) seconds of the steps after the first two; those that the first takes more; the peak of memory
    in bytes."""
    clock = Clock()
    trainer = build_trainer(name, options, [clock])
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # the model was made in float32
    trainer.train()

    first, _, *steps = clock.steps
    usual = [statistics.median(seconds) for seconds in zip(*steps)]
    start = [begun - each for begun, each in zip(first, usual)]
    return {"steps": steps, "start": start, "peak": peak_memory()}


def peak_memory():
    """Bytes: of the GPU, or of the whole process where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run_floor(options):
    """Operations of the plain step and of the largest product (with a language model's head), and its seconds."""
    model = build_model(options, "meta")
    largest = largest_product(model, options)
    tokens = options.batch * (options.length - 1)
    return {
        "erm": operations_of_plain_step(model, options),
        "product": 2 * tokens * largest.weight.numel(),
        "steps": time_of_product(tokens, largest.weight.shape, model.dtype),
    }


def largest_product(model, options):
    if options.classes:
        return model.bert.encoder.layer[0].intermediate.dense
    return model.get_output_embeddings()


def operations_of_plain_step(model, options):
    ids = torch.zeros(options.batch, options.length, dtype=torch.long, device="meta")
    labels = ids
    if options.classes:
        labels = ids[:, 0]
    # The products of other kinds of attention are not counted.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(input_ids=ids, labels=labels).loss.backward()
    return counter.get_total_flops()


def time_of_product(tokens, shape, dtype):
    """(wall, processor) seconds of the product of as many tokens with a weight of this shape, ten times."""
    device = device_of(None)
    width = shape[1]
    rows = torch.randn(tokens, width, device=device, dtype=dtype)
    weight = torch.randn(*shape, device=device, dtype=dtype)
    scores = rows @ weight.t()

    clock = Clock()
    for _ in range(10):
        clock.on_step_begin(None, None, None)
        torch.mm(rows, weight.t(), out=scores)
        clock.on_step_end(None, None, None)
    return clock.steps


def rounds_of(runs, clock=0):
    """By arm and round, by wall or processor time: seconds of a step; and the start in steps of its own, less that of
    the stock Trainer where it takes part."""
    seconds = {}
    for name, of_arm in runs.items():
        seconds[name] = [statistics.median(step[clock] for step in run["steps"]) for run in of_arm]

    begun = {}
    for name, of_arm in runs.items():
        if name != "floor":
            begun[name] = [run["start"][clock] for run in of_arm]

    plain = begun.get("erm", [0.0] * len(runs["floor"]))
    starts = {}
    for name, of_arm in begun.items():
        rounds = zip(of_arm, plain, seconds[name])
        starts[name] = [(start - base) / step for start, base, step in rounds]
    return seconds, starts


def products(options, runs, name):
    """The operations of a step of an arm, as a number of largest products."""
    floor = runs["floor"][0]
    plain = floor["erm"] / floor["product"]
    if options.classes or name.startswith(("erm", "sft")):
        return plain  # a classifier's head is too small to count

    products_of_head = 3  # forward, and the gradients of states and weight
    if options.lora:
        products_of_head = 2
    return plain + (options.layers - 1) * products_of_head


# ---- reporting ----


def report(options, runs):
    for clock, title in enumerate(("wall time", "processor time")):
        print_table(options, runs, clock, title)
    write(options.output, options=vars(options), runs=runs)


def print_table(options, runs, clock, title):
    """Time of a step of each arm, the share of it that its products need, its start, and its memory."""
    arms = [name for name in runs if name != "floor"]
    baselines = [name for name in ("erm", "sft", "naive", "erm-compiled") if name in arms]
    peaks = {name: statistics.median(run["peak"] for run in runs[name]) for name in arms}
    seconds, starts = rounds_of(runs, clock)
    fastest = statistics.median(seconds["floor"])
    ratios_to = {other: ratios(seconds, other) for other in baselines}

    rate = runs["floor"][0]["product"] / fastest / 1e9
    print(f"{title}: largest product at {rate:.0f} GFLOP/s; /NAME: against that arm")
    columns = "".join(f"{f'/{name}'[:7]:>8}" for name in baselines)
    print(f"{'':40} {'s a step (quartiles)':>22}{columns}  floor  start  peak MB{columns}")

    for name in arms:
        steps = [step[clock] for run in runs[name] for step in run["steps"]]
        low, middle, high = quartiles(steps)
        times = "".join(f"{ratios_to[other][name][1]:8.2f}" for other in baselines)
        memory = "".join(f"{peaks[name] / peaks[other]:8.2f}" for other in baselines)
        floor = " " * 7
        if not name.startswith(("subsampled", "exit")):
            floor = f"{products(options, runs, name) * fastest / middle:7.2f}"

        print(
            f"{ARMS[name]:40} {middle:8.3f} ({low:.3f}-{high:.3f}){times}{floor}"
            f"{statistics.median(starts[name]):7.1f} {peaks[name] / 2**20:8.0f}{memory}"
        )


def parse():
    sizes = {
        "layers": 8,
        "hidden": 256,
        "intermediate": 688,
        "heads": 4,
        "kv_heads": 4,
        "vocab": 32000,
        "batch": 4,
        "length": 256,
        "steps": 6,
        "classes": 0,
    }
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

    if options.arms is None:
        options.arms = usual_arms(options)
    if options.model:
        config = transformers.AutoConfig.from_pretrained(options.model)
        options.layers = config.num_hidden_layers
        options.hidden = config.hidden_size
        options.vocab = config.vocab_size
    return options


def usual_arms(options):
    if options.classes:
        return ["erm", "naive", "exact"]
    return [name for name in ARMS if "compiled" not in name]


def run_child(name):
    """What a process of its own measures of an arm."""
    command = [sys.executable, *sys.argv, "--child", "--arms", name]  # the last --arms counts
    done = subprocess.run(command, capture_output=True, text=True)
    results = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if not results:
        raise SystemExit(f"{name} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(results[-1].removeprefix(RESULT))


def main():
    options = parse()
    torch.set_num_threads(options.threads)
    if options.child:
        (arm,) = options.arms
        measured = run_floor(options) if arm == "floor" else run_arm(arm, options)
        print(f"{RESULT}{json.dumps(measured)}")
        return

    arms = {name: partial(run_child, name) for name in ("floor", *options.arms)}
    report(options, take_turns(arms, options.rounds, warm_ups=0))


if __name__ == "__main__":
    main()
