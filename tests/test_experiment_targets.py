"""The posterior in all its forms: from the sequences, by the theory, as targets of samplers, and packed for the step loops."""

from functools import cache, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import QUICK
from copyhead.experiment import collapsed
from copyhead.experiment.collapsed import Rung
from copyhead.experiment.packed import PackedPath, Transposed, prior_gradient
from copyhead.experiment.target import Collapsed, Joint, Reduced, posed
from copyhead.model import layout, moments, targets, tokens
from copyhead.model.attention import attention
from copyhead.model.network import Positional
from copyhead.model.prior import prior
from copyhead.problem import Problem, ProblemError
from copyhead.theory.posterior import Task, negative_log_posterior

pytestmark = pytest.mark.usefixtures("x64")

SEQUENCES, CHI = 11, 7.0
# The packed form keeps token bases and moments in float32: of numbers of order 100, added up in float64, 6e-8 each.
FLOAT32 = 3e-6


def numbers(kind: str, length: int = 4, vocab: int = 3, cyclic: bool = True, token_scale: float = 0.0) -> Problem:
    """Every number different from one, so that none can stand in for another."""
    given = {"noise": 0.5, "logit_variance": 1.3, "output_variance": 0.6, "position_scale": 1.2, "chi": CHI}
    return Problem(length=length, vocab=vocab, cyclic=cyclic, token_scale=token_scale, attention=kind, **given)


# V = 9 is beyond UNROLLED, where LAPACK inverts.
CASES = [
    numbers(kind, *rest)
    for kind in ("softmax", "linear")
    for rest in [(2, 2), (4, 3, True, 0.7), (4, 3, False, 0.7), (3, 9, False)]
]
PROBLEMS = pytest.mark.parametrize(
    "problem", CASES, ids=lambda p: f"{p.attention}-{p.length}-{p.vocab}-{'cyclic' if p.cyclic else 'open'}-{p.token_scale:g}"
)


@cache
def drawn(problem: Problem) -> np.ndarray:
    return tokens.sample(tokens.stream(3, "train"), SEQUENCES, problem.length, tokens.uniform(problem.vocab))


def data(problem: Problem) -> moments.Empirical:
    """In float64; counts are exact in either."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, float), moments.empirical(drawn(problem), problem.vocab))


def places(problem: Problem, count: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Positions with entries of order one, where no term is small."""
    source = np.random.default_rng(0)
    logits = source.normal(size=(count, problem.length, problem.length))
    return logits, source.normal(size=(count, problem.vocab, problem.vocab)) + np.eye(problem.vocab)


def softmax_or_linear(logits: np.ndarray, problem: Problem) -> np.ndarray:
    if problem.attention == "linear":
        return logits / problem.length
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def by_hand(problem: Problem, logits: np.ndarray, output: np.ndarray) -> float:
    """E(G, W) through the sequences and with K^-1 as a matrix; docs/theory.md, section 2."""
    first = 0 if problem.cyclic else 1
    x = np.eye(problem.vocab)[drawn(problem)]
    error = np.roll(x, 1, axis=1) - softmax_or_linear(logits, problem) @ x @ output
    inverse = np.linalg.inv(problem.position_scale * np.eye(problem.length) + problem.token_scale / problem.vocab)
    cost = np.sum(logits * (inverse @ logits @ inverse)) / (2 * problem.logit_variance)
    return np.sum(error[:, first:] ** 2) / (2 * problem.kappa) + np.sum(output**2) / (2 * problem.output_variance) + cost


@PROBLEMS
def test_joint_is_the_energy_of_the_sequences(problem):
    target = Joint(posed(problem, data(problem)))
    density = jax.jit(lambda place: target.log_density(place, CHI), compiler_options=QUICK)
    for logits, output in zip(*places(problem), strict=True):
        found = density(Positional(logits, output))
        assert float(found) == pytest.approx(-CHI * by_hand(problem, logits, output), rel=1e-12)


@PROBLEMS
@pytest.mark.parametrize("expected", [False, True], ids=["empirical", "expected"])
def test_collapsed_is_the_posterior_of_the_theory(problem, expected):
    seen = moments.expected(tokens.uniform(problem.vocab), SEQUENCES, problem.length) if expected else data(problem)
    target = Collapsed(posed(problem, seen))
    shift = targets.shift(problem.length, cyclic=problem.cyclic)
    task = Task(shift, seen, layout.full(problem.length, problem.cyclic), prior(problem))
    (first, second), _ = places(problem)
    density = jax.jit(lambda logits: target.log_density(logits, CHI), compiler_options=QUICK)
    theory = jax.jit(lambda logits: negative_log_posterior(logits, task, problem.attention), compiler_options=QUICK)
    found, wanted = density(first) - density(second), theory(second) - theory(first)
    # `expected` holds float32
    assert float(found) == pytest.approx(float(wanted), abs=1e-4 if expected else 1e-10)


def test_reduced_is_collapsed_on_tied_logits():
    for problem in (numbers("softmax"), numbers("linear", cyclic=False)):
        seen, shift = posed(problem, data(problem)), targets.shift(problem.length, cyclic=problem.cyclic)
        found = Reduced(seen).log_density(jnp.array([0.3, 1.7]), CHI)
        assert float(found) == pytest.approx(float(Collapsed(seen).log_density(0.3 + 1.7 * shift, CHI)), rel=1e-14)
        start = Reduced(seen).initial(Positional(0.3 + 1.7 * shift, np.eye(3)))
        assert np.allclose(start, [0.3, 1.7], rtol=1e-14)


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_monte_carlo_over_outputs_gives_the_collapsed_posterior(kind):
    """log of the mean over W ~ prior of exp(-chi E), at 2^k draws: exact marginal, and errors that fall as 2^(-k/2)."""
    problem, chi, repeats = numbers(kind, 3, 2), 1.0, 64
    seen, (logits, _) = posed(problem, data(problem)), places(problem, 1)
    random = np.random.default_rng(1)
    variance = problem.output_variance
    # the prior is normalised here, and the collapsed form leaves (V/2) log det (1/g_O) in its determinant
    wanted = float(Collapsed(seen).log_density(logits[0], chi)) - problem.vocab**2 / 2 * np.log(variance)
    energy = jax.jit(jax.vmap(lambda w: Joint(seen).energy(logits[0], w)))
    errors = []
    for k in (6, 8, 10, 12):
        output = random.normal(size=(repeats * 2**k, 2, 2)) * np.sqrt(variance / chi)
        of_data = -chi * (energy(output) - np.sum(output**2, axis=(1, 2)) / (2 * variance))
        means = np.exp(np.asarray(of_data) - wanted).reshape(repeats, -1).mean(axis=1)
        errors.append(np.sqrt(np.mean((means - 1) ** 2)))
    # of 64 repeats, so each error is known to 9% if their means are normal, the slope over six powers of two to 2%
    assert np.polyfit([6, 8, 10, 12], np.log2(errors), 1)[0] == pytest.approx(-0.5, abs=0.1)
    # four standard errors: a false alarm in 16,000
    assert abs(means.mean() - 1) < 4 * means.std(ddof=1) / np.sqrt(repeats)
    assert means.std(ddof=1) < 0.2


@PROBLEMS
def test_gradients_are_those_of_differences(problem):
    seen, source = posed(problem, data(problem)), np.random.default_rng(2)
    logits, output = (part[0] for part in places(problem, 1))
    for target in (Joint(seen), Collapsed(seen), Reduced(seen)):
        place = target.initial(Positional(logits, output))
        way = jax.tree.map(lambda leaf: source.normal(size=leaf.shape), place)
        slope = jax.jit(lambda one, target=target: target.value_and_gradient(one, CHI)[1], compiler_options=QUICK)(place)
        along = sum(float(np.sum(a * b)) for a, b in zip(jax.tree.leaves(slope), jax.tree.leaves(way), strict=True))

        density = jax.jit(lambda one, target=target: target.log_density(one, CHI), compiler_options=QUICK)

        def at(step, density=density, place=place, way=way):
            return float(density(jax.tree.map(lambda leaf, by: leaf + step * by, place, way)))

        # differences of fourth order: h^4 times a fifth derivative, and rounding 1e-16 / h
        h = 1e-3
        difference = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
        assert along == pytest.approx(difference, rel=1e-7, abs=1e-7)


# Rungs that differ from the posterior in each of their numbers.
RUNGS = [Rung(CHI, 1.0, 0.0, 0.0), Rung(3.0, 0.4, 0.0, 0.0), Rung(11.0, 1.7, 0.3, 0.0), Rung(5.0, 1.2, -0.4, 9.0)]


def place_by_hand(logits, problem: Problem):
    """u: log of attention on over off the target, or L times their difference (linear); means over scored rows."""
    first, length = (0 if problem.cyclic else 1), problem.length
    matrix = attention(logits, problem.attention, length)[first:]
    shift = targets.shift(length, cyclic=problem.cyclic)[first:]
    on = jnp.sum(shift * matrix) / problem.scored
    off = jnp.sum((1 - shift) * matrix) / (problem.scored * (length - 1))
    return jnp.log(on / off) if problem.attention == "softmax" else length * (on - off)


def negative_log(logits, problem: Problem, rung: Rung):
    """-log p at a rung, from `Collapsed` with as many data as the rung has, and the bias from above."""
    given = data(problem)
    target = Collapsed(posed(problem, given.scaled(rung.weight * given.sequences)))
    return -target.log_density(logits, rung.chi) + rung.stiffness * (place_by_hand(logits, problem) - rung.center) ** 2 / 2


@cache
def looking(problem: Problem):
    """What the step loop takes, the density at a rung as `data_term`, whole, and from marks, and the slope of the whole."""
    sizes = collapsed.sizes(problem)

    def found(logits, data, rung):
        seen, of_data, force = collapsed.look_and_force(logits, data, rung, sizes)
        slope = force + rung.chi[:, None, None] * prior_gradient(logits, sizes.prior)
        whole = collapsed.negative_log_density(seen, rung, sizes)
        return (
            rung.chi * seen.prior + of_data,
            whole,
            collapsed.density_of_marks(collapsed.marks(seen), rung, sizes),
            slope.mT,
        )

    return jax.jit(found, compiler_options=QUICK)


@cache
def look(problem: Problem):
    sizes = collapsed.sizes(problem)
    return jax.jit(lambda logits, data: collapsed.look(logits, data, sizes)[0], compiler_options=QUICK)


def packed(problem: Problem, count: int):
    one = data(problem)
    return PackedPath(problem).pack(jax.tree.map(lambda leaf: np.stack([leaf] * count), one))


@PROBLEMS
def test_packed_density_and_force_are_those_of_the_target_at_every_rung(problem):
    (first, second), _ = places(problem)
    logits = np.stack([first, second] * len(RUNGS))
    rung = Rung(*(np.repeat(part, 2) for part in np.array(RUNGS).T))
    in_parts, whole, of_marks, force = looking(problem)(logits.swapaxes(1, 2), packed(problem, len(logits)), rung)
    np.testing.assert_allclose(in_parts, whole, rtol=1e-12)
    np.testing.assert_allclose(of_marks, whole, rtol=1e-10)
    value = jax.jit(jax.value_and_grad(partial(negative_log, problem=problem)), compiler_options=QUICK)
    for index, one in enumerate(RUNGS):
        (left, slope), (right, _) = value(first, rung=one), value(second, rung=one)
        assert float(whole[2 * index] - whole[2 * index + 1]) == pytest.approx(float(left - right), rel=FLOAT32, abs=FLOAT32)
        np.testing.assert_allclose(force[2 * index], slope, atol=FLOAT32 * np.abs(slope).max())


@PROBLEMS
def test_packed_energy_and_slope_are_those_of_the_joint_target(problem):
    logits, output = places(problem)
    path, target = PackedPath(problem), Joint(posed(problem, data(problem)))
    held = Transposed(logits.swapaxes(1, 2), output)
    data_sets = path.pack(jax.tree.map(lambda leaf: np.stack([leaf] * 2), data(problem)))
    energy, slope = jax.jit(path.energy_and_slope, compiler_options=QUICK)(held, data_sets)
    value = jax.vmap(lambda *place: target.value_and_gradient(Positional(*place), CHI))
    log_density, gradient = jax.jit(value, compiler_options=QUICK)(logits, output)
    assert float(energy[0] - energy[1]) == pytest.approx(float(log_density[1] - log_density[0]) / CHI, rel=FLOAT32)
    for part, wanted in zip((slope.logits.mT, slope.output), gradient, strict=True):
        np.testing.assert_allclose(part, -wanted / CHI, atol=FLOAT32 * np.abs(wanted).max() / CHI)


@pytest.mark.parametrize("size", [2, 5, collapsed.UNROLLED, collapsed.UNROLLED + 1, 20])
def test_inverse_and_log_det(size):
    source = np.random.default_rng(4)
    root = source.normal(size=(6, size, size)) * np.logspace(-1.5, 1.5, size)[:, None]
    matrix = root @ root.swapaxes(1, 2) + 1e-3 * np.eye(size)
    inverse, log_det = collapsed.inverse_and_log_det(jnp.asarray(matrix))
    # the condition is up to 1e8, and rounding 1e-16 of it is what an inverse can be good to
    error = np.abs(inverse @ matrix - np.eye(size)).max(axis=(1, 2)) / np.linalg.cond(matrix)
    assert error.max() < 1e-14
    np.testing.assert_allclose(log_det, np.linalg.slogdet(matrix)[1], rtol=1e-9, atol=1e-9)


@PROBLEMS
def test_place_and_order_parameter_are_inverse_and_measured(problem):
    aG = np.linspace(-0.9 / problem.length, 0.95, 30)
    place = collapsed.place_of(aG, problem)
    assert all(low < high for low, high in pairwise(place))
    np.testing.assert_allclose(collapsed.order_parameter(place, problem), aG, rtol=1e-12, atol=1e-14)
    (logits,), _ = places(problem, 1)
    seen = look(problem)(logits.T[None], packed(problem, 1))
    assert float(seen.place[0]) == pytest.approx(float(place_by_hand(logits, problem)), abs=FLOAT32)
    first = 0 if problem.cyclic else 1
    matrix = softmax_or_linear(logits, problem)[first:]
    shift = targets.shift(problem.length, cyclic=problem.cyclic)[first:]
    measured = matrix[shift == 1].mean() - matrix[shift == 0].mean()
    assert float(collapsed.order_parameter(seen.place[0], problem)) == pytest.approx(measured, abs=FLOAT32)


@PROBLEMS
def test_drawn_outputs_have_the_law_of_the_posterior(problem):
    """mean and covariance from the Hessian of E by W: the draw is affine in its noise, so unit noise shows its factor."""
    (logits,), _ = places(problem, 1)
    vocab, rung = problem.vocab, Rung(*(np.array([part]) for part in (5.0, 1.2, 0.0, 0.0)))
    sizes = collapsed.sizes(problem)
    seen = look(problem)(logits.T[None], packed(problem, 1))
    given = data(problem)
    energy = partial(Joint(posed(problem, given.scaled(1.2 * given.sequences))).energy, logits)
    both = jax.jit(lambda w: (jax.grad(energy)(w), jax.hessian(energy)(w)), compiler_options=QUICK)
    slope, hessian = (np.asarray(part) for part in both(np.zeros((vocab, vocab))))
    hessian = hessian.reshape(vocab**2, vocab**2)
    mean = np.linalg.solve(hessian, -slope.ravel())
    noises = np.concatenate([np.zeros((1, vocab, vocab)), np.eye(vocab**2).reshape(-1, vocab, vocab)])
    draw = jax.jit(lambda noise: collapsed.draw_output(seen, rung, noise[None], sizes)[0].ravel(), compiler_options=QUICK)
    draws = np.stack([np.asarray(draw(noise)) for noise in noises])
    np.testing.assert_allclose(draws[0], mean, rtol=FLOAT32, atol=FLOAT32)
    factor = draws[1:] - draws[0]
    np.testing.assert_allclose(factor.T @ factor, np.linalg.inv(hessian) / 5.0, atol=FLOAT32)


@pytest.mark.parametrize(
    ("fields", "field"), [({"content": True, "token_scale": 1.0}, "content"), ({"head_dimension": 64}, "head")]
)
def test_other_networks_are_refused(fields, field):
    problem = numbers("softmax").model_copy(update=fields)
    for call in (lambda: posed(problem, data(problem)), lambda: collapsed.sizes(problem)):
        with pytest.raises(ProblemError, match=field):
            call()
