"""Shared by the tests: float64 for the theory, and the closed forms of docs/theory.md, section 4, written out by hand."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from hypothesis import settings

from copyhead.problem import Problem

# What one test, worker or command has compiled, the others of this session need not compile again; the processes that run the
# tests side by side have the folder of the one that has started them.
CACHE = None if "PYTEST_XDIST_WORKER" in os.environ else tempfile.TemporaryDirectory(prefix="copyhead-tests-")
folder = CACHE.name if CACHE else os.environ["JAX_COMPILATION_CACHE_DIR"]
for setting, value in (("compilation_cache_dir", folder), ("persistent_cache_min_compile_time_secs", 0.3)):
    jax.config.update(f"jax_{setting}", value)
    os.environ[f"JAX_{setting.upper()}"] = str(value)  # of the processes that tests start

# Compilation makes the first example slow, and the examples must be the same in every run.
settings.register_profile("copyhead", deadline=None, derandomize=True)
settings.load_profile("copyhead")


# For functions that a test calls a few times on small arrays: optimising them takes longer than running them.
QUICK = {"xla_backend_optimization_level": 0}


@contextmanager
def quickly() -> Iterator[None]:
    """QUICK for all that is compiled, in the processes that are started, too: for runs so short that most is compilation."""
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
        del os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"]


@pytest.fixture
def quick() -> Iterator[None]:
    """`quickly` for one test."""
    with quickly():
        yield


@pytest.fixture(scope="module")
def x64() -> Iterator[None]:
    """float64 for one module of tests, without touching the global flag."""
    with jax.enable_x64(True):
        yield


def derivative(function: Callable, place: float, order: int, radius: float = 0.2, points: int = 32) -> float:
    """The n-th derivative of an analytic function, by Cauchy's integral over a circle around `place`.

    The trapezoid rule converges geometrically, so the error is rounding, about order! 1e-16 |f| / radius^order.
    """
    phases = np.exp(2j * np.pi * np.arange(points) / points)
    values = function(place + radius * phases)
    return math.factorial(order) * float(np.mean(values / phases**order).real) / radius**order


@dataclass(frozen=True)
class Explicit:
    """The reduced action of uniform tokens (docs/theory.md, section 4) in NumPy; analytic in c1 and cG.

    An independent second copy of what the package evaluates through its general code. Without cyclic symmetry L - 1 rows
    are scored, each like a row of the cyclic task (token_scale = 0 only).
    """

    length: float
    vocab: float
    noise: float
    logit_variance: float = 1.0
    output_variance: float = 1.0
    position_scale: float = 1.0
    token_scale: float = 0.0
    attention: str = "softmax"
    cyclic: bool = True

    @classmethod
    def of(cls, problem: Problem) -> Explicit:
        return cls(**{name: getattr(problem, name) for name in cls.__dataclass_fields__})

    @property
    def rows(self) -> float:
        return self.length if self.cyclic else self.length - 1

    @property
    def kappa(self) -> float:
        return self.rows * self.noise

    @property
    def ridge(self) -> float:
        """r = kappa V / g_O."""
        return self.kappa * self.vocab / self.output_variance

    def attention_parameters(self, c1, cG):
        """(a1, aG)."""
        if self.attention == "linear":
            return c1, cG / self.length
        excess = (np.exp(cG) - 1) / (self.length - 1 + np.exp(cG))
        return 1 - excess, excess

    def sums(self, c1, cG):
        """t = tr A^T A, m = tr A^T T, s = |A 1|^2, q = (A 1).(T 1)."""
        a1, aG = self.attention_parameters(c1, cG)
        rows, length = self.rows, self.length
        return (
            rows * (a1**2 / length + 2 * a1 * aG / length + aG**2),
            rows * (a1 / length + aG),
            rows * (a1 + aG) ** 2,
            rows * (a1 + aG),
        )

    def prior(self, c1, cG):
        uniform = (self.position_scale + self.token_scale * self.length / self.vocab) ** 2
        row = (self.length * c1 + cG) ** 2 / uniform + (self.length - 1) * cG**2 / self.position_scale**2
        return self.rows / self.length * row / (2 * self.logit_variance)

    def output(self, c1, cG, sequences):
        """w_o and w_u, the optimum of W on zero-sum token vectors and on the uniform one."""
        t, m, s, q = self.sums(c1, cG)
        return sequences * m / (sequences * t + self.ridge), sequences * q / (sequences * s + self.ridge)

    def action(self, c1, cG, sequences):
        _, m, _, q = self.sums(c1, cG)
        w_o, w_u = self.output(c1, cG, sequences)
        unexplained = (self.vocab - 1) * (self.rows - w_o * m) + (self.rows - w_u * q)
        return self.prior(c1, cG) + sequences * unexplained / (2 * self.kappa * self.vocab)

    def loss(self, c1, cG, sequences):
        """Population loss per scored token."""
        t, m, s, q = self.sums(c1, cG)
        w_o, w_u = self.output(c1, cG, sequences)
        zero_sum = (self.vocab - 1) * (self.rows - 2 * w_o * m + w_o**2 * t)
        return (zero_sum + self.rows - 2 * w_u * q + w_u**2 * s) / (self.vocab * self.rows)

    def gradient(self, c1, cG, sequences):
        """By complex steps: exact to rounding, because there is no difference of close numbers."""
        step = 1e-30j
        by_c1 = self.action(c1 + step, cG, sequences).imag / 1e-30
        return np.array([by_c1, self.action(c1, cG + step, sequences).imag / 1e-30])

    def hessian(self, c1, cG, sequences):
        """Central differences of the complex-step gradient, good to about 1e-9 of its largest entries."""
        columns = []
        for index, value in enumerate((c1, cG)):
            step = np.zeros(2)
            step[index] = 1e-5 * max(abs(value), 1e-2)
            pair = [self.gradient(c1 + sign * step[0], cG + sign * step[1], sequences) for sign in (1, -1)]
            columns.append((pair[0] - pair[1]) / (2 * step[index]))
        return (np.array(columns) + np.array(columns).T) / 2

    def softmax_action(self, cG, sequences):
        """The action at c1 = -cG / L, where the rows of G sum to zero: one-dimensional."""
        return self.action(-cG / self.length, cG, sequences)

    def softmax_slope(self, cG, sequences):
        return self.softmax_action(cG + 1e-30j, sequences).imag / 1e-30

    def softmax_sequences(self, cG):
        """The one P at which a given cG > 0 is stationary, by bisection in ln P over exp(-60) .. exp(60).

        It is one only, since the data part of the slope grows with P whenever m^2 / t grows with cG, as it does for cG > 0.
        """
        cG = np.asarray(cG, float)
        low, high = np.full(cG.shape, -60.0), np.full(cG.shape, 60.0)
        for _ in range(64):  # 120 / 2^64 is below the spacing of float64 at these ln P
            middle = (low + high) / 2
            uphill = self.softmax_slope(cG, np.exp(middle)) > 0
            low, high = np.where(uphill, middle, low), np.where(uphill, high, middle)
        return np.exp((low + high) / 2)
