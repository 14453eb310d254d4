"""How often a verdict says "met" of a model that is exactly on the edge of what its row asks: 2.5 % are nominal.

    python recipes/benchmarks/verdict_coverage.py [--sets 2000] [--output FILE.json] [--table FILE.md]

Losses of rows are drawn from laws whose means are known, with light and heavy tails, and scaled so that the row of the
problem is met with equality. Each set of rows gets a verdict by several intervals:

- ours: `confidence_limits`, as `certify` takes it (checked on some sets of each kind);
- t: the t interval of the rows;
- skewness: Hall's correction of it alone, without a row more;
- bootstrap: the bootstrap-t interval of 999 draws (of bounds alone, and on a tenth of the sets);
- blocks: the t interval over blocks of batches of 8 rows in the order of the data, as version 0.2 had it. In the order
  "dealt", each batch gets the same mix of small and large losses. The others do not depend on the order.

"repeated" looks ten times at the same rows, while the losses of the model change a little from look to look: the share
of sets in which any look says "met".
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from scipy import integrate, stats

from hf_descent import DescentProblem
from hf_descent.constraints.problem import AT_CHANCE
from hf_descent.evaluation import certify, intervals
from hf_descent.evaluation.intervals import confidence_limits


RESULTS = Path(__file__).parent / "results"
ROWS = (30, 60, 100, 200, 872, 3000)
CONFIDENCE = 0.95
BATCH, BLOCKS = 8, 32  # of version 0.2
CHECKED = 20  # sets of each kind on which `certify` must agree
NORMAL = stats.norm.pdf


@dataclass
class Law:
    """Losses as a function of a standard normal number, so that those of two layers can be correlated."""

    name: str
    of: Callable[[np.ndarray], np.ndarray]

    @property
    def mean(self) -> float:
        return _mean(self.of)


@cache
def _mean(of: Callable) -> float:
    return integrate.quad(lambda z: of(z) * NORMAL(z), -9, 9, limit=500)[0]


def confident(margin: float, spread: float) -> Callable:
    """The cross-entropy of a binary classifier whose margins are normal."""
    return lambda z: np.logaddexp(0, -(margin - spread * z))


LAWS = [
    Law("normal", lambda z: 1 + 0.2 * z),
    Law("exponential", lambda z: -stats.norm.logsf(z)),
    Law("confident, mean 0.10", confident(7, 4)),
    Law("confident, mean 0.03", confident(6, 2.5)),
    Law("lognormal, sigma 1", lambda z: np.exp(z)),
    Law("lognormal, sigma 1.6", lambda z: np.exp(1.6 * z)),
]


@dataclass
class Kind:
    """A kind of row: which problem, and the losses of its two layers in the mean on its edge."""

    name: str
    problem: DescentProblem
    row: int  # of the problem
    edge: tuple[float, float]
    excess: Callable[[np.ndarray, np.ndarray], np.ndarray]  # of f_1 and f_2
    chance: float = 10.0


def kinds() -> list[Kind]:
    asked = 0.5**0.5  # on the line from f_0 = 1 to f_2 = 0.5, and by one of two steps
    line = DescentProblem("line", 1.0, 2, descent_strength=1.0)
    steps = DescentProblem("steps", 1.0, 2, descent_strength=1.0)

    def beyond_line(first, last):
        return first - last**0.5 - 0.1 * (1 - last**0.5)

    def beyond_step(first, last):
        return last - last**0.5 * first - 0.1 * (first - last**0.5 * first)

    bound = DescentProblem(None, 10.0, 2, loss_targets={1: 0.5})
    exit_row = DescentProblem(None, 10.0, 2, exit_targets={1: 0.1})
    last = 0.5
    first = last / (0.1 + 0.9 * last**0.5)  # the first layer's loss on the edge of the second step
    return [
        Kind("bound", bound, 0, (0.5, 0.3), lambda first, last: first - 0.5),
        Kind("exit", exit_row, 0, (0.55, 0.5), lambda first, last: first - 1.1 * last),
        Kind("line", line, 0, (asked + 0.1 * (1 - asked), 0.5), beyond_line, 1.0),
        Kind("steps", steps, 1, (first, last), beyond_step, 1.0),
    ]


def drawn(law: Law, kind: Kind, rows: int, sets: int, generator) -> tuple[np.ndarray, np.ndarray]:
    """Losses of both layers, `[rows, sets]` each, with a correlation of 0.8 of what they are made of."""
    last = generator.standard_normal((rows, sets))
    first = 0.8 * last + 0.6 * generator.standard_normal((rows, sets))
    return tuple(
        law.of(numbers) * (mean / law.mean) for numbers, mean in zip((first, last), kind.edge)
    )


def beyond(kind: Kind, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """What each row of the data says of the excess of its set, `[rows, sets]`, linear near the means of the set."""
    means = first.mean(axis=0), last.mean(axis=0)
    step = 1e-5
    slopes = []
    for layer in (0, 1):
        up, down = list(means), list(means)
        up[layer] = means[layer] + step
        down[layer] = means[layer] - step
        slopes.append((kind.excess(*up) - kind.excess(*down)) / (2 * step))
    off = slopes[0] * (first - means[0]) + slopes[1] * (last - means[1])
    return kind.excess(*means) + off


def our_limit(values: np.ndarray) -> np.ndarray:
    return confidence_limits(values, CONFIDENCE)[1]


def t_limit(values: np.ndarray) -> np.ndarray:
    count = len(values)
    error = values.std(axis=0, ddof=1) / count**0.5
    return values.mean(axis=0) + stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * error


def skewness_limit(values: np.ndarray) -> np.ndarray:
    """Ours without the row that was not seen, and for any number of rows."""
    unseen, skewed = intervals.UNSEEN, intervals.LEAST_SKEWED_ROWS
    intervals.UNSEEN, intervals.LEAST_SKEWED_ROWS = 0.0, 1
    try:
        return our_limit(values)
    finally:
        intervals.UNSEEN, intervals.LEAST_SKEWED_ROWS = unseen, skewed


def bootstrap_limit(values: np.ndarray, generator, draws: int = 999) -> np.ndarray:
    limits = []
    for column in values.T:
        samples = column[generator.integers(0, len(column), (draws, len(column)))]
        errors = np.maximum(samples.std(axis=1, ddof=1), 1e-12)
        statistic = np.quantile(
            (samples.mean(axis=1) - column.mean()) / errors, (1 - CONFIDENCE) / 2
        )
        limits.append(column.mean() - statistic * column.std(ddof=1))
    return np.array(limits)


def block_limit(values: np.ndarray) -> np.ndarray:
    """The t interval over blocks: batch i goes to block i modulo their number. NaN with fewer than eight."""
    batches = len(values) // BATCH
    if batches < 8:
        return np.full(values.shape[1], np.nan)
    means = values[: batches * BATCH].reshape(batches, BATCH, -1).mean(axis=1)
    blocks = [means[block::BLOCKS].mean(axis=0) for block in range(min(batches, BLOCKS))]
    return t_limit(np.array(blocks))


def dealt(values: np.ndarray) -> np.ndarray:
    """Each set in an order in which all batches have the same mix."""
    ordered = np.sort(values, axis=0)
    batches = max(1, len(values) // BATCH)
    return np.concatenate([ordered[start::batches] for start in range(batches)])


def is_met(kind: Kind, first, last, limit_of: Callable) -> np.ndarray:
    """Of each set, whether the row is called met by the upper limits of `limit_of`: that of its excess, and of the
    losses, which must not be at chance."""
    threshold = AT_CHANCE * kind.chance
    found = (limit_of(beyond(kind, first, last)) <= 0) & (limit_of(last) < threshold)
    if kind.problem.rows[kind.row].layer == 1:
        found &= limit_of(first) < threshold
    return found


def check(kind: Kind, first: np.ndarray, last: np.ndarray, found: np.ndarray) -> None:
    """Raises where `certify` says other than what was `found` of a set."""
    for index in range(CHECKED):
        rows = np.column_stack([first[:, index], last[:, index], np.ones(len(first))])
        verdict = certify(kind.problem, rows, CONFIDENCE, chance=kind.chance)
        if (verdict.verdicts[kind.row] == "met") != found[index]:
            raise RuntimeError(f"{kind.name}: `certify` differs from what is measured:\n{verdict}")


def measure(law: Law, kind: Kind, rows: int, sets: int, generator) -> dict:
    """The shares of sets that are called met, in percent."""
    first, last = drawn(law, kind, rows, sets, generator)
    limits = {
        "ours": our_limit,
        "t": t_limit,
        "skewness": skewness_limit,
        "blocks": block_limit,
        "blocks, dealt": lambda values: block_limit(dealt(values)),
    }
    met = {name: is_met(kind, first, last, limit_of) for name, limit_of in limits.items()}
    if rows < 8 * BATCH:  # too few for an interval of blocks
        met = {name: found for name, found in met.items() if not name.startswith("blocks")}
    check(kind, first, last, met["ours"])
    if kind.name == "bound":
        few = slice(max(sets // 10, 1))
        limit_of = partial(bootstrap_limit, generator=generator)
        met["bootstrap"] = is_met(kind, first[:, few], last[:, few], limit_of)
    values = beyond(kind, first, last)
    upper = our_limit(values)
    width = np.median((upper - values.mean(axis=0)) / (t_limit(values) - values.mean(axis=0)))
    return {
        "row": kind.name,
        "law": law.name,
        "rows": rows,
        "sets": sets,
        "met": {name: round(100 * float(found.mean()), 2) for name, found in met.items()},
        "without an interval": round(100 * float(np.isinf(upper).mean()), 2),
        "width, t = 1": round(float(width), 2) if np.isfinite(width) else None,
    }


def repeated(law: Law, rows: int, sets: int, generator, looks: int = 10) -> dict:
    """A bound, looked at `looks` times: numbers of the same rows, correlated by 0.95, in each look."""
    shared = generator.standard_normal((rows, sets))
    met = np.zeros(sets, dtype=bool)
    once = []
    for _ in range(looks):
        numbers = 0.95**0.5 * shared + 0.05**0.5 * generator.standard_normal((rows, sets))
        upper = our_limit(law.of(numbers) - law.mean)
        met |= upper <= 0
        once.append(np.mean(upper <= 0))
    return {
        "row": f"bound, {looks} looks",
        "law": law.name,
        "rows": rows,
        "sets": sets,
        "met": {"ours": round(100 * float(met.mean()), 2), "ours, each look": round(100 * float(np.mean(once)), 2)},
    }  # fmt: skip


def table(found: list[dict]) -> str:
    """The largest share over all laws for each kind of row and number of rows."""
    names = ["ours", "bootstrap", "skewness", "t", "blocks", "blocks, dealt"]
    lines = [["row", "rows of data", *names]]
    for kind in dict.fromkeys(each["row"] for each in found):
        for rows in dict.fromkeys(each["rows"] for each in found):
            cases = [each for each in found if (each["row"], each["rows"]) == (kind, rows)]
            if not cases:
                continue
            cells = [
                [each["met"][name] for each in cases if each["met"].get(name) is not None]
                for name in names
            ]
            lines.append(
                [kind, f"{rows:,}", *(f"{max(cell):.1f}" if cell else "" for cell in cells)]
            )
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sets", type=int, default=2000, help="sets of rows of each kind (2000)")
    parser.add_argument("--output", type=Path, default=RESULTS / "verdict_coverage.json")
    parser.add_argument("--table", type=Path, default=RESULTS / "verdict_coverage.md")
    options = parser.parse_args()

    generator = np.random.default_rng(0)
    found = []
    for rows in ROWS:
        # Of many rows fewer sets, so that it takes some minutes.
        sets = max(int(options.sets * min(1.0, 200 / rows) ** 0.5), CHECKED)
        for kind in kinds():
            for law in LAWS:
                found.append(measure(law, kind, rows, sets, generator))
                print(json.dumps(found[-1]), flush=True)
    for rows in (200, 872):
        for law in LAWS:
            found.append(repeated(law, rows, options.sets, generator))
            print(json.dumps(found[-1]), flush=True)

    options.output.write_text(json.dumps(found, indent=1) + "\n")
    text = "Largest share of false verdicts over all laws, in %. Nominal: 2.5. From `verdict_coverage.json`.\n\n"
    options.table.write_text(f"{text}{table(found)}\n")
    print(table(found))


if __name__ == "__main__":
    main()
