"""The figures show the numbers of the runs, tell groups apart without colour, and are written as PNG and SVG."""

import numpy as np
import pytest
from runs import GAMMAS, make_run

from hf_descent.evaluation import plots
from hf_descent.evaluation.comparison import Comparison, difference


@pytest.fixture
def groups():
    generator = np.random.default_rng(0)
    arms = {"erm": {}, "descent": {}, "deep_supervision": {"losses": (0.8, 0.5, 0.45)}}
    return {
        name: [
            make_run(generator.random(6), seed=seed, objective=name, **options) for seed in range(3)
        ]
        for name, options in arms.items()
    }


def bars(axes, number):
    """The mean of a line and the ends of its bars, `[points]` and `[points, (low, high)]`."""
    mean, _, (found,) = axes.containers[number].lines
    return mean.get_ydata(), np.array(found.get_segments())[..., 1]


def test_curves_are_means_with_the_range_over_seeds(groups):
    axes, run = plots.plot_curves(groups).axes[0], groups["erm"][0]
    for number, (name, runs) in enumerate(groups.items()):
        values = np.stack([run.curve.mean for run in runs])
        mean, ends = bars(axes, number)
        np.testing.assert_allclose(mean, values.mean(0))
        np.testing.assert_allclose(ends, np.stack([values.min(0), values.max(0)], axis=1))
        assert axes.containers[number].get_label() == name
    np.testing.assert_allclose(axes.containers[1].lines[0].get_xdata(), GAMMAS)
    # Of a single run it is the interval, where there are enough rows.
    run.curve.parts = np.tile(run.curve.parts, (20, 1))
    _, ends = bars(plots.plot_curves({"erm": [run]}).axes[0], 0)
    assert ends[0, 1] == pytest.approx(run.curve.mean[0] + run.curve.radius("mean")[0])


def test_layers_have_a_panel_for_each_level_that_all_runs_have(groups):
    figure = plots.plot_layers(groups)
    assert [axes.get_title() for axes in figure.axes] == ["without noise", "noise level 2"]
    np.testing.assert_allclose(bars(figure.axes[1], 2)[0], [0.8, 0.5, 0.45])
    for run in groups["descent"]:
        run.curve.gamma_train = 2.0
    assert plots.plot_layers(groups).axes[1].get_title() == "noise level 2 (training level)"
    assert plots.plot_layers(groups).axes[0].get_yscale() == "linear"
    groups["erm"] = [make_run([0.5, 0.6], losses=(9.0, 5.0, 0.4))]
    assert {axes.get_yscale() for axes in plots.plot_layers(groups).axes} == {"log"}
    del groups["erm"][0].profiles[2.0]
    assert len(plots.plot_layers(groups).axes) == 1


def test_the_loss_that_each_row_asks_for_is_drawn_and_the_interval_of_a_single_run():
    run = make_run([0.5, 0.6], objective="descent", feasible=True)
    profile = run.profiles[0.0]
    profile.row_sums[:, :-1] += np.linspace(-0.1, 0.1, 40)[:, None]
    axes = plots.plot_layers({"descent": [run]}).axes[0]
    (asked,) = [line for line in axes.lines if line.get_label() == "descent: asked"]
    np.testing.assert_array_equal(asked.get_xdata(), [1, 2, 3])
    bounds = 0.999 * np.array([1.1 * profile.losses[0], *profile.losses[:2]])
    np.testing.assert_allclose(asked.get_ydata(), bounds, rtol=1e-6)
    _, ends = bars(axes, 0)
    np.testing.assert_allclose(ends[:, 1] - profile.losses, profile.loss_radii)


def test_every_figure_that_has_data_is_written_twice(groups, tmp_path):
    def written():
        return set(plots.save_comparison(Comparison(groups, [verdict]), str(tmp_path)))

    verdict = difference(groups, "erm", "descent")
    texts = {"comparison.json", "comparison.txt"}
    figures = {
        f"{name}.{ending}"
        for name in ("metric_against_noise", "layer_losses")
        for ending in ("png", "svg")
    }
    assert written() == texts | figures
    assert all((tmp_path / file).stat().st_size > 5000 for file in figures)
    for runs, gamma in zip(groups.values(), (0.0, 2.0)):
        for run in runs:
            run.profiles = {gamma: run.profiles[gamma]}
    assert written() == texts | {"metric_against_noise.png", "metric_against_noise.svg"}
