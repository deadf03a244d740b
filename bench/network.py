"""Cost of one full-batch training step of one replica of networks whose attention reads tokens: this package and PyTorch.

    python bench/network.py [--length 32] [--vocab 4] [--width 64] [--sequences 300] [--replicas 4] [--json]

Prints microseconds for a replica-step (gradient of E through P sequences, and Adam's update) of the finite-width network and of
its limit d_model -> infinity, the kernel network, both with softmax, on one core, side by side in one run. "copyhead" is the
step loop that `copyhead` trains with. "PyTorch" is written independently: the finite-width network from the embedded sequences
on, as one would write it first, and through its query-key circuit U, which is as much work as the kernel network; replicas by
vmap(grad), batched by hand, or one after the other. Before anything is timed, the gradients are compared with those of
copyhead. Median and best of several rounds, taken in turns; ratios are to the fastest way.

Needs PyTorch (extra `bench`). torch.compile is not used: it takes minutes to compile the gradients, warns of recompilation, and
made the kernel network up to a third faster, the finite-width network from its sequences on not at all.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from typing import Any

os.environ["NPROC"] = "1"  # before JAX is imported: one thread

import jax
import jax.numpy as jnp
import numpy as np
import torch

from copyhead.experiment.adam import AdamSettings, descend
from copyhead.experiment.cells import Cells, assemble
from copyhead.experiment.direct import DirectPath
from copyhead.model import targets
from copyhead.model.network import Network, scales
from copyhead.problem import Problem

STEPS, TORCH_STEPS, ROUNDS = 40, 3, 9
RATE, DECAY, OFFSET = 0.01, (0.9, 0.999), 1e-8  # Adam
# Relative difference of gradients (norms, weight by weight) that float32 explains.
AGREEMENT = 1e-4

Tensors = tuple[torch.Tensor, ...]


class Data:
    """What the energy of replicas depends on beside the weights; leading axis: the replica. Tokens and targets are one-hot."""

    def __init__(self, problem: Problem, cells: Cells) -> None:
        self.tokens = torch.nn.functional.one_hot(torch.from_numpy(cells.data.tokens.astype(np.int64)), problem.vocab).float()
        self.targets = torch.from_numpy(targets.shift(problem.length, cyclic=problem.cyclic)).float() @ self.tokens
        self.start = tuple(torch.from_numpy(np.asarray(part)) for part in cells.start)


def by_token(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The row of a table for each token, (..., P, L, .): as one product per replica, whose gradient is a product, too."""
    return (tokens.flatten(-3, -2) @ table).unflatten(-2, tokens.shape[-3:-1])


def embedded_output(problem: Problem, weights: Tensors, tokens: torch.Tensor) -> torch.Tensor:
    """f of the finite-width network, from the embedded sequences on."""
    positions, embedding, query_key, value, output = weights
    rows = problem.position_scale**0.5 * positions.unsqueeze(-3) + by_token(tokens, problem.token_scale**0.5 * embedding)
    queries = (rows.flatten(-3, -2) @ query_key).unflatten(-2, rows.shape[-3:-1])
    return torch.softmax(queries @ rows.mT, dim=-1) @ by_token(tokens, (embedding @ value) @ output)


def circuit_output(problem: Problem, weights: Tensors, tokens: torch.Tensor) -> torch.Tensor:
    """f of the finite-width network, whose logits are those of a kernel network with U = z W_QK z^T."""
    positions, embedding, query_key, value, output = weights
    rows = torch.cat([problem.position_scale**0.5 * positions, problem.token_scale**0.5 * embedding], dim=-2)
    circuit, length = (rows @ query_key) @ rows.mT, problem.length
    position, token = circuit.split([length, problem.vocab], dim=-2)
    blocks = (*position.split([length, problem.vocab], dim=-1), *token.split([length, problem.vocab], dim=-1))
    return kernel_output(problem, (*blocks, (embedding @ value) @ output), tokens)


def kernel_output(problem: Problem, weights: Tensors, tokens: torch.Tensor) -> torch.Tensor:
    """f of the kernel network, whose logits are pp[a,b] + pt[a,x_b] + tp[x_a,b] + tt[x_a,x_b]."""
    pp, pt, tp, tt, output = weights
    logits = (pp.unsqueeze(-3) + by_token(tokens, tp)) + (pt.unsqueeze(-3) + by_token(tokens, tt)) @ tokens.mT
    return torch.softmax(logits, dim=-1) @ by_token(tokens, output)


def energy(problem: Problem, network: Network, predict: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Squared error / (2 kappa) + sum |weight - centre|^2 / (2 g) of one replica, or the sum over an axis of replicas."""
    how = scales(network, problem)

    def total(weights: Tensors, start: Tensors, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        found = (predict(problem, weights, tokens) - wanted).square().sum() / (2 * problem.kappa)
        for part, begin, scale in zip(weights, start, how, strict=True):
            found = found + (part - begin if scale.anchored else part).square().sum() / (2 * scale.variance)
        return found

    return total


def by_map(total: Callable[..., torch.Tensor], data: Data) -> Callable[[Tensors], Tensors]:
    """The gradient by the weights of all replicas, written for one of them."""
    mapped = torch.func.vmap(torch.func.grad(total))
    return lambda weights: mapped(weights, data.start, data.tokens, data.targets)


def by_hand(total: Callable[..., torch.Tensor], data: Data) -> Callable[[Tensors], Tensors]:
    """The same, of products that are batched already."""

    def backward(weights: Tensors) -> Tensors:
        leaves = tuple(part.detach().requires_grad_() for part in weights)
        return torch.autograd.grad(total(leaves, data.start, data.tokens, data.targets), leaves)

    return backward


def one_by_one(total: Callable[..., torch.Tensor], data: Data) -> Callable[[Tensors], Tensors]:
    """The same, replica after replica: their arrays are smaller."""

    def backward(weights: Tensors) -> Tensors:
        slopes = []
        for index, (tokens, wanted) in enumerate(zip(data.tokens, data.targets, strict=True)):
            leaves = tuple(part[index].detach().requires_grad_() for part in weights)
            slopes.append(torch.autograd.grad(total(leaves, [part[index] for part in data.start], tokens, wanted), leaves))
        return tuple(torch.stack(parts) for parts in zip(*slopes, strict=True))

    return backward


def training(slope: Callable[[Tensors], Tensors], start: Tensors, rates: Any, steps: int) -> Callable[[], Tensors]:
    """`steps` updates of Adam from the start, in place, with a learning rate for each weight."""

    def run() -> Tensors:
        weights = tuple(part.clone() for part in start)
        means, squares = (tuple(torch.zeros_like(part) for part in start) for _ in range(2))
        for step in range(1, steps + 1):
            slopes = slope(weights)
            first, second = (1 - decay**step for decay in DECAY)
            with torch.no_grad():
                for part, by, mean, square, rate in zip(weights, slopes, means, squares, rates, strict=True):
                    mean.lerp_(by, 1 - DECAY[0])
                    square.mul_(DECAY[1]).addcmul_(by, by, value=1 - DECAY[1])
                    part.addcdiv_(mean, square.sqrt().div_(math.sqrt(second)).add_(OFFSET), value=-RATE * rate / first)
        return weights

    return run


def check(slope: Tensors, weights: Any, ours: Any, name: str) -> float:
    """The largest relative difference between the gradients by a weight."""
    worst = 0.0
    for field, theirs, exact in zip(type(weights)._fields, slope, ours, strict=True):
        found, wanted = theirs.detach().numpy(), np.asarray(exact)
        worst = max(worst, float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted)))
        assert worst < AGREEMENT, f"{name}: gradient by {field} differs by {worst:.1e}"
    return worst


def displaced(cells: Cells) -> Cells:
    """The same cells away from their starts, where anchored priors would not show in the gradient, and at larger logits."""
    draw = np.random.default_rng(0).standard_normal
    moved = (part + 0.1 * np.std(part) * draw(part.shape).astype(np.float32) for part in cells.start)
    return cells._replace(start=type(cells.start)(*moved))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=4)
    parser.add_argument("--width", type=int, default=64, help="d_model of the finite-width network")
    parser.add_argument("--sequences", type=int, default=300)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    problem = Problem.preset("paper", length=args.length, vocab=args.vocab, token_scale=1.0)
    plain, circuit, kernel = "finite width", "finite width, U first", "kernel"
    written = {plain: embedded_output, circuit: circuit_output, kernel: kernel_output}
    runs: dict[str, dict[str, tuple[Callable[[], object], int]]] = {}
    differences: dict[str, float] = {}
    for name, predict in written.items():
        network = Network(kind="kernel") if name == kernel else Network(kind="embedded", width=args.width)
        path = DirectPath(problem, network)
        cells = assemble(path, [(args.sequences, seed, "small", problem.chi) for seed in range(args.replicas)])
        start, anchored = jax.tree.map(jnp.asarray, path.prepare(cells.start, cells.data, cells.batch_key))
        data, moved = Data(problem, cells), displaced(cells).start
        exact = jax.jit(path.slope, static_argnums=2)(moved, anchored, None)

        def step_loop(start=start, anchored=anchored, path=path) -> object:
            return jax.block_until_ready(descend(start, anchored, path, AdamSettings(STEPS, RATE)))

        runs[name] = {} if name == circuit else {"copyhead": (step_loop, STEPS)}
        at = tuple(torch.from_numpy(np.asarray(part, np.float32)) for part in moved)
        for way, make in (("vmap", by_map), ("by hand", by_hand), ("one by one", one_by_one)):
            slope = make(energy(problem, network, predict), data)
            differences[f"{name}, {way}"] = check(slope(at), moved, exact, f"{name}, {way}")
            runs[name][f"PyTorch {way}"] = (training(slope, data.start, path.rates, TORCH_STEPS), TORCH_STEPS)
    times: dict[str, dict[str, list[float]]] = {name: {way: [] for way in ways} for name, ways in runs.items()}
    for ways in runs.values():
        for run, _ in ways.values():
            run()
    for _ in range(ROUNDS):
        for name, ways in runs.items():
            for way, (run, steps) in ways.items():
                began = time.perf_counter()
                run()
                times[name][way].append(1e6 * (time.perf_counter() - began) / (steps * args.replicas))
    median, best = (
        {name: {way: float(of(values)) for way, values in ways.items()} for name, ways in times.items()}
        for of in (np.median, np.min)
    )
    fastest = {name: min((way for way in ways if way != "copyhead"), key=ways.__getitem__) for name, ways in median.items()}
    result = {
        "microseconds_median": median,
        "microseconds_best": best,
        "relative_difference_of_gradients": differences,
        "fastest_pytorch": fastest,
        "pytorch_over_copyhead": {
            name: median[name][way] / median[plain if name == circuit else name]["copyhead"] for name, way in fastest.items()
        },
        "kernel_over_finite_width": median[kernel]["copyhead"] / median[plain]["copyhead"],
    }
    if args.json:
        print(json.dumps(result))
        return
    print(
        f"P = {args.sequences}, L = {args.length}, V = {args.vocab}, d_model = {args.width}, softmax, {args.replicas} replicas"
    )
    print("float32, one core; median (best)")
    print(f"gradients of PyTorch and copyhead differ by {max(differences.values()):.1e} at most, relative to their norms")
    for name, ways in median.items():
        for way, value in ways.items():
            print(f"{name:22s} {way:24s} {value:9.1f} ({best[name][way]:.1f}) microseconds for a replica-step")
    for name, way in fastest.items():
        print(f"{name}: {way} / copyhead {result['pytorch_over_copyhead'][name]:.2f}")
    print(f"copyhead, kernel / finite width: {result['kernel_over_finite_width']:.2f}")


if __name__ == "__main__":
    main()
