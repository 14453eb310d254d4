"""The evaluation sets of a trainer by their names; its `eval_dataset` is one data set, or a dict of several."""

from typing import Any


def evaluation_sets(eval_dataset) -> dict[str, Any]:
    """A trainer's evaluation sets by their names; a single set is called "eval_dataset"."""
    sets = eval_dataset
    if not isinstance(sets, dict):
        sets = {"eval_dataset": sets}
    return {name: rows for name, rows in sets.items() if rows is not None}


def name_of_set(eval_dataset, dataset) -> str | None:
    """The name of the trainer's evaluation set that `evaluate(dataset)` would take; `None` for other data."""
    sets = evaluation_sets(eval_dataset)
    if isinstance(dataset, str) and dataset in sets:
        return dataset  # several names may stand for one data set
    rows = rows_of(eval_dataset, dataset)
    for name, known in sets.items():
        if known is rows:
            return name
    return None


def rows_of(eval_dataset, dataset) -> Any:
    """The data set that `evaluate(dataset)` takes, given a trainer's `eval_dataset`, or the dict of several sets."""
    if dataset is None:
        return eval_dataset
    if isinstance(dataset, str) and isinstance(eval_dataset, dict):
        return eval_dataset.get(dataset)
    return dataset


def set_of_metric(eval_dataset, metric: str | None) -> str | None:
    """The name of the evaluation set that a metric belongs to, as `accuracy` of "a" in `eval_a_accuracy`; `None` for a
    single set, and for a metric of none."""
    if metric is None or not isinstance(eval_dataset, dict):
        return None
    metric = metric.removeprefix("eval_")
    names = [name for name in eval_dataset if metric.startswith(f"{name}_")]
    return max(names, key=len, default=None)
