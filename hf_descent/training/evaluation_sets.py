"""The evaluation sets of a trainer, whose `eval_dataset` is one data set or a dict of several, by their names."""

from typing import Any


def evaluation_sets(eval_dataset) -> dict[str, Any]:
    """A trainer's data sets of evaluations in training by their names, a single one as "eval_dataset"."""
    sets = eval_dataset
    if not isinstance(sets, dict):
        sets = {"eval_dataset": sets}
    return {name: rows for name, rows in sets.items() if rows is not None}


def name_of_set(eval_dataset, dataset) -> str | None:
    """The name of the set of a trainer's `eval_dataset` that `evaluate(dataset)` would take; `None` for other data."""
    sets = evaluation_sets(eval_dataset)
    if isinstance(dataset, str) and dataset in sets:
        return dataset  # several names may stand for one data set
    rows = rows_of(eval_dataset, dataset)
    for name, known in sets.items():
        if known is rows:
            return name
    return None


def rows_of(eval_dataset, dataset) -> Any:
    """The data set that `evaluate(dataset)` takes, with a trainer's `eval_dataset`; of several sets the dict."""
    if dataset is None:
        return eval_dataset
    if isinstance(dataset, str) and isinstance(eval_dataset, dict):
        return eval_dataset.get(dataset)
    return dataset


def set_of_metric(eval_dataset, metric: str | None) -> str | None:
    """The name of the set of a trainer's several evaluation sets that a metric is of; `None` where it is of none."""
    if metric is None or not isinstance(eval_dataset, dict):
        return None
    metric = metric.removeprefix("eval_")
    names = [name for name in eval_dataset if metric.startswith(f"{name}_")]
    return max(names, key=len, default=None)
