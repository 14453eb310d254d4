import json

from hf_descent.demo import ARMS, GAMMAS, NUM_LAYERS, demo


def test_a_short_demo_trains_every_arm_and_writes_table_figure_and_numbers(tmp_path, capsys):
    results = demo(str(tmp_path), seeds=(0,), max_steps=8)
    assert json.loads((tmp_path / "demo.json").read_text()) == json.loads(json.dumps(results))
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    for arm in ARMS:
        (run,) = results["arms"][arm]
        assert len(run["layer_losses"]) == NUM_LAYERS and len(run["rmse"]) == len(GAMMAS)
        assert run["rmse"] == sorted(run["rmse"])  # more noise, more error
    printed = capsys.readouterr().out
    assert "layer 1" in printed and "without noise" in printed
