"""Effective samples of aG per second, of all samplers on one posterior, side by side in one run on one core.

    python bench/sampling.py [--sequences 250] [--chains 16] [--rounds 3] [--only NAME ...] [--json]

Softmax, preset `paper` with one data set; half of the chains start in the uniform phase and half as a copy head. Compilation
and warm-up are not timed: each sampler of this package runs its warm-up with draws and without, and the difference counts:
HMC on the collapsed posterior of G, MALA and SGLD on (G, W), the latter at the steps of a reproduction. blackjax, on the
densities of `experiment.target` with the full batch: HMC and NUTS after window adaptation, with four chains because they are
slow, and SGLD with one step for G and W, that which W allows.

SGLD has a bias by its step: its mean is printed beside the others. Rounds are taken in turns, with new random numbers; medians.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

os.environ["NPROC"] = "1"  # before JAX is imported: one thread

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from arviz_stats.base.array import array_stats

from copyhead.experiment import hamiltonian, langevin, mala
from copyhead.experiment.cells import STARTS, assemble, scattered
from copyhead.experiment.collapsed import Rung, sizes
from copyhead.experiment.hamiltonian import HamiltonianSettings
from copyhead.experiment.langevin import LOGIT_STEPS, LangevinSettings, output_curvature
from copyhead.experiment.observables import yardstick
from copyhead.experiment.packed import PackedPath
from copyhead.experiment.path import COMPILATION
from copyhead.experiment.reference import Algorithm, Library, ReferenceSettings
from copyhead.experiment.target import Collapsed, Joint, posed
from copyhead.model import targets
from copyhead.model.attention import attention
from copyhead.model.network import Network
from copyhead.problem import Problem

BASELINE = "SGLD on (G, W)"


class Sampler(NamedTuple):
    """warm: its warm-up with a seed, not timed in the result. whole: the same and then draws of aG, (chain, draw).

    gradients: evaluated for one draw.
    """

    warm: Callable[[int], Any]
    whole: Callable[[int], Any]
    gradients: float


def own_hmc(problem: Problem, cells: Any, chains: int, leapfrogs: int, draws: int) -> Sampler:
    path, numbers, against, shape = PackedPath(problem), sizes(problem), yardstick(problem, Network(), 8), (1, chains, 1)
    data = path.pack(jax.tree.map(lambda leaf: leaf[:1], cells.data))
    rung = Rung(*(np.full(shape, value, np.float32) for value in (problem.chi, 1, 0, 0)))

    def run(settings: HamiltonianSettings, seed: int) -> Any:
        keys = np.random.default_rng(seed).integers(0, 2**32, size=(*shape, 2), dtype=np.uint32)
        begin = scattered(problem, shape, seed).logits.swapaxes(-1, -2)
        trace = hamiltonian.run(begin, data, rung, keys, against, numbers, settings, problem)
        return np.asarray(trace.observables.aG)[0, :, 0]

    settings = HamiltonianSettings(leapfrogs, warmup=150, draws=draws, losses=False)
    return Sampler(partial(run, settings._replace(draws=1)), partial(run, settings), leapfrogs)


def on_all_weights(module: Any, problem: Problem, cells: Any, settings: LangevinSettings) -> Sampler:
    path, against = PackedPath(problem), yardstick(problem, Network(), 8)
    start, data = path.prepare(cells.start, cells.data, cells.batch_key)

    def run(settings: LangevinSettings, seed: int) -> Any:
        keys = np.random.default_rng(seed).integers(0, 2**32, size=cells.key.shape, dtype=np.uint32)
        return np.asarray(module.chains(start, data, cells.chi, keys, path, against, settings).observables.aG)

    return Sampler(partial(run, settings._replace(draws=1)), partial(run, settings), settings.thin)


def _along(logits: Any, problem: Problem) -> Any:
    """aG of one network."""
    matrix, shift = attention(logits, problem.attention, problem.length), jnp.asarray(targets.shift(problem.length))
    on = jnp.sum(shift * matrix) / problem.length
    return on - (jnp.sum(matrix) / problem.length - on) / (problem.length - 1)


def library(problem: Problem, cells: Any, kind: type, algorithm: Algorithm, draws: int, leapfrogs: int = 16) -> Sampler:
    """blackjax; its adaptation runs once, before all rounds."""
    target = kind(posed(problem, jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), cells.data)))
    found = Library(target, problem.chi, algorithm, ReferenceSettings(200, draws, leapfrogs, 6))
    tuned = found.adapt(jax.vmap(target.initial)(cells.start), 0)
    along = jax.jit(jax.vmap(jax.vmap(partial(_along, problem=problem))), compiler_options=COMPILATION)

    def whole(seed: int) -> Any:
        nonlocal tuned
        tuned, trace = found.draw(tuned, seed)
        return along(trace.positions.logits if kind is Joint else trace.positions)

    gradients = float(found.draw(tuned, 1)[1].gradients.mean())
    return Sampler(lambda seed: None, whole, gradients)


def library_sgld(problem: Problem, cells: Any, draws: int, thin: int) -> Sampler:
    """blackjax's SGLD kernel with the gradient of the full batch; one step for G and W."""
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), cells.data)
    target: Any = Joint(posed(problem, data))
    kernel = blackjax.sgld(lambda position, _: target.value_and_gradient(position, problem.chi)[1])
    step = float(LangevinSettings().output_courant / output_curvature(data.sequences, problem) / problem.chi)

    @partial(jax.jit, static_argnames="draws", compiler_options=COMPILATION)
    @partial(jax.vmap, in_axes=(0, 0, None))
    def run(position: Any, key: Any, draws: int) -> Any:
        def once(position: Any, key: Any) -> Any:
            return kernel.step(key, position, 0, step), None

        def draw(position: Any, key: Any) -> Any:
            position, _ = jax.lax.scan(once, position, jax.random.split(key, thin))
            return position, _along(position.logits, problem)

        return jax.lax.scan(draw, position, jax.random.split(key, draws))

    keys = partial(jax.random.split, num=len(cells.chi))
    begin = jax.vmap(target.initial)(cells.start)
    held = run(begin, keys(jax.random.key(0)), draws)[0]

    def whole(seed: int) -> Any:
        nonlocal held
        held, seen = run(held, keys(jax.random.key(seed)), draws)
        return np.asarray(seen)

    return Sampler(lambda seed: None, whole, thin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=250)
    parser.add_argument("--chains", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[""], help="names that begin with one of these")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    problem = Problem.preset("paper", length=args.length, vocab=args.vocab)
    cells = assemble(PackedPath(problem), [(args.sequences, 0, STARTS[i % 2], problem.chi) for i in range(args.chains)])
    few = jax.tree.map(lambda leaf: leaf[:4], cells)
    plain = LangevinSettings(LOGIT_STEPS["softmax"], warmup=3000, draws=300, thin=20)
    makers: dict[str, Callable[[], Sampler]] = {
        BASELINE: lambda: on_all_weights(langevin, problem, cells, plain),
        "MALA on (G, W)": lambda: on_all_weights(mala, problem, cells, plain),
        **{
            f"HMC on G, {steps} kicks": lambda steps=steps: own_hmc(problem, cells, args.chains, steps, 400)
            for steps in (2, 3, 4, 5, 6, 8)
        },
        "blackjax SGLD on (G, W)": lambda: library_sgld(problem, cells, 100, 20),
        "blackjax HMC on (G, W)": lambda: library(problem, few, Joint, "hmc", 100),
        "blackjax NUTS on (G, W)": lambda: library(problem, few, Joint, "nuts", 40),
        "blackjax HMC on G": lambda: library(problem, few, Collapsed, "hmc", 100, 8),
        "blackjax NUTS on G": lambda: library(problem, few, Collapsed, "nuts", 100),
    }
    names = [name for name in makers if name == BASELINE or any(name.startswith(part) for part in args.only)]
    samplers = {name: makers[name]() for name in names}
    for sampler in samplers.values():
        sampler.warm(0)
        sampler.whole(0)
    found: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in names}
    for seed in range(1, args.rounds + 1):
        for name, sampler in samplers.items():
            began = time.perf_counter()
            sampler.warm(seed)
            between = time.perf_counter()
            draws = np.asarray(sampler.whole(seed), float)
            seconds = (time.perf_counter() - between) - (between - began)
            ess = float(array_stats.ess(draws, chain_axis=0, draw_axis=1, method="bulk"))
            rhat = float(array_stats.rhat(draws, chain_axis=0, draw_axis=1))
            per_gradient = seconds / draws.size / sampler.gradients
            found[name].append((ess / seconds, ess, rhat, draws.mean(), per_gradient))
    result = {}
    for name, rows in found.items():
        rate, ess, rhat, _, cost = np.median(np.array(rows), axis=0).tolist()
        mean = [row[3] for row in rows]
        # the errors of all rounds together
        spread = np.sqrt(np.mean([(row[3] - np.mean(mean)) ** 2 for row in rows]) / max(len(rows) - 1, 1))
        result[name] = {
            "ess_per_second": rate, "ess": ess, "rhat": rhat, "aG": float(np.mean(mean)), "error": float(spread),
            "microseconds_per_gradient": 1e6 * cost, "over_sgld": rate,
        }  # fmt: skip
    for row in result.values():
        row["over_sgld"] /= result[BASELINE]["ess_per_second"]
    if args.json:
        print(json.dumps(result))
        return
    print(
        f"L = {args.length}, V = {args.vocab}, P = {args.sequences}, chi = {problem.chi:g}, softmax, one data set, "
        f"{args.chains} chains, one core; medians of {args.rounds} rounds"
    )
    print(f"{'':26s} ESS/s of aG  / SGLD      ESS  R-hat  mean aG            us/gradient")
    for name, row in result.items():
        print(
            f"{name:26s} {row['ess_per_second']:11.1f} {row['over_sgld']:7.2f} {row['ess']:8.0f}  {row['rhat']:.3f}  "
            f"{row['aG']:.6f}({row['error']:.6f}) {row['microseconds_per_gradient']:8.1f}"
        )


if __name__ == "__main__":
    main()
