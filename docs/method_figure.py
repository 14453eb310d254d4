"""Draws method.svg: layer losses of `hf-descent demo --paper`, mean and range of its seeds, and the line under them.

python docs/method_figure.py
"""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure


ALPHA, START = 0.05, 1.0
# Of three seeds the mean, the least and the greatest, by layer.
PLAIN = (
    [6.71, 8.44, 9.00, 6.81, 0.29],
    [6.27, 7.93, 8.45, 6.31, 0.28],
    [7.11, 8.93, 9.56, 7.19, 0.30],
)
CONSTRAINED = (
    [0.68, 0.50, 0.39, 0.33, 0.28],
    [0.68, 0.49, 0.38, 0.32, 0.28],
    [0.69, 0.51, 0.40, 0.35, 0.29],
)


def main(path=Path(__file__).parent / "method.svg"):
    layers, all_layers = np.arange(1, 6), np.arange(6)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "method", "font.size": 11}):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        line = START * (1 - ALPHA) ** all_layers
        axes.fill_between(all_layers, line, 0.2, color="0.92")
        axes.plot(
            all_layers, line, color="black", linewidth=1, label=r"the line (1 - $\alpha$)$^l$ f$_0$"
        )
        arms = (
            ("plain training", "o--", "#d55e00", PLAIN),
            ("constrained", "s-", "#0072b2", CONSTRAINED),
        )
        for label, style, color, (mean, least, greatest) in arms:
            axes.plot(layers, mean, style, color=color, label=label)
            axes.fill_between(layers, least, greatest, color=color, alpha=0.3)
        axes.annotate(
            "violated: the multiplier rises",
            (2.05, 7.9),
            (2.2, 3.4),
            arrowprops={"arrowstyle": "->"},
        )
        axes.annotate(
            "satisfied: it falls back to 0",
            (2.05, 0.49),
            (0.15, 0.3),
            arrowprops={"arrowstyle": "->"},
        )
        axes.set(
            yscale="log", ylim=(0.2, 12), xlim=(-0.1, 5.1), xlabel="layer l", ylabel="layer loss"
        )
        axes.set_yticks([0.3, 1, 3, 10], ["0.3", "1 = f$_0$", "3", "10"])
        axes.minorticks_off()
        axes.set_xticks(all_layers)
        axes.legend(loc=(0.02, 0.5), framealpha=1)
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
