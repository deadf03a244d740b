"""Order of a transition from data alone: rates of false verdicts on synthetic tables, the network's own transitions, bad tables.

A verdict is false if it is one of the three orders and not the true one; "undetermined" is not false. The rates are measured on
N tables. If the true rate were 5%, fewer than `few(N)` false ones would turn up with a probability below 2.5%, so a test that
finds fewer shows, at that level, that the rate is below 5%.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom
from synthetic import Draw, Ranges, crossover, first_order, second_order

from copyhead.experiment.classify import classify
from copyhead.experiment.table import Table, read
from copyhead.problem import Problem, ProblemError
from copyhead.theory.transition import phases

KINDS = {
    "first-order, two starts": ("first-order", first_order),
    "first-order, one start": ("first-order", lambda seed, ranges: first_order(seed, ranges, starts=1)),
    "second-order": ("second-order", second_order),
    "second-order, random sign": ("second-order", lambda seed, ranges: second_order(seed, ranges, mirrored=True)),
    "crossover": ("crossover", crossover),
    "crossover, two starts": ("crossover", lambda seed, ranges: crossover(seed, ranges, starts=2)),
}
# Ranges on which no threshold was chosen: other spans, places, noise, folds, saturation, and steps that are not symmetric.
FRESH = Ranges(
    span=(0.8, 5.0),
    place=(0.3, 0.7),
    noise=(0.01, 0.12),
    slope=(-0.2, 0.4),
    flat=(-0.03, 0.06),
    window=(2.2, 8.0),
    fold=(0.0, 0.4),
    scatter=(0.0, 0.8),
    width=(1.7, 5.0),
    skew=(-0.7, 0.7),
    saturation=(0.0, 2.5),
    rounding=(0.0, 0.15),
)
# Scatter of the mean over repeats, in heights, below which a table is a clear case.
CLEAR = 0.03


def few(tables: int) -> int:
    """Largest number of false verdicts that a rate of 5% would give with a probability below 2.5%."""
    return int(binom.ppf(0.025, tables, 0.05)) - 1


def measure(kind: str, seeds: range, ranges: Ranges) -> tuple[float, float, float]:
    """Share of false verdicts, of true ones, and of true ones among the clear cases."""
    truth, make = KINDS[kind]
    found = np.array([classify(make(seed, ranges)).verdict for seed in seeds])
    draws = [Draw(seed, ranges, 20) for seed in seeds]
    clear = np.array([draw.noise / np.sqrt(draw.repeats) < CLEAR for draw in draws])
    true = found == truth
    return float(np.mean(~true & (found != "undetermined"))), float(true.mean()), float(true[clear].mean())
