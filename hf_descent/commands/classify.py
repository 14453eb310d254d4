"""`hf-descent classify`: fine-tune a text classifier, then report it per layer and under noise."""

from dataclasses import dataclass, field
from functools import partial

from transformers import AutoModelForSequenceClassification, EvalPrediction, PreTrainedModel, set_seed
from transformers.utils import is_peft_available

from ..configs import DescentConfig
from ..data.text import DataArguments, load_text_classification, most_tokens, tokenize
from ..loading import load_tokenizer
from ..models import LinearReadoutForSequenceClassification, UTForSequenceClassification
from ..trainer import DescentTrainer
from .training import OutputArguments, report, resume_choice, train_and_report


POOLING = {"head": None, "cls_linear": "cls", "mean_linear": "mean"}


@dataclass
class ModelArguments(OutputArguments):
    """Which model, how its layers are read out, and whether it is adapted by LoRA."""

    model_name_or_path: str = field(metadata={"help": "Model on the Hub or in a local folder."})
    pooling: str = field(
        default="head",
        metadata={
            "help": "Readout of every layer: `head` (the model's own), or one linear layer on the first token "
            "(`cls_linear`, the paper's) or on the mean of the tokens (`mean_linear`)."
        },
    )
    unrolled_layers: int | None = field(
        default=None,
        metadata={"help": "Train an unrolled transformer (UT) of this depth on the token embeddings of that model."},
    )
    freeze_embeddings: bool = field(
        default=False,
        metadata={
            "help": "Leave the token embeddings as they are. Trained at a large rate they outgrow the noise, whose "
            "scale is theirs before training."
        },
    )
    use_peft: bool = field(default=False, metadata={"help": "Train LoRA adapters and the head, not the whole model."})
    lora_r: int = field(default=8, metadata={"help": "Rank of the adapters."})
    lora_alpha: int = field(default=16, metadata={"help": "Scale of the adapters, divided by their rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the adapters."})

    def __post_init__(self):
        if self.pooling not in POOLING:
            raise ValueError(f"`pooling` is {self.pooling!r}; choose one of {', '.join(POOLING)}.")
        if self.unrolled_layers is not None and (self.unrolled_layers < 1 or self.pooling != "head"):
            raise ValueError(
                f"`unrolled_layers` is {self.unrolled_layers} and `pooling` {self.pooling!r}; give a depth of at "
                "least 1 and `head`: a UT reads out the mean of its tokens by one linear layer."
            )
        if self.unrolled_layers is not None and self.use_peft:
            raise ValueError("`use_peft` with `unrolled_layers`: a UT has no linear layers to adapt. Leave one out.")


argument_types = (ModelArguments, DataArguments, DescentConfig)


def run(model_args: ModelArguments, data_args: DataArguments, args: DescentConfig) -> None:
    """Trains and evaluates. Beside the model, `args.output_dir` gets `all_results.json` (metrics and layer losses on
    the validation and test rows), `noise_curve.json` and `layer_profile.json` (on the test rows where there are any),
    the latter also at the training level, as `layer_profile_gamma_LEVEL.json`.

    Raises:
        ValueError: the data does not fit the arguments, or the output folder is not empty.
    """
    resume = resume_choice(args, model_args.overwrite_output_dir)
    set_seed(args.seed)  # the head is drawn before the trainer sets it
    tokenizer = load_tokenizer(model_args.model_name_or_path)
    with args.main_process_first(desc="loading"):
        dataset = load_text_classification(data_args)
    model = load_model(model_args, dataset["train"].features["labels"].names)
    limit = most_tokens(tokenizer, model, data_args.max_seq_length)
    with args.main_process_first(desc="tokenising"):
        dataset = tokenize(dataset, tokenizer, limit)
    config = model.config.get_text_config()
    if getattr(config, "pad_token_id", None) is None:  # causal models find the last token of a row by it
        config.pad_token_id = tokenizer.pad_token_id

    trainer = DescentTrainer(
        model,
        args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["validation"],
        processing_class=tokenizer,
        compute_metrics=accuracy_of,
    )
    train_and_report(trainer, resume, partial(report, trainer, dataset), model_args, data_args)


def load_model(args: ModelArguments, classes: list[str]) -> PreTrainedModel:
    """The classifier that `args` names, with one output for each of `classes`.

    Raises:
        ImportError: `use_peft` without PEFT.
    """
    labels = {"id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)}}
    if args.unrolled_layers is not None:
        model = UTForSequenceClassification.from_embeddings(
            args.model_name_or_path, num_hidden_layers=args.unrolled_layers, **labels
        )
    elif args.pooling == "head":
        model = AutoModelForSequenceClassification.from_pretrained(args.model_name_or_path, **labels)
    else:
        model = LinearReadoutForSequenceClassification.from_encoder(
            args.model_name_or_path, POOLING[args.pooling], **labels
        )
    if args.freeze_embeddings:
        model.get_input_embeddings().requires_grad_(False)
    if not args.use_peft:
        return model
    if not is_peft_available():
        raise ImportError("`use_peft` needs PEFT: `pip install hf_descent[peft]`.")
    from peft import LoraConfig, get_peft_model

    # The head is new, and often more than the one layer that PEFT would think of.
    head = [
        name for name, child in model.named_children() if name != model.base_model_prefix and list(child.parameters())
    ]
    config = LoraConfig(
        task_type="SEQ_CLS",
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules="all-linear",
        exclude_modules=rf"({'|'.join(head)})(\..*)?",
        modules_to_save=head,
    )
    return get_peft_model(model, config)


def accuracy_of(prediction: EvalPrediction) -> dict[str, float]:
    """`compute_metrics` of a classifier: its accuracy."""
    logits = prediction.predictions
    logits = logits[0] if isinstance(logits, tuple) else logits  # BART's come with the states of its encoder
    return {"accuracy": float((logits.argmax(-1) == prediction.label_ids).mean())}
