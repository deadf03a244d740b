"""Masks, heads, other targets and token laws: the symmetric subspace against the full matrices through dense S_ij."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from copyhead.model import layout, targets, tokens
from copyhead.model.moments import Correlated, Independent
from copyhead.problem import Problem
from copyhead.theory import symmetric
from copyhead.theory.descent import descend
from copyhead.theory.saddle_point import System
from copyhead.theory.symmetric import symmetric_task

pytestmark = pytest.mark.usefixtures("x64")

# sums and small inverses of numbers of order one in float64
ROUNDING = 1e-10
CHAIN = np.array([[0.1, 0.6, 0.3], [0.5, 0.0, 0.5], [0.7, 0.2, 0.1]])


def dense(law: tokens.Law, length: int, cyclic: bool) -> np.ndarray:
    """E x_i x_j^T as (L, L, V, V), from the pair probabilities of the law, one pair of positions at a time."""
    pairs = law.pairs(length, cyclic)
    found = np.empty((length, length, law.vocab, law.vocab))
    for i in range(length):
        for j in range(length):
            if cyclic:
                found[i, j] = pairs[(j - i) % length]
            else:
                found[i, j] = pairs[j - i] if j >= i else pairs[i - j].T
    return found


def contracted(left: np.ndarray, right: np.ndarray, tensor: np.ndarray) -> np.ndarray:
    """Q(left^T right) = sum_ij (left^T right)_ij S_ij."""
    return np.einsum("ij,ijuv->uv", left.T @ right, tensor)


def explained(matrices: np.ndarray, target: np.ndarray, tensor: np.ndarray, ridge: float) -> float:
    """tr N^T (F + ridge)^-1 N with the HV x HV matrix F built block by block; rows that are not scored must be zero."""
    square = np.block([[contracted(one, other, tensor) for other in matrices] for one in matrices])
    overlap = np.concatenate([contracted(one, target, tensor) for one in matrices])
    return float(np.sum(overlap * np.linalg.solve(square + ridge * np.eye(len(square)), overlap)))


def full_action(logits: np.ndarray, problem: Problem, sequences: float) -> float:
    """S of L x L logits of every head (docs/theory.md, section 3), nothing but NumPy and the law; token_scale = 0.

    Logits must be zero where they are masked and in rows that are not scored.
    """
    target, allowed = targets.operator(problem), targets.allowed(problem)
    tensor = sequences * dense(tokens.law(problem), problem.length, problem.cyclic)
    scored = np.any(target != 0, axis=1)
    if problem.attention == "linear":
        matrices = logits * allowed / problem.length
    else:
        weight = np.exp(logits) * allowed
        matrices = weight / weight.sum(-1, keepdims=True)
    matrices = matrices * scored[:, None]
    kappa = scored.sum() * problem.noise
    square = np.trace(contracted(target, target, tensor))
    prior = np.sum(logits**2) / (2 * problem.logit_variance * problem.position_scale**2)
    return float(prior + (square - explained(matrices, target, tensor, kappa / problem.output_variance)) / (2 * kappa))


def written(path, table) -> str:
    np.savetxt(path, table)
    return str(path)


def paper(**fields) -> Problem:
    return Problem.preset("paper", **fields)


def matrices_of(rng: np.random.Generator, heads: int, allowed: np.ndarray, scored: np.ndarray, kind: str) -> np.ndarray:
    """Random A of every head, of the signs and sums that the attention gives."""
    logits = 2 * rng.normal(size=(heads, *allowed.shape))
    if kind == "linear":
        return logits * allowed * scored[:, None] / len(allowed)
    weight = np.exp(logits) * allowed
    return weight / weight.sum(-1, keepdims=True) * scored[:, None]


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("kind", ["softmax", "linear"])
@pytest.mark.parametrize("causal", [False, True])
def test_independent_tokens_are_explained_as_by_the_whole_matrix(heads, kind, causal):
    rng, length, ridge, sequences = np.random.default_rng(heads), 5, 0.7, 3.0
    law = np.array([0.4, 0.15, 0.15, 0.3, 0.0])
    target = np.tril(rng.normal(size=(length, length)), -1)  # row 0 is not scored; signs differ
    allowed = np.tril(np.ones((length, length), bool)) if causal else np.ones((length, length), bool)
    matrices = matrices_of(rng, heads, allowed, np.any(target != 0, axis=1), kind)
    moments = Independent(np.float64(sequences), np.array([0.4, 0.15, 0.3]), np.array([1.0, 2.0, 1.0]))
    found = moments.explained(matrices, target, layout.masked(target, allowed), ridge)
    tensor = sequences * dense(tokens.Independent(law), length, False)
    assert float(found) == pytest.approx(explained(matrices, target, tensor, ridge), rel=ROUNDING)
    square = moments.target_square(target, layout.masked(target, allowed))
    assert float(square) == pytest.approx(np.trace(contracted(target, target, tensor)), rel=ROUNDING)


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("kind", ["softmax", "linear"])
@pytest.mark.parametrize("ring", [False, True])
def test_correlated_tokens_are_explained_as_by_the_whole_matrix(heads, kind, ring):
    rng, length, ridge, sequences = np.random.default_rng(heads), 4, 0.7, 3.0
    law = tokens.Markov(CHAIN)
    target = rng.normal(size=(length, length))
    target[0] = 0
    allowed = np.ones((length, length), bool) if ring else np.tril(np.ones((length, length), bool))
    matrices = matrices_of(rng, heads, allowed, np.any(target != 0, axis=1), kind)
    ahead = law.pairs(length, ring)
    pairs = ahead if ring else np.concatenate([ahead[:0:-1].transpose(0, 2, 1), ahead])
    found = Correlated(np.float64(sequences), pairs).explained(matrices, jnp.asarray(target), ridge)
    tensor = sequences * dense(law, length, ring)
    assert float(found) == pytest.approx(explained(matrices, target, tensor, ridge), rel=ROUNDING)


MIXED = [
    [0, 0, 0, 0, 0, 0],
    [2, -1, 0, 0, 0, 0],
    [1, 1, 1, 0, 0, 0],  # without a zero among the positions that are seen
    [0, 0, 1, 0, 0, 0],
    [0.5, 0.5, 2, -1, -1, 0],
    [0, 2, -1, 0, 0, 0],
]
ALIKE = [[1.0, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 2], [1, 1, 1, 1]]
ACTIONS = {
    "causal": {"length": 6, "causal": True},
    "causal, lag 0": {"length": 5, "causal": True, "target": "lag:0"},
    "causal lags": {"length": 6, "causal": True, "target": "lags:1=1,2=-0.5,3=1"},
    "cyclic lags": {"length": 6, "target": "lags:1=1,2=-0.5,4=-0.5"},
    "all lags": {"length": 3, "target": "lags:0=1,1=1,2=1"},
    "open": {"length": 5, "cyclic": False, "target": "lag:2"},
    "mixed rows": {"length": 6, "causal": True, "target": MIXED},
    "equal values": {"length": 4, "target": ALIKE},
    "zipf": {"length": 5, "causal": True, "tokens": "zipf:1.2", "vocab": 5},
    "two positions": {"length": 2, "causal": True},
}


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("kind", ["softmax", "linear"])
@pytest.mark.parametrize("name", ACTIONS)
def test_the_symmetric_action_is_that_of_the_full_matrix(tmp_path, name, kind, heads):
    fields = {"vocab": 4, **ACTIONS[name], "attention": kind, "heads": heads, "logit_variance": 1.7, "output_variance": 0.6}
    if isinstance(fields.get("target"), list):
        fields["target"] = "matrix:" + written(tmp_path / "target", fields["target"])
    problem, sequences = paper(**fields), 23.0
    task = symmetric.at_sequences(symmetric_task(problem), sequences)
    classes = layout.compressed(targets.operator(problem), targets.allowed(problem))
    coordinates = np.random.default_rng(1).normal(size=symmetric.dimension(task, kind))
    by_class = np.asarray(symmetric.class_logits(coordinates, task, kind))
    expanded = classes.expand(by_class)
    # a class that a row does not have is an entry of the prior and nothing else
    present = np.asarray(task.classes.columns) > 0
    unused = np.sum((by_class * ~present) ** 2) / (2 * problem.logit_variance)
    found = float(symmetric.symmetric_action(coordinates, task, kind))
    assert found == pytest.approx(full_action(expanded, problem, sequences) + unused, rel=ROUNDING)
    if kind == "softmax":  # the mean of every row is zero, where the prior is least
        assert np.abs(expanded.sum(-1)).max() < 1e-12


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_the_action_of_correlated_tokens_is_that_of_the_full_matrix(tmp_path, kind, heads):
    law = written(tmp_path / "chain", CHAIN)
    problem = paper(
        length=5, vocab=3, tokens=f"markov:{law}", target="lags:1=0.4,3=-1", attention=kind, heads=heads, logit_variance=1.7
    )
    task = symmetric.at_sequences(symmetric_task(problem), 23.0)
    coordinates = np.random.default_rng(1).normal(size=symmetric.dimension(task, kind))
    by_class = np.asarray(symmetric.class_logits(coordinates, task, kind))
    a, b = np.indices((5, 5))
    # docstring of the lags: those of the target first, by weight
    order = [3, 1, 0, 2, 4]
    expanded = by_class[:, 0, np.argsort(order)[(a - b) % 5]]
    found = float(symmetric.symmetric_action(coordinates, task, kind))
    assert found == pytest.approx(full_action(expanded, problem, 23.0), rel=ROUNDING)


@given(
    values=st.integers(2, 5).flatmap(
        lambda n: st.lists(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), min_size=n, max_size=n), min_size=n, max_size=n)
    ),
    causal=st.booleans(),
)
def test_compressed_targets_expand_to_themselves(values, causal):
    target = np.tril(values) if causal else np.array(values)
    assume(np.any(target))
    allowed = np.tril(np.ones(target.shape, bool)) if causal else np.ones(target.shape, bool)
    found = layout.compressed(target, allowed)
    np.testing.assert_array_equal(found.expand(found.target), target)
    scored = np.any(target != 0, axis=1)
    np.testing.assert_array_equal(found.entry >= 0, allowed & scored[:, None])
    # every position is counted once, and zero is the last value of every row
    np.testing.assert_array_equal(found.layout.columns[found.row[scored]].sum(1), allowed[scored].sum(1))
    assert found.layout.rows.sum() == scored.sum()
    last = found.target[:, -1]
    assert np.all((last == 0) | np.all(found.target != 0, axis=1))


def maxwell(problem: Problem, guess: float, low: float, high: float) -> tuple[float, float, float]:
    """P of equal action, and of the two folds, of one copy logit: from the slope on a fine grid, nothing followed."""
    task = symmetric_task(problem)
    assert symmetric.dimension(task, "softmax") == 1
    grid = np.linspace(-0.2, 3.5, 4001)

    @jax.jit
    def both(sequences):
        scaled = symmetric.at_sequences(task, sequences)
        one = jax.vmap(jax.value_and_grad(lambda c: symmetric.symmetric_action(c[None], scaled, "softmax")))
        return one(grid)

    def minima(sequences):
        value, slope = map(np.asarray, both(sequences))
        at = np.flatnonzero((slope[:-1] < 0) & (slope[1:] >= 0))
        # the cubic through values and slopes would do; a secant on the slope leaves an error of order 1e-10 in the action
        part = slope[at] / (slope[at] - slope[at + 1])
        return value[at] + slope[at] * part * (grid[1] - grid[0]) / 2

    def halved(passed, low, high):
        for _ in range(45):
            middle = (low + high) / 2
            low, high = (low, middle) if passed(middle) else (middle, high)
        return (low + high) / 2

    def copies(sequences):
        found = minima(sequences)
        return len(found) == 1 or found[1] < found[0]

    return (
        halved(copies, *guess),
        halved(lambda p: len(minima(p)) > 1, *low),
        halved(lambda p: len(minima(p)) == 1, *high),
    )


@pytest.mark.parametrize("fields", [{}, {"target": "lag:5"}, {"tokens": "zipf:0"}], ids=str)
def test_the_new_route_gives_the_transition_of_the_paper(fields):
    """theory.md, section 6: 296.8200 and the window 278.386 - 337.177, to the digits given there."""
    place, lower, upper = maxwell(paper(**fields), (285, 320), (270, 285), (320, 345))
    assert place == pytest.approx(296.8200, rel=1e-6)
    assert (lower, upper) == pytest.approx((278.386, 337.177), abs=2e-3)


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_the_new_route_is_the_action_of_the_paper(kind):
    from copyhead.theory.action import at, copy_task, reduced_action

    problem = paper(attention=kind, token_scale=0.5)
    old, new = at(copy_task(problem), 310.0), symmetric.at_sequences(symmetric_task(problem), 310.0)
    for c1, cG in ((-0.02, 0.3), (0.1, 1.9), (0.0, -0.7)):
        mean = -cG / 32 if kind == "softmax" else c1
        place = np.array([cG]) if kind == "softmax" else np.array([c1 + cG, c1])
        expected = float(reduced_action(np.array([mean, cG]), old, kind))
        assert float(symmetric.symmetric_action(place, new, kind)) == pytest.approx(expected, rel=ROUNDING)


class Compiled:
    """S of one problem with its gradient and Hessian, as functions of the coordinates and P."""

    def __init__(self, problem: Problem):
        self.task, kind = symmetric_task(problem), problem.attention

        def action(c, sequences):
            return symmetric.symmetric_action(c, symmetric.at_sequences(self.task, sequences), kind)

        self.action = jax.jit(action)
        self.both = jax.jit(jax.value_and_grad(action))
        self.hessian = jax.jit(jax.hessian(action))

    def minimum(self, start, sequences: float) -> tuple[float, np.ndarray]:
        """Where a descent ends."""
        place = descend(lambda c: tuple(map(np.asarray, self.both(c, sequences))), np.asarray(start, float), 1e-9).place
        return float(self.action(place, sequences)), place


def test_two_heads_break_their_symmetry_in_a_jump():
    """theory.md, section 9: between P = 250 and 275. In the window 235.298 - 314.175 equal heads and different ones coexist."""
    two = Compiled(paper(heads=2))

    def equal(sequences):
        """A descent from equal heads keeps them equal; stationary to 1e-9."""
        value, place = two.minimum([0.3, 0.3], sequences)
        assert place[0] == pytest.approx(place[1], abs=1e-9)
        return value, place

    def difference(sequences):
        value, place = two.minimum([2.0, -1.0], sequences)
        assert np.ptp(place) > 1
        return value - equal(sequences)[0]

    assert difference(250.0) > 0 > difference(275.0)
    # the value of the package, 252.096, within 0.01
    assert difference(252.086) > 0 > difference(252.106)
    for sequences, stable in ((313.9, True), (314.5, False)):
        values, vectors = np.linalg.eigh(np.asarray(two.hessian(equal(sequences)[1], sequences)))
        assert (values[0] > 0) == stable
        # a pitchfork: what gets soft is the difference of the heads, while equal heads stay stable
        assert abs(vectors[0, 0] + vectors[1, 0]) < 1e-6
        assert values[1] > 0


def test_rotations_of_linear_heads_change_nothing():
    """S depends on sum_h A_h (x) W_h alone, and both priors on sums of squares: O(H) is a symmetry of linear attention."""
    rng = np.random.default_rng(0)
    problem = paper(length=5, attention="linear", heads=3, causal=True)
    logits = rng.normal(size=(3, 5, 5)) * np.tril(np.ones((5, 5)), 0)
    logits[:, 0] = 0
    turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    turned = np.einsum("hg,gab->hab", turn, logits)
    assert full_action(turned, problem, 40.0) == pytest.approx(full_action(logits, problem, 40.0), rel=ROUNDING)
    # so a head with its first h entries at zero is general
    task = symmetric.at_sequences(symmetric_task(problem), 40.0)
    by_class = rng.normal(size=task.shape) * (np.asarray(task.classes.columns) > 0)
    direct = float(symmetric.action_of(by_class, task, "linear"))
    coordinates = symmetric.coordinates_of(by_class, task, "linear")
    assert len(coordinates) == by_class.size - 3
    back = np.asarray(symmetric.class_logits(coordinates, task, "linear"))
    gram = np.einsum("hrk,hqj->rkqj", by_class, by_class)
    np.testing.assert_allclose(np.einsum("hrk,hqj->rkqj", back, back), gram, atol=1e-12)
    unused = np.sum((back * (np.asarray(task.classes.columns) == 0)) ** 2)
    assert unused < 1e-20
    assert float(symmetric.symmetric_action(coordinates, task, "linear")) == pytest.approx(direct, rel=ROUNDING)


@pytest.mark.parametrize("heads", [2, 4])
def test_a_second_linear_head_becomes_active_at_one_place_for_any_number(heads):
    """The value of the package is 618.795: the Hessian on the logits of all heads, with one active, loses its sign there."""
    many, one = (Compiled(paper(attention="linear", heads=count)) for count in (heads, 1))
    shape, signs = many.task.shape, []

    @jax.jit
    def action(free, sequences):
        return symmetric.action_of(free.reshape(shape), symmetric.at_sequences(many.task, sequences), "linear")

    hessian = jax.jit(jax.hessian(action))
    for sequences in (600.0, 618.7, 618.9, 640.0):
        value, place = one.minimum([5.0, 0.1], sequences)
        active = np.concatenate([place, np.zeros(2 * (heads - 1))])
        values = np.linalg.eigvalsh(np.asarray(hessian(active, sequences)))
        # the rotations of the active head into each other one are H - 1 flat directions; the rest decides
        rest = values[np.argsort(np.abs(values))[heads - 1 :]]
        signs.append(rest.min() > 0)
        if sequences != 640.0:
            continue
        near = active.reshape(shape) + 0.1 * np.random.default_rng(0).normal(size=shape)
        below, found = many.minimum(symmetric.coordinates_of(near, many.task, "linear"), sequences)
        assert below < value - 1e-6
        logits = np.asarray(symmetric.class_logits(found, many.task, "linear"))[:, 0]
        assert np.linalg.matrix_rank(logits, tol=1e-2) == 2
    assert signs == [True, True, False, False]


def test_coordinates_are_read_off_logits():
    """`coordinates_of` inverts `class_logits` for both attentions, up to the gauge of each, which S does not see."""
    for kind in ("softmax", "linear"):
        one = Compiled(paper(length=6, causal=True, heads=2, attention=kind))
        for start in symmetric.starts(one.task, kind)[::3]:
            back = symmetric.coordinates_of(np.asarray(symmetric.class_logits(start, one.task, kind)), one.task, kind)
            assert float(one.action(back, 50.0)) == pytest.approx(float(one.action(start, 50.0)), rel=ROUNDING)


def test_the_loss_is_that_of_the_best_output():
    """|T x - sum_h A_h x W_h|^2 with W = (F + ridge)^-1 N, per token, from the dense matrices."""
    problem, sequences = paper(length=5, causal=True, heads=2, tokens="zipf:0.8"), 60.0
    task = symmetric.at_sequences(symmetric_task(problem), sequences)
    classes = layout.compressed(targets.operator(problem), targets.allowed(problem))
    by_class = np.asarray(symmetric.class_logits(np.random.default_rng(3).normal(size=8), task, "softmax"))
    found = symmetric.parts(by_class, task, "softmax")
    logits, target = classes.expand(by_class), targets.operator(problem)
    weight = np.exp(logits) * np.tril(np.ones((5, 5)))
    matrices = weight / weight.sum(-1, keepdims=True) * (np.arange(5) > 0)[:, None]
    tensor = sequences * dense(tokens.law(problem), 5, False)
    square = np.block([[contracted(one, other, tensor) for other in matrices] for one in matrices])
    overlap = np.concatenate([contracted(one, target, tensor) for one in matrices])
    output = np.linalg.solve(square + problem.kappa / problem.output_variance * np.eye(8), overlap)
    loss = np.trace(contracted(target, target, tensor)) - 2 * np.sum(output * overlap) + np.sum(output * (square @ output))
    assert float(found.loss) == pytest.approx(loss / (4 * sequences), rel=ROUNDING)
    below = np.tril(np.ones((5, 5)))
    for row, position in enumerate(range(1, 5)):
        others = [logits[0, position, b] for b in range(position + 1) if b != position - 1]
        off = np.mean(others)
        assert float(found.rows[0, row]) == pytest.approx(logits[0, position, position - 1] - off, rel=ROUNDING)
    on = target > 0
    off = matrices[0][(below > 0) & ~on & (np.arange(5) > 0)[:, None]].mean()
    assert float(found.a1[0]) == pytest.approx(5 * off, rel=ROUNDING)
    assert float(found.aG[0]) == pytest.approx(matrices[0][on].mean() - off, rel=ROUNDING)


def test_whitening_makes_the_prior_a_square():
    """In z the prior is unit |z|^2 / 2, also with entries that some rows do not have."""
    task = symmetric_task(paper(length=5, causal=True, target="lags:1=1,2=-0.5"))
    system = System.of(task, "softmax")
    z = np.random.default_rng(0).normal(size=system.dimension)
    bare = symmetric.at_sequences(task, math.exp(-700))
    found = float(symmetric.symmetric_action(system.coordinates(z), bare, "softmax"))
    assert found == pytest.approx(system.unit * (z @ z) / 2, rel=ROUNDING)
