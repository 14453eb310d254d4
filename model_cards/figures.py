"""Draws the figures of the cards anew, as PNG and SVG, from the numbers in their `model_card.json`.

python model_cards/figures.py
"""

import json
from pathlib import Path

import numpy as np

from hf_descent import DescentProblem
from hf_descent.evaluation import LayerProfile, NoiseCurve
from hf_descent.evaluation.comparison import Run
from hf_descent.evaluation.plots import plot_curves, plot_layers, save_figure


def run_of(card: dict, descent: dict) -> Run:
    """What version 0.1 measured of a card's model, or of its baseline; `descent` is what the layers were asked."""
    curve, layers = card["noise_curve"], card["layer_profile"]
    values, losses = np.array([curve["mean"]]).T, np.array(layers["losses"])
    names = ("alpha", "initial_loss_bound", "num_layers", "constrained_layers")
    rows = DescentProblem(*(descent[name] for name in names))
    # The sums of all data as one block: of a single block there is no interval.
    blocks = np.ones((1, len(losses), 4))
    blocks[..., 2] = losses
    profile = LayerProfile(
        layers["metric"], losses, layers["values"], layers["gamma"], problem=rows.state_dict(), blocks=blocks
    )
    noise = NoiseCurve(curve["metric"], curve["gammas"], values, values, curve["gamma_train"])
    return Run(card["model_name"], noise, {profile.gamma: profile}, {"objective": card["objective"]})


def groups_of(path: Path) -> dict[str, list[Run]]:
    """The model of a card and its baseline, by their names."""
    card = json.loads(path.read_text(encoding="utf-8"))
    return {each["model_name"]: [run_of(each, card["descent"])] for each in (card, card["baseline"])}


if __name__ == "__main__":
    for path in sorted(Path(__file__).parent.glob("*/model_card.json")):
        groups = groups_of(path)
        save_figure(plot_layers(groups), path.parent, "layers")
        save_figure(plot_curves(groups), path.parent, "noise")
