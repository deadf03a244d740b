"""Finite chi: blocks of the Hessian against all L^2 logits, the expansion against quadrature, P*(chi), barriers, precursors."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import QUICK, Explicit
from copyhead.model import moments, tokens
from copyhead.model.energy import energy
from copyhead.problem import Problem, ProblemError
from copyhead.theory.action import at, full_task
from copyhead.theory.coexistence import barrier, maxwell
from copyhead.theory.effective_action import entropy, free_energy, gaussian_task, rates, spectrum
from copyhead.theory.fluctuations import fluctuations
from copyhead.theory.posterior import action, best_output, negative_log_posterior, token_blocks
from copyhead.theory.transition import phases

pytestmark = pytest.mark.usefixtures("x64")

SEQUENCES = 7.3
PLACES = [(0.3, 1.1), (-0.2, -0.7), (0.0, 0.0), (0.1, 2.6)]


def numbers(kind, length, cyclic=True, token_scale=0.0, **fields) -> Problem:
    """Every number different from one, so that none can stand in for another."""
    given = {"vocab": 3, "noise": 0.5, "logit_variance": 1.3, "output_variance": 0.6, "position_scale": 1.2}
    return Problem(length=length, cyclic=cyclic, token_scale=token_scale, attention=kind, **{**given, **fields})


CASES = [
    numbers(kind, *rest)
    for kind in ("softmax", "linear")
    for rest in [(2,), (2, True, 0.7), (3, False), (4, True, 0.8), (5,), (5, False), (8, True, 0.3), (8, False)]
]
PROBLEMS = pytest.mark.parametrize(
    "problem", CASES, ids=lambda p: f"{p.attention}-{p.length}-{'cyclic' if p.cyclic else 'open'}-tau{p.token_scale:g}"
)


def brute(problem: Problem, sequences: float = SEQUENCES):
    return full_task(problem, moments.population(tokens.uniform(problem.vocab), sequences))


def symmetric(problem: Problem, place) -> np.ndarray:
    """G = c1 1 1^T + cG G*; a row that is not scored is zero."""
    logits = place[0] + place[1] * np.roll(np.eye(problem.length), -1, axis=1)
    logits[: 0 if problem.cyclic else 1] = 0.0
    return logits


# Compiled once for each kind and number of positions: all other numbers are arguments.
@partial(jax.jit, static_argnames="kind", compiler_options=QUICK)
def full_hessian(logits, task, kind):
    size = logits.shape[0]
    return jax.hessian(lambda x: action(x.reshape(size, size), task, kind))(logits.ravel())


spectrum_at = jax.jit(spectrum, static_argnames="kind", compiler_options=QUICK)
free_energies = jax.jit(jax.vmap(free_energy, in_axes=(0, None)), compiler_options=QUICK)


@PROBLEMS
def test_blocks_are_the_hessian_over_all_logits(problem):
    task, here = brute(problem), at(gaussian_task(problem), SEQUENCES)
    for place in PLACES:
        logits, kind = symmetric(problem, place), problem.attention
        ratio = np.linalg.solve(full_hessian(logits, at(task, 0.0), kind), full_hessian(logits, task, kind))
        found = spectrum_at(np.array(place), here, kind)
        once = [*np.linalg.eigvals(found.symmetric), *[1.0] * (problem.length * (problem.length - problem.scored))]
        copies = [*np.linalg.eigvals(found.edges), float(found.rows)] * (problem.scored - 1)
        if int(found.others) < 0:  # L = 2: one of the edges does not exist, and is equal to `rest`
            for _ in range(-int(found.others)):
                copies.pop(int(np.argmin(np.abs(np.array(copies) - float(found.rest)))))
        rest = [float(found.rest)] * max(int(found.others), 0)
        values = np.sort(np.array([*once, *copies, *rest]).real)
        expected = np.sort(np.linalg.eigvals(ratio).real)
        np.testing.assert_allclose(values, expected, atol=1e-10 * abs(expected).max())
        log_det = found.log_det(np.linalg.det(found.symmetric))
        assert float(log_det) == pytest.approx(np.linalg.slogdet(ratio)[1], abs=1e-10)
        unscored = np.inf if problem.cyclic else 1.0  # rows that only the prior sees
        assert min(float(found.lowest()), unscored) == pytest.approx(expected[0], abs=1e-10)


@PROBLEMS
def test_entropy_is_the_part_of_the_posterior_that_does_not_grow_with_chi(problem):
    task, here = brute(problem), at(gaussian_task(problem), SEQUENCES)
    for place in PLACES[:2]:
        logits = jnp.asarray(symmetric(problem, place))
        whole = negative_log_posterior(logits, task, problem.attention) - problem.chi * action(logits, task, problem.attention)
        assert float(entropy(np.array(place), here, problem.attention)) == pytest.approx(float(whole), abs=1e-10)


@pytest.mark.parametrize("problem", [numbers("softmax", 4, False), numbers("linear", 4, True, 0.8)], ids=["softmax", "linear"])
def test_rates_are_eigenvalues_of_the_energy_of_all_weights(problem):
    task, here, mobility = brute(problem), at(gaussian_task(problem), SEQUENCES), (0.7, 1.9)
    length, vocab = problem.length, problem.vocab
    place = np.array([0.2, 1.4])
    logits = jnp.asarray(symmetric(problem, place))
    output = best_output(token_blocks(logits, task, problem.attention), task.prior)[0]
    steps = jnp.sqrt(jnp.concatenate([jnp.full(length**2, mobility[0]), jnp.full(vocab**2, mobility[1])]))

    def flat(change):
        change = steps * change
        first, second = change[: length**2].reshape(length, length), change[length**2 :].reshape(vocab, vocab)
        weights = logits + first, output + second
        return energy(*weights, task.target, task.moments, task.layout, task.prior, problem.attention)

    matrix = np.asarray(jax.jit(jax.hessian(flat), compiler_options=QUICK)(jnp.zeros(length**2 + vocab**2)))
    values, vectors = np.linalg.eigh(matrix)
    # those that move cG, that is have a part along the copy entries minus the mean
    pattern = np.asarray(task.target) * np.asarray(task.layout.scored)[:, None]
    pattern -= pattern.sum(axis=1, keepdims=True) / length
    moving = np.abs(np.append(pattern.ravel(), np.zeros(vocab**2)) @ vectors) > 1e-8
    expected = jax.jit(lambda c: rates(c, here, problem.attention, mobility), compiler_options=QUICK)(place)
    np.testing.assert_allclose(values[moving], expected, atol=1e-9)


class Quadrature:
    """Moments of exp(-chi S - (V/2) log det) over all scored logits, by Gauss-Hermite quadrature around one minimum.

    Softmax: over the zero-sum part of each row. The action is docs/theory.md, section 4, with sums over rows written out.
    """

    def __init__(self, problem: Problem, sequences: float, center, nodes: int = 18):
        rows, length = problem.scored, problem.length
        self.problem, self.sequences, self.copies = problem, sequences, (np.arange(rows), np.arange(rows))
        row = np.eye(length) if problem.attention == "linear" else np.linalg.svd(np.ones((1, length)))[2][1:]
        self.basis = np.kron(np.eye(rows), row)
        self.start = (center[0] + center[1] * np.eye(rows, length)).ravel() @ self.basis.T
        size = len(self.start)
        # central second differences, good to 1e-7: the rule converges with any similar Gaussian
        step = 1e-4 * np.eye(size)
        corners = [self.start + a * step[:, None] + b * step for a in (1, -1) for b in (1, -1)]
        values = [self.terms(corner.reshape(-1, size))[0].reshape(size, size) for corner in corners]
        hessian = (values[0] - values[1] - values[2] + values[3]) / 4e-8
        self.root = np.linalg.inv(np.linalg.cholesky(hessian)).T
        places, weights = np.polynomial.hermite_e.hermegauss(nodes)
        logs = np.log(weights / np.sqrt(2 * np.pi)) + places**2 / 2
        self.normal = np.stack(np.meshgrid(*[places] * size, indexing="ij"), axis=-1).reshape(-1, size)
        self.log_weights = sum(grid.ravel() for grid in np.meshgrid(*[logs] * size, indexing="ij"))

    def matrices(self, points):
        logits = (points @ self.basis).reshape(-1, self.problem.scored, self.problem.length)
        if self.problem.attention == "linear":
            return logits, logits / self.problem.length
        matrix = np.exp(logits)
        return logits, matrix / matrix.sum(-1, keepdims=True)

    def terms(self, points):
        """S and (V/2) log det."""
        problem, (logits, matrix) = self.problem, self.matrices(points)
        modes = [
            (problem.vocab - 1, (matrix**2).sum((1, 2)), matrix[:, *self.copies].sum(1)),
            (1, (matrix.sum(-1) ** 2).sum(1), matrix.sum((1, 2))),
        ]
        ridge = problem.kappa * problem.vocab / problem.output_variance
        value = (logits**2).sum((1, 2)) / (2 * problem.logit_variance * problem.position_scale**2)
        log_det = 0.0
        for count, square, overlap in modes:
            left = problem.scored - self.sequences * overlap**2 / (self.sequences * square + ridge)
            value = value + self.sequences * count * left / (2 * problem.kappa * problem.vocab)
            log_det = log_det + problem.vocab / 2 * count * np.log1p(self.sequences * square / ridge)
        return value, log_det

    def moments(self, chi):
        """Means of (c1, cG, aG), their variances, and -log(evidence) / chi under the normalised prior of these logits."""
        points = self.start + self.normal @ self.root.T / np.sqrt(chi)
        value, log_det = self.terms(points)
        log_density = -chi * (value - value.min()) - log_det + self.log_weights
        density = np.exp(log_density)
        seen = []
        for array in self.matrices(points):
            copies = array[:, *self.copies]
            off = (array.sum((1, 2)) - copies.sum(1)) / (self.problem.scored * (self.problem.length - 1))
            seen += [off, copies.mean(1) - off]
        seen = np.array([seen[0], seen[1], seen[3]])
        mean = seen @ density / density.sum()
        variance = (seen - mean[:, None]) ** 2 @ density / density.sum()
        scale = np.sqrt(self.problem.logit_variance) * self.problem.position_scale
        volume = np.log(np.linalg.det(self.root / scale))
        return mean, variance, value.min() - (np.log(density.sum()) + volume) / chi


def tiny(kind, length, vocab, cyclic=True):
    return Problem(
        length=length, vocab=vocab, noise=0.5, logit_variance=1.3, output_variance=0.6, attention=kind, cyclic=cyclic
    )


# Two rows of two logits, two rows of three (the smallest with every mode), and linear attention in both of its phases.
SMALL = pytest.mark.parametrize(
    ("problem", "sequences"),
    [
        (tiny("softmax", 2, 2), 6.0),
        (tiny("softmax", 3, 2, cyclic=False), 6.0),
        (tiny("linear", 2, 3), 1.0),
        (tiny("linear", 2, 3), 30.0),
    ],
    ids=["softmax", "softmax-open", "linear-zero", "linear-ordered"],
)


@cache
def quadrature(problem: Problem, sequences: float) -> Quadrature:
    state = found(problem).minima(sequences)[0].order_parameters
    c1 = -state.cG / problem.length if problem.attention == "softmax" else state.c1
    return Quadrature(problem, sequences, (c1, state.cG))


@cache
def found(problem: Problem):
    return phases(problem)


def with_chi(problem: Problem, chi: float) -> Problem:
    return problem.model_copy(update={"chi": chi})


@SMALL
def test_errors_of_the_expansion_fall_by_the_next_power_of_chi(problem, sequences):
    errors = []
    for chi in (400.0, 800.0):
        one, *_ = fluctuations(with_chi(problem, chi), sequences, found(problem))
        mean, variance, free = quadrature(problem, sequences).moments(chi)
        assert one.status == "good"
        gaps = {
            "c1": one.c1 - mean[0],
            "cG": one.cG - mean[1],
            "aG": one.aG - mean[2],
            "gamma": one.gamma - free,
            "var c1": one.covariance[0, 0] - variance[0],
            "var cG": one.covariance[1, 1] - variance[1],
            "var aG": one.attention_covariance[1, 1] - variance[2],
        }
        errors.append({name: abs(gap) for name, gap in gaps.items()})
    powers = {"c1": 2, "cG": 2, "aG": 2, "gamma": 2, "var c1": 3, "var cG": 3, "var aG": 2}
    if problem.attention == "softmax":
        del powers["var c1"]  # moves with the sum of a row, which the quadrature leaves out
    elif sequences == 1.0:
        assert max(errors[0][name] for name in ("c1", "cG", "aG")) < 1e-15
        powers = {"gamma": 2, "var c1": 3, "var cG": 3, "var aG": 3}  # no odd order, by the symmetry G -> -G
    else:
        powers["var aG"] = 3  # aG = cG / L
    for name, power in powers.items():
        assert np.log2(errors[0][name] / errors[1][name]) == pytest.approx(power, abs=0.05), name


@pytest.mark.parametrize(("length", "cyclic"), [(2, True), (3, False)])
def test_free_energy_of_cG_gives_its_mean_and_variance(length, cyclic):
    problem, sequences = tiny("softmax", length, 2, cyclic), 6.0
    errors = []
    for chi in (200.0, 400.0):
        here = at(gaussian_task(with_chi(problem, chi)), sequences)
        mean, variance, _ = quadrature(problem, sequences).moments(chi)
        cG = np.linspace(mean[1] - 10 * variance[1] ** 0.5, mean[1] + 10 * variance[1] ** 0.5, 2001)
        energy = np.asarray(free_energies(cG, here))
        density = np.exp(-chi * (energy - energy.min()))
        center = cG @ density / density.sum()
        errors.append(np.abs([center - mean[1], (cG - center) ** 2 @ density / density.sum() - variance[1]]))
    np.testing.assert_allclose(np.log2(errors[0] / errors[1]), [2, 3], atol=0.1)


def test_means_of_the_reference():
    """docs: (L, V, sigma^2) = (16, 4, 0.9) at P = 100; Langevin on (G, W) gives 0.4035(14), 0.378(5), 0.324(2)."""
    problem = Problem(length=16, vocab=4, noise=0.9, sequences=100.0)
    for chi, expected in ((50.0, 0.404275), (15.0, 0.383870), (5.0, 0.335545)):
        (one,) = fluctuations(with_chi(problem, chi), found=found(problem))
        assert one.saddle[1] == pytest.approx(0.413809, abs=1e-6)
        assert one.cG == pytest.approx(expected, abs=1e-6)
        assert one.c1 == pytest.approx(-one.cG / 16, abs=1e-12)
        assert one.a1 + one.aG == pytest.approx(1, abs=1e-12)
        assert one.weight == 1
    # Gamma in an independent form: the Hessian over all 256 logits, at chi = 50, is lowest at 0.4043
    task = brute(problem, 100.0)
    values = []
    for cG in (0.403275, 0.404275, 0.405275):
        logits = symmetric(problem, (-cG / 16, cG))
        log_det = np.linalg.slogdet(full_hessian(logits, task, problem.attention))[1]
        values.append(float(negative_log_posterior(jnp.asarray(logits), task, "softmax")) + log_det / 2)
    assert np.polyfit([-1, 0, 1], values, 2)[1] / np.polyfit([-1, 0, 1], values, 2)[0] == pytest.approx(0, abs=5e-3)


PAPER = Problem.preset("paper")


def test_infinite_chi_and_no_data():
    for P in (250.0, 310.0):
        branches = fluctuations(with_chi(PAPER, 1e10), P, found(PAPER))
        for one, state in zip(branches, found(PAPER).minima(P), strict=True):
            parameters = state.order_parameters
            np.testing.assert_allclose([one.cG, one.aG], [parameters.cG, parameters.aG], atol=1e-8)
            assert one.gamma == pytest.approx(state.action, abs=1e-7)
            np.testing.assert_allclose(one.covariance * 1e10, one.susceptibility, rtol=1e-5)
    problem = numbers("softmax", 9, noise=1e12)
    (one,) = fluctuations(problem, 1.0)
    # one logit of the prior has the variance g_W tau_p^2 / chi, and cG is a difference of two means
    variance = problem.logit_variance * problem.position_scale**2 / problem.chi
    assert one.covariance[1, 1] == pytest.approx(variance * (1 / 9 + 1 / 72), rel=1e-9)
    assert one.cG == pytest.approx(0, abs=1e-9)


def test_maxwell_point_moves_like_one_over_chi():
    results = {chi: maxwell(with_chi(PAPER, chi), found(PAPER)) for chi in (1e4, 1000.0, 500.0, 50.0)}
    (transition,) = found(PAPER).transitions
    for result in results.values():
        assert result.limit == transition.P
        assert result.before.gamma == pytest.approx(result.after.gamma, abs=1e-9)
        assert result.before.weight == pytest.approx(0.5, abs=1e-5)
        assert result.before.cG < result.after.cG
    moved = {chi: result.P - transition.P - result.slope / chi for chi, result in results.items()}
    assert np.log2(moved[500.0] / moved[1000.0]) == pytest.approx(2, abs=0.05)
    assert abs(results[50.0].P - 301.171) < 1e-3
    # at P*(chi) of one chi the weights are e to the power of the difference, at any other P near it
    branches = fluctuations(PAPER, 301.0, found(PAPER))
    gap = PAPER.chi * (branches[1].gamma - branches[0].gamma)
    assert branches[0].cG < 1
    assert branches[1].weight / branches[0].weight == pytest.approx(np.exp(-gap), rel=1e-9)
    assert branches[0].weight + branches[1].weight == pytest.approx(1)


def test_slope_of_the_maxwell_point_from_all_logits():
    problem = Problem(length=18, vocab=4, noise=0.9)
    result = maxwell(with_chi(problem, 1e4), found(problem))
    explicit, task = Explicit.of(problem), brute(problem, result.limit)
    loops, slopes = [], []
    for one in (result.before, result.after):
        state = min(found(problem).minima(result.limit), key=lambda m: abs(m.order_parameters.cG - one.cG)).order_parameters
        logits = symmetric(problem, (-state.cG / 18, state.cG))
        log_det = np.linalg.slogdet(full_hessian(logits, task, problem.attention))[1]
        entropic = negative_log_posterior(jnp.asarray(logits), task, "softmax") - problem.chi * action(
            jnp.asarray(logits), task, "softmax"
        )
        loops.append(float(entropic) + log_det / 2)
        slopes.append(explicit.softmax_action(state.cG, result.limit + 1e-30j).imag / 1e-30)
    assert result.slope == pytest.approx((loops[1] - loops[0]) / (slopes[0] - slopes[1]), rel=1e-6)


def test_barrier_grows_with_chi_and_lives_exponentially():
    explicit = Explicit.of(PAPER)
    (transition,) = found(PAPER).transitions
    before, after = transition.before.cG, transition.after.cG
    top = max(explicit.softmax_action(cG, transition.P) for cG in np.linspace(before, after, 20001))
    height = top - explicit.softmax_action(before, transition.P)
    far, near = (barrier(with_chi(PAPER, chi), transition.P, before, after) for chi in (1e6, 100.0))
    assert far.heights[0] / 1e6 == pytest.approx(height, rel=1e-4)
    assert before < near.top < after
    assert near.symmetric
    further = barrier(with_chi(PAPER, 101.0), transition.P, before, after)
    assert np.log(further.lifetimes[0] / near.lifetimes[0]) == pytest.approx(height, rel=0.01)
    # time is eps times steps: twice the step sizes, half the lifetime
    faster = barrier(with_chi(PAPER, 100.0), transition.P, before, after, mobility=(2.0, 2.0))
    assert faster.lifetimes[1] == pytest.approx(near.lifetimes[1] / 2, rel=1e-9)
    assert barrier(PAPER, 250.0, 0.2, 0.21) is None


def uniform_branch(sequences: float):
    """The branch that training from small weights sits on."""
    return min(fluctuations(PAPER, sequences, found(PAPER)), key=lambda one: one.saddle[1])


def test_susceptibility_diverges_at_the_upper_fold_only():
    segment = next(one for one in found(PAPER).segments if one.end is not None)
    fold = np.exp(segment.upper)
    distances = fold * np.array([1e-5, 4e-5, 1.6e-4])
    values = [uniform_branch(fold - distance).susceptibility[1, 1] for distance in distances]
    exponents = np.diff(np.log(values)) / np.diff(np.log(distances))
    np.testing.assert_allclose(exponents, -0.5, atol=0.01)
    assert uniform_branch(found(PAPER).transitions[0].P).susceptibility[1, 1] < values[-1] / 10
    # at finite chi the branch is lost before the fold
    assert uniform_branch(fold * (1 - 1e-4)).status == "no minimum"


def test_linear_attention_announces_its_transition():
    problem = PAPER.model_copy(update={"attention": "linear"})
    critical = found(problem).transitions[0].P
    distances = critical * np.array([1e-5, 1e-4, 1e-3])
    below, above = (
        [fluctuations(with_chi(problem, 1e12), critical + sign * d, found(problem))[0] for d in distances] for sign in (-1, 1)
    )
    for side, branches in (("below", below), ("above", above)):
        values = [one.susceptibility[0, 0] for one in branches]
        exponents = np.diff(np.log(values)) / np.diff(np.log(distances))
        np.testing.assert_allclose(exponents, -1, atol=0.02, err_msg=side)
    # the Landau theory of one component: half the susceptibility on the ordered side
    assert below[0].susceptibility[0, 0] / above[0].susceptibility[0, 0] == pytest.approx(2, rel=0.01)
    # the critical mode slows down with it
    assert below[0].relaxation / below[1].relaxation == pytest.approx(0.1, rel=0.02)


def test_status_where_the_expansion_fails():
    copying = fluctuations(with_chi(PAPER, 5.0), 320.0, found(PAPER))[-1]
    assert copying.status == "no minimum"
    assert np.isnan([copying.cG, copying.gamma]).all()
    assert copying.weight == 0
    assert copying.saddle[1] == pytest.approx(1.9977, abs=1e-4)
    lost = maxwell(with_chi(PAPER, 5.0), found(PAPER))
    assert np.isnan(lost.P)
    assert lost.barrier is None
    linear = PAPER.model_copy(update={"attention": "linear"})
    (one,) = fluctuations(with_chi(linear, 5.0), 100.0, found(linear))
    assert one.status == "correction not small"
    assert not barrier(PAPER.model_copy(update={"length": 64}), 771.0, 0.17, 2.4).symmetric


def test_a_long_sequence_costs_no_more():
    problem = PAPER.model_copy(update={"length": 10_000, "chi": 1e5})
    result = maxwell(problem)
    assert result.before.status == result.after.status == "good"
    assert abs(result.P / (result.limit + result.slope / problem.chi) - 1) < 1e-3


@pytest.mark.parametrize(
    ("fields", "field"), [({"content": True, "token_scale": 1.0}, "content"), ({"head_dimension": 64}, "head_dimension")]
)
def test_other_networks_are_refused(fields, field):
    problem = PAPER.model_copy(update=fields)
    for call in (lambda: fluctuations(problem, 300.0), lambda: maxwell(problem)):
        with pytest.raises(ProblemError, match=field):
            call()


def test_what_is_missing_is_named():
    with pytest.raises(ProblemError, match="sequences"):
        fluctuations(PAPER)
    with pytest.raises(ProblemError, match="linear"):
        barrier(PAPER.model_copy(update={"attention": "linear"}), 300.0, 0.1, 1.0)
    assert maxwell(PAPER.model_copy(update={"attention": "linear"})) is None
