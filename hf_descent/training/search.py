"""`Trainer.hyperparameter_search` over arguments of several types, and trials with and without layers."""

from transformers.trainer_utils import default_compute_objective

from ..configs import JSON_ARGUMENTS


class SearchMixin:
    """The part of [`DescentMixin`] that searches; the spaces are in `search_space.py`."""

    def hyperparameter_search(
        self, hp_space=None, compute_objective=None, n_trials=20, direction="minimize", *args, **kwargs
    ):
        if compute_objective is None:
            if self._reads_layers and direction != "minimize":
                raise ValueError(
                    f"`direction` is {direction!r} but the default objective is `eval_loss`; pass `compute_objective`."
                )
            if self._reads_layers and isinstance(self.eval_dataset, dict):
                raise ValueError(
                    f"`eval_dataset` has several data sets ({', '.join(map(str, self.eval_dataset))}), and the "
                    "default objective is the loss of one; pass `compute_objective`, a function of their metrics."
                )
            compute_objective = _DefaultObjective()
        return super().hyperparameter_search(hp_space, compute_objective, n_trials, direction, *args, **kwargs)

    def _hp_search_setup(self, trial):
        # Trainer casts a value to the type of the one before; these arguments take several types.
        before = {name: getattr(self.args, name) for name in JSON_ARGUMENTS}
        for name in JSON_ARGUMENTS:
            setattr(self.args, name, _Uncast())
        try:
            super()._hp_search_setup(trial)
        finally:
            for name, value in before.items():
                if isinstance(getattr(self.args, name), _Uncast):
                    setattr(self.args, name, value)


class _Uncast:
    """Stands for an argument whose type, called with a new value, is to give that value."""

    def __new__(cls, *values):
        return values[0] if values else super().__new__(cls)


class _DefaultObjective:
    """`eval_loss` for trials that read layers, whose losses are no metrics to add up; Trainer's own for plain ones."""

    def __init__(self):
        self._found: set[str] = set()

    def __call__(self, metrics: dict[str, float]) -> float:
        reads_layers = any("_layer_loss_" in name for name in metrics)
        value, loss = default_compute_objective(dict(metrics)), metrics.get("eval_loss")
        if reads_layers and loss is None:
            raise ValueError(
                f"There is no `eval_loss` among the metrics ({', '.join(metrics)}): with several `eval_dataset`, pass "
                "`compute_objective`, a function of them."
            )
        if not reads_layers and value == loss:
            return value
        self._found.add("eval_loss" if reads_layers else "the sum of the metrics")
        if len(self._found) == 2:
            raise ValueError(
                f"The trials have no common default objective (metrics: {', '.join(metrics)}): pass "
                "`compute_objective`, a function of them."
            )
        return loss if reads_layers else value
