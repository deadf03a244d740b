"""The noise is the published cipher, normal, and independent of batching."""

import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32
from scipy.stats import kstest

from copyhead.experiment.noise import normals, threefry

KEYS = np.array([[1, 2], [3, 4], [5, 6]], np.uint32)


def test_threefry_is_the_cipher_of_jax():
    counters = np.arange(64, dtype=np.uint32)
    for key in KEYS:
        ours = threefry((key[0], key[1]), jnp.asarray(counters[:32]), jnp.asarray(counters[32:]))
        assert np.array_equal(np.concatenate(ours), threefry_2x32(jnp.asarray(key), jnp.asarray(counters)))


def test_threefry_known_answer():
    # Random123, kat_vectors: threefry2x32, 20 rounds, all counters and keys 0xffffffff
    ones = jnp.full(1, 0xFFFFFFFF, jnp.uint32)
    first, second = threefry((ones, ones), ones, ones)
    assert (int(first[0]), int(second[0])) == (0x1CB996FC, 0xBB002BE7)


def test_normals_are_normal():
    draws = np.asarray(normals(KEYS, jnp.uint32(7), 100_001)).astype(float)
    assert draws.shape == (3, 100_001)
    for chain in draws:
        # a p-value below 1e-4 in one of three chains has probability 3e-4 for true normals; the draw is fixed
        assert kstest(chain, "norm").pvalue > 1e-4
    moments = [(draws**power).mean() for power in (1, 2, 3, 4)]
    # standard errors of the moments of n normals: sqrt(Var x^k / n) with variances 1, 2, 15, 96
    errors = np.sqrt(np.array([1, 2, 15, 96]) / draws.size)
    assert np.all(np.abs(np.array(moments) - [0, 1, 0, 3]) < 4 * errors)


def test_both_halves_steps_and_chains_are_uncorrelated():
    n = 50_000
    first, second = (np.asarray(normals(KEYS, jnp.uint32(step), 2 * n)) for step in (0, 1))
    pairs = [(first[0, :n], first[0, n:]), (first[0], second[0]), (first[0], first[1])]
    for left, right in pairs:
        assert abs(np.corrcoef(left, right)[0, 1]) < 4 / np.sqrt(n)


def test_noise_does_not_depend_on_the_batch():
    together = np.asarray(normals(KEYS, jnp.uint32(3), 101))
    alone = np.concatenate([np.asarray(normals(KEYS[i : i + 1], jnp.uint32(3), 101)) for i in range(3)])
    assert np.array_equal(together, alone)
