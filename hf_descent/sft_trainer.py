"""Supervised fine-tuning of language models with layerwise descent constraints: TRL's `SFTTrainer`, every layer read.

Data, collation, PEFT and metrics are TRL's. The loss of a micro-batch comes from `trainer.py`, and TRL's metrics are
logged from the last layer's predictions.
"""

from itertools import groupby

import torch
from datasets import Dataset, IterableDataset, concatenate_datasets
from torch.utils.data import DataLoader
from transformers.utils import logging
from trl import SFTTrainer
from trl.data_utils import get_dataset_column_names

from .compat import router_coefficient
from .readout.labels import IGNORE_INDEX
from .readout.stack import inner_model
from .runs import RunFolder
from .sft_config import SFTDescentConfig
from .trainer import DescentMixin
from .training import data_checks
from .training.evaluation import without_persistent_workers


logger = logging.get_logger(__name__)


class SFTDescentTrainer(DescentMixin, SFTTrainer):
    """[`~trl.SFTTrainer`] whose model lowers the token loss with every layer (arXiv 2601.17257, Algorithm 1).

    With `objective="erm"` and no noise it trains as [`~trl.SFTTrainer`] does, bit for bit. With another objective, or
    with noise, the logged `loss` is the token loss of the last layer, and TRL's `mean_token_accuracy` and `entropy`
    are measured on the last layer. `evaluate` then adds the loss of every layer, as it does if you state
    constraints.

    It takes the arguments of [`~trl.SFTTrainer`], and `readout`, `layer_loss_fn` and `dual_dataset` as
    [`DescentTrainer`] does. Plain `SFTConfig` and `TrainingArguments` get the defaults of [`SFTDescentConfig`].

    ValueError if a data set has no token with a label, or a sequence with more tokens than the model has positions.
    If layers are read, ValueError also for a `loss_type` other than "nll", and for packed examples whose documents
    see one another. TRL drops examples that have no token with a label within `max_length`; a warning says how many.

    Example, of which `recipes/examples/sft_lora.py` is a complete script:

    ```python
    rows = load_dataset("trl-lib/Capybara", split="train")
    trainer = SFTDescentTrainer("Qwen/Qwen3-0.6B", train_dataset=rows, peft_config=LoraConfig(r=6))
    trainer.train()
    ```
    """

    _name = "SFT-Descent"
    _tag_names = [*DescentMixin._tag_names, *SFTTrainer._tag_names]
    config_class = SFTDescentConfig
    logs_tokens = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._set_router_coefficient()
        datasets = {"train": self.train_dataset}
        if isinstance(self.eval_dataset, dict):
            datasets.update(self.eval_dataset)
        else:
            datasets["eval"] = self.eval_dataset
        for name, dataset in datasets.items():
            if isinstance(dataset, Dataset) and "input_ids" in dataset.column_names:
                data_checks.check_positions(self, dataset, name)

    def _set_router_coefficient(self) -> None:
        # TRL weighs the router's loss by its own coefficient; models weigh it by what they read when they were built.
        coefficient = router_coefficient(self)
        if coefficient is None:
            return
        for module in inner_model(self.model).modules():
            if hasattr(module, "router_aux_loss_coef"):
                module.router_aux_loss_coef = coefficient

    def preview(self) -> str:
        """The first training example as the model sees it: its text, split where tokens with a label begin or end."""
        example = next(iter(self.train_dataset))
        if "input_ids" not in example:  # TRL leaves images and their texts to the collator
            batch = self.data_collator([example])
            example = {name: batch[name][0].tolist() for name in ("input_ids", "labels")}

        tokens = example["input_ids"]
        labels = example.get("labels", tokens)
        count = sum(label != IGNORE_INDEX for label in labels)

        lines = [f"First training example: {len(labels)} tokens, {count} with a label"]
        for is_scored, stretch in groupby(zip(tokens, labels), key=_has_label):
            text = self.processing_class.decode([token for token, _ in stretch])
            kind = "label" if is_scored else "no label"
            lines.append(f"[{kind}] {text!r}")
        return "\n".join(lines)

    # ---- data ----

    def _prepare_dataset(
        self, dataset, processing_class, args, packing, formatting_func, dataset_name
    ):
        given = dataset
        dataset = super()._prepare_dataset(
            given, processing_class, args, packing, formatting_func, dataset_name
        )
        if isinstance(dataset, Dataset):
            if not packing:  # which joins examples, and drops none
                data_checks.report_dropped(dataset, given, dataset_name, args.max_length)
            data_checks.check_some_labels(dataset, dataset_name, args.max_length)
        return dataset

    # ---- one micro-batch ----

    @property
    def _may_scale_losses(self) -> bool:
        return self._kind.trains_layers  # TRL divides plain losses by the items of the whole step

    def _prepare_inputs(self, inputs):
        inputs = dict(super()._prepare_inputs(inputs))
        # As TRL's own `compute_loss` has it: beside a cache, the attention mask would ignore the borders of documents.
        inputs["use_cache"] = False
        return inputs

    @torch.no_grad()
    def _log_tokens(self, inputs, outputs, tokens):
        """What TRL logs of a batch, from the last layer's predictions of the labelled tokens."""
        gather = self.accelerator.gather_for_metrics
        metrics = self._metrics["train" if self.model.training else "eval"]
        count = gather(torch.tensor(len(tokens.hits), device=tokens.hits.device)).sum().clamp(min=1)
        metrics["entropy"].append((gather(tokens.entropies.sum()).sum() / count).item())
        metrics["mean_token_accuracy"].append((gather(tokens.hits.sum()).sum() / count).item())

        if self.model.training:
            self._total_train_tokens += gather(_number_of_tokens(inputs, count.device)).sum().item()
        metrics["num_tokens"] = [self._total_train_tokens]
        if self.aux_loss_enabled:
            metrics["aux_loss"].append(gather(outputs["aux_loss"]).mean().item())

    # ---- evaluation and logs ----

    def get_eval_dataloader(self, eval_dataset=None):
        if self.compute_metrics is not None and not self.padding_free:  # which scores rows
            return super().get_eval_dataloader(eval_dataset)
        dataset = eval_dataset
        if dataset is None:
            dataset = self.eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        filled = self._filled(dataset)
        if filled is dataset:
            return super().get_eval_dataloader(eval_dataset)
        with without_persistent_workers(self.args):
            return super().get_eval_dataloader(filled)

    def get_test_dataloader(self, test_dataset):
        if self.padding_free:
            test_dataset = self._filled(test_dataset)
        return super().get_test_dataloader(test_dataset)

    def _filled(self, dataset):
        """`dataset`, with rows without labels at the end that fill the last batch on several processes.

        accelerate would repeat others, which padding-free batches cannot tell from the rest, and TRL counts.
        """
        processes = self.args.world_size
        has_labels = isinstance(dataset, Dataset) and "labels" in dataset.column_names
        if processes == 1 or not self._kind.trains_layers or not has_labels:
            return dataset

        missing = -len(dataset) % (self.args.eval_batch_size * processes)
        filler = dataset.select([0] * missing)
        ignored = [[IGNORE_INDEX] * len(labels) for labels in filler["labels"]]
        filler = filler.remove_columns("labels").add_column(
            "labels", ignored, feature=dataset.features["labels"]
        )
        return concatenate_datasets([dataset, filler])

    def prediction_step(self, *args, **kwargs):
        before = {name: len(values) for name, values in self._metrics["eval"].items()}
        prediction = super().prediction_step(*args, **kwargs)
        # A last batch that repeated rows fill up is read once more, without them: only that counts.
        for name, values in self._metrics["eval"].items():
            del values[before.get(name, 0) : -1]
        return prediction

    def _in_batches(self, rows):
        if not isinstance(rows, Dataset | IterableDataset):
            return rows
        # With TRL's columns, which hold the lengths of packed documents.
        collate = self._get_collator_with_removed_columns(self.data_collator)

        def prepared(batch):
            return self._prepare_inputs(collate(batch))

        return DataLoader(rows, self.args.eval_batch_size, collate_fn=prepared)

    def _prepared(self, rows):
        if self._skip_prepare_dataset or not isinstance(rows, Dataset | IterableDataset):
            return rows
        if "input_ids" in get_dataset_column_names(rows):
            return rows
        packing = self.args.eval_packing
        if packing is None:
            packing = self.args.packing
        return self._prepare_dataset(
            rows, self.processing_class, self.args, packing, self._formatting_func, "eval"
        )

    def _run_summary(self):
        summary = super()._run_summary()
        if "training_started" not in summary:
            return summary
        # Rows that come with labels may leave out others than prompts.
        rows = self.train_dataset
        if isinstance(rows, Dataset) and IGNORE_INDEX not in rows[0].get("labels", ()):
            summary["completion_only_loss"] = self.completion_only_loss
        summary["num_tokens"] = self._total_train_tokens
        return summary

    def _inner_training_loop(self, batch_size=None, *args, **kwargs):
        # TRL would count from nothing.
        checkpoint = kwargs.get("resume_from_checkpoint")
        if checkpoint is not None:
            saved = RunFolder(checkpoint).summary
            self._total_train_tokens = saved.get("num_tokens", self._total_train_tokens)
        return super()._inner_training_loop(batch_size, *args, **kwargs)


def _has_label(token_and_label: tuple[int, int]) -> bool:
    return token_and_label[1] != IGNORE_INDEX


def _number_of_tokens(inputs, device: torch.device) -> torch.Tensor:
    """The tokens of a batch as TRL counts them, a scalar."""
    mask = inputs.get("attention_mask")
    if mask is None:  # padding-free: the rows are joined into one
        return torch.tensor(inputs["position_ids"].size(1), device=device)
    return mask.sum()
