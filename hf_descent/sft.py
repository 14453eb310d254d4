"""`hf-descent sft`: fine-tune a language model on instructions, then report it per layer and under noise."""

import os
from dataclasses import dataclass, field

from datasets import DatasetDict
from transformers import AutoTokenizer
from trl import ModelConfig, get_peft_config, get_quantization_config

from .classify import resume_choice
from .data.alpaca import AlpacaArguments, load_alpaca
from .sft_config import SFTDescentConfig
from .sft_trainer import SFTDescentTrainer


@dataclass
class ModelArguments(ModelConfig):
    """TRL's model arguments: name, precision, LoRA, quantisation."""

    overwrite_output_dir: bool = field(
        default=False,
        metadata={"help": "Train from scratch into a folder that is not empty; nothing in it is deleted."},
    )


argument_types = (ModelArguments, AlpacaArguments, SFTDescentConfig)


def run(model_args: ModelArguments, data_args: AlpacaArguments, args: SFTDescentConfig) -> None:
    """Trains and evaluates. Beside the model, `args.output_dir` gets `all_results.json` (metrics and layer losses on
    the validation and test rows), `layer_profile.json` and, where noise levels are given, `noise_curve.json` (on the
    test rows where there are any).

    Raises:
        ValueError: the data does not fit the arguments, or the output folder is not empty.
    """
    if model_args.model_name_or_path is None:
        raise ValueError("`model_name_or_path` is not given; name a model on the Hub or in a local folder.")
    resume = resume_choice(args, model_args.overwrite_output_dir)
    tokenizer = AutoTokenizer.from_pretrained(
        model_args.model_name_or_path,
        revision=model_args.model_revision,
        trust_remote_code=args.trust_remote_code,
    )
    with args.main_process_first(desc="loading"):
        dataset = load_alpaca(data_args, tokenizer, gets_template=args.chat_template_path is not None)
    args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(args.model_init_kwargs or {}),
    }
    trainer = SFTDescentTrainer(
        model_args.model_name_or_path,
        args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["validation"],
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.accelerator.print(trainer.preview())
    metrics = trainer.train(resume_from_checkpoint=resume).metrics
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("train", metrics)
    report(trainer, dataset)
    if args.push_to_hub:
        trainer.push_to_hub()  # what was saved before is without these results


def report(trainer: SFTDescentTrainer, dataset: DatasetDict) -> None:
    """Evaluates on the validation and test rows, writes the result files, and prints them as short tables."""
    args = trainer.args
    tables = [f"{'':10} {'accuracy':>10} {'loss':>10}"]
    prefixes = {"validation": "eval"} | ({"test": "test"} if "test" in dataset else {})
    for split, prefix in prefixes.items():
        metrics = trainer.evaluate(dataset[split], metric_key_prefix=prefix)
        # TRL calls its own metrics `eval_...` whatever the prefix.
        metrics = {name.replace("eval_", f"{prefix}_", 1): value for name, value in metrics.items()}
        trainer.save_metrics(prefix, metrics)
        accuracy, loss = metrics[f"{prefix}_mean_token_accuracy"], metrics[f"{prefix}_loss"]
        tables[0] += f"\n{split:10} {accuracy:10.4f} {loss:10.4f}"

    # `split` and `prefix` are those of the last one from here on: of the test rows where there are any.
    results = {"layer_profile": trainer.evaluate_layers(dataset[split])}
    if args.eval_gammas:
        results["noise_curve"] = trainer.evaluate_robustness(dataset[split])
    summaries = {f"{prefix}_{name}": value for result in results.values() for name, value in result.to_dict().items()}
    trainer.save_metrics(prefix, metrics | summaries)
    if trainer.is_world_process_zero():
        for name, result in results.items():
            result.to_json(os.path.join(args.output_dir, f"{name}.json"))
            tables.append(f"{name.replace('_', ' ')}, {split} rows\n{result}")
        print("\n\n".join([*tables, f"Written to {args.output_dir}"]))
