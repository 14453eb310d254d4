"""Verdicts between groups of runs: against the textbook tests that they reduce to, and by their rate of errors."""

import json
import shutil

import numpy as np
import pytest
from runs import GAMMAS, make_profile, make_run, save_run
from scipy import stats

from hf_descent.evaluation.comparison import Run, compare, difference


def groups_of(before, after, **options):
    """Runs from accuracies of rows, `[seeds, rows]`."""
    return {
        name: [make_run(rows, seed=seed, **options) for seed, rows in enumerate(side)]
        for name, side in (("erm", before), ("descent", after))
    }


def accuracies(seeds, rows, mean, of_seeds, of_rows, noise, generator):
    """Accuracies with a part of each seed, a part of each row and a rest, `[seeds, rows]`."""
    rest = noise * generator.normal(size=(seeds, rows))
    return mean + of_seeds * generator.normal(size=(seeds, 1)) + of_rows + rest


def test_with_no_part_of_the_data_it_is_the_paired_t_test():
    generator = np.random.default_rng(0)
    before, after = (
        np.repeat(0.5 + 0.05 * generator.normal(size=(5, 1)), 8, axis=1) for _ in range(2)
    )
    groups = groups_of(before, after)
    groups["descent"].reverse()
    found = difference(groups, "erm", "descent")
    expected = stats.ttest_rel(after[:, 0], before[:, 0])
    assert found.paired
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-6)
    low, high = expected.confidence_interval(0.95)
    assert (found.estimate, found.radius) == pytest.approx(
        ((low + high) / 2, (high - low) / 2), rel=1e-6
    )


def test_with_other_seeds_it_is_welchs_test():
    generator = np.random.default_rng(1)
    before = np.repeat(0.5 + 0.05 * generator.normal(size=(3, 1)), 8, axis=1)
    after = np.repeat(0.6 + 0.01 * generator.normal(size=(6, 1)), 8, axis=1)
    found = difference(groups_of(before, after), "erm", "descent")
    expected = stats.ttest_ind(after[:, 0], before[:, 0], equal_var=False)
    assert not found.paired
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-6)
    assert found.freedom == pytest.approx(expected.df, rel=1e-6)
    twice = groups_of(before[:2], after[:2])
    for run in twice["erm"] + twice["descent"]:
        run.summary["arguments"]["seed"] = 0
    assert not difference(twice, "erm", "descent").paired
    for run in twice["descent"]:
        del run.summary["arguments"]["seed"]
    for baseline, group in (("erm", "descent"), ("descent", "erm")):
        assert not difference(twice, baseline, group).paired


def test_with_both_parts_it_is_the_test_of_reader_studies():
    """By the mean squares of an analysis of variance (Hillis 2007, equations 6 and 9)."""
    generator = np.random.default_rng(9)
    before, after = (
        accuracies(4, 8, 0.5, 0.03, 0.05 * generator.normal(size=8), 0.02, generator)
        for _ in range(2)
    )
    table = after - before
    of_seeds, of_rows = 8 * table.mean(1).var(ddof=1), 4 * table.mean(0).var(ddof=1)
    rest = (31 * table.var(ddof=1) - 3 * of_seeds - 7 * of_rows) / 21
    both = of_seeds + of_rows - rest
    found = difference(groups_of(before, after), "erm", "descent")
    assert found.freedom == pytest.approx(3 * (both / of_seeds) ** 2)
    assert found.radius == pytest.approx(stats.t.ppf(0.975, found.freedom) * np.sqrt(both / 32))


def test_what_the_data_decides_widens_the_interval():
    """Every seed gains on the same rows and loses on the same others: another test set might turn it round."""
    generator = np.random.default_rng(2)
    of_rows = 0.2 * generator.normal(size=12)
    before = accuracies(4, 12, 0.5, 0.0, 0.0, 0.01, generator)
    after = accuracies(4, 12, 0.55, 0.0, of_rows - of_rows.mean(), 0.01, generator)
    found = difference(groups_of(before, after), "erm", "descent")
    assert stats.ttest_rel(after.mean(1), before.mean(1)).pvalue < 0.01
    assert found.verdict == "not significant"
    assert found.radius == pytest.approx(found.data_radius, rel=0.2)
    same = accuracies(4, 12, 0.55, 0.0, 0.0, 0.01, generator)
    assert difference(groups_of(before, same), "erm", "descent").verdict == "better"


def test_the_estimate_is_the_difference_of_what_the_curves_say():
    groups = groups_of(*np.random.default_rng(9).uniform(0.3, 0.9, (2, 3, 8)))
    for run in groups["erm"] + groups["descent"]:
        run.curve.metric = "rmse"
        run.curve.values = np.sqrt(run.curve.values)
    before, after = (
        np.mean([run.curve.auc_over_range for run in groups[name]]) for name in ("erm", "descent")
    )
    assert difference(groups, "erm", "descent").estimate == pytest.approx(after - before, rel=1e-9)


def test_seeds_that_agree_by_chance_prove_nothing():
    """Two seeds that lose one row of many each: the same difference to the last digit, on other rows."""
    before = np.full((2, 10), 0.7)
    after = before.copy()
    after[0, 3] -= 0.1
    after[1, 6] -= 0.1
    found = difference(groups_of(before, after), "erm", "descent")
    assert found.estimate == pytest.approx(-0.01)
    assert found.verdict == "not significant" and found.p_value > 0.05
    assert found.radius == pytest.approx(found.data_radius)


@pytest.mark.parametrize(("size", "second"), [(0.026, [1, 1, -1, -1]), (0.009, [-1, 1, -1, 1])])
def test_few_seeds_prove_no_more_where_the_data_is_sure(size, second):
    """Two seeds gain 0.02 and 0.03; what their rows add is their own."""
    before = np.full((2, 8), 0.5)
    own = size * np.array([2 * [1, -1, 1, -1], 2 * second])
    after = before + np.array([[0.02], [0.03]]) + own
    assert stats.ttest_1samp((after - before).mean(axis=0), 0).pvalue < 0.01
    found = difference(groups_of(before, after), "erm", "descent")
    expected = stats.ttest_rel(after.mean(1), before.mean(1))
    assert expected.pvalue > 0.1
    assert found.verdict == "not significant" and found.p_value == pytest.approx(
        expected.pvalue, rel=1e-6
    )
    assert found.radius == pytest.approx(
        np.diff(expected.confidence_interval(0.95))[0] / 2, rel=1e-6
    )


@pytest.mark.parametrize("paired", [True, False])
def test_false_verdicts_are_as_rare_as_stated(paired):
    """Seeds, data and a rest of comparable parts, the same means; the data's part differs between the groups."""
    generator = np.random.default_rng(3)
    wrong = 0
    for _ in range(300):
        sides = [
            accuracies(3, 8, 0.5, 0.02, 0.02 * generator.normal(size=8), 0.04, generator)
            for _ in range(2)
        ]
        groups = groups_of(*sides)
        if not paired:
            for run in groups["descent"]:
                run.summary["arguments"]["seed"] += 100
        wrong += difference(groups, "erm", "descent").verdict != "not significant"
    assert stats.binomtest(wrong, 300, 0.05, alternative="greater").pvalue > 1e-3


def test_verdicts_in_words():
    generator = np.random.default_rng(4)
    low, high = (accuracies(3, 8, mean, 0.001, 0.0, 0.001, generator) for mean in (0.5, 0.7))
    assert "descent is better, statistically significant at 95 %" in str(
        difference(groups_of(low, high), "erm", "descent")
    )
    worse = difference(groups_of(high, low), "erm", "descent")
    assert worse.verdict == "worse" and "paired by seed" in str(worse)
    again = accuracies(3, 8, 0.5, 0.001, 0.0, 0.001, generator)
    assert "no statistically significant difference at 95 %" in str(
        difference(groups_of(low, again), "erm", "descent")
    )
    single = difference(groups_of(low[:1], high[:1]), "erm", "descent")
    assert single.verdict == "open" and np.isinf(single.radius)
    assert "Train at least two seeds" in str(single)
    errors = groups_of(low, high)
    for run in errors["erm"] + errors["descent"]:
        run.curve.greater_is_better = False
    assert difference(errors, "erm", "descent").verdict == "worse"


def test_only_runs_under_the_same_noise_and_data_are_compared(tmp_path):
    generator = np.random.default_rng(5)
    folders = [
        save_run(tmp_path / name, make_run(generator.random(6), objective=name))
        for name in ("erm", "descent")
    ]
    assert compare(folders).differences[0].verdict == "open"
    for name, value in (("scale", 255.0), ("metric", "f1")):
        other = make_run(generator.random(6), objective="hinge")
        setattr(other.curve, name, value)
        with pytest.raises(ValueError, match="were not evaluated on the same data"):
            compare([*folders, save_run(tmp_path / name, other)])
    settings = (
        {"batch_size": 5},
        {"samples": 61},
        {"data": "other rows"},
        {"perturbation": "gaussian (Own)"},
    )  # as many rows
    for change in ({"noise_seed": 1}, {"gammas": GAMMAS + 0.1}, *settings):
        made = {} if change in settings else change
        run = make_run(generator.random(6), objective="hinge", **made)
        run.curve.settings |= change if change in settings else {}
        other, named = (
            save_run(tmp_path / "other", run),
            rf"'{next(iter(change))}'" if change in settings else "",
        )
        with pytest.raises(
            ValueError,
            match=rf"were not evaluated on the same data, levels and noise \(\[.*{named}",
        ):
            compare([*folders, other])
    with pytest.raises(ValueError, match="at least two ways of training"):
        compare(folders[:1])
    with pytest.raises(
        ValueError, match="holds no noise_curve.json of its last training; run `hf-descent evaluate"
    ):
        compare([str(tmp_path), folders[0]])
    with pytest.raises(ValueError, match="too few examples"):
        compare(
            [
                save_run(tmp_path / name, make_run([0.5], objective=name))
                for name in ("erm", "descent")
            ]
        )


def test_what_proves_nothing_is_refused_or_said(tmp_path):
    generator = np.random.default_rng(7)
    folders = [
        save_run(
            tmp_path / f"{name}-{seed}", make_run(generator.random(6), objective=name, seed=seed)
        )
        for name in ("erm", "descent")
        for seed in range(3)
    ]
    named = [
        shutil.copytree(folder, f"{tmp_path}/descent_seed{seed}")
        for seed, folder in enumerate(folders[3:])
    ]
    assert [*compare([*folders[:3], *named]).groups] == ["erm", "descent"]
    for confidence in (95, 0, -1):
        with pytest.raises(ValueError, match=f"`confidence` is {confidence}"):
            compare(folders, confidence=confidence)
    shutil.copytree(folders[0], tmp_path / "erm-7")
    for again in (f"{tmp_path}/./erm-0", str(tmp_path / "erm-7")):
        with pytest.raises(
            ValueError, match=r"'erm' have the seeds \[0, 1, 2, 0\].*Give each once"
        ):
            compare([*folders[:3], again, *folders[3:5]])
    save_run(
        tmp_path / "erm-1", make_run([0.5, np.nan, 0.5, 0.6, 0.7, 0.4], objective="erm", seed=1)
    )
    comparison = compare(folders)
    assert comparison.differences[0].verdict == "open" and "accuracy that is not finite" in str(
        comparison
    )


def test_feasible_is_meant_at_the_training_noise(tmp_path):
    run = make_run([0.5, 0.6], objective="descent")
    run.summary["noise_gamma"], run.profiles[0.0] = (
        [1.0, 2.0],
        make_profile([0.9, 0.6, 0.4], 0.0, True),
    )
    run.profiles[2.0] = make_profile([0.9, 0.6, 0.4], 2.0, False)
    folder = save_run(tmp_path / "run", run)
    assert Run.load(folder).feasible is False


def test_all_verdicts_hold_together(tmp_path):
    generator = np.random.default_rng(6)
    names = ("erm", "descent", "hinge")
    folders = [
        save_run(
            tmp_path / f"{name}-{seed}", make_run(generator.random(6), objective=name, seed=seed)
        )
        for name in names
        for seed in range(3)
    ]
    comparison = compare(folders, baseline="hinge")
    assert list(comparison.groups) == ["hinge", "erm", "descent"]
    assert [found.confidence for found in comparison.differences] == [0.975] * 2
    assert "The level is 97.5 % for each of the 2, so that it is 95 % for all together." in str(
        comparison
    )
    assert "level 1" not in str(comparison).splitlines()[1]  # all have one unit of noise
    written = json.loads(json.dumps(comparison.to_dict()))
    assert written["groups"]["erm"]["seeds"] == [0, 1, 2]
    assert written["differences"][0]["verdict"] == comparison.differences[0].verdict
    averages = [run.curve.auc_over_range for run in comparison.groups["erm"]]
    assert written["groups"]["erm"]["auc_over_range"] == pytest.approx(
        [np.mean(averages), np.std(averages, ddof=1)]
    )


def test_all_groups_are_in_distribution_up_to_the_same_level(tmp_path):
    """Of runs that were trained without noise, too: else their part with more noise would be that of other levels."""
    runs = [make_run([0.5, 0.6], objective="erm"), make_run([0.5, 0.6], objective="descent")]
    for run, level in zip(runs, (0.0, 1.0)):
        run.curve.gamma_train, run.curve.settings["sigma"] = level, 0.5 + level
    comparison = compare([save_run(tmp_path / run.summary["objective"], run) for run in runs])
    groups = comparison.to_dict()["groups"]
    for name in ("erm", "descent"):
        assert (groups[name]["auc_id"][0], groups[name]["auc_ood"][0]) == pytest.approx((0.5, 0.4))
    assert "As in training: noise levels up to 1; more noise: beyond." in str(comparison)
    assert groups["descent"]["sigma"][0] == 1.5
    assert "level 1" in str(comparison).splitlines()[1]  # the two have another unit of noise
    assert comparison.groups["erm"][0].curve.gamma_train == 0.0
    runs = [
        make_run([0.5, 0.6], objective=name, gammas=GAMMAS + 0.5) for name in ("erm", "descent")
    ]
    found = compare([save_run(tmp_path / run.summary["objective"], run) for run in runs]).to_dict()
    assert np.isnan(found["groups"]["erm"]["clean"][0])  # without level 0


def test_the_table_counts_feasible_runs_at_the_training_level(tmp_path):
    erm = make_run([0.5, 0.6], objective="erm")
    runs = [make_run([0.5, 0.6], seed, "descent", False) for seed in range(3)]
    for run, feasible in zip(
        runs, (True, False)
    ):  # the third was not profiled at the training level
        run.profiles[1.0] = make_profile([0.9, 0.6, 0.4], 1.0, feasible)
    # Judged by the problem that its arguments state, though it was trained to meet none.
    supervised = make_run([0.5, 0.6], 0, "deep_supervision")
    supervised.profiles[1.0] = make_profile([0.9, 0.6, 0.4], 1.0, True)
    comparison = compare(
        [
            save_run(tmp_path / f"{run.summary['objective']}-{run.seed}", run)
            for run in (erm, *runs, supervised)
        ]
    )
    rows = str(comparison).splitlines()
    row, other = (
        next(line for line in rows if line.startswith(arm))
        for arm in ("descent ", "deep_supervision")
    )
    assert row.split()[-3:] == ["1", "of", "2"] and other.split()[-3:] == ["1", "of", "1"]
