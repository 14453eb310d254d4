"""What small training runs lead to, to compare two states of the package.

    PYTHONPATH=path/to/old python tests/trajectories.py record old.json
    PYTHONPATH=. python tests/trajectories.py record new.json
    python tests/trajectories.py compare old.json new.json       # exits with 1 where they differ

Distributed runs are compared to those of one process by the tests in `distributed`.
"""

import argparse
import contextlib
import fnmatch
import hashlib
import io
import json
import logging
import math
import sys
import tempfile
import warnings
from pathlib import Path

import architectures
import tiny
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, get_peft_model

import hf_descent
from hf_descent import models


TOLERANCE = 1e-6  # of numbers above 1 relative, else absolute
TIMES = ("runtime", "per_second", "seconds", "flos")

AUTO = {"descent_alpha": "auto", "initial_loss_bound": "auto", "dual_warmup_steps": 4}
KEEP, CLIP = {"negative_weights": "keep"}, {"negative_weights": "clip"}
ASCENT = {"dual_optim": "sgd", "dual_learning_rate": 0.5}
UNEQUAL = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}  # the last group of an epoch is short
NOISY = {"noise_gamma": 0.5}
LANGUAGE = {"initial_loss_bound": 4.0}
DENOISING = {"initial_loss_bound": 2.0, "noise_sigma": 0.3, "learning_rate": 0.01, "noise_gamma": 0.5}
# name -> model, arguments of the config, and (in words) what else: "sft", "lora", "resume"
RUNS = {
    "classifier, descent keep, adamw": ("bert", KEEP | {"optim": "adamw_torch", "learning_rate": 1e-2}),
    "classifier, descent clip, accumulation": ("bert", CLIP | UNEQUAL | {"max_steps": -1, "num_train_epochs": 2}),
    "classifier, auto, resume in warm-up": ("bert", AUTO | KEEP | {"save_steps": 3}, "resume"),
    "classifier, slacks, raw violations": (
        "bert", KEEP | ASCENT | {"resilience": 0.1, "resilience_form": "slack", "normalize_violations": False},
    ),
    "classifier, hinge, smoothing": ("bert", UNEQUAL | {"objective": "hinge", "label_smoothing_factor": 0.1}),
    "classifier, erm, noise": ("bert", UNEQUAL | NOISY | {"objective": "erm"}),
    "classifier, fixed, two layers": (
        "bert", {"objective": "fixed", "fixed_multipliers": [0, 0.5, 0.7], "constrained_layers": [2, 3]},
    ),
    "classifier, lora": ("bert", KEEP, "lora"),
    "classifier, deep supervision": ("bert", NOISY | {"objective": "deep_supervision"}),
    "untied, descent keep, accumulation": ("llama", LANGUAGE | KEEP | ASCENT | UNEQUAL),
    "untied, token fraction, resume": (
        "llama", LANGUAGE | CLIP | {"readout_token_fraction": 0.4, "save_steps": 4}, "resume",
    ),
    "untied, smoothing, auto": ("llama", AUTO | UNEQUAL | {"label_smoothing_factor": 0.1}),
    "tied, noise range, checkpointing": (
        "tied llama", LANGUAGE | KEEP | {"noise_gamma": [0.2, 0.8], "gradient_checkpointing": True},
    ),
    "sft, descent keep, accumulation": ("llama", LANGUAGE | KEEP | UNEQUAL, "sft"),
    "sft, lora, padding-free, noise": (
        "llama", LANGUAGE | KEEP | NOISY | {"padding_free": True, "max_length": None}, "sft lora",
    ),
    "experts, descent keep": ("MixtralForCausalLM", LANGUAGE | KEEP | UNEQUAL),
    "t5, quadratic, smoothing, noise": ("T5ForConditionalGeneration", LANGUAGE | NOISY | {"objective": "quadratic"}),
    "ut denoiser, descent keep, noise": ("ut", DENOISING | KEEP | ASCENT),
    "dust denoiser, auto, accumulation": ("dust", DENOISING | AUTO | UNEQUAL),
}  # fmt: skip


def model_and_rows(name):
    """A model whose layers differ, and 33 rows."""
    if name == "bert":
        return tiny.spread(tiny.bert(dropout=0.1)), tiny.classification_data(33)
    if name in ("llama", "tied llama"):
        return tiny.spread(tiny.llama(tie_word_embeddings="tied" in name)), tiny.language_data(33)
    if name in architectures.MODELS:
        return architectures.build(name, architectures.MODELS[name][0]), tiny.language_data(33)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3}
    if name == "ut":
        model = models.UTForVideoDenoising(models.UTConfig(**sizes, attention_step=0.5))
    else:
        model = models.DustForVideoDenoising(models.DustConfig(**sizes, dictionary_size=24))
    clean = torch.rand(33, 1, 16).expand(33, 5, 16)  # [clips, frames, values]
    noise = 0.1 * torch.randn(33, 5, 16)
    return model, [{"pixel_values": row + more, "labels": row} for row, more in zip(clean, noise)]


def make_trainer(folder, name, settings, words):
    given = {
        "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 8, "optim": "sgd",
        "learning_rate": 0.1, "dual_warmup_steps": 2, "dual_learning_rate": 0.1, "resilience": 0.001, "seed": 5,
        "eval_gammas": [0.0, 0.7], **settings,
    }  # fmt: skip
    if "save_steps" in settings:
        given["save_strategy"] = "steps"
    model, rows = model_and_rows(name)
    task = "SEQ_CLS" if name == "bert" else "CAUSAL_LM"
    lora = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules="all-linear", task_type=task)
    lora = lora if "lora" in words else None
    transformers.set_seed(5)
    if "sft" in words:
        rows = Dataset.from_list([{key: row[key].tolist() for key in ("input_ids", "labels")} for row in rows])
        own = {"bf16": False, "gradient_checkpointing": False, **given}
        args = hf_descent.SFTDescentConfig(**tiny.config(folder).to_dict() | own)
        train, held_out = rows.select(range(22)), rows.select(range(22, 33))
        more = {"processing_class": tiny.word_tokenizer(), "peft_config": lora}
        return hf_descent.SFTDescentTrainer(model, args, train_dataset=train, eval_dataset=held_out, **more)
    if lora is not None:
        model = get_peft_model(model, lora)
    args = tiny.config(folder, **given)
    return hf_descent.DescentTrainer(model, args, train_dataset=rows[:22], eval_dataset=rows[22:])


def run(folder, name, settings, words=""):
    """What a run shows: of a resumed one, its second part with the logs of both."""
    trainer = make_trainer(folder, name, settings, words)
    trainer.train()
    if "resume" in words:
        trainer = make_trainer(folder, name, settings, words)
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{settings['save_steps']}"))
    digest, projections = hashlib.sha256(), {}
    for key, tensor in sorted(trainer.model.state_dict().items()):
        values = tensor.detach().float().flatten()
        digest.update(values.numpy().tobytes())
        # On a fixed direction: unlike a norm, it shows a small change of any kind.
        projections[key] = (values.double() * torch.arange(1.0, values.numel() + 1).double().cos()).sum().item()
    found = {"weights": digest.hexdigest(), "projections": projections}
    if trainer.multipliers is not None:
        found |= {"multipliers": trainer.multipliers.values.tolist(), "slacks": trainer.multipliers.slacks.tolist()}
    if trainer.problem is not None:
        found["problem"] = trainer.problem.state_dict()
    history = [*trainer.state.log_history, trainer.evaluate()]
    found["logs"] = [{k: v for k, v in log.items() if not any(time in k for time in TIMES)} for log in history]
    metric = {"metric": "rmse"} if name in ("ut", "dust") else {}
    curve, profile = trainer.evaluate_robustness(**metric), trainer.evaluate_layers(gamma=0.5, **metric)
    return found | {"curve": [curve.losses.tolist(), curve.values.tolist()], "layers": profile.losses.tolist()}


def record(out, pattern):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    print(f"hf_descent of {Path(hf_descent.__file__).parent}", flush=True)
    found = {}
    for name in fnmatch.filter(RUNS, pattern):
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            found[name] = run(Path(folder), *RUNS[name])
    Path(out).write_text(json.dumps(found, indent=1, default=float))


def flat(value, path=""):
    """Every number or word by its path."""
    if not isinstance(value, dict | list):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {key: leaf for name, each in items for key, leaf in flat(each, f"{path}/{name}").items()}


def gap(old, new):
    """0.0 for the same; of numbers in units of the tolerance's scale, of anything else infinite."""
    if old == new or (old != old and new != new):  # not a number
        return 0.0
    if not all(isinstance(value, int | float) for value in (old, new)):
        return math.inf
    return abs(old - new) / max(1.0, abs(old))


def compare(old_file, new_file):
    """Prints what differs; whether nothing does but the bits of weights."""
    old, new = (flat(json.loads(Path(file).read_text())) for file in (old_file, new_file))
    gaps = {key: gap(old.get(key), new.get(key)) for key in old.keys() | new.keys()}
    moved = [key for key in gaps if key.endswith("/weights") and gaps[key]]
    different = [key for key in sorted(gaps) if key not in moved and not gaps[key] <= TOLERANCE]
    for key in different:
        print(f"DIFFERENT {key}: {old.get(key)!r} became {new.get(key)!r}")
    print(f"{len(different)} of {len(gaps)} numbers and words differ; other bits in the weights: {moved}")
    return not different


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("files", nargs="+")
    parser.add_argument("--runs", default="*", help="a pattern of the runs' names")
    options = parser.parse_args()
    if options.action == "record":
        record(*options.files, options.runs)
    else:
        sys.exit(not compare(*options.files))
