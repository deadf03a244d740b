"""Tables of runs with a transition of known order, from random hidden parameters."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from copyhead.experiment.table import Table


class Ranges(NamedTuple):
    """Ranges of the hidden parameters, uniform. Widths in grid spacings of ln P, noise and slopes in heights of the step."""

    span: tuple[float, float] = (1.2, 3.5)  # ln of the largest over the smallest P
    place: tuple[float, float] = (0.35, 0.65)  # of the transition in that range
    noise: tuple[float, float] = (0.02, 0.1)  # of one run
    slope: tuple[float, float] = (-0.1, 0.3)  # of the background over the whole range
    repeats: tuple[int, int] = (1, 8)
    flat: tuple[float, float] = (-0.05, 0.1)  # second-order: the background instead of `slope`
    window: tuple[float, float] = (2.5, 6.0)  # first-order: coexistence
    fold: tuple[float, float] = (0.0, 0.3)  # first-order: how much each branch bends before it ends
    scatter: tuple[float, float] = (0.0, 0.5)  # first-order: of the place of the jump from run to run
    width: tuple[float, float] = (2.0, 4.5)  # crossover: w in tanh((x - x0) / w)
    skew: tuple[float, float] = (0.0, 0.0)  # crossover: ln nu of logistic^nu
    saturation: tuple[float, float] = (0.3, 1.5)  # second-order: c in sqrt(t / (1 + c t)), t = P / P_c - 1
    rounding: tuple[float, float] = (0.0, 0.1)  # second-order: value at P_c


TUNED = Ranges()


class Draw:
    """What all kinds share: a grid of P, a background, noise and repeats."""

    def __init__(self, seed: int, ranges: Ranges, points: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.ranges = ranges
        span = self.of("span")
        grid = np.linspace(0, span, points) if self.rng.random() < 0.5 else np.log(np.linspace(1, np.exp(span), points))
        self.x = np.sort(grid + np.log(10) * self.rng.uniform(1, 3))
        self.repeats = int(self.rng.integers(ranges.repeats[0], ranges.repeats[1] + 1))
        self.noise, self.slope = self.of("noise"), self.of("slope")
        # equally spaced in ln P or in P; the place is drawn by grid index, so that both sides have their points
        index = self.of("place") * (points - 1)
        self.place = float(np.interp(index, np.arange(points), self.x))
        self.spacing = float(np.interp(index, np.arange(points - 1) + 0.5, np.diff(self.x)))
        self.height = float(np.exp(self.rng.uniform(-3, 3)))
        self.base = float(self.rng.uniform(-1, 1)) * self.height

    def of(self, name: str) -> float:
        return float(self.rng.uniform(*getattr(self.ranges, name)))

    def table(self, x: np.ndarray, level: np.ndarray, base: float | None = None, **columns: np.ndarray) -> Table:
        """level: step of height one, by row; loss falls with it."""
        background = self.slope * (x - self.x[0]) / np.ptp(self.x)
        y = level + background + self.noise * self.rng.normal(size=x.shape)
        loss = 1 - 0.6 * level**2 - 0.1 * background + 0.3 * self.noise * self.rng.normal(size=x.shape)
        order = (self.base if base is None else base) + self.height * y
        shuffle = self.rng.permutation(len(x))
        return Table(np.exp(x)[shuffle], order[shuffle], loss=loss[shuffle], **{k: v[shuffle] for k, v in columns.items()})


def first_order(seed: int, ranges: Ranges = TUNED, points: int = 20, starts: int = 2) -> Table:
    """Two branches that end at folds. starts = 1: in the window the branch of a run is random."""
    draw = Draw(seed, ranges, points)
    window = draw.of("window") * draw.spacing
    bend = draw.of("fold")
    rows = np.repeat(draw.x, draw.repeats)
    tables = []
    for start in range(starts):
        if starts == 2:
            edge = draw.place + (0.5 - start) * window + draw.of("scatter") * draw.spacing * draw.rng.normal(size=rows.shape)
            upper = rows > edge
        else:
            upper = draw.rng.random(rows.shape) < np.clip((rows - draw.place) / window + 0.5, 0, 1)
        reach = np.ptp(draw.x)
        before = bend * (1 - np.sqrt(np.maximum(draw.place + window / 2 - rows, 0) / reach))
        after = 1 - bend * (1 - np.sqrt(np.maximum(rows - draw.place + window / 2, 0) / reach))
        tables.append(np.where(upper, after, np.minimum(before, bend)))
    if starts == 1:
        return draw.table(rows, tables[0])
    names = np.repeat(["small", "copy"], len(rows))
    return draw.table(np.tile(rows, 2), np.concatenate(tables), start=names)


def second_order(seed: int, ranges: Ranges = TUNED, points: int = 20, mirrored: bool = False) -> Table:
    """A square root that saturates, rounded at P_c. mirrored: with random sign."""
    draw = Draw(seed, ranges, points)
    rows = np.repeat(draw.x, draw.repeats)
    t = np.maximum(np.exp(rows - draw.place) - 1, 0)
    c = draw.of("saturation")
    top = np.exp(draw.x[-1] - draw.place) - 1
    m = np.sqrt(t / (1 + c * t) / (top / (1 + c * top)))
    level = np.sqrt(m**2 + draw.of("rounding") ** 2)
    draw.slope = 0.0 if mirrored else draw.of("flat")
    if mirrored:
        return draw.table(rows, m * draw.rng.choice([-1, 1], size=rows.shape), base=0.0)
    return draw.table(rows, level)


def crossover(seed: int, ranges: Ranges = TUNED, points: int = 20, starts: int = 1) -> Table:
    """A smooth step, the same from every start."""
    draw = Draw(seed, ranges, points)
    rows = np.repeat(draw.x, draw.repeats * starts)
    width = draw.of("width") * draw.spacing / 2  # of the logistic function
    nu = np.exp(draw.of("skew"))
    level = (0.5 * (1 + np.tanh((rows - draw.place) / width / 2))) ** nu
    if starts == 1:
        return draw.table(rows, level)
    return draw.table(rows, level, start=np.tile(["small", "copy"], len(rows) // 2))
