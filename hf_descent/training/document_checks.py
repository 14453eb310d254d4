"""Whether a model keeps the documents of a packed row apart, tried on a batch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from ..readout.labels import labels_of
from ..readout.replay import output_logits, probing


PACKING_TOKENS = 64  # length of each of the two documents by which packing is tried
MIXED_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_documents(model: nn.Module, inputs: Mapping[str, Any], trainer: Trainer) -> None:
    """ValueError if documents that share a row (their positions start anew) see one another.

    It is tried on the first tokens of a row, cut into two documents: the logits of the second must stay the same when
    the tokens of the first are replaced.
    """
    positions = inputs.get("position_ids")  # [rows, seq]
    labels = labels_of(inputs, trainer.label_names)
    if positions is None or positions.shape != labels.shape:
        return
    if inputs.get("attention_mask") is not None or positions.shape[1] < 2:
        return

    if not (_packs(trainer) or (positions.diff(dim=1) != 1).any()):
        return

    length = min(positions.shape[1] // 2, PACKING_TOKENS)
    error = _influence(model, _two_documents(inputs, labels, length), length)

    if error > _rounding(model, trainer):
        raise ValueError(
            f"{type(model).__name__} lets the documents of a packed example see one another: its logits change "
            f"by {error:.2g} of their size. Set `packing=False` and `padding_free=False`, or where documents are "
            "meant to be joined `packing_strategy='wrapped'`; with flash attention some models keep them apart."
        )


def _packs(trainer: Trainer) -> bool:
    """Whether other rows may hold several documents, if the first row does not."""
    args = trainer.args
    if not getattr(trainer, "padding_free", False):
        return False
    if args.packing or args.train_batch_size > 1:
        return True
    return bool(trainer.eval_dataset) and args.eval_batch_size > 1


def _two_documents(inputs: Mapping[str, Any], labels: torch.Tensor, length: int) -> dict[str, Any]:
    """The first tokens of a batch's first row as two documents of `length` tokens."""
    batch = {}
    for name, value in inputs.items():
        # Positions tell the lengths, too.
        if value is labels or name.startswith(("cu_seq_lens", "max_length")):
            continue
        batch[name] = value
        if getattr(value, "shape", ())[:2] == labels.shape:
            batch[name] = value[:1, : 2 * length]

    places = torch.arange(length, device=labels.device)
    batch["position_ids"] = places.repeat(2)[None]
    if "seq_idx" in batch:
        documents = torch.arange(2, device=labels.device)
        batch["seq_idx"] = documents.repeat_interleave(length)[None].int()
    return batch


def _influence(model: nn.Module, batch: Mapping[str, Any], length: int) -> float:
    """How much the logits of the second document change with the tokens of the first, as a share of their size."""
    tokens = batch["input_ids"]
    second = tokens[:, length:]
    logits = []
    with probing(model):
        for first in (tokens[:, :length], second.flip(1)):
            outputs = model(**{**batch, "input_ids": torch.cat([first, second], dim=1)})
            of_second = output_logits(outputs)[:, -length:].float()  # [1, length, vocab]
            logits.append(of_second - of_second.mean(-1, keepdim=True))
    return ((logits[1] - logits[0]).norm() / logits[0].norm()).item()


def _rounding(model: nn.Module, trainer: Trainer) -> float:
    """The change that rounding alone may cause, as a share."""
    dtypes = {MIXED_DTYPES.get(trainer.accelerator.mixed_precision, torch.float32)}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            dtypes.add(parameter.dtype)
    return max(1e-4, *(8 * torch.finfo(dtype).eps for dtype in dtypes))
