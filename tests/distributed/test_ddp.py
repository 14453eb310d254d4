"""One process with batch 8, two with batch 4, and two with batch 2 twice accumulated take the same steps under DDP."""

import pytest
from launching import assert_same, launch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "settings"),
    [
        ("classification", {}),
        ("language", {"initial_loss_bound": 4.0, "dual_learning_rate": 0.1}),
        ("image", {"ddp_find_unused_parameters": False}),
        ("image", {"ddp_find_unused_parameters": True}),
        ("image", {"objective": "erm"}),
        ("language", {"descent_alpha": "auto", "initial_loss_bound": "auto", "dual_warmup_steps": 4}),
    ],
)
def test_the_number_of_processes_does_not_matter(tmp_path, task, settings):
    single = launch(tmp_path / "1x8", task, 8, 1, 1, **settings)
    for name, batch, accumulation in (("2x4", 4, 1), ("2x2x2", 2, 2)):
        double = launch(tmp_path / name, task, batch, accumulation, 2, **settings)
        assert (single[0]["processes"], double[0]["processes"]) == (1, 2)
        assert double[0]["type"] == "MULTI_CPU"
        assert_same(single, double)
    assert max(single[0]["multipliers"][0]) > 0.01 or "objective" in settings
