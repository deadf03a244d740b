"""Standard normal noise for the Langevin loop: counter-based, so it depends on key, step and index, and on no batching.

Threefry-2x32 (20 rounds, Salmon et al. 2011) with its rounds unrolled, so that XLA makes one kernel of it: the library's is
a loop, whose cost exceeds that of the whole Langevin step. One block gives two words and, by Box and Muller, two normals.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.lax import optimization_barrier
from jaxtyping import Array, Float, UInt32

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)
# Odd polynomial for sin(2 pi x), |x| <= 1/4, highest power first; absolute error 2e-7.
SINE = (3.8199525848, -15.094642577, 42.058693945, -76.705859753, 81.605249277, -41.341702240, 6.2831853072)


def threefry(
    key: tuple[UInt32[Array, "..."], UInt32[Array, "..."]], first: UInt32[Array, "..."], second: UInt32[Array, "..."]
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """The block cipher Threefry-2x32 on counters (first, second); the same function as JAX's generator."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ PARITY)
    first, second = first + schedule[0], second + schedule[1]
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            first = first + second
            turned = (second << np.uint32(rotation)) | (second >> np.uint32(32 - rotation))
            second = turned ^ first
        first = first + schedule[(group + 1) % 3]
        second = second + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return first, second


def normals(keys: UInt32[Array, "chain 2"], step: UInt32[Array, ""], count: int) -> Float[Array, "chain count"]:
    """`count` standard normals for each chain at a step. Uniforms have 24 bits: tails end at 5.9 standard deviations."""
    half = (count + 1) // 2
    index = jnp.arange(half, dtype=jnp.uint32)[None]
    words = threefry((keys[:, :1], keys[:, 1:]), index, jnp.broadcast_to(step, index.shape))
    # Barriers: without them XLA runs the twenty rounds again for every use of their result.
    bits = optimization_barrier(jnp.stack(words))
    uniform, angle = (bits >> 8).astype(jnp.int32).astype(jnp.float32) * 2**-24 + 2**-25
    radius, turn = optimization_barrier((jnp.sqrt(-2 * jnp.log(uniform)), angle - 0.5))
    return jnp.concatenate([radius * _sine(turn), radius * _sine(0.25 - jnp.abs(turn))], axis=1)[:, :count]


def _sine(turns: Float[Array, "..."]) -> Float[Array, "..."]:
    """sin(2 pi x) for |x| <= 1/2."""
    folded = jnp.copysign(0.25 - jnp.abs(jnp.abs(turns) - 0.25), turns)
    square, value = folded * folded, jnp.zeros_like(folded)
    for coefficient in SINE:
        value = value * square + coefficient
    return value * folded
