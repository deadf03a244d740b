"""Several heads, with a mask and any target: the gradient, training, starts and observables."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import QUICK
from copyhead.experiment import adam, cells
from copyhead.experiment.adam import AdamSettings, train
from copyhead.experiment.cells import assemble, data_sets
from copyhead.experiment.direct import DirectPath
from copyhead.experiment.moment_path import MomentPath, chunk_size
from copyhead.experiment.observables import measure_all, yardstick
from copyhead.experiment.packed import PackedPath
from copyhead.experiment.path import path
from copyhead.model import layout, network, targets, tokens
from copyhead.model.energy import energy
from copyhead.model.network import Network, Positional
from copyhead.model.prior import prior
from copyhead.problem import Problem, ProblemError
from copyhead.study.cell import groups
from copyhead.study.methods import run_cells
from copyhead.study.study_file import Adam, Block

pytestmark = pytest.mark.slow

LENGTH, VOCAB = 5, 3
TARGETS = ("lag:1", "lag:2", "lags:0=0.5,1=-1,3=2", "matrix")
# Not uniform, and not the same for two data sets: no moment then has a value that a wrong index would share.
LAWS = [0.5, 0.3, 0.2], [0.1, 0.3, 0.6]
# Adam's steps are of the size of the learning rate also where a gradient is rounding: a run of a few is compared loosely.
SHORT = 60
KINDS = pytest.mark.parametrize("kind", ["softmax", "linear"])


def tiny(causal: bool, heads: int, target: str, kind: str, folder) -> Problem:
    if target == "matrix":
        found = np.random.default_rng(5).normal(size=(LENGTH, LENGTH))
        found[2] = 0  # a row that is not scored
        file = folder / f"{causal}.txt"
        np.savetxt(file, np.tril(found) if causal else found)
        target = f"matrix:{file}"
    fields = {"attention": kind, "heads": heads, "target": target, "token_scale": 0.7, "position_scale": 1.5}
    return Problem(length=LENGTH, vocab=VOCAB, noise=0.8, logit_variance=0.7, output_variance=2.0, **fields).replace(
        causal=causal
    )


@partial(jax.jit, static_argnames=("heads", "kind"), compiler_options=QUICK)
def direct(weights, sequences, target, inside, scored, heads, kind):
    """E of one network on sequences as they are, and its gradient; loops over heads, and the kernel of the prior inverted.

    The prior of a masked head is that of G with zeros where it is masked. Numbers of the prior are those of `tiny`.
    """

    def total(weights):
        one_hot = jnp.eye(VOCAB)[sequences]
        inverse = jnp.linalg.inv(1.5 * jnp.eye(LENGTH) + 0.7 / VOCAB)
        wanted, given, cost = target @ one_hot, 0.0, 0.0
        for logits, output in zip(*weights, strict=True):
            shown = logits * inside
            matrix = shown / LENGTH if kind == "linear" else jnp.exp(logits) * inside
            if kind == "softmax":
                matrix = matrix / matrix.sum(axis=1, keepdims=True)
            given = given + matrix @ one_hot @ output
            cost = cost + jnp.sum(shown * (inverse @ shown @ inverse)) / (2 * 0.7) + jnp.sum(output**2) / (2 * 2.0)
        error = jnp.sum(scored[:, None] * (wanted - given) ** 2)
        return error / (2 * scored.sum() * 0.8) + cost

    return jax.value_and_grad(total)(weights)


def random_weights(problem: Problem, count: int, kind: type) -> Positional:
    source = np.random.default_rng(0)
    logits = source.normal(size=(count, problem.heads, problem.length, problem.length)) * targets.allowed(problem)
    return Positional(
        logits.astype(kind), source.normal(size=(count, problem.heads, problem.vocab, problem.vocab)).astype(kind)
    )


def slope(way, weights: Positional, data) -> Positional:
    """grad E as the path has it, one operation after the other: these are compiled once for all problems of one size."""
    begin, held = way.prepare(weights, data, np.zeros((2, 2), np.uint32))
    with jax.default_matmul_precision("highest"):
        found = way.restore(way.slope(jax.tree.map(jnp.asarray, begin), held, None))
    return jax.tree.map(np.asarray, found)


def drawn(problem: Problem) -> list[np.ndarray]:
    return [tokens.sample(tokens.stream(seed, "train"), 40, problem.length, law) for seed, law in enumerate(LAWS)]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("target", TARGETS)
@KINDS
def test_the_gradient_is_that_of_the_squared_error_over_sequences(kind, target, tmp_path):
    """In float64 and in float32, and E itself as model.energy has it."""
    for causal, heads in itertools.product((False, True), (1, 2, 3)):
        problem = tiny(causal, heads, target, kind, tmp_path)
        way, data, operator = MomentPath(problem), drawn(problem), targets.operator(problem)
        inside, entries = targets.allowed(problem), layout.masked(operator, targets.allowed(problem))
        with jax.enable_x64(True):
            exact = random_weights(problem, 2, np.float64)
            moments = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), way.collect(data))
            found = slope(way, exact, moments)
            for k, sequences in enumerate(data):
                one, its = jax.tree.map(lambda leaf, k=k: jnp.asarray(leaf[k]), (exact, moments))
                scored = np.any(operator != 0, axis=1).astype(float)
                value, wanted = direct(one, sequences, operator, inside.astype(float), scored, heads, kind)
                total = energy(*one, operator, its, entries, prior(problem), kind, masked=True)
                # sums of some hundred terms, and moments that cancel, in float64
                assert float(total) == pytest.approx(float(value), rel=1e-12)
                for part, reference in zip(found, wanted, strict=True):
                    assert np.abs(part[k] - reference).max() < 1e-12 * np.abs(reference).max()
        if heads == 2:
            rounded = slope(way, random_weights(problem, 2, np.float32), way.collect(data))
            for part, reference in zip(rounded, found, strict=True):
                assert part.dtype == np.float32
                # as for the packed path: a relative 1e-5 of the largest entry is several times what is seen
                assert np.abs(part - reference).max() < 1e-5 * np.abs(reference).max()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("cyclic", [True, False])
@KINDS
def test_one_head_on_the_papers_task_has_the_gradient_of_the_packed_path(kind, cyclic):
    problem = Problem(length=LENGTH, vocab=VOCAB, noise=0.8, attention=kind, cyclic=cyclic, token_scale=0.4)
    packed, general = PackedPath(problem), MomentPath(problem)
    begin = random_weights(problem, 2, np.float32)
    one_head = Positional(*(part[:, 0] for part in begin))
    data = packed.collect(data_sets(problem, [50, 80], 0))
    wanted, found = slope(packed, one_head, data), slope(general, begin, data)
    for part, reference in zip(found, wanted, strict=True):
        assert np.abs(part[:, 0] - reference).max() < 1e-5 * np.abs(reference).max()


def test_a_causal_head_is_trained_to_a_stationary_point_where_later_rows_have_larger_logits():
    """A row of n positions needs a logit that grows with ln n for the same attention, and rows are otherwise alike."""
    problem = Problem(length=12, vocab=3, noise=0.8, causal=True, cyclic=False)
    way = path(problem)
    assert isinstance(way, MomentPath)
    trained = train(
        assemble(way, [(800, seed, start, 1.0) for seed in (0, 1) for start in cells.STARTS]), way, AdamSettings(2500)
    )
    assert trained.converged.all()
    seen = measure_all(trained.weights, yardstick(problem, Network(), 64), problem)
    rows = np.asarray(seen.rows)
    assert rows.shape == (4, 11)
    # both starts end at one minimum; at a gradient below 1e-3 with curvature of order one logits are within 1e-3
    assert np.abs(rows[::2] - rows[1::2]).max() < 3e-3
    # between rows of data scatter of 0.1 the trend is clear: thirds of the rows, in order
    thirds = rows[:, :9].reshape(4, 3, 3).mean(axis=-1)
    assert np.all(np.diff(thirds, axis=1) > 0.1)
    masked = np.broadcast_to(~targets.allowed(problem), trained.weights.logits.shape)
    assert np.all(np.asarray(trained.weights.logits)[masked] == 0)


@KINDS
def test_permuted_heads_stay_permuted(kind):
    problem = Problem(length=6, vocab=3, noise=0.8, attention=kind, heads=3, target="lags:1=1,2=0.5", causal=True, cyclic=False)
    way = path(problem)
    runs = assemble(way, [(60, 0, "copy", 1.0)])
    order = [2, 0, 1]
    moved = runs._replace(start=Positional(*(part[:, order] for part in runs.start)))
    first, second = (train(each, way, AdamSettings(SHORT)).weights for each in (runs, moved))
    for part, other, begin in zip(first, second, runs.start, strict=True):
        # float32 sums in another order, over SHORT steps of Adam
        assert np.abs(part[:, order] - other).max() < 1e-3
        assert np.abs(part - begin).max() > 0.1
    against = yardstick(problem, Network(), 64)
    seen, again = (measure_all(weights, against, problem) for weights in (first, second))
    for one, two in zip(seen, again, strict=True):
        assert np.allclose(one, two, atol=2e-3)


def test_divergence_and_gradients_are_known_for_every_cell_with_heads():
    """One number for each cell, however many heads it has."""
    problem = Problem(length=6, vocab=3, noise=0.8, heads=2)
    way = path(problem)
    runs = assemble(way, [(60, seed, "small", 1.0) for seed in range(3)])
    spoilt = runs.start.output.copy()
    spoilt[1, 1, 0, 0] = 2 * adam.LARGEST_WEIGHT
    trained = train(runs._replace(start=runs.start._replace(output=spoilt)), way, AdamSettings(SHORT))
    assert trained.gradient.shape == trained.diverged.shape == (3,)
    assert (trained.diverged == adam.NEVER).tolist() == [True, False, True]


def test_small_starts_are_those_of_the_first_head_and_zero_where_masked():
    plain = Problem(length=6, vocab=3, noise=0.8)
    many = plain.replace(heads=3)
    causal = many.replace(causal=True)
    one, two, three = (
        network.start(Network(), problem, targets.operator(problem), "small", 4) for problem in (plain, many, causal)
    )
    assert isinstance(two, Positional)
    assert isinstance(three, Positional)
    assert np.array_equal(one[0], two.logits[0])
    assert np.array_equal(one[1], two.output[0])
    flat = two.logits.reshape(3, -1)
    assert np.abs(np.corrcoef(flat) - np.eye(3)).max() < 0.7  # 36 independent draws: four standard deviations
    assert np.array_equal(three.logits, np.tril(two.logits))


@KINDS
def test_a_copying_start_follows_the_target(kind):
    """Causal rows of all lengths: the target entries take the part e^2 n / (n - 1 + e^2 n), in the ratio of their weights."""
    problem = Problem(length=6, vocab=3, noise=0.8, attention=kind, heads=2, target="lags:1=3,2=1", causal=True, cyclic=False)
    target = targets.operator(problem)
    begin = network.start(Network(), problem, target, "copy", 4)
    assert isinstance(begin, Positional)
    assert np.abs(begin.logits[1]).max() < 0.1  # ten standard deviations
    logits, output = begin.logits[0].astype(float), begin.output[0].astype(float)
    if kind == "linear":
        assert np.allclose(logits / 6 * output[0, 0], target, rtol=1e-6)
        return
    matrix = np.where(targets.allowed(problem), np.exp(logits), 0)
    matrix /= matrix.sum(axis=1, keepdims=True)
    for a in range(2, 6):
        n = a + 1
        total = np.exp(2) * n / (n - 2 + np.exp(2) * n)
        assert matrix[a, [a - 1, a - 2]] == pytest.approx(total * np.array([0.75, 0.25]), rel=1e-6)  # logits are float32
    # T = w q: rows with both lags have w = 4, row 1 has w = 3; least squares weighs them by |q|^2
    assert output == pytest.approx((4 * 4 * 0.625 + 3) / (4 * 0.625 + 1) * np.eye(3), rel=1e-6)
    opposite = problem.replace(target="lags:1=1,2=-1", causal=False, cyclic=True)
    balanced = network.start(Network(), opposite, targets.operator(opposite), "copy", 4)
    assert isinstance(balanced, Positional)
    assert np.abs(balanced.output[0]).max() == 0  # neither sign can be had with positive attention


def test_observables_are_those_of_the_leading_head_and_ordered():
    problem = Problem(length=4, vocab=2, noise=0.8, heads=2, causal=True, cyclic=False)
    leading = np.zeros((4, 4))
    leading[1], leading[2], leading[3] = [2, 1, 0, 0], [0, 5, 2, 0], [3, 0, 10, 0]  # on target 2, 5, 10
    logits = np.stack([np.tril(np.ones((4, 4))), leading]).astype(np.float32)[None]
    output = np.stack([np.full((2, 2), 0.1), [[0.8, 0.1], [0.2, 0.6]]]).astype(np.float32)[None]
    seen = measure_all(Positional(logits, output), yardstick(problem, Network(), 16), problem)
    c1 = (1 + 0 + 2 + 3 + 0 + 0) / 6
    exact = {"c1": c1, "cG": 17 / 3 - c1, "rows": [2 - 1, 5 - 1, 10 - 1], "heads": [17 / 3 - c1, 0.0], "overlap": 0.7}
    for name, value in exact.items():
        assert np.asarray(getattr(seen, name))[0] == pytest.approx(value, abs=1e-6), name
    on, off, uniform, spread = 0.0, 0.0, 0.0, 0.0
    for a in range(1, 4):
        row = np.exp(leading[a, : a + 1])
        row /= row.sum()
        on, off = on + row[a - 1] / 3, off + (1 - row[a - 1]) / 6
        uniform, spread = uniform + 1 / (a + 1) / 3, spread + a / (a + 1) / 6
    assert np.asarray(seen.heads_a)[0] == pytest.approx([on - off, uniform - spread], abs=1e-6)
    assert float(seen.aG[0]) == pytest.approx(on - off, abs=1e-6)
    assert float(seen.a1[0]) == pytest.approx(4 * off, abs=1e-6)
    assert np.asarray(seen.lags)[0] == pytest.approx([on], abs=1e-6)


def test_the_population_loss_is_the_mean_over_all_sequences():
    """V = 2, L = 4: sixteen equally likely sequences, all enumerated."""
    problem = Problem(length=4, vocab=2, noise=0.8, heads=2, target="lags:1=2,3=-1", cyclic=False)
    weights = random_weights(problem, 1, np.float32)
    seen = measure_all(weights, yardstick(problem, Network(), 16), problem)
    every = np.array(list(itertools.product(range(2), repeat=4)))
    one_hot, matrix = np.eye(2)[every], np.exp(weights.logits[0])
    matrix /= matrix.sum(axis=-1, keepdims=True)
    given = sum(matrix[h] @ one_hot @ weights.output[0, h] for h in range(2))
    error = (targets.operator(problem) @ one_hot - given)[:, 1:]  # the first row has no target
    assert float(seen.loss[0]) == pytest.approx(np.sum(error**2) / (16 * 3), rel=1e-5)  # float32


def test_mirror_images_of_a_linear_head_have_the_same_observables():
    problem = Problem(length=5, vocab=3, noise=0.8, heads=2, attention="linear", target="lag:2")
    weights, against = random_weights(problem, 1, np.float32), yardstick(problem, Network(), 16)
    turned = Positional(*(part * np.array([1, -1], np.float32)[:, None, None] for part in weights))
    for one, two in zip(*(measure_all(each, against, problem) for each in (weights, turned)), strict=True):
        assert np.array_equal(one, two)


@pytest.mark.usefixtures("quick")
def test_a_study_keeps_arrays_beside_numbers():
    def trained(problem: Problem):
        (group, cells), *_ = groups([Block(method=Adam(steps=100), problem=problem, grid={"sequences": (20, 30)})])
        return run_cells(group, cells)

    problem = Problem(length=5, vocab=2, noise=0.8, heads=2, target="lags:1=1,3=0.5", cyclic=False)
    found = trained(problem)
    assert found.aG.dims == ("cell",)
    assert found.rows.dims == ("cell", "row")
    assert found.row.values.tolist() == [1, 2, 3, 4]
    assert found.lag.values.tolist() == [1, 3]
    assert np.array_equal(found.heads_a.sel(head=0), found.aG)
    assert set(trained(problem.replace(heads=1, target="lag:1")).dims) == {"cell"}


def test_what_is_not_known_is_refused():
    problem = Problem(length=5, vocab=2, noise=0.8, heads=2, token_scale=1.0)
    for refused in (
        lambda: path(problem, Network(kind="kernel")),
        lambda: path(problem, Network(kind="embedded")),
        lambda: path(problem.replace(token_scale=0.0), batch=4),
        lambda: PackedPath(problem),
        lambda: DirectPath(problem, Network()),
    ):
        with pytest.raises(ProblemError, match="heads = 2"):
            refused()
    with pytest.raises(ProblemError, match="head_dimension = 3"):
        path(problem.replace(head_dimension=3))
    with pytest.raises(ProblemError, match="content = True"):
        path(problem.replace(content=True))


def test_cells_are_run_one_at_a_time_where_moments_are_large():
    assert chunk_size(32, 128, 1) == chunk_size(16, 128, 8) == 1
    assert chunk_size(32, 4, 1) > 1
