"""Short trainings, and what to watch them with."""

import torch
from torch.utils.data import SequentialSampler
from transformers import TrainerCallback

from hf_descent import DescentConfig, DescentTrainer
from tiny.devices import TEST_DEVICE


def config(output_dir, **arguments):
    """Quick, silent training arguments; constraints known from the start unless said otherwise."""
    defaults = {
        "report_to": "none",
        "use_cpu": TEST_DEVICE == "cpu",
        "disable_tqdm": True,
        "save_strategy": "no",
        "per_device_train_batch_size": 8,
        "max_steps": 6,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "descent_alpha": 0.3,
        "initial_loss_bound": 1.0,
        "dual_warmup_steps": 0,
    }
    return DescentConfig(output_dir=str(output_dir), **{**defaults, **arguments})


class InOrder(DescentTrainer):
    """Takes the training rows in their order, so that a test knows each batch."""

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


def fitted(trainer, checkpoint=None):
    """The trainer after training, from a checkpoint on where one is given."""
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def trained(model, args, trainer_class=DescentTrainer, **keywords):
    """A trainer of this class after training."""
    return fitted(trainer_class(model, args, **keywords))


def watch(event, see):
    """A callback, and the list of what it sees at each event: `see(args, state, arguments)`."""
    seen = []

    def keep(self, args, state, control, **kwargs):
        seen.append(see(args, state, kwargs))

    return type("Watch", (TrainerCallback,), {event: keep})(), seen


def dual_step(state, losses, step):
    """Gives a `DualState` the mean layer losses `[L]` of an optimizer step."""
    state.take_step(torch.cat([losses, torch.ones(1)]), step)
