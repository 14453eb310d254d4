import random

import numpy as np
import torch

from hf_descent import random_state


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002


def test_generators_continue_as_if_nothing_had_been_drawn():
    with random_state.preserved([]):
        first = draw()
    assert draw() == first
    assert draw() != first


def test_torch_states_replay_the_same_draws():
    states = random_state.torch_states([])
    first = torch.rand(3)
    random_state.set_torch_states(states, [])
    assert torch.equal(torch.rand(3), first)


def test_parameters_on_the_cpu_need_no_accelerator():
    assert random_state.accelerators(torch.nn.Linear(2, 2)) == []
