import math

import defaults as benchmark
import pytest

from hf_descent import DescentConfig


@pytest.mark.parametrize("arm", benchmark.ARMS)
def test_every_arm_is_a_setting_that_the_package_takes(tmp_path, arm):
    DescentConfig(str(tmp_path), **benchmark.ARMS[arm])


def run_of(arm, seed, losses, steps=300):
    return {
        "settings": {"kind": "lora", "arm": arm, "seed": seed, "steps": steps},
        "losses": losses,
    }


def test_price_and_gain_are_those_of_runs_with_the_same_seed():
    runs = [
        run_of("plain", 0, [8.0, 4.0, 2.0]),
        run_of("plain", 1, [8.0, 4.0, 4.0]),
        run_of("defaults", 0, [4.0, 4.0, 2.1]),
        run_of("defaults", 1, [4.0, 4.0, 4.0]),
        run_of("no limit", 0, [4.0, 2.0, 3.0]),
        run_of("no limit", 1, [2.0, 4.0, 4.0]),
        run_of("defaults", 2, [1.0, 1.0, 1.0]),  # without a plain run
        run_of("defaults", 0, [1.0, 1.0, 1.0], steps=900),  # without one of its length
    ]
    columns, lines = benchmark.table(runs)
    found = {line[2]: dict(zip(columns, line, strict=True)) for line in lines}
    assert found["defaults"]["seeds"] == "2" and found["defaults"]["last layer"] == "3.050"
    assert found["defaults"]["price"] == "+2.5%" and found["defaults"]["highest price"] == "+5.0%"
    assert found["defaults"]["gain"] == f"{math.log(2) / 2:.2f}"
    assert found["defaults"]["share of gain"] == f"{math.log(2) / (2 * math.log(2)):.2f}"
    assert found["no limit"]["share of gain"] == "1.00" and found["plain"]["price"] == "-"


def test_an_exit_is_reached_where_its_ratio_is_at_most_what_was_asked():
    runs = [
        run_of("plain", 0, [9.0, 8.0, 7.0, 3.0, 2.0]),
        run_of("plain", 1, [9.0, 8.0, 7.0, 5.0, 4.0]),
        run_of("exit", 0, [9.0, 8.0, 7.0, 2.5, 2.2]),
        run_of("exit", 1, [9.0, 8.0, 7.0, 5.2, 4.0]),
        run_of("defaults", 1, [9.0, 8.0, 7.0, 5.0, 4.0]),
    ]
    columns, lines = benchmark.exit_table(runs)
    found = {line[2]: dict(zip(columns, line, strict=True)) for line in lines}
    assert found.keys() == {"plain", "exit"}
    assert found["exit"]["reached"] == "1 of 2" and found["exit"]["price"] == "+5.0%"
    assert found["exit"]["f_4 / f_L"] == f"{(2.5 / 2.2 + 1.3) / 2:.2f}"
    assert found["plain"]["reached"] == "1 of 2" and found["plain"]["f_4 / f_L"] == "1.38"


@pytest.mark.slow
def test_finished_runs_are_not_repeated(tmp_path, monkeypatch):
    output = tmp_path / "runs.jsonl"
    options = ["--smoke", "--seeds", "0", "--kinds", "denoiser", "--output", str(output)]
    table = benchmark.main(options)
    assert len(output.read_text().splitlines()) == 2 and "denoiser | 4 | defaults" in table

    def measured_again(*args, **kwargs):
        raise AssertionError("a finished run is repeated")

    monkeypatch.setattr(benchmark, "measure", measured_again)
    assert benchmark.main(options) == table
