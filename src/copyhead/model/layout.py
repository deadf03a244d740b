"""Layout: which entries of an L x L matrix a symmetry makes equal, and how often each of them occurs.

A matrix in the commutant of a permutation symmetry takes few values. It is stored as an array of shape (R, K): R classes
of rows, K classes of entries in a row of that class. The full matrix is the layout with R = K = L and every multiplicity
one, so one code evaluates S(G) on L^2 logits and on two order parameters; L enters the latter as a number, not as a shape.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


class Layout(NamedTuple):
    """Multiplicities of the entries of a (compressed) L x L matrix B.

    rows: (R,) number of positions in each row class, scored or not.
    scored: (R,) number of them that enter the loss.
    columns: (R, K) number of entries in one row of the class that take the value B[r, k].
    """

    rows: Float[Array, "R"]
    scored: Float[Array, "R"]
    columns: Float[Array, "R K"]

    def row_sums(self, matrix: Float[Array, "R K"]) -> Float[Array, "R"]:
        """B 1, by row class."""
        return jnp.sum(self.columns * matrix, axis=-1)

    def column_sums(self, matrix: Float[Array, "R K"]) -> tuple[Float[Array, "C"], Float[Array, "C"]]:
        """1^T B and the multiplicity of each of its entries.

        For the full matrix these are the L columns; the symmetric layouts have one row class because the symmetry
        moves every position into every other, so their column sums equal their row sums.
        """
        rows, columns = matrix.shape
        if rows == 1:
            return self.row_sums(matrix), self.rows
        if rows != columns:
            raise ValueError(f"layout of shape {matrix.shape}: column sums are known for one row class or the full matrix")
        return jnp.sum(self.columns * matrix, axis=0), self.rows

    def squared_singular_values(self, matrix: Float[Array, "1 2"]) -> tuple[Float[Array, "2"], Float[Array, "2"]]:
        """Eigenvalues of B B^T and how often each occurs, for B = c1 1 1^T + cG T of the copy layout; smooth in B.

        With R rows and T T^T = I, B B^T = cG^2 I + (L c1^2 + 2 c1 cG) 1 1^T: cG^2 occurs R - 1 times, and 1 is the eigenvector
        of cG^2 + R (L c1^2 + 2 c1 cG) = [R (L c1 + cG)^2 + (L - R) cG^2] / L. In the cyclic task R = L.
        """
        if matrix.shape != (1, 2):
            raise ValueError(f"layout of shape {matrix.shape}: singular values are known for the copy layout")
        rows, length = self.rows[0], jnp.sum(self.columns)
        excess = (matrix[0, 0] - matrix[0, 1]) ** 2
        uniform = (rows * self.row_sums(matrix)[0] ** 2 + (length - rows) * excess) / length
        return jnp.stack([uniform, excess]), jnp.stack([jnp.ones_like(rows), rows - 1])


def full(length: int, cyclic: bool = True, dtype: jnp.dtype | None = None) -> Layout:
    """Every entry for itself; position 0 is not scored unless the task is cyclic."""
    ones = jnp.ones(length, dtype)
    scored = ones if cyclic else ones.at[0].set(0)
    return Layout(ones, scored, jnp.ones((length, length), dtype))


def masked(target: Float[np.ndarray, "L L"], allowed: Bool[np.ndarray, "L L"]) -> Layout:
    """Every entry for itself; those that are not allowed occur no times, rows without a target are not scored."""
    return Layout(np.ones(len(target)), np.any(target != 0, axis=1).astype(float), allowed.astype(float))


class Compressed(NamedTuple):
    """What independent tokens cannot tell apart of a target, stored once (docs/theory.md, section 14).

    The data enter S through the rows of A alone: sum of squares, sum on each value of the target, and total. So rows with equal
    lists of target values form a class, and in it all entries with the same target value are equal, in whatever columns they
    are. target: (R, K), values of a row in falling order of size, zero last. row, entry: class of each position, and of each
    entry, -1 where it is masked or its row is not scored.
    """

    layout: Layout
    target: Float[np.ndarray, "R K"]
    row: Int[np.ndarray, "L"]
    entry: Int[np.ndarray, "L L"]

    def expand(self, matrix: Float[np.ndarray, "*h R K"]) -> Float[np.ndarray, "*h L L"]:
        """The full matrix; zero where there is no class."""
        inside = self.entry >= 0
        rows = np.broadcast_to(self.row[:, None], self.entry.shape)
        found = np.zeros((*matrix.shape[:-2], *self.entry.shape))
        found[..., inside] = np.asarray(matrix)[..., rows[inside], self.entry[inside]]
        return found


def compressed(target: Float[np.ndarray, "L L"], allowed: Bool[np.ndarray, "L L"]) -> Compressed:
    """Classes of rows and entries of a target for independent tokens; scored rows only."""
    length = len(target)
    classes: dict[tuple[tuple[float, int], ...], int] = {}
    row, entry = np.full(length, -1), np.full((length, length), -1)
    for a in np.flatnonzero(np.any(target != 0, axis=1)):
        values, counts = np.unique(target[a, allowed[a]], return_counts=True)
        order = np.lexsort((-values, -np.abs(values)))
        key = tuple((float(values[k]), int(counts[k])) for k in order)
        row[a] = classes.setdefault(key, len(classes))
        ranks = {float(values[k]): rank for rank, k in enumerate(order)}
        entry[a, allowed[a]] = [ranks[float(value)] for value in target[a, allowed[a]]]
    most = max(len(key) for key in classes)
    number = np.bincount(row[row >= 0], minlength=len(classes)).astype(float)
    kept = np.zeros((len(classes), most))
    columns = np.zeros((len(classes), most))
    for key, index in classes.items():
        # zero is the last value of every row, also where others have more values
        places = [most - 1 if value == 0 else place for place, (value, _) in enumerate(key)]
        kept[index, places] = [value for value, _ in key]
        columns[index, places] = [count for _, count in key]
        if key[-1][0] == 0 and len(key) < most:
            moved = (row == index)[:, None] & (entry == len(key) - 1)
            entry[moved] = most - 1
    return Compressed(Layout(number, number, columns), kept, row, entry)


def copy(length: float, scored: float) -> Layout:
    """The commutant of the copy task: in every scored row one target entry and L - 1 others.

    An unscored row of logits is zero at its optimum and is left out.
    """
    rows = np.array([scored], float)
    return Layout(rows, rows, np.array([[1.0, length - 1.0]]))
