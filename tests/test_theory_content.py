"""Attention that reads the tokens: against enumeration of all sequences with all four blocks of logits, and written-out sums.

Two independent copies of the theory: `Blocks` runs every one of the V^L sequences through a network with blocks pp, pt, tp, tt
and a V x V output map; `Sums` has the four order parameters with the full binomial sum, as moments of token histograms.
"""

import itertools
import json
import math
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import eigh
from scipy.optimize import brentq, minimize, minimize_scalar, root
from scipy.stats import binom

from conftest import QUICK
from copyhead import predict
from copyhead.cli import app
from copyhead.problem import Problem, ProblemError
from copyhead.study.diagram import diagram, parse_axis
from copyhead.theory import action as reduced
from copyhead.theory import content
from copyhead.theory import order_parameters as op
from copyhead.theory.action import at, copy_task, full_task
from copyhead.theory.end_point import end_point

pytestmark = pytest.mark.usefixtures("x64")

KINDS = pytest.mark.parametrize("kind", ["softmax", "linear"])
# (c1, cG, cI, cS)
PLACES = [(0.3, 1.1, -0.4, 0.2), (-0.05, 2.7, 0.8, -0.6), (0.2, -0.8, 0.1, 1.5), (0.4, 0.0, 0.0, 0.0), (-0.1, 0.3, -1.6, 0.0)]
# a few hundred operations on numbers of order one, and cancellation between P L / (2 kappa) and what is explained
ROUNDING = 1e-11

reduced_action = jax.jit(reduced.reduced_action, static_argnames="kind", compiler_options=QUICK)
order_parameters = jax.jit(op.order_parameters, static_argnames="kind", compiler_options=QUICK)
gradient = jax.jit(jax.grad(reduced.reduced_action), static_argnames="kind", compiler_options=QUICK)
hessian = jax.jit(jax.hessian(reduced.reduced_action), static_argnames="kind", compiler_options=QUICK)


def numbers(kind, length=5, vocab=3, **fields) -> Problem:
    """Every number different from one, so that none can stand in for another."""
    given = {"logit_variance": 1.3, "output_variance": 0.6, "position_scale": 1.2, "token_scale": 0.8, "noise": 0.7}
    return Problem(length=length, vocab=vocab, attention=kind, content=True, **{**given, **fields})


def preset(kind, **fields) -> Problem:
    return Problem.preset("paper", attention=kind, token_scale=1.0, content=True, **fields)


SMALL = [(5, 3), (4, 2), (3, 4)]
SIZES = pytest.mark.parametrize(("length", "vocab"), SMALL, ids=str)


def variances(problem: Problem) -> tuple[float, ...]:
    """Prior variances of an entry of pp, pt, tp and tt: products of the weights of what query and key hold."""
    position, token = problem.position_scale, problem.token_scale
    return tuple(problem.logit_variance * a * b for a, b in itertools.product((position, token), repeat=2))


@dataclass(frozen=True)
class Blocks:
    """The network on every sequence of V^L, each with the same probability."""

    problem: Problem

    @property
    def shapes(self):
        length, vocab = self.problem.length, self.problem.vocab
        return (length, length), (length, vocab), (vocab, length), (vocab, vocab)

    def sequences(self):
        return np.array(list(itertools.product(range(self.problem.vocab), repeat=self.problem.length)))

    def attention(self, pp, pt, tp, tt):
        x = self.sequences()
        positions = np.arange(self.problem.length)
        logits = pp + pt[positions[None, :, None], x[:, None, :]] + tp[x[:, :, None], positions[None, None, :]]
        logits = logits + tt[x[:, :, None], x[:, None, :]]
        return logits / self.problem.length if self.problem.attention == "linear" else jax.nn.softmax(logits, axis=-1)

    def least_squares(self, blocks, sequences):
        """E without the prior of the logits at its minimum over all V x V output maps; and the loss per token there."""
        problem, x = self.problem, self.sequences()
        one_hot = jnp.eye(problem.vocab)[x]
        rows = (self.attention(*blocks) @ one_hot).reshape(-1, problem.vocab)
        copied = jnp.roll(one_hot, 1, axis=1).reshape(-1, problem.vocab)
        weight, kappa = sequences / len(x), problem.length * problem.noise
        gram = weight * rows.T @ rows + kappa / problem.output_variance * jnp.eye(problem.vocab)
        output = jnp.linalg.solve(gram, weight * rows.T @ copied)
        error = jnp.sum((copied - rows @ output) ** 2)
        energy = weight * error / (2 * kappa) + jnp.sum(output**2) / (2 * problem.output_variance)
        return energy, error / (len(x) * problem.length)

    def prior(self, blocks):
        return sum(jnp.sum(block**2) / (2 * g) for block, g in zip(blocks, variances(self.problem), strict=True))

    def action(self, blocks, sequences):
        return self.prior(blocks) + self.least_squares(blocks, sequences)[0]

    def least_norm(self, coordinates):
        """The blocks of least prior cost that give every sequence the logits of (c1, cG, cI, cS)."""
        c1, cG, cI, cS = coordinates
        length, vocab = self.problem.length, self.problem.vocab
        sizes = [math.prod(shape) for shape in self.shapes]
        starts = np.cumsum([0, *sizes])
        equations, right = [], []
        for a, b, u, v in itertools.product(range(length), range(length), range(vocab), range(vocab)):
            if a == b and u != v:
                continue  # one position holds one token
            row = np.zeros(starts[-1])
            places = a * length + b, a * vocab + v, u * length + b, u * vocab + v
            row[[start + place for start, place in zip(starts, places, strict=False)]] = 1
            equations.append(row)
            right.append(c1 + cG * (b == (a - 1) % length) + cI * (u == v) + cS * (a == b))
        scale = np.repeat(np.sqrt(variances(self.problem)), sizes)
        matrix = np.array(equations) * scale
        found = np.linalg.lstsq(matrix, np.array(right), rcond=1e-12)[0]
        assert np.max(np.abs(matrix @ found - right)) < 1e-12
        return [part.reshape(shape) for part, shape in zip(np.split(found * scale, starts[1:-1]), self.shapes, strict=True)]


@dataclass(frozen=True)
class Sums:
    """The action of the four order parameters in NumPy, by moments of token histograms and the full binomial sum; analytic."""

    problem: Problem

    def moments(self, c1, cG, cI, cS):
        """Per row: E|h_o|^2, E h_o . y_o, E s^2, E s and E (attention on the target), with s = sum h and o: zero-sum part."""
        length, vocab = self.problem.length, self.problem.vocab
        n = np.arange(length - 1)
        found = 0
        for equal, probability in ((1, 1 / vocab), (0, 1 - 1 / vocab)):
            weights = np.array([0 * c1, cI, cG + cI * equal, cI + cS])
            if self.problem.attention == "linear":
                other, same, target, own = c1 + weights
            else:
                other, same, target, own = np.exp(weights - np.max(weights.real))
            rest = length - 2 - n
            total = own + same * n + target + other * rest
            divisor = length if self.problem.attention == "linear" else total
            # of one of the V - 1 tokens that are not u, the number in `rest` positions: mean, and mean square
            mean = rest / (vocab - 1)
            square = mean * (1 - 1 / (vocab - 1)) + mean**2
            if equal:
                copied = own + same * n + target
                norm = copied**2 + (vocab - 1) * other**2 * square
            else:
                copied = target + other * mean
                norm = (own + same * n) ** 2 + target**2 + 2 * target * other * mean + (vocab - 1) * other**2 * square
            parts = norm - total**2 / vocab, (copied - total / vocab) * divisor, total**2, total * divisor, target * divisor
            law = probability * binom.pmf(n, length - 2, 1 / vocab)
            found = found + np.array([np.sum(law * part / divisor**2) for part in parts])
        return found

    def prior(self, c1, cG, cI, cS):
        p = self.problem
        mean = (c1 + (cG + cS) / p.length + cI / p.vocab) / (p.position_scale / p.length + p.token_scale / p.vocab)
        positions = (p.length * (cG**2 + cS**2) - (cG + cS) ** 2) / p.position_scale**2
        return (mean**2 + positions + (p.vocab - 1) * cI**2 / p.token_scale**2) / (2 * p.logit_variance)

    def action(self, coordinates, sequences):
        p = self.problem
        square, overlap, total_square, total, _ = p.length * self.moments(*coordinates)
        kappa, modes = p.length * p.noise, p.vocab - 1
        ridge = kappa / p.output_variance
        zero_sum = sequences * overlap**2 / modes / (sequences * square / modes + ridge)
        uniform = sequences * (total / p.vocab) ** 2 / (sequences * total_square / p.vocab + ridge)
        return self.prior(*coordinates) + sequences * (p.length - zero_sum - uniform) / (2 * kappa)

    def gradient(self, coordinates, sequences):
        """By complex steps: exact to rounding, because there is no difference of close numbers."""
        steps = 1e-30j * np.eye(4)
        return np.array([self.action(np.asarray(coordinates) + step, sequences).imag / 1e-30 for step in steps])

    def hessian(self, coordinates, sequences):
        """Central differences of the complex-step gradient, good to about 1e-9 of its largest entries."""
        steps = 1e-5 * np.eye(4)
        columns = [
            (self.gradient(coordinates + step, sequences) - self.gradient(coordinates - step, sequences)) / 2e-5
            for step in steps
        ]
        return (np.array(columns) + np.array(columns).T) / 2

    def minimum(self, start, sequences):
        """The minimum that BFGS ends in, polished."""
        run = minimize(self.action, start, args=(sequences,), jac=self.gradient)
        found = root(self.gradient, run.x, args=(sequences,), jac=self.hessian, tol=1e-13)
        assert np.linalg.eigvalsh(self.hessian(found.x, sequences))[0] > 0
        return found.x

    def minima(self, sequences, starts):
        """All distinct minima from the starts, lowest first; linear attention has each with its mirror image, cG > 0 counts."""
        found = [self.minimum(start, sequences) for start in starts]
        if self.problem.attention == "linear":
            found = [x * np.sign(x[1]) for x in found]
        distinct: list[np.ndarray] = []
        for x in sorted(found, key=lambda x: self.action(x, sequences)):
            if not any(np.allclose(x, other, atol=1e-4) for other in distinct):
                distinct.append(x)
        return distinct


@SIZES
@KINDS
def test_action_attention_and_loss_are_those_of_all_sequences(kind, length, vocab):
    problem = numbers(kind, length, vocab)
    blocks, task = Blocks(problem), at(copy_task(problem), 40.0)
    for place in PLACES:
        circuit = blocks.least_norm(place)
        energy, loss = blocks.least_squares(circuit, 40.0)
        expected = energy + blocks.prior(circuit)
        assert float(reduced_action(jnp.array(place), task, kind)) == pytest.approx(float(expected), rel=ROUNDING)
        matrix = np.mean(np.asarray(blocks.attention(*circuit)), axis=0)
        target = np.array([[b == (a - 1) % length for b in range(length)] for a in range(length)])
        on, off = matrix[target].mean(), matrix[~target].mean()
        values = order_parameters(jnp.array(place), task, kind)
        assert tuple(values)[:4] == pytest.approx(place)
        assert (float(values.a1), float(values.aG)) == pytest.approx((length * off, on - off), rel=ROUNDING, abs=ROUNDING)
        assert float(values.loss) == pytest.approx(float(loss), rel=ROUNDING)


@SIZES
def test_prior_is_the_least_cost_over_the_four_blocks(length, vocab):
    problem = numbers("softmax", length, vocab)
    blocks, task = Blocks(problem), content.content_task(problem)
    for place in [*PLACES, *np.eye(4)]:
        cost = content.content_logit_energy(jnp.array(place), task)
        assert float(cost) == pytest.approx(float(blocks.prior(blocks.least_norm(place))), rel=ROUNDING)


@pytest.mark.parametrize(("kind", "sequences"), [("softmax", 150.0), ("linear", 150.0)])
def test_minima_are_stationary_in_all_logits_and_would_not_be_without_cS(kind, sequences):
    """The four coordinates are closed under the gradient of the whole network; c1, cG and cI alone are not."""
    problem = numbers(kind, 5, 2, noise=0.2)
    sums, blocks = Sums(problem), Blocks(problem)
    slope = jax.jit(jax.grad(lambda parts: blocks.action(parts, sequences)))
    found = sums.minimum(np.array([0.3, 2.0, -0.3, 0.1]), sequences)
    assert min(abs(found[1:])) > 0.02  # a place where every order parameter plays a part
    for part in slope(blocks.least_norm(found)):
        assert np.max(np.abs(part)) < 1e-9  # the minimum is polished to a gradient of 1e-13 times its condition number
    three = minimize(lambda x: sums.action(np.array([*x, 0.0]), sequences), found[:3], tol=1e-12).x
    assert max(np.max(np.abs(part)) for part in slope(blocks.least_norm([*three, 0.0]))) > 1e-3


@KINDS
def test_without_content_order_parameters_it_is_the_action_of_positional_attention(kind):
    problem = numbers(kind, 9, 5)
    plain, task = copy_task(problem.replace(content=False)), copy_task(problem)
    for c1, cG in [(0.3, 1.1), (-0.05, 2.7), (0.2, -0.8), (0.0, 0.0)]:
        coordinates, reference = jnp.array([c1, cG, 0.0, 0.0]), jnp.array([c1, cG])
        expected = reduced_action(reference, at(plain, 60.0), kind)
        assert float(reduced_action(coordinates, at(task, 60.0), kind)) == pytest.approx(float(expected), rel=ROUNDING)
        values = order_parameters(coordinates, at(task, 60.0), kind)
        expected = order_parameters(reference, at(plain, 60.0), kind)
        for name in ("a1", "aG", "loss"):
            assert float(getattr(values, name)) == pytest.approx(float(getattr(expected, name)), rel=ROUNDING, abs=ROUNDING)


@pytest.mark.parametrize(("count", "probability"), [(0, 0.5), (1, 0.25), (10, 0.2), (content.NODES - 1, 0.25)])
def test_quadrature_with_enough_nodes_is_the_law_itself(count, probability):
    deviation, weight = content.binomial_quadrature(count, probability)
    assert deviation.shape == weight.shape == (content.NODES,)
    np.testing.assert_allclose(deviation[: count + 1] + count * probability, np.arange(count + 1), atol=1e-12)
    np.testing.assert_allclose(weight[: count + 1], binom.pmf(np.arange(count + 1), count, probability), atol=1e-14)
    assert np.all(weight[count + 1 :] == 0)


@pytest.mark.parametrize(("count", "probability"), [(30, 0.25), (98, 0.5), (5000, 0.01), (99_998, 0.25), (99_998, 1e-6)])
def test_quadrature_has_the_moments_of_the_law(count, probability):
    deviation, weight = content.binomial_quadrature(count, probability)
    law = binom(count, probability)
    values = np.arange(law.ppf(1e-300), law.isf(1e-300) + 1)
    for order in range(12):
        expected = np.sum(law.pmf(values) * ((values - law.mean()) / law.std()) ** order)
        assert np.sum(weight * (deviation / law.std()) ** order) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("length", "vocab"), [(32, 4), (64, 30), (100, 2), (300, 4), (300, 300), (3000, 50)])
@KINDS
def test_quadrature_agrees_with_the_full_sum(kind, length, vocab):
    """|cI| up to 3, thirty times what the minima have, at a cG up to ln L, where half of the attention is on the target."""
    problem = numbers(kind, length, vocab)
    task, sums = at(copy_task(problem), 500.0), Sums(problem)
    for place in [*PLACES, (0.0, math.log(length), 3.0, -2.0), (0.0, math.log(length), -3.0, 1.0), (0.0, 1.0, 2.0, 2.0)]:
        found = float(reduced_action(jnp.array(place), task, kind))
        assert found == pytest.approx(sums.action(np.array(place), 500.0), rel=ROUNDING)


@KINDS
def test_gradient_and_hessian(kind):
    problem = numbers(kind, 30, 4)
    task, sums = at(copy_task(problem), 200.0), Sums(problem)
    for place in PLACES:
        found = gradient(jnp.array(place), task, kind)
        np.testing.assert_allclose(found, sums.gradient(place, 200.0), rtol=1e-9, atol=1e-9)
        second = hessian(jnp.array(place), task, kind)
        # central differences: 1e-5 squared times fourth derivatives, next to entries of up to several hundred
        np.testing.assert_allclose(second, sums.hessian(np.array(place), 200.0), rtol=1e-6, atol=1e-5)


@KINDS
def test_large_logits_do_not_overflow(kind):
    """exp(800) is beyond float64; the tiny weights of the rest underflow to an attention of zero, which is right."""
    task = at(copy_task(numbers(kind, 30, 4)), 200.0)
    for place in ([0.0, 800.0, 0.0, 0.0], [0.0, -800.0, -800.0, 3.0], [0.0, 0.0, 300.0, 500.0]):
        assert np.isfinite(float(reduced_action(jnp.array(place), task, kind)))
        assert np.all(np.isfinite(gradient(jnp.array(place), task, kind)))


def test_monte_carlo_forward_pass_at_the_preset():
    """20000 rows of random sequences through softmax attention, at the state that the theory finds for P = 450."""
    problem = preset("softmax", sequences=450.0)
    values = predict(problem).state[0].order_parameters
    rng, length = np.random.default_rng(3), problem.length
    x = rng.integers(problem.vocab, size=(20000, length))
    logits = values.c1 + values.cI * (x == x[:, :1]) + np.array([values.cS, *(0,) * (length - 2), values.cG])
    weights = np.exp(logits)
    weights /= weights.sum(axis=1, keepdims=True)
    on, off = weights[:, -1], length * weights[:, :-1].mean(axis=1)
    for sample, expected in ((off, values.a1), (on - off / length, values.aG)):
        assert abs(sample.mean() - expected) < 4 * sample.std() / math.sqrt(len(x))
    one_hot = np.eye(problem.vocab)[x]
    rows, copied = np.einsum("pb,pbu->pu", weights, one_hot), one_hot[:, -1]
    weight = 450.0 * length / len(x)
    gram = weight * rows.T @ rows + problem.kappa / problem.output_variance * np.eye(problem.vocab)
    errors = np.sum((copied - rows @ np.linalg.solve(gram, weight * rows.T @ copied)) ** 2, axis=1)
    assert abs(errors.mean() - values.loss) < 4 * errors.std() / math.sqrt(len(x))


@cache
def prediction(kind):
    return predict(preset(kind))


STARTS = [np.array([c1, cG, cI, cS]) for c1 in (0.1, 0.5) for cG in (0.1, 2.0) for cI in (-0.5, 0.0, 0.5) for cS in (0.0, 0.3)]


def test_softmax_place_and_window():
    """The places of the equal action and the folds by BFGS on the written-out sums."""
    (found,) = prediction("softmax").transitions
    assert found.kind == "first-order"
    sums = Sums(preset("softmax"))
    before, after = np.array(found.before[:4]), np.array(found.after[:4])

    def difference(sequences):
        states = (sums.minimum(start, sequences) for start in (before, after))
        return float(np.subtract(*(sums.action(state, sequences) for state in states)))

    assert pytest.approx(brentq(difference, 290, 300, xtol=1e-9), rel=1e-9) == found.P
    np.testing.assert_allclose(sums.minimum(before, found.P), before, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(sums.minimum(after, found.P), after, rtol=1e-6, atol=1e-8)
    # the metastable minimum is one just inside its fold; from just outside of it BFGS slides into the other
    phases = prediction("softmax").phases
    for fold, inward in zip(found.window, (1, -1), strict=True):
        inside, outside = fold * (1 + 1e-3 * inward), fold * (1 - 1e-3 * inward)
        stable, metastable = (np.array(minimum.order_parameters[:4]) for minimum in phases.minima(inside))
        assert np.max(np.abs(sums.gradient(metastable, inside))) < 1e-7  # entries of S are 100, its curvatures up to 30
        assert np.linalg.eigvalsh(sums.hessian(metastable, inside))[0] > 0
        assert len(phases.minima(outside)) == 1
        np.testing.assert_allclose(sums.minimum(metastable, outside), stable, atol=0.02)
    # tokens that agree with the own one are avoided, on both sides of the jump; it comes earlier than without (296.8200)
    assert found.before.cI < -0.05 > found.after.cI
    assert 0.98 < found.P / 296.8200 < 1


def test_linear_place_is_the_generalised_eigenvalue():
    """P_c = kappa / sqrt(g_O lambda): the data term (V - 1) N_o^2 + N_u^2 at G = 0 against the prior, both quadratic.

    With linear attention y meets the target position only, and there cI adds 1/V on average; to the row sum it adds
    1 + (L - 1)/V, the own position included.
    """
    problem = preset("linear")
    length, vocab = problem.length, problem.vocab
    copied, row_sum = np.array([1, 1, 1 / vocab, 0]), np.array([length, 1, 1 + (length - 1) / vocab, 1])
    gain = ((vocab - 1) * np.outer(copied, copied) + np.outer(row_sum, row_sum)) / vocab**2
    prior = Sums(problem).prior
    # the second derivatives of a quadratic form, by polarisation
    form = np.array([[prior(*(a + b)) - prior(*a) - prior(*b) for a in np.eye(4)] for b in np.eye(4)])
    place = problem.kappa / math.sqrt(problem.output_variance * eigh(gain, form)[0][-1])
    second, crossover = prediction("linear").transitions
    assert (second.kind, crossover.kind) == ("second-order", "crossover")
    assert pytest.approx(place, rel=1e-8) == second.P  # located next to a singular matrix, 1e-9 of a step off
    assert place < 12.7813  # without cI: the prior cost of pooling is lower with it
    assert tuple(second.before) == pytest.approx((0, 0, 0, 0, 0, 0, 1), abs=1e-10)


def test_linear_crossover_is_the_steepest_growth_of_cG():
    sums, crossover = Sums(preset("linear")), prediction("linear").transitions[1]

    def growth(log_p):
        sequences, step = math.exp(log_p), 1e-5
        state = sums.minimum(np.array(crossover.before[:4]), sequences)
        high, low = (sums.gradient(state, math.exp(log_p + sign * step)) for sign in (1, -1))
        return -np.linalg.solve(sums.hessian(state, sequences), (high - low) / (2 * step))[1]

    centre = math.log(crossover.P)
    place = minimize_scalar(
        lambda u: -growth(u), bounds=(centre - 0.1, centre + 0.12), method="bounded", options={"xatol": 1e-6}
    )
    # the slope is flat there and its differences are good to 1e-9, so its place is known to the root of that
    assert pytest.approx(math.exp(place.x), rel=1e-4) == crossover.P


@pytest.mark.parametrize(("kind", "sequences"), [("softmax", 200.0), ("softmax", 300.0), ("linear", 300.0), ("linear", 1000.0)])
def test_state_lists_the_minima_that_a_search_finds(kind, sequences):
    found = predict(preset(kind, sequences=sequences)).state
    sums = Sums(preset(kind))
    # the minimum with the other sign of the row sums is reached from a negative c1
    expected = sums.minima(sequences, [*STARTS, np.array([-0.3, 2.5, 0.0, -0.2])])
    assert [minimum.action for minimum in found] == pytest.approx([sums.action(x, sequences) for x in expected], rel=1e-9)
    for minimum, x in zip(found, expected, strict=True):
        # softmax rows may be shifted at no cost but that of the prior, so all four are determined
        np.testing.assert_allclose(minimum.order_parameters[:4], x, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("kind", "place"), [("softmax", 296.8200), ("linear", 115.0149)])
def test_with_a_vanishing_weight_of_tokens_the_places_are_the_positional_ones(kind, place):
    """docs/theory.md, section 6; corrections are of the order of tau_x L / V, here 1e-5."""
    found = predict(Problem.preset("paper", attention=kind, token_scale=1e-6, content=True))
    assert pytest.approx(place, rel=2e-5) == found.transitions[0].P


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_scale": 0.0}, "content = True: needs token_scale > 0"),
        ({"cyclic": False}, "needs cyclic = True"),
        ({"length": 2}, "length = 2: must be >= 3"),
    ],
)
def test_problems_that_the_theory_does_not_cover(fields, message):
    with pytest.raises(ProblemError, match=message):
        predict(preset("softmax").replace(**fields))


@pytest.mark.parametrize("length", [5, 32, 50])
def test_the_cost_of_separate_queries_and_keys_is_that_of_the_singular_values_of_all_four_blocks(length):
    """At length 50 beyond MODES, where the sum over angles is a mean over fewer: (cS / cG)^32 is below rounding."""
    problem = numbers("softmax", length=length, vocab=4, head_dimension=30)
    cG, cI, cS = 1.1, -0.4, 0.3
    position, token = problem.position_scale, problem.token_scale
    pp = cG * np.roll(np.eye(length), 1, axis=0) + cS * np.eye(length)
    # c1 that leaves no mean logit, as softmax chooses it: then only the parts without uniform directions are left
    c1 = -(cG + cS) / length - cI / problem.vocab
    squared = [np.linalg.svd(centred(pp), compute_uv=False) ** 2 / position**2]
    squared += [np.linalg.svd(centred(cI * np.eye(problem.vocab)), compute_uv=False) ** 2 / token**2]
    ratio = problem.head_dimension / problem.chi
    m = np.sqrt(np.concatenate(squared) / (problem.logit_variance * ratio))
    m = m[m > 1e-9]  # the uniform directions, which the rate would be 0 / 0 for
    x = (np.sqrt(1 + 4 * m**2) - 1) / (2 * m)  # docs/theory.md, section 13
    expected = ratio * np.sum(x * m + np.log(1 - x**2) / 2)
    found = content.content_logit_energy(jnp.array([c1, cG, cI, cS]), copy_task(problem))
    assert float(found) == pytest.approx(expected, rel=ROUNDING)


def centred(matrix):
    """Without its uniform directions."""
    return matrix - matrix.mean(axis=0) - matrix.mean(axis=1, keepdims=True) + matrix.mean()


def test_many_columns_of_queries_and_keys_give_the_fused_places():
    """Corrections are of the order of chi / d_h = 5e-5 of the cost, and of that order in the place."""
    fused, separate = predict(preset("softmax")), predict(preset("softmax", head_dimension=1_000_000))
    assert pytest.approx(fused.transitions[0].P, rel=5e-4) == separate.transitions[0].P
    assert separate.transitions[0].P < fused.transitions[0].P


def test_the_full_matrix_refuses_it():
    with pytest.raises(ProblemError, match="content = True"):
        full_task(numbers("softmax"), None)


def test_the_record_and_the_text_have_the_new_order_parameters_only_with_content():
    names = ["c1", "cG", "cI", "cS", "a1", "aG", "loss"]
    problem = preset("linear", sequences=310.0)
    found, plain = predict(problem), predict(problem.replace(content=False))
    record, without = found.to_dict(), plain.to_dict()
    for entry in record["transitions"]:
        assert list(entry["before"]) == list(entry["after"]) == names
    assert list(record["state"][0])[:7] == names
    assert json.loads(json.dumps(record)) == record
    assert "cI" in repr(found)
    assert "attention reads the tokens" in repr(found)
    assert "cI" not in repr(plain) + json.dumps([without["transitions"], without["state"]])


def test_command_line_and_diagram():
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["predict", "--content", "--token-scale", "1", "--json"])
    assert json.loads(result.output)["transitions"][0]["after"]["cI"] == pytest.approx(
        prediction("softmax").transitions[0].after.cI
    )
    axes = parse_axis("x", "sequences=200,400"), parse_axis("y", "length=16,32")
    found = diagram(preset("softmax"), *axes)
    assert found.verdicts[1, 0] == "first-order"
    assert found.places[1, 0] == pytest.approx(prediction("softmax").transitions[0].P)
    assert found.loss[1, 1] < 0.5 < found.loss[1, 0]


def test_the_window_closes_at_a_length_close_to_the_positional_one():
    """The search evaluates real lengths, for which the quadrature has no integer number of positions."""
    with_content, without = end_point(preset("softmax")), end_point(Problem.preset("paper"))
    assert with_content.value == pytest.approx(without.value, rel=0.1)
    lengths = [math.floor(with_content.value), math.ceil(with_content.value)]
    assert [predict(preset("softmax", length=length)).verdict for length in lengths] == ["crossover", "first-order"]
