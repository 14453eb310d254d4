"""`hf-descent classify`: fine-tune a text classifier, then report it per layer and under noise."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from transformers import (
    AutoModelForSequenceClassification,
    EvalPrediction,
    PreTrainedModel,
    set_seed,
)
from transformers.hf_argparser import HfArg

from ..configs import DescentConfig
from ..data.splits import check_arguments
from ..data.text import DataArguments, load_text_classification, most_tokens, tokenize
from ..loading import load_tokenizer, weights_of
from ..models import LinearReadoutForSequenceClassification, UTForSequenceClassification
from ..trainer import DescentTrainer
from .arguments import parse_recipe
from .training import OutputArguments, report, resume_choice, train_and_report


@dataclass
class ModelArguments(OutputArguments):
    """The model, how its layers are read out, and whether it is trained plainly, too."""

    model_name_or_path: str = HfArg(help="Model on the Hub or in a local folder.")
    pooling: Literal["head", "cls_linear", "mean_linear"] = HfArg(
        default="head",
        help="What reads a layer: the model's own head (`head`), or one linear layer on the first token "
        "(`cls_linear`, as in the paper) or on the mean of the tokens (`mean_linear`).",
    )
    unrolled_layers: int | None = HfArg(
        default=None,
        help="Train an unrolled transformer (UT) of this many layers on the token embeddings of the model.",
    )
    freeze_embeddings: bool = HfArg(
        default=False, help="Do not train the token embeddings. Trained ones may outgrow the noise."
    )

    def __post_init__(self):
        check_arguments(self, {"unrolled_layers": 1})
        if self.unrolled_layers is not None and self.pooling != "head":
            raise ValueError(
                f"`unrolled_layers` takes no other `pooling` than 'head', and it is {self.pooling!r}: leave it out."
            )


argument_types = (ModelArguments, DataArguments, DescentConfig)
parse = partial(parse_recipe, argument_types)


def run(model_args: ModelArguments, data_args: DataArguments, args: DescentConfig) -> None:
    """Train and evaluate. Beside the model, `args.output_dir` gets the results of [`report`]."""
    if args.prediction_loss_only or not args.eval_do_concat_batches:
        raise ValueError(
            "The accuracy needs the predictions: leave out `prediction_loss_only` and the like."
        )

    resume = resume_choice(args, model_args)
    set_seed(args.seed)  # the head is drawn before the trainer sets it
    tokenizer = load_tokenizer(model_args.model_name_or_path)
    with args.main_process_first(desc="loading"):
        dataset = load_text_classification(data_args)
    model = load_model(model_args, dataset["train"].features["labels"].names)
    limit = most_tokens(tokenizer, model, data_args.max_seq_length)
    with args.main_process_first(desc="tokenising"):
        dataset = tokenize(dataset, tokenizer, limit)

    trainer = DescentTrainer(
        model,
        args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["validation"],
        processing_class=tokenizer,
        compute_metrics=accuracy_of,
    )

    train_and_report(
        trainer, resume, partial(report, trainer, dataset), model_args, data_args, score="accuracy"
    )


def load_model(args: ModelArguments, classes: list[str]) -> PreTrainedModel:
    """The classifier that `args` names, with one output for each of `classes`."""
    labels = {
        "id2label": dict(enumerate(classes)),
        "label2id": {label: i for i, label in enumerate(classes)},
    }
    name = args.model_name_or_path
    pooling = args.pooling.removesuffix("_linear")
    with weights_of(name, len(classes)):
        if args.unrolled_layers is not None:
            model = UTForSequenceClassification.from_embeddings(
                name, num_hidden_layers=args.unrolled_layers, **labels
            )
        elif pooling == "head":
            model = AutoModelForSequenceClassification.from_pretrained(name, **labels)
        else:
            model = LinearReadoutForSequenceClassification.from_encoder(name, pooling, **labels)

    if args.freeze_embeddings:
        model.get_input_embeddings().requires_grad_(False)
    return model


def accuracy_of(prediction: EvalPrediction) -> dict[str, float]:
    """`compute_metrics` of a classifier: its accuracy."""
    logits = prediction.predictions
    if isinstance(logits, tuple):  # BART adds the states of its encoder
        logits = logits[0]
    return {"accuracy": float((logits.argmax(-1) == prediction.label_ids).mean())}
