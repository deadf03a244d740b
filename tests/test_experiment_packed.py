"""The packed gradient is the gradient of the energy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from copyhead.experiment.cells import assemble
from copyhead.experiment.packed import PackedPath, Transposed, chunk_size, gradient, pack, rows
from copyhead.model import layout, targets
from copyhead.model.energy import energy
from copyhead.model.prior import prior
from copyhead.problem import Problem

CASES = [
    {},
    {"cyclic": False},
    {"token_scale": 0.7},
    {"attention": "linear"},
    {"attention": "linear", "cyclic": False},
    {"attention": "linear", "token_scale": 0.3, "position_scale": 2.0, "logit_variance": 0.7, "output_variance": 3.0},
    {"vocab": 2, "length": 2},
]


def weights(problem: Problem, cells: int) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(0)
    shapes = (cells, problem.length, problem.length), (cells, problem.vocab, problem.vocab)
    return tuple(source.normal(size=shape).astype(np.float32) for shape in shapes)


@pytest.mark.parametrize("fields", CASES)
def test_packed_gradient_is_the_gradient_of_the_energy(fields):
    problem = Problem(**{"length": 7, "vocab": 3, "noise": 0.8, **fields})
    path = PackedPath(problem)
    cells = assemble(path, [(50, 0, "small", 1.0), (80, 1, "copy", 1.0)])
    logits, output = weights(problem, 2)
    target, whole = targets.shift(problem.length, cyclic=problem.cyclic), layout.full(problem.length, problem.cyclic)

    def total(pair, data):
        return energy(*pair, target, data, whole, prior(problem), problem.attention)

    with jax.default_matmul_precision("highest"):
        _, packed = path.prepare(cells.start, cells.data, cells.batch_key)
        found = path.slope(Transposed(logits.swapaxes(1, 2), output), packed, None)
        wanted = jax.vmap(jax.grad(total))((logits, output), cells.data)
    for part, reference in zip((found.logits.mT, found.output), wanted, strict=True):
        # float32 sums of a few hundred terms: a relative 1e-5 of the largest entry is ten times what is seen
        assert jnp.abs(part - reference).max() < 1e-5 * jnp.abs(reference).max()


def test_general_target():
    problem = Problem(length=6, vocab=3, noise=0.8)
    cells, whole, numbers = assemble(PackedPath(problem), [(60, 0, "small", 1.0)]), layout.full(6), prior(problem)
    target = np.random.default_rng(1).normal(size=(6, 6)).astype(np.float32)  # rows do not sum to one
    logits, output = weights(problem, 1)
    for kind in ("softmax", "linear"):
        found = gradient(
            Transposed(logits.swapaxes(1, 2), output), pack(cells.data, target), rows(target, whole), numbers, kind
        )
        total = partial(energy, target=target, moments=jax.tree.map(lambda leaf: leaf[0], cells.data), layout=whole)
        wanted = jax.grad(lambda pair, total=total, kind=kind: total(*pair, prior=numbers, kind=kind))((logits[0], output[0]))
        for part, reference in zip((found.logits[0].T, found.output[0]), wanted, strict=True):
            assert jnp.abs(part - reference).max() < 1e-5 * jnp.abs(reference).max()


def test_chunk_size_is_a_power_of_two_in_range():
    sizes = [chunk_size(length, vocab) for length, vocab in ((8, 2), (32, 4), (64, 4), (128, 32))]
    assert sizes == sorted(sizes, reverse=True)
    assert all(2 <= size <= 32 and size & (size - 1) == 0 for size in sizes)
