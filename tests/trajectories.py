"""What small training runs lead to, step by step, to compare two states of the package.

    python tests/trajectories.py against acff127       # this checkout with that commit; exits with 1 where they differ
    python tests/trajectories.py record OUT.json       # the package on PYTHONPATH
    python tests/trajectories.py compare OLD.json NEW.json

Only the public interface is used, and nothing of the other tests, so that one script runs old and new states. What
"auto" stands for differs between states: given a record by `--numbers`, such runs take the numbers that were found in
it, as the new state of `against` does.
"""

import argparse
import fnmatch
import hashlib
import json
import logging
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path


# What differs from acff127 on purpose: "run/key" patterns, each with the reason.
ALLOWED = {
    "*adamw/projections/*key.bias": "no loss depends on a key's bias: its gradient is rounding, which Adam scales up",
    "*feasible_score": "a layer at chance is never feasible, and what it lacks counts in the score",
    "*feasible": "a verdict is a certificate's, and of held-out data alone",
    "*layers/violations/*": "profiles have the losses, and the largest violation",
    "*/summary/DescentState/train_max_violation": "the problem and the averages tell it",
    "classifier, fixed, two layers/logs/*_1": "a layer without a constraint has no row",
    "*num_tokens": "TRL's count of tokens goes on in a resumed run",
    "*tied, erm*": "plain training of GPT-2 counts no first label as an item, since nothing predicts it",
    "*smoothing*/*layers/*": "the losses of samples are smoothed as the task loss is",
    "*label_moments*": "f_0 is measured before the first step, with no statistics of labels in a checkpoint",
    **dict.fromkeys(
        ("2 processes, untied, auto, noise, resume/*", *(f"2 processes*/{x}*" for x in ("noisy", "robust", "logs/8"))),
        "the deviation of the signal counts no row twice: two processes find that of one",
    ),
}
TOLERANCE = 1e-6  # of numbers above 1 relative, else absolute
TIMES = ("runtime", "per_second", "seconds", "flos")
VOCAB, LAYERS = 40, 3

SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
BERT = SIZES | {"intermediate_size": 32, "max_position_embeddings": 32, "num_labels": 3}
DISTILBERT = {"vocab_size": VOCAB, "dim": 16, "n_layers": LAYERS, "n_heads": 2, "hidden_dim": 32, "num_labels": 3}
LLAMA = SIZES | {"intermediate_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8}
GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": LAYERS, "n_head": 2, "n_positions": 64}
T5 = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 2}
T5 |= {"num_decoder_layers": LAYERS, "decoder_start_token_id": 0}
EXPERTS = LLAMA | {"output_router_logits": True, "router_aux_loss_coef": 1.0}
SPARSE = {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
MODELS = {
    "bert": ("BertForSequenceClassification", BERT),  # with dropout
    "distilbert": ("DistilBertForSequenceClassification", DISTILBERT),
    "regression": ("BertForSequenceClassification", BERT | {"num_labels": 1}),
    "masked": ("DistilBertForMaskedLM", DISTILBERT),
    "image": ("ViTForImageClassification", SIZES | {"intermediate_size": 32, "image_size": 8, "patch_size": 4}),
    "llama": ("LlamaForCausalLM", LLAMA),
    "llama tied": ("LlamaForCausalLM", LLAMA | {"tie_word_embeddings": True}),
    "llama many classes": ("LlamaForCausalLM", LLAMA | {"vocab_size": 8192}),
    "qwen3 tied": ("Qwen3ForCausalLM", LLAMA | {"tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", GPT2),  # tied, with dropout
    "t5": ("T5ForConditionalGeneration", T5),
    "mixtral": ("MixtralForCausalLM", EXPERTS | {"num_local_experts": 4}),
    "qwen2 moe": ("Qwen2MoeForCausalLM", EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16}),
    "switch": ("SwitchTransformersForConditionalGeneration", T5 | SPARSE),
    "ut": ("UTForVideoDenoising", {"hidden_size": 16, "num_hidden_layers": LAYERS, "attention_step": 0.5}),
    "dust": ("DustForVideoDenoising", {"hidden_size": 16, "dictionary_size": 24, "num_hidden_layers": LAYERS}),
}

AUTO = {"descent_alpha": "auto", "initial_loss_bound": "auto", "dual_warmup_steps": 4}
KEEP, CLIP = {"negative_weights": "keep"}, {"negative_weights": "clip"}
ASCENT = {"dual_optim": "sgd", "dual_learning_rate": 0.5}
UNEQUAL = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}  # the last group of an epoch is short
TWO_EPOCHS = {"max_steps": -1, "num_train_epochs": 2}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 3}
SMOOTHED = {"label_smoothing_factor": 0.1}
NOISY = {"noise_gamma": 0.5}
FIXED = {"objective": "fixed", "fixed_multipliers": [0, 0.5, 0.7], "constrained_layers": [2, 3]}
RAW = {"normalize_violations": False, "multiplier_max": 0.25, "resilience": 0, "descent_alpha": [0.5] * 3}
LANGUAGE = {"initial_loss_bound": 4.0}
DENOISING = {"initial_loss_bound": 2.0, "noise_sigma": 0.3, "learning_rate": 0.01}


def own_loss(outputs, labels, num_items_in_batch=None):
    """Softer than the model's."""
    import torch.nn.functional as F

    return F.cross_entropy(outputs["logits"] / 2, labels)


def own_readout(model, hidden, inputs):
    return model.classifier(hidden[:, 0])


# name -> model, arguments of the config, and (in words) what else: "sft", "lora", "resume", "text", "loss", "readout"
RUNS = {
    "classifier, descent keep, adamw": ("bert", KEEP | EVALUATED | {"optim": "adamw_torch", "learning_rate": 1e-2}),
    "classifier, descent clip, accumulation": ("bert", CLIP | UNEQUAL | TWO_EPOCHS),
    "classifier, auto, resume in warm-up": ("bert", AUTO | KEEP | {"save_steps": 3}, "resume"),
    "classifier, auto, evaluation": ("distilbert", AUTO | EVALUATED | {"descent_strength": 0.7}),
    "classifier, slacks": ("distilbert", KEEP | ASCENT | TWO_EPOCHS | {"resilience": 0.1, "resilience_form": "slack"}),
    "classifier, hinge, smoothing": ("distilbert", UNEQUAL | SMOOTHED | {"objective": "hinge"}),
    "classifier, quadratic, readout": ("bert", EVALUATED | {"objective": "quadratic"}, "readout"),
    "classifier, descent, own loss": ("bert", KEEP | UNEQUAL, "loss"),
    "classifier, erm, accumulation": ("bert", UNEQUAL | EVALUATED | {"objective": "erm"}),
    "classifier, erm, noise": ("distilbert", NOISY | {"objective": "erm"}),
    "classifier, fixed, two layers": ("distilbert", FIXED),
    "classifier, raw violations, cap, noise": ("bert", KEEP | NOISY | RAW),
    "classifier, lora, resume": ("bert", KEEP | {"save_steps": 4}, "lora resume"),
    "regression, descent": ("regression", CLIP | UNEQUAL),
    "masked language model, descent": ("masked", LANGUAGE | KEEP | UNEQUAL),
    "image classifier, deep supervision": ("image", NOISY | {"objective": "deep_supervision", "noise_sigma": 1.0}),
    "untied, descent keep, accumulation": ("llama", LANGUAGE | KEEP | ASCENT | UNEQUAL | TWO_EPOCHS | EVALUATED),
    "untied, token fraction, resume": (
        "llama",
        LANGUAGE | CLIP | {"readout_token_fraction": 0.4, "save_steps": 4},
        "resume",
    ),
    "untied, many classes, auto": ("llama many classes", AUTO | UNEQUAL),
    "untied, smoothing": ("llama", LANGUAGE | KEEP | UNEQUAL | SMOOTHED),
    "untied, erm, accumulation": ("llama", UNEQUAL | {"objective": "erm"}),
    "untied, checkpointing": ("llama", LANGUAGE | KEEP | {"gradient_checkpointing": True}),
    "tied, noise range, auto, resume": (
        "qwen3 tied",
        AUTO | KEEP | {"noise_gamma": [0.2, 0.8], "save_steps": 6},
        "resume",
    ),
    "tied, deep supervision": ("gpt2", UNEQUAL | {"objective": "deep_supervision", "penalty_coefficient": 0.5}),
    "tied, erm, accumulation": ("gpt2", UNEQUAL | {"objective": "erm"}),
    "sft, tied, descent keep, accumulation": ("llama tied", LANGUAGE | KEEP | UNEQUAL | EVALUATED, "sft"),
    "sft, untied, lora, noise": ("llama", LANGUAGE | KEEP | NOISY, "sft text lora"),
    "sft, untied, padding-free, token fraction": (
        "llama",
        LANGUAGE | CLIP | {"padding_free": True, "max_length": None, "readout_token_fraction": 0.5},
        "sft text",
    ),
    "sft, untied, auto, resume": ("llama", AUTO | UNEQUAL | {"save_steps": 3}, "sft resume"),
    "sft, tied, erm, noise": ("gpt2", UNEQUAL | NOISY | {"objective": "erm"}, "sft"),
    "sft, tied, hinge, bf16": ("llama tied", LANGUAGE | {"objective": "hinge", "bf16": True}, "sft text"),
    "sft, experts, descent clip": (
        "qwen2 moe",
        LANGUAGE | CLIP | UNEQUAL | EVALUATED | {"router_aux_loss_coef": 1.0},
        "sft",
    ),
    "experts, descent keep, accumulation": ("mixtral", LANGUAGE | KEEP | UNEQUAL),
    "experts, erm": ("qwen2 moe", UNEQUAL | {"objective": "erm"}),
    "encoder-decoder experts, descent keep": ("switch", LANGUAGE | KEEP | UNEQUAL),
    "t5, descent keep, accumulation": ("t5", LANGUAGE | KEEP | ASCENT | UNEQUAL | EVALUATED),
    "t5, quadratic, smoothing, noise": ("t5", LANGUAGE | SMOOTHED | NOISY | {"objective": "quadratic"}),
    "ut denoiser, descent keep, noise": ("ut", DENOISING | KEEP | ASCENT | NOISY | EVALUATED),
    "dust denoiser, auto, accumulation": ("dust", DENOISING | AUTO | UNEQUAL | {"noise_gamma": [0.0, 0.5]}),
}
# With two processes, which start once for all of these.
DISTRIBUTED_RUNS = {
    "2 processes, classifier, accumulation": ("bert", KEEP | ASCENT | UNEQUAL | EVALUATED),
    "2 processes, classifier, erm": ("distilbert", UNEQUAL | {"objective": "erm"}),
    "2 processes, untied, auto, noise, resume": ("llama", AUTO | KEEP | NOISY | {"save_steps": 3}, "resume"),
    "2 processes, sft, tied, token fraction": (
        "llama tied",
        LANGUAGE | CLIP | UNEQUAL | {"readout_token_fraction": 0.5},
        "sft",
    ),
    "2 processes, sft, lora": ("llama", LANGUAGE | KEEP | EVALUATED, "sft text lora"),
    "2 processes, image classifier": ("image", KEEP),
}


# ---- models and data ----


def build(name):
    """In float32, with weights of order one, so that layers differ."""
    import torch
    import transformers

    import hf_descent.models

    class_name, fields = MODELS[name]
    model_class = getattr(transformers, class_name, None) or getattr(hf_descent.models, class_name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**fields))
    if name not in ("ut", "dust"):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=parameter[0].numel() ** -0.5)
    return model


def data(model, count, seed):
    """Rows of different lengths, or with different numbers of labels, that can be learned."""
    import torch

    generator, kind = torch.Generator().manual_seed(seed), type(model).__name__
    size = 10

    def row():
        def draw(high, shape=(), low=0):
            return torch.randint(low, high, shape, generator=generator)

        if "Denoising" in kind:
            clean = torch.rand(1, 16, generator=generator).expand(5, 16)  # [frames, values]
            return {"pixel_values": clean + 0.1 * torch.randn(5, 16, generator=generator), "labels": clean}
        if "Image" in kind:
            image = torch.randn(3, 8, 8, generator=generator)
            return {"pixel_values": image, "labels": int(image.mean() > 0)}
        mask = (torch.arange(size) < draw(size + 1, low=5)).long()
        if "SequenceClassification" in kind:
            ids, label = draw(VOCAB, (size,), low=10), int(draw(3))
            ids[2] = 3 + label
            label = label / 2 if model.config.num_labels == 1 else label
            return {"input_ids": ids * mask, "attention_mask": mask, "labels": label}
        ids = (draw(VOCAB) + torch.arange(size)) % VOCAB
        if "Conditional" in kind:
            labels = ids.flip(0).where(mask > 0, -100)
            given = torch.cat(
                [torch.zeros(1, dtype=torch.long), labels[:-1].clamp(min=0)]
            )  # a label smoother needs it
            return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels, "decoder_input_ids": given}
        labelled = torch.arange(size) >= draw(size - 2)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.where(labelled, -100)}

    return [row() for _ in range(count)]


def pairs(count, seed):
    """Prompts and completions of different lengths, in words of `tokenizer`."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(20, (count,), generator=generator).tolist()
    words = [[f"w{start + i}" for i in range(4 + start % 7)] for start in starts]
    return [{"prompt": " ".join(row[:2]) + " ", "completion": " ".join(row[2:])} for row in words]


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {
        word: index for index, word in enumerate(["<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(VOCAB - 3))])
    }
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


# ---- one run ----


def make_trainer(folder, model_name, settings, words):
    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import set_seed

    import hf_descent

    settings = {
        "report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1,
        "max_steps": 8, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "optim": "sgd",
        "learning_rate": 0.1, "descent_alpha": 0.3, "initial_loss_bound": 1.0, "dual_warmup_steps": 2,
        "dual_learning_rate": 0.1, "resilience": 0.001, "seed": 5, "eval_gammas": [0.0, 0.7], **settings,
    }  # fmt: skip
    if "RANK" in os.environ:
        settings["ddp_backend"] = "gloo"
    if "save_steps" in settings:
        settings |= {"save_strategy": "steps", "save_only_model": False}
    model = build(model_name)
    train, held_out = (data(model, count, seed) for count, seed in ((22, 0), (11, 1)))
    lora = None
    if "lora" in words:
        is_language = "Sequence" not in type(model).__name__
        task = {"task_type": "CAUSAL_LM" if is_language else "SEQ_CLS"}
        lora = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules="all-linear", **task)
    set_seed(5)
    if "sft" in words:
        if "text" in words:
            train, held_out = pairs(22, 0), pairs(11, 1)
        else:
            columns = ("input_ids", "labels")
            train, held_out = (
                [{name: row[name].tolist() for name in columns} for row in rows] for rows in (train, held_out)
            )
        settings = {"bf16": False, "gradient_checkpointing": False, **settings}
        args = hf_descent.SFTDescentConfig(output_dir=str(folder), **settings)
        train, held_out = Dataset.from_list(train), Dataset.from_list(held_out)
        given = {"processing_class": tokenizer(), "peft_config": lora}
        return hf_descent.SFTDescentTrainer(model, args, train_dataset=train, eval_dataset=held_out, **given)
    if lora is not None:
        model = get_peft_model(model, lora)
        torch.manual_seed(5)
    given = {"layer_loss_fn": own_loss} if "loss" in words else {}
    given |= {"readout": own_readout} if "readout" in words else {}
    args = hf_descent.DescentConfig(output_dir=str(folder), **settings)
    return hf_descent.DescentTrainer(model, args, train_dataset=train, eval_dataset=held_out, **given)


def run(folder, model_name, settings, words=""):
    """Everything that a run shows: of a resumed one, its second part with the logs of both."""
    import numpy as np
    from transformers import PrinterCallback

    words = words.split()
    trainer = make_trainer(folder, model_name, settings, words)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    found = {}
    if "resume" in words:
        found["straight weights"] = hash_of(trainer.model)
        trainer = make_trainer(folder, model_name, settings, words)
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{settings['save_steps']}"))
        found["checkpoint"] = checkpoint_at(folder / f"checkpoint-{settings['save_steps']}")
    found["weights"] = hash_of(trainer.model)  # before an evaluation
    found["projections"] = {name: projection(tensor) for name, tensor in sorted(trainer.model.state_dict().items())}
    multipliers = trainer.multipliers
    if multipliers is not None:
        found |= {"multipliers": multipliers.values.tolist(), "slacks": multipliers.slacks.tolist()}
    if trainer.problem is not None:
        weights = trainer.problem.weights(multipliers.values)
        violations = trainer.problem.violations(2.0 / (1 + weights.new_tensor(range(len(weights)))))
        found["problem"] = {"weights": weights.tolist(), "violations": violations.tolist()}
    found["evaluation"] = timeless(trainer.evaluate())
    prediction = trainer.predict(trainer.eval_dataset)
    found["prediction"] = timeless(prediction.metrics) | {"norm": norm(prediction.predictions)}
    metric = {"metric": "rmse"} if "Denoising" in type(trainer.model).__name__ else {}
    curve = trainer.evaluate_robustness(**metric)
    profile, noisy = trainer.evaluate_layers(**metric), trainer.evaluate_layers(gamma=0.5, **metric)
    kept = {"robustness": curve, "layers": profile, "noisy layers": noisy}
    for name, each in kept.items():
        arrays = {key: getattr(each, key, None) for key in ("gammas", "values", "losses", "sample_losses")}
        found[name] = each.to_dict() | {key: np.asarray(array).tolist() for key, array in arrays.items()}
    found["logs"] = logs(trainer.state.log_history)
    return found


def hash_of(model):
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def projection(tensor):
    """On a fixed direction: unlike a norm, it shows a small change of any kind."""
    import torch

    values = tensor.detach().double().flatten()
    return (values * torch.arange(1, values.numel() + 1, dtype=torch.float64).cos()).sum().item()


def checkpoint_at(folder):
    """The names of its files, the dual state in full, and the copy of it for people to read."""
    from safetensors.torch import load_file

    files = sorted(path.name for path in folder.iterdir())
    dual = [folder / name for name in files if name.endswith(".safetensors") and "model" not in name]
    state = json.loads((folder / "trainer_state.json").read_text())
    tensors = {name: tensor.tolist() for path in dual for name, tensor in load_file(path).items()}
    return {"files": dict.fromkeys(files, 1), "dual state": tensors, "summary": state["stateful_callbacks"]}


def norm(predictions):
    import numpy as np

    arrays = predictions if isinstance(predictions, tuple) else (predictions,)
    return float(sum(np.abs(np.where(array == -100, 0, array)).astype(np.float64).mean() for array in arrays))


def timeless(metrics):
    return {name: value for name, value in metrics.items() if not any(time in name for time in TIMES)}


def logs(history):
    """Log entries by step; of several with one key at a step, the later ones are marked."""
    steps = {}
    for entry in history:
        entry, place = timeless(entry), str(entry["step"])
        while (entry.keys() - {"step", "epoch"}) & steps.get(place, {}).keys():
            place += "+"
        steps.setdefault(place, {}).update(entry)
    return steps


# ---- recording ----


def prepare():
    os.environ.update(
        HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_MODE="disabled"
    )
    warnings.simplefilter("ignore")
    import datasets
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    datasets.disable_progress_bars()


def record_runs(runs, says):
    found = {}
    for name, arguments in runs.items():
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                # As JSON gives it back: keys are texts.
                found[name] = json.loads(json.dumps(run(Path(shared_folder(folder)), *arguments), default=float))
            except Exception as error:  # recorded, so that one side alone can fail
                found[name] = {"error": f"{type(error).__name__}: {error}"}
                traceback.print_exc()
        if says:
            print(f"{time.perf_counter() - start:6.1f} s  {name}", flush=True)
    return found


def shared_folder(folder):
    """The first process's folder, in all processes."""
    import torch.distributed

    if not torch.distributed.is_initialized():
        return folder
    folders = [folder]
    torch.distributed.broadcast_object_list(folders)
    return folders[0]


def work(rank, port, runs, out):
    """One of two processes."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    prepare()
    import torch.distributed

    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=90))
    found = record_runs(runs, says=rank == 0)
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    torch.distributed.barrier()
    # Torch's threads can abort the interpreter's end.
    os._exit(0)


def with_numbers(found, model_name, settings, words=""):
    """The arguments of a run, "auto" replaced by the step size and f_0 that an earlier state found for it."""
    if found is None or settings.get("descent_alpha") != "auto":
        return model_name, settings, words
    first, second, *_ = found["problem"]["violations"]  # of losses 2, 1, 2/3
    ratio = (1 - second) / 2
    return model_name, settings | {"descent_alpha": 1 - ratio, "initial_loss_bound": (2 - first) / ratio}, words


def record(out, pattern, numbers=None):
    prepare()
    import torch.multiprocessing

    import hf_descent

    print(f"hf_descent of {Path(hf_descent.__file__).parent}", flush=True)
    earlier = json.loads(Path(numbers).read_text()) if numbers else {}
    runs = {name: with_numbers(earlier.get(name), *run) for name, run in (RUNS | DISTRIBUTED_RUNS).items()}
    chosen = {name: run for name, run in runs.items() if fnmatch.fnmatch(name, pattern)}
    distributed = {name: run for name, run in chosen.items() if name in DISTRIBUTED_RUNS}
    alone = {name: run for name, run in chosen.items() if name in RUNS}
    found = record_runs(alone, says=True)
    if distributed:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        part = Path(f"{out}.part")
        torch.multiprocessing.spawn(work, (port, distributed, str(part)), nprocs=2)
        found |= json.loads(part.read_text())
        part.unlink()
    Path(out).write_text(json.dumps(found, indent=1))
    failed = [name for name, each in found.items() if "error" in each]
    print(f"{len(found)} runs, {len(failed)} of them failed {failed}", flush=True)
    return not failed


# ---- comparison ----


def flat(value, path=""):
    """Every number or word by its path."""
    if not isinstance(value, dict | list):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    leaves = {}
    for name, each in items:
        leaves |= flat(each, f"{path}/{name}" if path else str(name))
    return leaves


def difference(old, new):
    """0.0 for the same; of numbers in units of the tolerance's scale, of anything else infinite."""
    if old == new or (old != old and new != new):  # not a number
        return 0.0
    if not all(isinstance(value, int | float) for value in (old, new)):
        return math.inf
    gap = abs(old - new) / max(1.0, abs(old))
    return gap if math.isfinite(gap) else math.inf


def compare(old_file, new_file, pattern, tolerance):
    """Prints what differs; whether nothing does but what is allowed."""
    sides = [json.loads(Path(file).read_text()) for file in (old_file, new_file)]
    old, new = ({name: run for name, run in side.items() if fnmatch.fnmatch(name, pattern)} for side in sides)
    different, allowed, moved = {}, {}, []
    for name in old:
        before, after = flat(old[name]), flat(new.get(name, {"error": "not run"}))
        for side, leaves in {"old": before, "new": after}.items():
            if "error" in leaves:
                different[f"{name}, {side} side"] = [(math.inf, leaves["error"])]
        if "error" in before or "error" in after:
            continue
        hashes = [key for key in before if key in ("weights", "straight weights")]
        if any(before[key] != after.get(key) for key in hashes):
            moved.append(name)
        for key in before.keys() - set(hashes):
            gap = difference(before[key], after.get(key))
            if gap > tolerance:
                place = f"{name}/{key}"
                reason = next((why for known, why in ALLOWED.items() if fnmatch.fnmatch(place, known)), None)
                if reason is not None:
                    allowed[reason] = allowed.get(reason, 0) + 1
                    continue
                words = f"{before[key]!r} became {after.get(key)!r}"
                # One line for all steps, and all elements of a list.
                kind = re.sub(r"/\d+\+*(?=/|$)", "/*", place)
                different.setdefault(kind, []).append((gap, f"{words} ({key})"))
    for reason, count in allowed.items():
        print(f"allowed, {count} times: {reason}")
    for kind, gaps in sorted(different.items()):
        print(f"DIFFERENT {kind}: {len(gaps)} times, at most by {max(gaps)[0]:.1e}: {max(gaps)[1]}")
    for name in moved:
        print(f"other bits in the weights: {name}")
    numbers = sum(len(flat(each)) for each in old.values())
    print(
        f"{len(old)} runs with {numbers} numbers and words: {len(different)} kinds differ by more than {tolerance:g}; "
        f"{len(old) - len(moved)} runs end with the same bits in all weights"
    )
    return not different


def against(commit, pattern, tolerance):
    root, start = Path(__file__).resolve().parents[1], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", str(tree), commit], cwd=root, check=True)
        try:
            for side, path, numbers in (("old", tree, []), ("new", root, ["--numbers", f"{folder}/old.json"])):
                command = [sys.executable, __file__, "record", f"{folder}/{side}.json", "--runs", pattern, *numbers]
                environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
                subprocess.run(command, env=environment, cwd=folder, check=False)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=root, check=True)
        same = compare(f"{folder}/old.json", f"{folder}/new.json", pattern, tolerance)
    print(f"{time.perf_counter() - start:.0f} s")
    return same


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare", "against"))
    parser.add_argument("names", nargs="+", help="A file, two files, or a commit.")
    parser.add_argument("--runs", default="*", help="A pattern of the runs' names.")
    parser.add_argument("--numbers", help='A record: its step sizes and f_0 are those of the runs with "auto".')
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    options = parser.parse_args()
    if options.action == "record":
        succeeded = record(*options.names, options.runs, options.numbers)
    elif options.action == "compare":
        succeeded = compare(*options.names, options.runs, options.tolerance)
    else:
        succeeded = against(*options.names, options.runs, options.tolerance)
    sys.exit(0 if succeeded else 1)


if __name__ == "__main__":
    main()
