"""The logit prior of separate query and key matrices: rate function, spectrum, and what it does to the transitions."""

import json
import math
from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq, minimize, minimize_scalar
from scipy.special import gammaln, i0e, kve

from conftest import QUICK, Explicit, derivative
from copyhead import predict
from copyhead.model import layout, targets
from copyhead.model.prior import logit_energy, prior, rate, spectral_energy
from copyhead.problem import Problem, ProblemError
from copyhead.theory.leading_order import cost_ratio
from copyhead.theory.transition import phases

pytestmark = pytest.mark.usefixtures("x64")

gradient_of = jax.jit(jax.grad(logit_energy), compiler_options=QUICK)
curvature_of = jax.jit(jax.hessian(logit_energy), compiler_options=QUICK)


def quoted_rate(m):
    """I(m) as theory.md, section 13, gives it."""
    x = (np.sqrt(1 + 4 * m**2) - 1) / (2 * m)
    return x * m + np.log(1 - x**2) / 2


def rate_of_square(y):
    """a - 1 - log(a) / 2 with a (a - 1) = y; analytic at y = 0."""
    a = (1 + np.sqrt(1 + 4 * y)) / 2
    return a - 1 - np.log(a) / 2


# --- the rate function ---


def test_rate_is_the_quoted_formula():
    m = np.geomspace(0.05, 1e3, 60)
    np.testing.assert_allclose(rate(m**2), quoted_rate(m), rtol=1e-11)  # 1 - x^2 = 1 / a loses three digits at m = 1e3
    np.testing.assert_allclose(rate_of_square(m**2), quoted_rate(m), rtol=1e-11)


def test_rate_for_small_and_large_arguments():
    small, large = np.array([1e-150, 1e-8, 1e-3]), np.array([1e6, 1e9])
    np.testing.assert_allclose(rate(small**2), small**2 / 2 - small**4 / 4, rtol=1e-11)
    np.testing.assert_allclose(rate(large**2), large - np.log(large) / 2 - 0.5, rtol=1e-12)


@pytest.mark.parametrize("m", [0.2, 1.0, 7.0])
def test_rate_is_the_wishart_rate_minimised_over_the_diagonal(m):
    """Gram matrix of d_h normal pairs (q_i, k_i), over d_h: rate (tr S - log det S - 2) / 2."""

    def wishart(diagonal):
        first, second = np.exp(diagonal)
        gap = first * second - m**2
        return (first + second - np.log(gap) - 2) / 2 if gap > 0 else np.inf

    start = np.log([2 * m + 1.0, m + 1.5])
    found = minimize(wishart, start, method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-14, "maxiter": 2000})
    assert float(rate(m**2)) == pytest.approx(found.fun, rel=1e-10)


def test_derivatives_of_the_rate_are_finite_at_zero_and_right_elsewhere():
    def of_m(m):
        return rate(m**2)

    first, second = jax.grad(of_m), jax.grad(jax.grad(of_m))
    fourth = jax.grad(jax.grad(second))
    # I = m^2/2 - m^4/4 + ...
    assert [float(f(0.0)) for f in (first, second, fourth)] == pytest.approx([0, 1, -6], abs=1e-14)
    for m in (0.3, 2.0, 40.0):
        assert float(first(m)) == pytest.approx((math.sqrt(1 + 4 * m * m) - 1) / (2 * m), rel=1e-12)  # the conjugate x
        assert float(second(m)) == pytest.approx(derivative(lambda z: rate_of_square(z**2), m, 2), rel=1e-9)


# --- the large deviation ---


def scalar_cost(m: float, d: int) -> float:
    """-log [p(g) / p(0)] / d of g = q . k = m d for standard normal q, k of d entries: |g|^v K_v(|g|), v = (d - 1) / 2."""
    order, g = (d - 1) / 2, m * d
    at_zero = (order - 1) * math.log(2) + gammaln(order)
    return (at_zero - order * math.log(g) - math.log(kve(order, g)) + g) / d


def matrix_cost(m1: float, m2: float, n: int, d: int) -> float:
    """-log [p(G) / p(0)] / d of the n x n matrix G = Q K^T with singular values d (m1, m2, 0, ..), Q and K n x d.

    At given Q the columns of G are normal with covariance S = Q Q^T. Only the inverse of S on the first two directions enters,
    that is a 2 x 2 Wishart matrix of d - n + 2 degrees of freedom, independent of the rest of det S^(-n/2). Left are its
    eigenvalues d exp(p +- q), and the angle to its eigenvectors, a Bessel function.
    """
    degrees = d - n + 2
    places = [math.log((1 + math.sqrt(1 + 4 * m * m)) / 2) for m in (m1, m2, 0.0)]
    nodes, weights = np.polynomial.legendre.leggauss(240)
    low, high = min(places) - 9 / math.sqrt(d), max(places) + 9 / math.sqrt(d)
    p = (low + high) / 2 + (high - low) / 2 * nodes[:, None]
    q = (high - low) / 4 * (nodes + 1)
    first, second = np.exp(p + q), np.exp(p - q)
    measure = (degrees - 3 - n + 2) * p + np.log(first - second) - d * (first + second) / 2

    def log_integral(a: float, b: float) -> float:
        trace = (1 / first + 1 / second) * (a**2 + b**2) / 2
        turn = d / 2 * (1 / second - 1 / first) * abs(a**2 - b**2) / 2
        exponent = measure - d * trace / 2 + np.log(i0e(turn)) + turn
        top = exponent.max()
        return top + math.log(weights @ np.exp(exponent - top) @ weights)

    return (log_integral(0, 0) - log_integral(m1, m2)) / d


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (lambda d: scalar_cost(0.3, d), quoted_rate(0.3)),
        (lambda d: scalar_cost(2.0, d), quoted_rate(2.0)),
        (lambda d: matrix_cost(0.8, 0.0, 2, d), quoted_rate(0.8)),
        (lambda d: matrix_cost(0.8, 0.8, 2, d), 2 * quoted_rate(0.8)),
        (lambda d: matrix_cost(1.5, 0.4, 2, d), quoted_rate(1.5) + quoted_rate(0.4)),
        (lambda d: matrix_cost(0.8, 0.8, 3, d), 2 * quoted_rate(0.8)),  # the copy pattern cG (G* - 1 1^T / 3)
    ],
    ids=["n1-small", "n1-large", "n2-rank1", "n2-equal", "n2-unequal", "n3-copy"],
)
def test_density_of_products_follows_the_sum_of_rates(cost, expected):
    """-log p / d_h deviates by c / d_h: it halves when d_h doubles, and what extrapolation leaves falls fourfold."""
    values = [cost(d) for d in (96, 192, 384)]
    errors = [value - expected for value in values]
    assert abs(errors[2]) < 0.02
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.05)
    left = [abs(2 * after - before) for before, after in pairwise(errors)]
    assert left[1] < 2e-4
    assert left[1] < 0.3 * left[0]


# --- the spectrum of the logits ---


def energy_by_svd(logits, problem: Problem) -> float:
    length = problem.length
    kernel = problem.position_scale * np.eye(length) + problem.token_scale / problem.vocab * np.ones((length, length))
    values, vectors = np.linalg.eigh(kernel)
    root = (vectors / np.sqrt(values)) @ vectors.T
    nu = problem.head_dimension / problem.chi
    return nu * float(np.sum(quoted_rate(np.linalg.svd(root @ logits @ root)[1] / math.sqrt(problem.logit_variance * nu))))


EXAMPLES = [
    Problem(length=6, vocab=3, noise=1.0, logit_variance=1.7, position_scale=1.3, token_scale=0.7, chi=10, head_dimension=4),
    Problem(length=6, vocab=3, noise=1.0, logit_variance=0.6, position_scale=0.8, cyclic=False, chi=3, head_dimension=20),
]
BOTH = pytest.mark.parametrize("problem", EXAMPLES, ids=["cyclic", "open"])


@BOTH
def test_energy_of_any_logits_is_that_of_their_singular_values(problem):
    logits = np.random.default_rng(0).normal(size=(6, 6))
    assert float(logit_energy(logits, layout.full(6, problem.cyclic), prior(problem))) == pytest.approx(
        energy_by_svd(logits, problem), rel=1e-12
    )


@BOTH
def test_both_layouts_agree_on_symmetric_logits(problem):
    for c1, cG in ((-0.4, 1.9), (0.7, -0.2), (0.3, 0.0)):
        whole = np.asarray(cG * targets.shift(6, cyclic=problem.cyclic)) + c1
        if not problem.cyclic:
            whole[0] = 0
        full = logit_energy(whole, layout.full(6, problem.cyclic), prior(problem))
        compressed = logit_energy(jnp.array([[c1 + cG, c1]]), layout.copy(6, problem.scored), prior(problem))
        assert float(compressed) == pytest.approx(float(full), rel=1e-12)


def test_other_compressed_layouts_are_refused():
    three = layout.Layout(jnp.ones(1) * 6, jnp.ones(1) * 6, jnp.array([[1.0, 1.0, 4.0]]))
    with pytest.raises(ValueError, match="copy layout"):
        logit_energy(jnp.zeros((1, 3)), three, prior(EXAMPLES[0]))


@BOTH
def test_derivatives_at_zero_are_those_of_the_fused_matrix(problem):
    fused = prior(problem.replace(head_dimension=None))
    for shape, entries in (((6, 6), layout.full(6, problem.cyclic)), ((1, 2), layout.copy(6, problem.scored))):
        zero = jnp.zeros(shape)
        gradient = gradient_of(zero, entries, prior(problem))
        curvature = curvature_of(zero, entries, prior(problem))
        np.testing.assert_array_equal(gradient, 0)
        np.testing.assert_allclose(curvature, curvature_of(zero, entries, fused), rtol=1e-12, atol=1e-14)


@BOTH
def test_derivatives_where_singular_values_are_equal(problem):
    """The copy pattern: central differences along random directions, which lift the degeneracy."""
    numbers, entries = prior(problem), layout.full(6, problem.cyclic)
    place = 1.6 * np.asarray(targets.shift(6, cyclic=problem.cyclic)) - 0.2
    gradient, curvature = gradient_of(place, entries, numbers), curvature_of(place, entries, numbers)
    for seed in range(3):
        along = np.random.default_rng(seed).normal(size=(6, 6))
        there, back = (place + sign * 1e-4 * along for sign in (1, -1))
        slope = (energy_by_svd(there, problem) - energy_by_svd(back, problem)) / 2e-4
        assert float(np.sum(gradient * along)) == pytest.approx(slope, rel=1e-6)
        change = (gradient_of(there, entries, numbers) - gradient_of(back, entries, numbers)) / 2e-4
        np.testing.assert_allclose(np.einsum("ijkl,kl->ij", curvature, along), change, rtol=1e-5, atol=1e-6)


def test_head_ratio_may_be_traced():
    numbers, entries = prior(EXAMPLES[0]), layout.copy(6, 6)
    ratios = jnp.array([0.1, 1.0, 30.0])
    logits = jnp.array([[1.5, -0.4]])
    together = jax.jit(jax.vmap(lambda ratio: logit_energy(logits, entries, numbers._replace(head_ratio=ratio))))(ratios)
    alone = [logit_energy(logits, entries, numbers._replace(head_ratio=float(ratio))) for ratio in ratios]
    np.testing.assert_allclose(together, alone, rtol=1e-14)


def test_limits_of_many_and_of_few_columns():
    """nu -> infinity: sum s^2 / (2 g_W), from below like 1 / nu. nu -> 0: the nuclear norm, from below, with logarithms."""
    squared, multiplicity = jnp.array([4.0, 0.09]), jnp.array([1.0, 5.0])
    problem = Problem(length=6, vocab=3, noise=1.0, logit_variance=1.7)
    fused = float(spectral_energy(squared, multiplicity, prior(problem)))
    assert fused == pytest.approx((4.0 + 5 * 0.09) / (2 * 1.7), rel=1e-14)

    def at(ratio):
        return float(spectral_energy(squared, multiplicity, prior(problem)._replace(head_ratio=ratio)))

    missing = [fused - at(ratio) for ratio in (1e3, 2e3)]
    assert missing[0] / missing[1] == pytest.approx(2, rel=5e-3)
    assert missing[0] == pytest.approx((4.0**2 + 5 * 0.09**2) / (4 * 1.7**2 * 1e3), rel=1e-2)  # -m^4 / 4
    nuclear = math.sqrt(1e-10 / 1.7) * (2.0 + 5 * 0.3)
    assert at(1e-10) == pytest.approx(nuclear, rel=1e-3)
    assert at(1e-10) < nuclear


def test_weight_decay_of_query_and_key_is_the_nuclear_norm_and_not_this_prior():
    """The least (|Q|^2 + |K|^2) / (2 chi) at given G, by descent over Q and K: linear in small G, where I is quadratic."""
    problem = Problem(length=4, vocab=3, noise=1.0, logit_variance=1.7, chi=5.0, head_dimension=6)
    nu = 6 / 5.0
    for size in (3.0, 0.01):
        logits = size * (np.asarray(targets.shift(4)) - 0.25)
        # Q K^T; it has rank L - 1, and a trace of the identity keeps Q Q^T invertible
        product = logits * math.sqrt(6 * 5.0 / 1.7) + 1e-9 * size * np.eye(4)

        def norm(flat, product=product):
            # the least |K| at given Q solves Q K^T = product, K^T = Q^+ product
            query = flat.reshape(4, 6)
            solution = jnp.linalg.solve(query @ query.T, product)
            return (jnp.sum(query**2) + jnp.sum(solution * product)) / (2 * 5.0)

        start = np.random.default_rng(0).normal(size=24) * math.sqrt(size)
        found = minimize(jax.jit(jax.value_and_grad(norm)), start, jac=True, method="BFGS", options={"gtol": 1e-9})
        nuclear = math.sqrt(nu / 1.7) * 3 * size
        assert found.fun == pytest.approx(nuclear, rel=1e-3)
        energy = float(logit_energy(jnp.asarray(logits), layout.full(4), prior(problem)))
        assert energy < nuclear
        if size < 0.1:
            assert energy == pytest.approx(3 * size**2 / (2 * 1.7), rel=1e-3)
            assert energy < 0.01 * nuclear


# --- transitions ---


@dataclass(frozen=True)
class Split(Explicit):
    """The explicit action with the cost of singular values: one of the uniform direction, the others |cG| / tau_p."""

    chi: float = 50.0
    head_dimension: int = 1

    def prior(self, c1, cG):
        rows, length, nu = self.rows, self.length, self.head_dimension / self.chi
        uniform = (self.position_scale + self.token_scale * length / self.vocab) ** 2
        copying = cG**2 / self.position_scale**2
        pooling = (rows * (length * c1 + cG) ** 2 / uniform + (length - rows) * copying) / length
        width = self.logit_variance * nu
        return nu * (rate_of_square(pooling / width) + (rows - 1) * rate_of_square(copying / width))


SOFTMAX = [
    *(Problem.preset("paper", head_dimension=d) for d in (8, 64, 512)),
    Problem(length=40, vocab=7, noise=0.3, logit_variance=1.6, position_scale=1.2, cyclic=False, chi=20, head_dimension=30),
    Problem(length=24, vocab=3, noise=2.0, logit_variance=0.7, token_scale=1.0, chi=100, head_dimension=64),
]


def name(problem: Problem) -> str:
    return f"L{problem.length}-nu{problem.head_dimension / problem.chi:g}"


@pytest.mark.parametrize("problem", SOFTMAX, ids=name)
def test_softmax_place_and_window_are_those_of_the_formula(problem):
    explicit = Split.of(problem)
    grid = np.linspace(0.005, 3 * math.log(problem.length), 2000)
    rising = np.diff(explicit.softmax_sequences(grid)) > 0
    upper, lower = np.flatnonzero(rising[1:] != rising[:-1])
    folds = [
        minimize_scalar(
            lambda c, sign=sign: sign * explicit.softmax_sequences(c),
            bounds=(grid[turn], grid[turn + 2]),
            method="bounded",
            options={"xatol": 1e-9},
        ).x
        for turn, sign in ((lower, 1), (upper, -1))
    ]
    window = [float(explicit.softmax_sequences(c)) for c in folds]

    def difference(sequences):
        ends = [
            brentq(explicit.softmax_slope, *bounds, args=(sequences,), xtol=1e-14)
            for bounds in ((1e-9, folds[1]), (folds[0], 30))
        ]
        return explicit.softmax_action(ends[0], sequences) - explicit.softmax_action(ends[1], sequences)

    place = brentq(difference, window[0] * (1 + 1e-6), window[1] * (1 - 1e-6), xtol=1e-11)
    found = predict(problem)
    assert (found.verdict, found.status) == ("first-order", "ok")
    np.testing.assert_allclose(found.transitions[0].window, window, rtol=1e-9)
    assert pytest.approx(place, rel=1e-9) == found.transitions[0].P


@pytest.mark.parametrize("head_dimension", [8, 64, 128])
def test_linear_transitions_are_between_minima_of_equal_action_and_none_is_lower(head_dimension):
    problem = Problem.preset("paper", attention="linear", head_dimension=head_dimension)
    explicit = Split.of(problem)
    rng = np.random.default_rng(head_dimension)

    def lowest(sequences):
        starts = rng.normal(size=(16, 2)) * [0.3, 3.0] * np.exp(rng.normal(size=(16, 1)))
        runs = [
            minimize(lambda x: explicit.action(*x, sequences), s, jac=lambda x: explicit.gradient(*x, sequences))
            for s in starts
        ]
        return min(explicit.action(0.0, 0.0, sequences), *(run.fun for run in runs))

    found = predict(problem)
    assert found.status == "ok"
    jumps = [transition for transition in found.transitions if transition.window]
    assert len(jumps) == (1 if head_dimension == 128 else 2)
    for jump in jumps:
        sides = [(state.c1, state.cG) for state in (jump.before, jump.after)]
        for side in sides:
            assert explicit.action(*side, jump.P) == pytest.approx(lowest(jump.P), rel=1e-8)
            np.testing.assert_allclose(explicit.gradient(*side, jump.P), 0, atol=1e-7)
            curvature = explicit.hessian(*side, jump.P)
            assert np.linalg.eigvalsh(curvature)[0] > 0
        assert explicit.action(*sides[0], jump.P) == pytest.approx(explicit.action(*sides[1], jump.P), rel=1e-10)


def test_pooling_becomes_first_order_below_a_tricritical_number_of_columns():
    """I grows slower than m^2/2: at nu < L / (2 sqrt(g_O g_W)), for L^2 >> V, the quartic term of the action in c1 is negative.

    At finite L, with s = L c1: -s^4 / (4 g_W^2 nu) of the prior against P^3 (V - 1 + L^3) / (2 kappa V r^2) c1^4 of the data.
    """
    problem = Problem.preset("paper", attention="linear")
    explicit = Explicit.of(problem)
    (pooling, _) = predict(problem).transitions
    length, vocab = 32, 4
    data = pooling.P**3 * (vocab - 1 + length**3) / (2 * explicit.kappa * vocab * explicit.ridge**2)
    tricritical = length**4 / (4 * data) * problem.chi
    assert tricritical == pytest.approx(804, abs=1)
    assert tricritical == pytest.approx(problem.chi * length / 2, rel=0.01)
    found = {
        d: predict(problem.replace(head_dimension=d)).transitions for d in (int(0.98 * tricritical), int(1.02 * tricritical))
    }
    below, above = found.values()
    assert [t.kind for t in below] == ["first-order", "crossover"]
    assert [t.kind for t in above] == ["second-order", "crossover"]
    # the curvature at zero does not depend on nu, so the upper end of the window and P_c stay
    assert below[0].window[1] == pytest.approx(pooling.P, rel=1e-9)
    assert pytest.approx(pooling.P, rel=1e-9) == above[0].P


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_many_columns_return_the_fused_matrix(attention):
    """Places and windows differ by c / nu."""
    problem = Problem.preset("paper", attention=attention, chi=1.0)

    def numbers(head_dimension):
        found = predict(problem.replace(head_dimension=head_dimension)).transitions
        return np.array([value for t in found for value in (t.P, *(t.window or ()))])

    fused, once, twice = numbers(None), numbers(2000), numbers(4000)
    np.testing.assert_allclose(twice, fused, rtol=2e-3)
    moved = np.abs(once - fused) > 1e-6 * fused  # all but P_c
    assert moved.sum() == (3 if attention == "softmax" else 1)
    np.testing.assert_allclose(((once - fused) / (twice - fused))[moved], 2, rtol=0.02)


@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize("ratio", [0.05, 0.3, 2.0, 10.0, 100.0])
def test_every_branch_is_found_at_any_ratio(attention, ratio):
    problem = Problem.preset("paper", attention=attention, chi=100.0, head_dimension=int(100 * ratio))
    found = phases(problem)
    assert found.complete
    assert found.verdict == ("second-order" if attention == "linear" and ratio == 100 else "first-order")


def test_the_search_goes_down_as_far_as_cheap_logits_move_the_transition():
    problem = Problem.preset("paper", chi=1e8, head_dimension=1)
    found = predict(problem)
    assert (found.verdict, found.status) == ("first-order", "ok")
    assert 0.01 * min(found.leading_order) > found.transitions[0].P
    explicit, copying = Split.of(problem), found.transitions[0].after.cG
    fused = Explicit.of(problem).prior(-copying / 32, copying)
    assert cost_ratio(problem) < explicit.prior(-copying / 32, copying) / fused
    assert cost_ratio(Problem.preset("paper")) == 1


# --- the parameter ---


def test_head_dimension_is_checked_and_kept(capsys, monkeypatch):
    for wrong in (0, -3, 2.5, "many"):
        with pytest.raises(ProblemError, match=r"head_dimension = .*: must be an integer >= 1"):
            Problem.preset("paper", head_dimension=wrong)
    problem = Problem.preset("paper", head_dimension=64)
    assert Problem.from_toml(problem.to_toml()) == Problem.from_json(problem.to_json()) == problem

    from copyhead.cli import main

    monkeypatch.setattr("sys.argv", ["copyhead", "predict", "--head-dimension", "64", "--json"])
    with pytest.raises(SystemExit):
        main()
    printed = json.loads(capsys.readouterr().out)
    assert printed["problem"]["head_dimension"] == 64
    assert printed["transitions"][0]["P"] == pytest.approx(predict(problem).transitions[0].P, rel=1e-12)
