"""One training of a trainer: what it finds out once, what it counts in the present step, and what it has measured."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import Trainer

from ..constraints.state import DualState
from ..evaluation import Certificate
from ..losses.layerwise import BatchLosses, LayerLosses
from ..losses.task import TaskLoss
from ..noise.embedding_noise import EmbeddingNoise
from ..readout.pooling import ONE_TOKEN, reads_one_token
from ..readout.replay import Readout, probing
from ..readout.stack import unwrapped
from .checks import for_verdicts, report_layers_at_chance
from .dual_side import has_state, make_dual
from .judging import chance_in_training, judging_state
from .objective import LayerObjective
from .preparation import (
    find_layers,
    find_task,
    shared_batch,
    takes_items,
)
from .records import Evaluation, EvaluationTotals, RunRecord, StepTotals
from .references import LastLayerReferences, moment_of_reading


class DescentRun:
    """What a trainer knows of one training. Before the first one it has a run that never started.

    Args:
        record ([`RunRecord`], *optional*): see below.
        trainer (`Trainer`, *optional*): the trainer that trains; needed if it goes on from a checkpoint.

    Attributes:
        record ([`RunRecord`]): what is kept of the run for its summary and its card.
        references ([`LastLayerReferences`]): the loss of the last layer before training and after the warm-up.
        task ([`TaskLoss`], *optional*): found on the first batch, also of plain training that needs it.
        objective ([`LayerObjective`], *optional*): found on the first batch of a run that reads its layers.
        noise ([`EmbeddingNoise`], *optional*): the noise of training, with its scale.
        plain_judge ([`DualState`], *optional*): judges a model that was not trained under its problem; takes no
            steps.
        plain_layers ([`LayerLosses`], *optional*): the layers that evaluations of plain training read.
        evaluation ([`Evaluation`]): the facts about the present call of `evaluate` or `predict`.
        totals ([`EvaluationTotals`]): what the present evaluation has read so far.
        step ([`StepTotals`]): the optimizer step that is being taken.
    """

    def __init__(self, record: RunRecord | None = None, trainer: Trainer | None = None):
        if record is None:
            record = RunRecord()

        self.record = record
        self.references = LastLayerReferences()
        if record.resumed_from is not None:
            self.references = LastLayerReferences.load(record.resumed_from, trainer)
            self.record.load(record.resumed_from)

        self.task: TaskLoss | None = None
        self.objective: LayerObjective | None = None
        self.noise: EmbeddingNoise | None = None
        self.plain_judge: DualState | None = None
        self.plain_layers: LayerLosses | None = None
        self._chance: float | None = None  # of the training labels, for verdicts on plain training

        self.evaluation = Evaluation()
        self.totals = EvaluationTotals()
        self.step = StepTotals()

    @property
    def has_started(self) -> bool:
        return self.record.started is not None

    @property
    def dual(self) -> DualState | None:
        """The dual side of a run that reads its layers, once it is known."""
        return None if self.objective is None else self.objective.dual

    @property
    def judge(self) -> DualState | None:
        """What evaluations judge the model by: the dual side, or after plain training `plain_judge`."""
        return self.plain_judge if self.dual is None else self.dual

    @property
    def layers(self) -> LayerLosses | None:
        """The layer losses that training minimises, or that evaluations of plain training read. `None` until they are
        found."""
        return self.plain_layers if self.objective is None else self.objective.layers

    @property
    def readout(self) -> Readout | None:
        return None if self.layers is None else self.layers.readout

    # ---- found out once ----

    def known_objective(self) -> LayerObjective:
        """The objective; ValueError before a batch has shown the layers."""
        if self.objective is None:
            raise ValueError(
                "The layers are not known yet: `train`, `evaluate` and `predict` find them on their first batch."
            )
        return self.objective

    def has_layers_of(self, model: nn.Module) -> bool:
        """Whether the layers of this very model, with this head and these adapters, were found."""
        if self.readout is None:
            return False
        return self.readout.fits(unwrapped(model))

    def find_layers(
        self,
        trainer: Trainer,
        model: nn.Module,
        inputs: Mapping[str, Any],
        readout: Callable | None,
        dual_dataset,
    ) -> None:
        """Find the task and the layers on a batch, anew where the model has become another one; make or load the dual
        side, once."""
        model = unwrapped(model)
        inputs = shared_batch(inputs, trainer)
        self.task = find_task(trainer, model, inputs, readout)

        layers = find_layers(trainer, model, inputs, self.task, readout)
        dual = self.dual
        if dual is None:
            dual = make_dual(trainer, layers, inputs, dual_dataset, self.record.resumed_from)

        args = trainer.args
        self.objective = LayerObjective(layers, dual, args.process_index, args.world_size)

    def find_task(
        self, trainer: Trainer, model: nn.Module, inputs: Mapping[str, Any], finds_items: bool
    ) -> None:
        """Find the task loss of plain training on a batch. With `finds_items`, find out whether it divides by the
        items that it is given."""
        inputs = shared_batch(inputs, trainer)
        self.task = find_task(trainer, unwrapped(model), inputs)
        if finds_items:
            self.task.takes_items = takes_items(self.task, inputs)

    def find_plain_layers(
        self, trainer: Trainer, model: nn.Module, inputs: Mapping[str, Any]
    ) -> None:
        """Find the layers that evaluations of plain training read, on a batch."""
        model = unwrapped(model)
        inputs = shared_batch(inputs, trainer)
        with for_verdicts(), probing(model), trainer.compute_loss_context_manager():
            task = find_task(trainer, model, inputs)
            self.plain_layers = find_layers(trainer, model, inputs, task, None, is_minimised=False)

    def find_noise(self, model: nn.Module, trainer: Trainer) -> None:
        """Make the noise of training. Its scale, the deviation of the signal before training, serves evaluations under
        noise, too."""
        args = trainer.args
        if self.noise is None and (args.gamma_train > 0 or args.eval_gammas):
            sigma = trainer.noise_sigma()
            self.noise = EmbeddingNoise(unwrapped(model), args.noise_gamma, args.seed, sigma)

    def read_last_layer_if_due(self, trainer: Trainer) -> None:
        """Read f_L on the evaluation sets before training and at the end of the warm-up. A verdict derives the price
        of the constraints from it."""
        moment = moment_of_reading(trainer.state.global_step, self.dual.active_from)
        if moment is not None and moment not in self.references.times():
            self.references.read(trainer, self.objective.layers, moment)

    # ---- the present step ----

    def begin_step(self, step: StepTotals) -> None:
        """Begin an optimizer step."""
        self.step = step

    def end_step(self, skipped: bool) -> None:
        """End an optimizer step of a run that reads its layers: move the multipliers."""
        if self.objective is None:
            return
        self.objective.dual_step(self.step, skipped)

    # ---- evaluations ----

    @contextlib.contextmanager
    def evaluating(self, evaluation: Evaluation) -> Iterator[None]:
        """Within it, the present evaluation is this one."""
        before = self.evaluation
        self.evaluation = evaluation
        try:
            yield
        finally:
            self.evaluation = before

    def begin_evaluation(self) -> None:
        """Begin an evaluation."""
        self.totals = EvaluationTotals()
        if not self.has_started:
            # If the model was not trained here, f_0 comes from the rows evaluated, so it is found anew.
            self.objective = None

    def find_plain_judge(self, trainer: Trainer, num_layers: int, chance: float | None) -> None:
        """Find the problem that judges plain training. `chance` is the loss of the best constant prediction of the
        evaluated labels; it is used if the same loss on the training labels is not known."""
        has_ended = self.has_started and not trainer.is_in_train
        if has_ended and self._chance is None:
            self._chance = chance_in_training(trainer)
        if self._chance is not None:
            chance = self._chance
        self.plain_judge = judging_state(trainer, num_layers, chance, self.has_started)

    def add_batch(self, losses: BatchLosses, inputs: Mapping[str, Any]) -> None:
        """Add a batch to what the present evaluation has read."""
        layers = self.layers
        labels = None
        if layers.chance_loss is not None:
            labels = layers.chance_loss.of_batch(layers.task, inputs)
        self.totals = self.totals.plus(losses, labels)

    @contextlib.contextmanager
    def kept_if(self, counts: bool) -> Iterator[None]:
        """What is added to the present evaluation within it stays there if it `counts`; else it is taken back."""
        before = self.totals
        yield
        if not counts:
            self.totals = before

    def keep_certificate(self, certificate: Certificate, step: int) -> None:
        """Keep the certificate of the present evaluation, if that keeps a verdict."""
        if self.evaluation.keeps_verdict:
            self.record.keep_certificate(certificate, step)

    def begin_search(self) -> None:
        """From now on, evaluations choose settings."""
        self.record = replace(self.record, searched=True)

    # ---- checkpoints, and the end of training ----

    def save(self, folder: str, step: int, write: bool) -> None:
        """Save the dual side, the references and the verdict on the model after `step` into a checkpoint folder, on
        the process that is to `write`."""
        if self.dual is not None:
            self.dual.save(folder, write=write)
        if write:
            self.references.save(folder)
            self.record.save(folder, step)

    def go_back_to(self, checkpoint: str, step: int) -> None:
        """Take over the dual side and the verdict of the best checkpoint, whose model was loaded after `step`."""
        self.record.go_back_to(checkpoint, step)
        if self.dual is not None and has_state(checkpoint):
            self.dual.load(checkpoint)

    def end_training(self, trainer: Trainer) -> None:
        self.plain_judge = None  # found again with the f_0 of the training labels
        # A training that was resumed at its end has read no batch.
        self.find_noise(trainer.model, trainer)

    # ---- logs ----

    def additions_to(self, logs: Mapping[str, Any], step: int) -> dict[str, float]:
        """The numbers to add to Trainer's `logs` of a step, or of the end of training."""
        is_end = "train_runtime" in logs
        if self.dual is None or not (is_end or "loss" in logs):
            return {}
        report_layers_at_chance(self.readout, self.dual, step)
        if "loss" in logs:
            return self.dual.logs(step)
        advice = ""
        if reads_one_token(self.readout.model, self.readout.readout):
            advice = ONE_TOKEN
        return self.dual.report(advice)
