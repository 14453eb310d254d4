"""The problem by which evaluations judge a model that this trainer did not train under constraints."""

from transformers import Trainer

from ..constraints.state import DualState
from ..logs import get_logger
from ..losses.chance_probe import find_chance_loss
from ..readout.replay import probing
from ..readout.stack import unwrapped
from ..runs import RunFolder
from .chance import collated, drawing_apart, is_readable_once, measure_chance
from .preparation import find_task, loaded_from, shared_batch


logger = get_logger(__name__)


def judging_state(
    trainer: Trainer, num_layers: int, chance: float | None, has_started: bool
) -> DualState:
    """A dual side without steps, whose `problem` is that of a trainer's arguments. If they state none and no training
    of this trainer `has_started`, it is the problem of the run that the model comes from.

    The `problem` is `None` if f_0 is not known. `chance` is the loss of the best constant prediction of the training
    labels, or of those evaluated; 0 (all labels are alike) says nothing.
    """
    if chance == 0:
        chance = None
    dual = DualState(trainer.args, num_layers, 0, 0, chance)  # 0 steps: it only judges
    if not has_started:
        dual.take_saved_problem(RunFolder(loaded_from(trainer.model)).summary)

    if dual.problem is None and (trainer.args.exit_targets or trainer.args.loss_targets):
        logger.warning_once(
            "The targets are not judged: the loss of a constant prediction, above which no layer meets them, is not "
            "known. Set `initial_loss_bound` to a number."
        )
    return dual


def chance_in_training(trainer: Trainer) -> float | None:
    """The loss of the best constant prediction of the training labels, as in constrained training; `None` if it is not
    known."""
    data = trainer.train_dataset
    if data is None or is_readable_once(data):
        return None

    model = unwrapped(trainer.model)
    with drawing_apart(trainer, model):
        batch = next(collated(trainer, data, trainer.args.train_batch_size))

    with probing(model), trainer.compute_loss_context_manager():
        inputs = shared_batch(trainer._prepare_inputs(batch), trainer)
        task = find_task(trainer, model, inputs)
        inputs = task.short(inputs)
        try:
            chance_loss = find_chance_loss(task, inputs, model(**task.model_inputs(inputs)))
            return measure_chance(trainer, task, chance_loss, data)
        except ValueError:
            return None
