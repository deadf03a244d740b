"""Cost of one training step of one replica, side by side in one run on one core.

    python bench/step.py [--length 32] [--vocab 4] [--replicas 64] [--json]

Prints microseconds for a replica-step of Adam and of SGLD in moment form, of Adam in the direct batched form (forward and
backward through P sequences) at P = 300 and 3000, and what the machine's own matrix product (1024 x 1024, float32) would take
for the same number of floating-point operations; and the ratios. Median and best of several rounds, taken in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

os.environ["NPROC"] = "1"  # before JAX is imported: one thread

import jax
import jax.numpy as jnp
import numpy as np
import optax

from copyhead.experiment.adam import AdamSettings, descend
from copyhead.experiment.cells import Cells, assemble
from copyhead.experiment.langevin import LangevinSettings, chains
from copyhead.experiment.observables import yardstick
from copyhead.experiment.packed import PackedPath
from copyhead.model import layout, targets, tokens
from copyhead.model.attention import attention
from copyhead.model.network import Network, Positional
from copyhead.model.prior import logit_energy, output_energy, prior
from copyhead.problem import Problem

STEPS, DIRECT_STEPS, PRODUCTS, ROUNDS = 400, 2, 20, 7


def natural_operations(length: int, vocab: int) -> int:
    """Of the moment form as it is written down: J, K, F, N (2 L^2 V^2 each), A^T A and A K (2 L^3 each)."""
    return 8 * length**2 * vocab**2 + 4 * length**3


def packed_operations(length: int, vocab: int) -> int:
    """Of the packed form that is executed (one token indicator eliminated, pairs u <= v)."""
    n = vocab - 1
    return 4 * length**3 + 2 * length**2 * (n * (n + 1) + 2 * n * n)


def direct(problem: Problem, cells: Cells, sequences: int) -> Callable[[], object]:
    """Adam through P sequences for every replica, vmapped, as one would write it first."""
    numbers, whole = prior(problem), layout.full(problem.length, dtype=jnp.float32)
    law, length, vocab = tokens.uniform(problem.vocab), problem.length, problem.vocab
    drawn = [tokens.sample(tokens.stream(seed, "train"), sequences, length, law) for seed in range(len(cells.chi))]
    inputs = jax.nn.one_hot(jnp.stack(drawn), vocab)
    wanted = jnp.einsum("ab,rpbu->rpau", targets.shift(length), inputs)
    optimiser = optax.adam(0.01)

    def energy(weights: Positional, x: jax.Array, y: jax.Array) -> jax.Array:
        matrix = attention(weights.logits, problem.attention, length)
        error = jnp.sum((y - matrix @ (x @ weights.output)) ** 2)
        return (
            error / (2 * numbers.kappa) + output_energy(weights.output, numbers) + logit_energy(weights.logits, whole, numbers)
        )

    @jax.jit
    def run(weights: Positional, x: jax.Array, y: jax.Array) -> Positional:
        def step(state: tuple, _: None) -> tuple[tuple, None]:
            current, memory = state
            updates, memory = optimiser.update(jax.vmap(jax.grad(energy))(current, x, y), memory)
            return (optax.apply_updates(current, updates), memory), None

        (weights, _), _ = jax.lax.scan(step, (weights, optimiser.init(weights)), length=DIRECT_STEPS)
        return weights

    weights = jax.tree.map(jnp.asarray, cells.start)
    return lambda: jax.block_until_ready(run(weights, inputs, wanted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    problem = Problem.preset("paper", length=args.length, vocab=args.vocab)
    path = PackedPath(problem)
    cells = assemble(path, [(300, seed, "small", problem.chi) for seed in range(args.replicas)])
    chunk, against = path.cells, yardstick(problem, Network(), 100)
    start, packed = path.prepare(cells.start, cells.data, cells.batch_key)

    def in_turn(run: Callable[..., object], *arrays: object) -> Callable[[], None]:
        parts = [
            jax.tree.map(lambda leaf, i=i: jnp.asarray(leaf[i : i + chunk]), arrays) for i in range(0, args.replicas, chunk)
        ]

        def call() -> None:
            for part in parts:
                jax.block_until_ready(run(*part))

        return call

    settings = LangevinSettings(warmup=STEPS - 20, draws=1, thin=20)
    square = jnp.asarray(np.random.default_rng(0).standard_normal((1024, 1024)), jnp.float32)
    product = jax.jit(lambda x: x @ x)

    def products() -> None:
        for _ in range(PRODUCTS):
            product(square).block_until_ready()

    runs: dict[str, tuple[Callable[[], object], float]] = {
        "matmul": (products, PRODUCTS * 2 * 1024**3),
        "adam": (
            in_turn(lambda s, d: descend(s, d, path, AdamSettings(STEPS, 0.01)), start, packed),
            args.replicas * STEPS,
        ),
        "sgld": (
            in_turn(
                lambda s, d, c, k: chains(s, d, c, k, path, against, settings),
                start, packed, cells.chi, cells.key,
            ),
            args.replicas * STEPS,
        ),
        "direct P=300": (direct(problem, cells, 300), args.replicas * DIRECT_STEPS),
        "direct P=3000": (direct(problem, cells, 3000), args.replicas * DIRECT_STEPS),
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run, _ in runs.values():
        run()
    for _ in range(ROUNDS):
        for name, (run, count) in runs.items():
            began = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - began) / count)
    median = {name: float(np.median(values)) for name, values in times.items()}
    best = {name: float(np.min(values)) for name, values in times.items()}
    rate = 1 / median["matmul"]
    natural, done = natural_operations(args.length, args.vocab), packed_operations(args.length, args.vocab)
    result = {
        "matmul_gflops": rate / 1e9,
        "operations": {"moment form": natural, "packed form": done},
        "microseconds_median": {name: 1e6 * value for name, value in median.items() if name != "matmul"},
        "microseconds_best": {name: 1e6 * value for name, value in best.items() if name != "matmul"},
        "limit_microseconds": {"moment form": 1e6 * natural / rate, "packed form": 1e6 * done / rate},
        "adam_over_limit": {
            "moment form": median["adam"] * rate / natural,
            "packed form": median["adam"] * rate / done,
        },
        "direct_over_adam": {p: median[f"direct P={p}"] / median["adam"] for p in (300, 3000)},
        "sgld_over_adam": median["sgld"] / median["adam"],
    }
    if args.json:
        print(json.dumps(result))
        return
    print(f"L = {args.length}, V = {args.vocab}, {args.replicas} replicas, chunk {chunk}, float32, one core; median (best)")
    print(f"matrix product: {rate / 1e9:.0f} GFLOP/s")
    for name in ("adam", "sgld", "direct P=300", "direct P=3000"):
        print(f"{name:14s} {1e6 * median[name]:9.2f} ({1e6 * best[name]:.2f}) microseconds for a replica-step")
    for name, count in result["operations"].items():
        limit = 1e6 * count / rate
        print(f"{name}: {count} operations, limit {limit:.2f} microseconds, Adam / limit {1e6 * median['adam'] / limit:.2f}")
    print(
        f"direct / Adam: {result['direct_over_adam'][300]:.1f} at P = 300, {result['direct_over_adam'][3000]:.0f} at P = 3000"
    )
    print(f"SGLD / Adam: {result['sgld_over_adam']:.2f}")


if __name__ == "__main__":
    main()
