"""Target operators T (L x L): the target of sequence x is y = T x."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float


def shift(length: int, lag: int = 1, cyclic: bool = True) -> Float[np.ndarray, "L L"]:
    """Copy the token that stands `lag` positions before: T_ab = delta(b, a - lag).

    lag = 1 is the copy task, T = G*. Not cyclic: the first `lag` rows are zero and not scored.
    """
    target = np.eye(length, k=-lag)
    return target + np.eye(length, k=length - lag) if cyclic else target
