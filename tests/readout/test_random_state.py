import random
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from hf_descent.readout import random_state


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002


@pytest.mark.parametrize("fails", [False, True])
def test_generators_continue_as_if_nothing_had_been_drawn(fails):
    with suppress(KeyError), random_state.preserved([]):
        first = draw()
        if fails:
            raise KeyError
    assert draw() == first
    assert draw() != first


def test_offloaded_parameters_are_those_of_the_device_that_computes(monkeypatch):
    mesh = DeviceMesh("cuda", [0], _init_backend=False, _rank=0)
    spec = DTensorSpec(
        mesh, (Shard(0),), tensor_meta=TensorMeta(torch.Size([2]), (1,), torch.float32)
    )
    model = torch.nn.ParameterList(
        [torch.nn.Parameter(DTensor(torch.zeros(2), spec, requires_grad=False))]
    )
    assert model[0].device.type == "cpu"
    monkeypatch.setattr(
        torch, "get_device_module", lambda kind: SimpleNamespace(current_device=lambda: 3)
    )
    assert random_state.accelerators(model) == [torch.device("cuda", 3)]
    assert random_state.accelerators(torch.nn.Linear(2, 2)) == []


def test_devices_are_found_anew_where_other_parameters_take_their_place_or_move(monkeypatch):
    model = torch.nn.Linear(2, 2)
    assert random_state.accelerators(model) == []
    searched = []
    monkeypatch.setattr(random_state, "_accelerators_of", lambda found: searched.append(found))
    random_state.accelerators(model)
    assert searched == []

    model.weight = torch.nn.Parameter(torch.zeros(2, 2))
    random_state.accelerators(model)
    model.to("meta")
    random_state.accelerators(model)
    random_state.accelerators(model)
    assert len(searched) == 2
    assert searched[1][0].device.type == "meta"
