"""The gradient through sequences: exact, whatever chunk and batch, for every network."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from copyhead.experiment.adam import NEVER, AdamSettings, train
from copyhead.experiment.cells import assemble, data_sets
from copyhead.experiment.diagnostics import over_chains
from copyhead.experiment.direct import NO_TOKEN, DirectPath, squared_error_gradient
from copyhead.experiment.langevin import LangevinSettings, sample
from copyhead.experiment.observables import measure_all, yardstick
from copyhead.experiment.packed import PackedPath
from copyhead.experiment.path import path
from copyhead.model import network, targets, tokens
from copyhead.model.network import Circuits, Network
from copyhead.problem import Problem, ProblemError
from copyhead.theory.full_network import minimise_network, symmetric
from copyhead.theory.transition import phases

PROBLEM = Problem(length=7, vocab=3, noise=0.8, token_scale=0.6, position_scale=1.2)
KERNEL, EMBEDDED = Network(kind="kernel"), Network(kind="embedded", width=16, embedding_variance=0.5)
# float32 sums of a few hundred terms: a relative 1e-5 of the largest entry is ten times what is seen
FLOAT32 = 1e-5


def spread(weights):
    """Weights of order one: a start is so small that attention hardly depends on it."""
    draw = np.random.default_rng(5).standard_normal
    return jax.tree.map(lambda part: part + np.asarray(0.3 * draw(part.shape), np.float32), weights)


def energy(net, weights, begin, data, problem):
    """E in float64, from the forward pass of the model."""
    target = targets.shift(problem.length, cyclic=problem.cyclic)
    wanted = jnp.einsum("ab,pbv->pav", target, jax.nn.one_hot(data, problem.vocab))
    missed = (wanted - network.forward(network.circuits(weights, problem), data, problem.attention)) ** 2
    error = jnp.sum(missed * target.any(axis=1)[:, None])
    return error / (2 * problem.kappa) + network.prior_energy(weights, begin, network.scales(net, problem))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("net", "fields"),
    [
        (KERNEL, {}),
        (KERNEL, {"attention": "linear"}),
        (KERNEL, {"cyclic": False}),
        (KERNEL, {"attention": "linear", "cyclic": False}),
        (KERNEL, {"vocab": 2, "length": 3}),
        (KERNEL, {"vocab": 11}),
        (Network(), {"token_scale": 0.0}),
        (EMBEDDED, {}),
        (EMBEDDED, {"attention": "linear"}),
        (EMBEDDED, {"head_dimension": 5}),
        (EMBEDDED.replace(positions="fixed"), {}),
    ],
)
def test_the_gradient_is_that_of_the_energy(net, fields):
    problem = PROBLEM.replace(**fields)
    way = DirectPath(problem, net)
    cells = assemble(way, [(30, 0, "small", 1.0), (50, 1, "small", 1.0)])
    begin, data = way.prepare(cells.start, cells.data, cells.batch_key)
    weights = spread(cells.start)
    found = jax.jit(lambda w: way.slope(w, data, None))(weights)
    with jax.enable_x64(True):
        for cell, count in enumerate((30, 50)):
            one, first = (jax.tree.map(lambda part, c=cell: jnp.asarray(part[c], jnp.float64), w) for w in (weights, begin))
            expected = jax.grad(lambda w, f=first, c=cell, n=count: energy(net, w, f, cells.data.tokens[c, :n], problem))(one)
            for name, part, wanted in zip(expected._fields, found, expected, strict=True):
                if net.positions == "fixed" and name == "positions":
                    assert not np.any(part[cell])
                else:
                    assert np.abs(part[cell] - wanted).max() < FLOAT32 * np.abs(wanted).max(), name


@pytest.mark.usefixtures("quick")
def test_large_logits_do_not_overflow_and_padding_adds_nothing():
    draw = np.random.default_rng(0).standard_normal
    shapes = (7, 7), (7, 3), (3, 7), (3, 3), (3, 3)
    net = Circuits(*(jnp.asarray(20 * draw(shape), jnp.float32) for shape in shapes))
    data = np.random.default_rng(1).integers(0, 3, (20, 7)).astype(np.int32)
    filled = np.concatenate([data, np.full((9, 7), NO_TOKEN, np.int32)])
    target = targets.shift(7)
    (error, slope), (padded_error, padded) = (
        squared_error_gradient(net, jnp.asarray(x), target, "softmax") for x in (data, filled)
    )
    assert np.isfinite(error)
    assert float(padded_error) == pytest.approx(float(error), rel=1e-6)
    for part, other in zip(slope, padded, strict=True):
        np.testing.assert_allclose(part, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())


@pytest.mark.usefixtures("quick")
def test_the_positional_network_has_the_same_gradient_through_moments_and_through_sequences():
    problem = PROBLEM.replace(token_scale=0.0)
    moments, direct = PackedPath(problem), DirectPath(problem, Network())
    runs = [(40, 0, "small", 1.0)]
    first, second = assemble(moments, runs), assemble(direct, runs)
    np.testing.assert_array_equal(first.start.logits, second.start.logits)
    weights = spread(second.start)
    turned = moments.prepare(weights, first.data, first.batch_key)
    slope = moments.restore(moments.slope(*turned, None))
    expected = direct.slope(weights, direct.prepare(second.start, second.data, second.batch_key)[1], None)
    for part, other in zip(slope, expected, strict=True):
        assert np.abs(part - other).max() < FLOAT32 * np.abs(other).max()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("net", "batch"), [(KERNEL, None), (EMBEDDED, None), (KERNEL, 20)])
def test_the_chunk_of_sequences_and_of_cells_does_not_matter(net, batch):
    runs = [(count, seed, "small", 20.0) for seed in range(3) for count in (45, 60)]
    settings = AdamSettings(60)
    trained = []
    for size, cells in ((None, None), (7, 2), (16, 5)):
        way = DirectPath(PROBLEM, net, batch=batch, chunk=size)
        trained.append(train(assemble(way, runs), way, settings, chunk=cells).weights)
    for other in trained[1:]:
        for part, reference in zip(other, trained[0], strict=True):
            # float32 in another order of sums, over 60 steps of Adam, which divides by the size of the gradient
            np.testing.assert_allclose(part, reference, atol=2e-4)


@pytest.mark.usefixtures("quick")
def test_a_batch_of_all_sequences_is_the_full_batch_exactly():
    runs = [(50, seed, "small", 20.0) for seed in range(2)]
    full, all_of_them = (
        train(assemble(way := DirectPath(PROBLEM, KERNEL, batch=batch), runs), way, AdamSettings(40)).weights
        for batch in (None, 50)
    )
    for part, other in zip(full, all_of_them, strict=True):
        np.testing.assert_array_equal(part, other)


def test_the_gradient_of_a_batch_is_unbiased():
    """Its mean over steps is that of the full batch; the priors are not scaled."""
    way = DirectPath(PROBLEM, KERNEL, batch=10)
    cells = assemble(way, [(40, 0, "small", 1.0), (25, 1, "small", 1.0)])
    _, data = way.prepare(cells.start, cells.data, cells.batch_key)
    weights = spread(cells.start)
    draws = jax.lax.map(lambda number: way.slope(weights, data, number), jnp.arange(4000, dtype=jnp.uint32))
    full = way.slope(weights, data, None)
    for part, exact in zip(draws, full, strict=True):
        error = np.asarray(part).std(axis=0) / len(part) ** 0.5
        z = (np.asarray(part).mean(axis=0) - exact) / error
        # 150 entries, strongly correlated: 4.5 is exceeded by one of them once in a thousand
        assert np.abs(z).max() < 4.5
        assert 0.2 < np.sqrt(np.mean(z**2)) < 2.0  # the error is not empty, nor larger than it says


def test_a_batch_is_drawn_without_replacement_from_the_data_set_alone():
    way = DirectPath(PROBLEM, KERNEL, batch=5)
    numbered = jnp.arange(12)[:, None] * jnp.ones((1, 7), int)
    seen = set()
    for number in range(200):
        drawn, factor = way._drawn(numbered, jnp.asarray(8), jnp.array([1, 2], jnp.uint32), number, 5)
        rows = np.asarray(drawn[:, 0]).tolist()
        assert len(set(rows)) == 5
        assert float(factor) == np.float32(8 / 5)
        seen |= set(rows)
    assert seen == set(range(8))


def test_mini_batches_end_near_the_minimum_of_the_full_batch():
    problem = Problem(length=12, vocab=3, noise=0.8, token_scale=1.0)
    found = []
    for batch in (None, 100):
        way = DirectPath(problem, KERNEL, batch=batch)
        trained = train(assemble(way, [(300, 0, "copy", 1.0)]), way, AdamSettings(3000, 0.03))
        found.append(measure_all(trained.weights, yardstick(problem, KERNEL, 512), problem))
        assert trained.converged.all() == (batch is None)  # the last steps of mini-batches scatter
    # Adam with noise: of the order of the last learning rates, and of the noise that the mean gradient has there
    assert float(found[1].cG[0]) == pytest.approx(float(found[0].cG[0]), rel=0.03)


def test_without_data_weight_the_kernel_network_samples_its_prior():
    """sigma^2 so large that the data do not matter: every block has its own variance, 1 / (1 - eps k / 2) above the prior's."""
    problem = Problem(length=6, vocab=3, noise=1e6, token_scale=0.5, position_scale=1.2, logit_variance=0.8, chi=10.0)
    way = DirectPath(problem, KERNEL)
    cells = assemble(way, [(4, seed, "small", problem.chi) for seed in range(8)])
    settings = LangevinSettings(step_logits=0.1, output_courant=0.2, warmup=400, draws=400, thin=15)
    seen = sample(cells, way, yardstick(problem, KERNEL, 16), settings).observables
    scale = network.scales(KERNEL, problem)
    # cI is the mean of V entries of tt minus that of V (V - 1); the means of pt and tp have L V entries
    for name, how, entries in (("cI", scale.tt, 1 / (1 / 3 + 1 / 6)), ("pt", scale.pt, 18), ("tp", scale.tp, 18)):
        eps = settings.step_logits * min(1.0, how.variance)
        expected = how.variance / problem.chi / entries / (1 - eps / how.variance / 2)
        second = over_chains(np.asarray(getattr(seen, name)) ** 2)
        assert second.ess > 100
        assert abs(second.mean - expected) < 4 * second.error, name


def test_sampled_queries_and_keys_have_the_logits_of_their_own_prior_and_not_of_a_fused_matrix():
    """docs/theory.md, section 10: all weights of an embedded network at large chi, against the saddle points of both priors."""
    chi, sequences = 200.0, 60
    problem = Problem(length=6, vocab=3, noise=0.8, token_scale=1.0, chi=chi, head_dimension=100)
    net = Network(kind="embedded", width=32)
    way = path(problem, net)
    cells = assemble(way, [(sequences, seed, "copy", chi) for seed in range(4)])
    settings = LangevinSettings(step_logits=0.1, warmup=2000, draws=150, thin=20)
    seen = sample(cells, way, yardstick(problem, net, 64), settings).observables
    own, fused = (
        phases(problem.replace(content=True, head_dimension=heads)).minima(sequences)[0].order_parameters
        for heads in (100, None)
    )
    for name in ("cG", "cS"):
        found = over_chains(np.asarray(getattr(seen, name)))
        assert found.mixed
        assert abs(found.mean - getattr(own, name)) < 4 * found.error, name
    found = over_chains(np.asarray(seen.cG))
    assert found.mean - fused.cG > 20 * found.error


def test_linear_attention_that_reads_tokens_has_metastable_signs_of_tokens():
    """The sign of a key token in pt and tt, and of the row of W that reads it, is free where pp and tp are zero."""
    problem = Problem(length=8, vocab=3, noise=0.6, token_scale=1.0, attention="linear")
    draw = np.random.default_rng(0).standard_normal
    pt, tt, output = (draw(shape) for shape in ((8, 3), (3, 3), (3, 3)))
    data = np.random.default_rng(1).integers(0, 3, (20, 8))
    signs = np.array([1.0, -1.0, 1.0])
    turn = ((pt, tt, output), (pt * signs, tt * signs, signs[:, None] * output))
    plain, turned = (
        network.forward(Circuits(jnp.zeros((8, 8)), jnp.asarray(a), jnp.zeros((3, 8)), *map(jnp.asarray, b)), data, "linear")
        for a, *b in turn
    )
    np.testing.assert_allclose(plain, turned, atol=1e-5)
    # above the pooling transition; a random pattern of 3 signs is a mixed one three times in four
    way = DirectPath(problem, KERNEL)
    trained = train(assemble(way, [(40, seed, "small", 1.0) for seed in range(8)]), way, AdamSettings(2000, 0.03))
    seen = measure_all(trained.weights, yardstick(problem, KERNEL, 64), problem)
    mixed = np.asarray(seen.signs) < 1
    assert 0 < mixed.sum() < 8
    assert trained.converged[mixed].all()
    for seed in np.flatnonzero(mixed):
        sequences = data_sets(problem, [40], int(seed))[0]
        state, copy = (
            minimise_network(problem, sequences, jax.tree.map(lambda part: np.asarray(part, float), start))
            for start in (
                jax.tree.map(lambda part, seed=seed: part[seed], trained.weights),
                symmetric(phases(problem.replace(content=True)).minima(40)[0].order_parameters, problem),
            )
        )
        assert state.converged
        assert state.action > copy.action  # equal signs are the global minimum


@pytest.mark.usefixtures("quick")
def test_a_run_that_diverges_is_marked_with_a_step_and_leaves_the_others_alone():
    way = DirectPath(PROBLEM, KERNEL)
    cells = assemble(way, [(40, 0, "small", 1.0), (40, 1, "small", 1.0)])
    healthy = train(cells, way, AdamSettings(100))
    cells.start.output[0] *= 1e30  # overflows in the first step
    trained = train(cells, way, AdamSettings(100))
    # looked at 20 times in 100 steps
    assert trained.diverged.tolist() == [5, NEVER]
    assert not trained.converged[0]
    for part, other in zip(trained.weights, healthy.weights, strict=True):
        np.testing.assert_array_equal(part[1], other[1])


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_observables_read_off_the_order_parameters_of_symmetric_logits(attention):
    problem = PROBLEM.replace(attention=attention)
    target = targets.shift(7)
    c1, cG, cI, cS = 0.3, 1.1, -0.4, 0.2
    pp = c1 - 0.5 + cG * target + cS * np.eye(7)
    net = Circuits(pp, np.full((7, 3), 0.2), np.full((3, 7), 0.3), cI * np.eye(3), np.diag([1.0, 2.0, 3.0]))
    seen = measure_all(network.stacked([net]), yardstick(problem, KERNEL, 300), problem)
    expected = {"c1": c1, "cG": cG, "cI": cI, "cS": cS, "pt": 0.2, "tp": 0.3, "content": 0.0, "overlap": 2.0}
    for name, value in expected.items():
        assert float(getattr(seen, name)[0]) == pytest.approx(value, abs=1e-6), name
    fresh = tokens.sample(tokens.stream(0, "fresh"), 300, 7, tokens.uniform(3))
    matrix = np.array([[c1 + cG * target + cI * np.equal.outer(x, x) + cS * np.eye(7)] for x in fresh])[:, 0]
    matrix = np.exp(matrix) / np.exp(matrix).sum(axis=2, keepdims=True) if attention == "softmax" else matrix / 7
    one_hot = np.eye(3)[fresh]
    loss = np.mean(np.sum((target @ one_hot - matrix @ one_hot @ np.diag([1.0, 2.0, 3.0])) ** 2, axis=2))
    assert float(seen.loss[0]) == pytest.approx(loss, rel=1e-5)
    average = matrix[:256].mean(axis=0)  # attention is averaged over the first 256
    off = np.sum(average * (1 - target)) / 42
    assert float(seen.a1[0]) == pytest.approx(7 * off, rel=1e-5)
    assert float(seen.aG[0]) == pytest.approx(np.sum(average * target) / 7 - off, rel=1e-4)


@pytest.mark.parametrize(("name", "value"), [("batch", 0), ("chunk", 0)])
def test_sizes_below_one_are_refused(name, value):
    with pytest.raises(ProblemError, match=f"{name} = 0: must be an integer >= 1"):
        DirectPath(PROBLEM, KERNEL, **{name: value})


def test_the_fastest_path_is_chosen():
    positional = PROBLEM.replace(token_scale=0.0)
    assert isinstance(path(positional), PackedPath)
    assert isinstance(path(positional, batch=10), DirectPath)
    assert isinstance(path(PROBLEM, KERNEL), DirectPath)
