"""Rows held out of training, on which the multipliers move (Cotter et al. 2019): constraints are on expectations."""

import contextlib
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, IterableDataset, Subset
from transformers import Trainer
from transformers.trainer_utils import has_length

from ..configs import DescentArguments
from ..extras import is_dataset
from ..logs import get_logger
from ..losses.layerwise import LayerLosses
from ..readout.stack import inner_model
from .initial_loss import drawing_apart
from .records import RunRecord, evaluation_sets, reduced


logger = get_logger(__name__)

LEAST_ROWS = 200  # with fewer, means are too noisy to detect a violation of a few percent
MOST_ROWS = 100_000  # of each data set, compared with others to find shared rows
MOST_SHARED = 0.01


def row_keys(trainer: Trainer, rows) -> list[int]:
    """Hashes of the main input in `rows`, with images or sound beside it: of at most 100,000 drawn at random. None of
    data whose rows may cost something to read: of other kinds than a list or a `Dataset` as it is stored."""
    name = getattr(inner_model(trainer.model), "main_input_name", "input_ids")
    is_stored = is_dataset(rows) and rows.format["type"] != "custom"
    first = rows.features if is_stored else rows[0] if isinstance(rows, list) and rows else None
    if not isinstance(first, Mapping) or name not in first:
        return []
    chosen = sorted(np.random.default_rng(0).permutation(len(rows))[:MOST_ROWS].tolist())
    names = dict.fromkeys([name, "pixel_values", "pixel_values_videos", "input_features"])
    rows = rows.select(chosen) if is_stored else [rows[row] for row in chosen]
    columns = [_stored(rows, name) for name in names if name in first] if is_stored else []
    columns = columns or [[row.get(name) for row in rows] for name in names]
    return [
        hash(tuple(_content(value) for value in values if value is not None))
        for values in zip(*columns)
    ]


def _stored(rows, name: str) -> Iterator:
    """The values of a column, flat: images and sound are not decoded, nor nested lists built, which would be slow."""
    from pyarrow import ListScalar  # which comes with `datasets`

    for table in rows.with_format("arrow", columns=[name]).iter(batch_size=32):
        for value in table[name]:
            value = getattr(value, "value", value)  # the lists of an `Array3D`
            value = value.values if isinstance(value, ListScalar) else value.as_py()
            while hasattr(value, "flatten"):
                value = value.flatten()
            yield value


def _content(value) -> bytes | str:
    """Alike for the same numbers in lists, arrays and tensors; of over 32,767 some are taken, spread evenly."""
    with contextlib.suppress(
        TypeError, ValueError, RuntimeError
    ):  # texts, or lists of uneven lengths
        value = (value if hasattr(value, "ravel") else np.asarray(value)).ravel()
        value = value[
            :: len(value) // 2**14 | 1
        ]  # in odd steps: even ones would pass over columns of images
        return np.asarray(value, np.float64).tobytes()
    return repr(value.tolist() if hasattr(value, "tolist") else value)


def check_parts(trainer: Trainer, dual_dataset) -> dict[str, set | dict]:
    """The keys of the rows that fit weights and multipliers, `seen`, and of those `evaluated`, by the names of their
    sets; shared ones are logged.

    ValueError where rows of `dual_dataset` are too few or cannot be counted, or over 1 % are in another part: people's
    data has duplicates."""
    if dual_dataset is not None and trainer.args.dual_holdout is not None:
        raise ValueError(
            "Give `dual_dataset` or `dual_holdout`, not both: either holds the rows of the multipliers."
        )
    if dual_dataset is not None and not (
        has_length(dual_dataset) and len(dual_dataset) >= LEAST_ROWS
    ):
        count = len(dual_dataset) if has_length(dual_dataset) else "no known number of"
        raise ValueError(
            f"`dual_dataset` has {count} rows; give {LEAST_ROWS} or more, in a dataset with a length."
        )
    sets, dual = (
        {"train_dataset": trainer.train_dataset, **evaluation_sets(trainer)},
        row_keys(trainer, dual_dataset),
    )
    keys = {name: row_keys(trainer, rows) for name, rows in sets.items()}
    for name, rows in sets.items() if dual_dataset is not None else ():
        share = np.isin(dual, keys[name]).mean() if dual else 0.0
        if dual_dataset is rows or share > MOST_SHARED:
            raise ValueError(
                f"`dual_dataset` has rows of `{name}` ({share:.1%} of those looked at): give others."
            )
    seen = {*keys.pop("train_dataset"), *dual}
    for name, found in keys.items():
        _report_shared_rows(found, seen, name)
    return {"seen": seen, "evaluated": keys}


def _report_shared_rows(keys: list[int], seen: set[int], name: str = "eval_dataset") -> None:
    """Log how many rows of an evaluation are among those `seen` in training, where there are any."""
    if count := sum(key in seen for key in keys):
        logger.warning(
            f"At least {count} of {len(keys)} rows of `{name}` ({count / len(keys):.1%}) are among those that the "
            "weights or the multipliers are fitted to: a verdict on them says less of new data."
        )


def is_of_training(trainer: Trainer, dataset, record: RunRecord) -> bool:
    """Whether an evaluation of `dataset` is on rows (over 1 %) that training was fitted to, which are logged, or those
    of its evaluations, which may choose the checkpoint, or in a search the settings."""
    seen, evaluated = record.seen, set().union(*record.evaluated.values())
    given = trainer.eval_dataset if dataset is None else dataset
    given = trainer.eval_dataset[given] if isinstance(given, str) else given
    own = next((name for name, rows in evaluation_sets(trainer).items() if rows is given), None)
    keys = record.evaluated.get(own, [])
    if own is None and (seen or evaluated):
        rows = trainer._held_out(given) if is_dataset(given) else given
        keys = row_keys(
            trainer, rows.dataset if isinstance(rows, DataLoader) else rows
        )  # TRL's, tokenised
        _report_shared_rows(keys, seen)
    fitted, chosen = (
        sum(key in known for key in keys) > MOST_SHARED * len(keys) for known in (seen, evaluated)
    )
    chosen = (chosen or own is not None) and (record.searched or trainer.args.eval_strategy != "no")
    return fitted or chosen or (given is trainer.train_dataset and record.started is not None)


def split(dataset, args: DescentArguments) -> tuple:
    """The rows of a training set that are trained on, in their order, and those held out, in random order, or `None`:
    objectives without multipliers train on all. They depend on the seed of the data, the number of rows and the share
    alone: a resumed run has the same. ValueError where there are too few, or they cannot be counted."""
    if args.dual_holdout is None or args.objective != "descent":
        return dataset, None
    is_stream = isinstance(dataset, IterableDataset) or not has_length(dataset)
    rows = 0 if is_stream else len(dataset)
    if (count := int(args.dual_holdout * rows)) < LEAST_ROWS:
        raise ValueError(
            f"`dual_holdout`={args.dual_holdout} of {'a stream' if is_stream else rows} is {count} rows to move the "
            f"multipliers on: give a share that makes {LEAST_ROWS} or more, or leave it out."
        )
    order = shuffled(dataset, args).indices
    # A `datasets.Dataset` stays one: Trainer drops its columns, and may sort it by a column of lengths.
    select = (
        dataset.select if hasattr(dataset, "select") else lambda indices: Subset(dataset, indices)
    )
    return select(sorted(order[count:])), Subset(dataset, order[:count])


def shuffled(rows, args: DescentArguments) -> Subset:
    """`rows` in a random order that depends on the seed of the data alone."""
    seed = args.seed if args.data_seed is None else args.data_seed
    return Subset(rows, np.random.default_rng(seed).permutation(len(rows)).tolist())


class HeldOutRows:
    """`count` rows that are not trained on, read in eval mode, without dropout but with the noise of training."""

    def __init__(self, trainer: Trainer, rows):
        self._trainer, self._rows, self.count = trainer, rows, len(rows)
        self._collate = trainer.get_test_dataloader(
            rows
        ).collate_fn  # drops columns, as in training
        logger.info(f"The multipliers move on {self.count} rows that are held out of training.")

    def layer_losses(self, layers: LayerLosses, turn: int) -> torch.Tensor:
        """Layer losses `[L]` of as many rows as an optimizer step takes, over all processes; NaN where none counts.
        Turns are counted from 0. They go through the rows in a circle, so that a turn reads the same in every run."""
        trainer, args = self._trainer, self._trainer.args
        model = trainer.model_wrapped
        size = trainer._train_batch_size if args.auto_find_batch_size else args.train_batch_size
        size //= args.world_size if trainer.accelerator.split_batches else 1
        parts = args.gradient_accumulation_steps * args.world_size
        own = range(
            turn * parts + args.process_index, (turn + 1) * parts, args.world_size
        )  # of all batches
        with drawing_apart(trainer, model, seed=turn):
            rows = [
                [self._rows[(part * size + row) % self.count] for row in range(size)]
                for part in own
            ]
            batches = list(map(self._collate, rows))
        # In float32, all that some devices have, sums lose digits.
        dtype = torch.float64 if args.device.type in ("cpu", "cuda") else torch.float32
        totals = torch.zeros(layers.num_layers + 1, dtype=dtype, device=args.device)
        model.eval()
        # The noise is entered once: its draws go on from one batch to the next.
        with (
            torch.no_grad(),
            trainer.compute_loss_context_manager(),
            trainer._noise_of_micro_batch(),
        ):
            for part, batch in zip(own, batches, strict=True):
                inputs = trainer._prepare_inputs(batch)
                measured = layers.measure(model, inputs, keep_logits=False, key=(part,))
                sums = measured.means * measured.items  # [layers]
                totals = totals + torch.cat([sums, measured.items.to(sums)[None]])
        model.train()
        for unit in model.modules():
            if isinstance(
                unit, FSDPModule
            ):  # one that is left whole would keep the step's gradient at `zero_grad`
                unit.reshard()
        sums = reduced(trainer, totals)  # [layers + 1]
        return (sums[:-1] / sums[-1]).float()
