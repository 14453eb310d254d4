"""`hf-descent sft`: fine-tune a language model on instructions, then report it per layer and under noise."""

from dataclasses import dataclass
from functools import partial

from trl import ModelConfig, get_peft_config, get_quantization_config

from ..data.alpaca import AlpacaArguments, load_alpaca
from ..loading import architecture_of, load_tokenizer, weights_of
from ..sft_config import SFTDescentConfig
from ..sft_trainer import SFTDescentTrainer
from .arguments import parse_recipe
from .training import OutputArguments, report, resume_choice, train_and_report


LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@dataclass
class ModelArguments(OutputArguments, ModelConfig):
    """TRL's model arguments: name, precision, LoRA, quantisation."""


argument_types = (ModelArguments, AlpacaArguments, SFTDescentConfig)
parse = partial(parse_recipe, argument_types)


def run(model_args: ModelArguments, data_args: AlpacaArguments, args: SFTDescentConfig) -> None:
    """Train and evaluate. Beside the model, `args.output_dir` gets the results of [`report`]."""
    name = model_args.model_name_or_path
    if name is None:
        raise ValueError(
            "`model_name_or_path` is not given; name a model on the Hub or in a local folder."
        )

    if not args.trust_remote_code and not architecture_of(name).endswith(LANGUAGE_MODELS):
        raise ValueError(
            f"`model_name_or_path` is {name!r}, a {architecture_of(name)}; give a language model."
        )

    resume = resume_choice(args, model_args)

    hub = {"revision": model_args.model_revision, "trust_remote_code": args.trust_remote_code}
    tokenizer = load_tokenizer(name, **hub)
    with args.main_process_first(desc="loading"):
        dataset = load_alpaca(
            data_args, tokenizer, gets_template=args.chat_template_path is not None
        )

    init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    if args.model_init_kwargs:
        init_kwargs.update(args.model_init_kwargs)
    args.model_init_kwargs = init_kwargs
    with weights_of(name):
        trainer = SFTDescentTrainer(
            name,
            args,
            train_dataset=dataset["train"],
            eval_dataset=dataset["validation"],
            processing_class=tokenizer,
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
        )

    trainer.accelerator.print(trainer.preview())
    score = "mean_token_accuracy"
    train_and_report(
        trainer,
        resume,
        partial(report, trainer, dataset, score),
        model_args,
        data_args,
        score=score,
    )
