import logging

import pytest
from tiny import bert, classification_data, config
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from hf_descent import DescentTrainer
from hf_descent.training.callbacks import show_messages


DATA = classification_data(32)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


@pytest.mark.parametrize("data", [DATA, Stream()], ids=["sized", "stream"])
def test_slacks_start_afresh_with_every_pass_over_the_data(tmp_path, data):
    seen = {}

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen[state.global_step] = trainer.multipliers.slack_steps.item()

    args = config(tmp_path, max_steps=10, resilience=1.0, resilience_form="slack")
    trainer = DescentTrainer(bert(), args, train_dataset=data, callbacks=[Watch()])
    trainer.train()
    assert trainer.multipliers.slack_steps.item() == 2
    if data is not DATA:
        assert seen[5] == seen[9] == 1
    if data is DATA:  # of which the last step is known: a callback that saves there comes after
        assert seen[4] == seen[8] == 0 < seen[5]


def test_messages_are_shown_from_the_level_that_was_chosen_on(tmp_path, monkeypatch):
    logger = logging.getLogger("hf_descent")
    for name, value in (("level", logging.NOTSET), ("handlers", []), ("propagate", False)):
        monkeypatch.setattr(logger, name, value)
    for level, shown in (("passive", logging.INFO), ("error", logging.ERROR)):
        show_messages(config(tmp_path, log_level=level))
        assert logger.level == shown and len(logger.handlers) == 1
