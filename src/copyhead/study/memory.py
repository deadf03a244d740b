"""How much memory a run needs, before it is started."""

from __future__ import annotations

from copyhead.model.network import Network
from copyhead.problem import Problem, ProblemError

# Most memory for the moments of one data set, for its sequences while they are counted, and for the tables and weights of the
# networks that are trained together.
MOST_MOMENTS, MOST_SEQUENCES, MOST_TOGETHER = 1.5e9, 6e9, 6e9
# Arrays of the size of a table, or of the weights, that a step holds at a time: values, gradients, and those of the optimiser.
COPIES = 4


def moment_bytes(problem: Problem) -> int:
    """Memory that a data set needs at least: its token moments, L^2 V^2, and the token bases of packing, V^4; float32.

    Problems beyond the paper's are not packed.
    """
    return 4 * (problem.length**2 * problem.vocab**2 + (0 if problem.beyond else problem.vocab**4))


def sequence_bytes(problem: Problem, sequences: float) -> float:
    """Memory to draw P sequences and to count their moments: random numbers, tokens, and one-hot rows in two forms."""
    return sequences * problem.length * (16 + 5 * problem.vocab)


def weight_bytes(problem: Problem, network: Network) -> int:
    """Weights of one network that reads tokens; float32."""
    rows = problem.length + problem.vocab
    return 4 * (2 * network.width**2 + (rows + problem.vocab) * network.width if network.kind == "embedded" else rows**2)


def run_bytes(problem: Problem, network: Network) -> int:
    """Memory of one run while it waits: its data or weights, as they are and arranged for the step loop."""
    return 3 * (moment_bytes(problem) if network.kind == "positional" else weight_bytes(problem, network))


def step_bytes(problem: Problem, network: Network) -> int:
    """Memory of the step loop of networks that read tokens: tables over tokens and positions, and weights."""
    from copyhead.experiment.direct import CELLS

    table = 4 * problem.vocab**2 * problem.length * max(problem.length, 16)
    return CELLS * COPIES * (table + weight_bytes(problem, network))


def refuse_too_large(problem: Problem, network: Network, sequences: float = 0, where: str = "") -> None:
    """Checks a problem, with data sets of P sequences, before it is run; `where` says what wants this size.

    Raises:
        ProblemError: if it needs too much memory.
    """
    sizes = f"length = {problem.length}, vocab = {problem.vocab}"
    positional = network.kind == "positional"
    needed, most = (moment_bytes(problem), MOST_MOMENTS) if positional else (step_bytes(problem, network), MOST_TOGETHER)
    named = sizes if positional else f"{sizes}, width = {network.width}"
    if needed <= most:
        needed, most = sequence_bytes(problem, sequences), MOST_SEQUENCES
        named = f"sequences = {sequences:g}, {sizes}"
    if needed > most:
        raise ProblemError(f"{named}{where}: needs {needed / 1e9:.3g} GB, which must be below {most / 1e9:g} GB")
