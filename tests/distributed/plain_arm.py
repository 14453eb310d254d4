"""Trains plainly and with constraints in one trainer, and each alone; prints whether they are the same trainings."""

import sys
from pathlib import Path

import torch


sys.path.insert(0, str(Path(__file__).parent.parent))
from tiny.data import classification_data
from tiny.models import bert
from tiny.training import config

from hf_descent import DescentTrainer


ROWS = classification_data(64, pad=False)
TEST = classification_data(48, seed=1, pad=False)


def trainer_in(folder, **settings):
    args = config(folder, eval_strategy="steps", eval_steps=3, **settings)
    return DescentTrainer(bert(dropout=0.1), args, train_dataset=ROWS, eval_dataset=TEST)


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def main(output_dir):
    both = trainer_in(f"{output_dir}/both")
    found = both.train_with_plain()
    alone = {}
    profiles = {}
    for name in ("erm", "descent"):  # each is made just before it trains: that sets the seed
        alone[name] = trainer_in(f"{output_dir}/{name}", objective=name)
        alone[name].train()
        profiles[name] = alone[name].evaluate_layers()
    assert weights(both).equal(weights(alone["descent"]))
    assert (found.plain.losses == profiles["erm"].losses).all()
    assert (found.trained.losses == profiles["descent"].losses).all()


if __name__ == "__main__":
    main(sys.argv[1])
