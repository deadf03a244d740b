"""Parametrisations: every network is a map from weights to the circuits of one forward pass."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from copyhead.model import network, targets
from copyhead.model.network import Circuits, Fused, Network, Positional, Split
from copyhead.problem import Problem, ProblemError

LENGTH, VOCAB, WIDTH, HEADS = 5, 3, 12, 4
PROBLEM = Problem(length=LENGTH, vocab=VOCAB, noise=0.8, position_scale=1.3, token_scale=0.6)
ROUNDING = 1e-12  # a few hundred float64 operations on numbers of order one

pytestmark = pytest.mark.usefixtures("x64")


def normal(seed, *shapes):
    draw = np.random.default_rng(seed).standard_normal
    return [draw(shape) for shape in shapes]


def weights(kind):
    square = (WIDTH, WIDTH)
    if kind == "fused":
        return Fused(*normal(0, (LENGTH, WIDTH), (VOCAB, WIDTH), square, square, (WIDTH, VOCAB)))
    return Split(*normal(0, (LENGTH, WIDTH), (VOCAB, WIDTH), (WIDTH, HEADS), (WIDTH, HEADS), square, (WIDTH, VOCAB)))


@pytest.mark.parametrize("kind", ["fused", "split"])
@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_the_forward_pass_is_that_of_a_transformer_layer_written_out(kind, attention):
    """h_a = sqrt(tau_p) p_a + sqrt(tau_x) W_emb[x_a], logits h_a^T W_QK h_b, values from the token embedding alone."""
    net = weights(kind)
    tokens = np.random.default_rng(1).integers(0, VOCAB, (4, LENGTH))
    found = network.forward(network.circuits(net, PROBLEM), tokens, attention)
    for sequence, output in zip(tokens, found, strict=True):
        h = PROBLEM.position_scale**0.5 * net.positions + PROBLEM.token_scale**0.5 * net.tokens[sequence]
        both = net.query_key if kind == "fused" else net.query @ net.key.T
        logits = np.array([[h[a] @ both @ h[b] for b in range(LENGTH)] for a in range(LENGTH)])
        exponential = np.exp(logits)
        matrix = exponential / exponential.sum(axis=1, keepdims=True) if attention == "softmax" else logits / LENGTH
        values = net.tokens[sequence] @ net.value @ net.output
        np.testing.assert_allclose(output, matrix @ values, rtol=1e-9, atol=1e-9)  # logits of order 100 are exponentiated


def test_logits_of_the_kernel_network_are_gathered_from_four_blocks():
    shapes = (LENGTH, LENGTH), (LENGTH, VOCAB), (VOCAB, LENGTH), (VOCAB, VOCAB), (VOCAB, VOCAB)
    net = Circuits(*map(jnp.asarray, normal(2, *shapes)))
    x = np.random.default_rng(3).integers(0, VOCAB, (2, LENGTH))
    found = network.logits(net, x)
    for m, a, b in itertools.product(range(2), range(LENGTH), range(LENGTH)):
        expected = net.pp[a, b] + net.pt[a, x[m, b]] + net.tp[x[m, a], b] + net.tt[x[m, a], x[m, b]]
        assert float(found[m, a, b]) == pytest.approx(float(expected), rel=ROUNDING)


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("heads", [None, 40])
def test_prior_variance_of_logits_and_output_without_data_is_the_same_at_every_width(width, heads):
    """Var pp = tau_p^2 g_W / chi, Var W = g_O / chi, where the embeddings are at their start (d_model to infinity)."""
    problem = PROBLEM.replace(length=16, vocab=8, logit_variance=0.7, output_variance=1.9, chi=9.0, head_dimension=heads)
    chosen = Network(kind="embedded", width=width)
    begin = network.start(chosen, problem, targets.shift(16), "small", 0)
    scale = network.scales(chosen, problem)
    samples = 60
    found = []
    for seed in range(samples):
        draw = np.random.default_rng(seed).standard_normal
        parts = [
            part if how.anchored else draw(part.shape) * (how.variance / problem.chi) ** 0.5
            for part, how in zip(begin, scale, strict=True)
        ]
        found.append(network.circuits(type(begin)(*parts), problem))
    pp, output = (np.array([getattr(net, name) for net in found]) for name in ("pp", "output"))
    # independent entries; a product of Gaussians of d_h columns has kurtosis 3 + 6 / d_h, so a variance of (2 + 6 / d_h) / n
    for values, expected in ((pp, 1.3**2 * 0.7 / 9), (output, 1.9 / 9)):
        error = (2.2 / values.size) ** 0.5
        assert values.var() / expected == pytest.approx(1, abs=4 * error)


def test_at_the_start_embeddings_are_orthonormal_and_the_same_rotation_at_any_start():
    chosen = Network(kind="embedded", width=WIDTH)
    small, copy = (network.start(chosen, PROBLEM, targets.shift(LENGTH), kind, 7) for kind in ("small", "copy"))
    rows = np.concatenate([small.positions, small.tokens])
    np.testing.assert_allclose(rows @ rows.T, np.eye(LENGTH + VOCAB), atol=1e-5)  # float32
    values = small.tokens @ small.value
    np.testing.assert_allclose(values @ values.T, np.eye(VOCAB), atol=1e-5)
    for name in ("positions", "tokens", "value"):
        np.testing.assert_array_equal(getattr(small, name), getattr(copy, name))


def test_more_rows_than_columns_give_a_tight_frame():
    frame = network.orthogonal(np.random.default_rng(0).standard_normal((20, 8)))
    np.testing.assert_allclose(frame.T @ frame, np.eye(8) * 20 / 8, atol=1e-12)


WIDE = Network(kind="embedded", width=64, embedding="gaussian")


@pytest.mark.parametrize(("chosen", "heads"), [(Network(kind="kernel"), None), (WIDE, None), (WIDE, 8)])
@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_every_network_can_start_as_a_copying_one(chosen, heads, attention):
    problem = PROBLEM.replace(attention=attention, head_dimension=heads)
    target = targets.shift(LENGTH)
    net = network.circuits(network.start(chosen, problem, target, "copy", 0), problem)
    reference = network.copying(target, VOCAB, attention)
    # float32 pseudo-inverses of random matrices with condition numbers of order ten
    np.testing.assert_allclose(net.pp, reference.logits, atol=2e-4 * np.abs(reference.logits).max())
    np.testing.assert_allclose(net.output, reference.output, atol=2e-4 * np.abs(reference.output).max())


def test_a_small_start_is_small_in_the_circuits_at_every_width():
    for width in (64, 512):
        problem = PROBLEM.replace(length=16, position_scale=1.0)
        net = network.start(Network(kind="embedded", width=width), problem, targets.shift(16), "small", 0)
        pp = np.asarray(network.circuits(net, problem).pp)
        # 256 independent entries of standard deviation 0.01; four errors of a standard deviation
        assert pp.std() == pytest.approx(0.01, rel=4 / (2 * pp.size) ** 0.5)


def test_the_prior_energy_counts_every_trained_weight_around_its_centre():
    problem = PROBLEM.replace(logit_variance=0.7, output_variance=1.9)
    for fixed in (False, True):
        chosen = Network(kind="embedded", width=WIDTH, embedding_variance=0.3, positions="fixed" if fixed else "learned")
        begin, net = weights("fused"), Fused(*(part + 0.1 for part in weights("fused")))
        moved = (0 if fixed else LENGTH * WIDTH) + VOCAB * WIDTH + WIDTH * WIDTH
        expected = WIDTH / 0.3 * moved * 0.01 / 2  # each entry has moved by 0.1
        expected += np.sum(net.query_key**2) / (2 * 0.7) + np.sum(net.output**2) / (2 * 1.9)
        found = network.prior_energy(net, begin, network.scales(chosen, problem))
        assert float(found) == pytest.approx(expected, rel=ROUNDING)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("kernel", {"token_scale": 0.0}, "token_scale = 0: must be > 0 with network = kernel"),
        ("embedded", {"token_scale": 0.0}, "token_scale = 0: must be > 0 with network = embedded"),
        ("positional", {}, "token_scale = 0.6: .* positional network reads no tokens"),
        ("kernel", {"head_dimension": 4}, "head_dimension = 4: needs network = embedded"),
    ],
)
def test_networks_that_do_not_go_with_the_problem(kind, fields, message):
    with pytest.raises(ProblemError, match=message):
        network.scales(Network(kind=kind), PROBLEM.replace(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "deep"}, "kind = 'deep': must be one of positional, kernel, embedded"),
        ({"width": 1}, "width = 1: must be an integer >= 2"),
        ({"embedding": "sparse"}, "embedding = 'sparse'"),
        ({"embedding_variance": 0}, "embedding_variance = 0: must be a finite number > 0"),
    ],
)
def test_a_wrong_field_is_named_with_its_range(fields, message):
    with pytest.raises(ProblemError, match=message):
        Network(**fields)


def test_positional_weights_are_circuits_with_empty_blocks():
    logits, output = normal(4, (LENGTH, LENGTH), (VOCAB, VOCAB))
    net = network.circuits(Positional(jnp.asarray(logits), jnp.asarray(output)), PROBLEM)
    assert not any(np.any(part) for part in (net.pt, net.tp, net.tt))
    np.testing.assert_array_equal(net.pp, logits)


def test_overlaps_of_normal_embeddings_make_logits_dearer():
    """docs/theory.md, section 7: least |W_QK|^2 of a copy pattern over that with orthonormal rows is (1 - (L + V)/d)^-2."""
    problem = PROBLEM.replace(length=40, vocab=8, position_scale=1.0)
    target = targets.shift(40) - 1 / 40
    ratios = []
    for seed in range(30):
        net = network.start(Network(kind="embedded", width=192, embedding="gaussian"), problem, target, "small", seed)
        inverse = np.linalg.pinv(np.concatenate([net.positions, net.tokens]))[:, :40]
        ratios.append(np.sum((inverse @ target @ inverse.T) ** 2) / np.sum(target**2))
    error = np.std(ratios, ddof=1) / len(ratios) ** 0.5
    # a law for L, d -> infinity; corrections are of relative order 1 / L
    assert np.mean(ratios) == pytest.approx(1 / (1 - 48 / 192) ** 2, rel=1 / 40, abs=4 * error)
