import pytest
from tiny import bert, classification_data, config
from torch.utils.data import IterableDataset

from hf_descent import DescentTrainer


DATA = classification_data(32)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


@pytest.mark.parametrize("data", [DATA, Stream()], ids=["sized", "stream"])
def test_slacks_start_afresh_with_every_pass_over_the_data(tmp_path, data):
    args = config(tmp_path, max_steps=10, resilience=1.0, resilience_form="slack")
    trainer = DescentTrainer(bert(), args, train_dataset=data)
    restarts, restart = [], trainer._after_epoch
    trainer._after_epoch = lambda: (restarts.append(trainer.state.global_step), restart())
    trainer.train()
    assert sorted({*restarts}) == [4, 8]
    assert trainer.multipliers.slack_steps.item() == 2
