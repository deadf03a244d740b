"""The claims of the paper by name, each beside what this run found; and remarks on what disagrees."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from copyhead.experiment.adam import GRADIENT_TOLERANCE
from copyhead.model.tokens import describe
from copyhead.problem import Problem
from copyhead.study.compare import AGREEMENT, Agreement
from copyhead.study.curves import Measured
from copyhead.study.scaling import Scaling
from copyhead.study.spec import Reproduction
from copyhead.study.width import Departure
from copyhead.theory.leading_order import leading_order
from copyhead.theory.transition import phases

# The quoted numbers, "about 100", "near 300" and "322 to 400", as ranges: a fifth either way where one number is given.
QUOTED = {"P_c": (80.0, 120.0), "P*": (240.0, 360.0), "crossover": (322.0, 400.0)}


class Claim(NamedTuple):
    """A claim of the paper, what was found, and a verdict in a few words."""

    claim: str
    found: str
    verdict: str


def claims(
    problem: Problem,
    measured: dict[str, Measured],
    transitions: list[dict[str, Any]],
    agreements: list[Agreement],
    growth: Scaling,
) -> list[Claim]:
    """All claims of theory.md section 0; the verdicts follow from the numbers of this run.

    The quoted numbers are for the paper's sizes, which the preset stands for; at other sizes they are not judged.
    """
    found: list[Claim] = []
    preset = problem.replace(token_scale=0.0, content=False) == Problem.preset("paper", chi=problem.chi)
    if "softmax" in measured:
        found += [_softmax(measured["softmax"], preset), _scaling(growth), _gain(problem, measured, growth)]
    if "linear" in measured:
        places = {row["place"].split(" ")[0]: row for row in transitions if row["attention"] == "linear"}
        found += [_pooling(places.get("P_c"), preset), _quoted(problem), _crossover(places.get("crossover"), preset)]
    if problem.content:
        found += [
            _tokens_in_the_kernel(problem, measured),
            *(_equal_tokens(name, results) for name, results in measured.items()),
        ]
    return [
        *found,
        _agreement(agreements),
        Claim(
            "the boundary holds over the planes (P, L) and (P, V)",
            "see the loss maps: training from small weights against folds, P*, crossover and leading order",
            "to be read off the figure; no number is claimed",
        ),
        Claim(
            "softmax has no precursor, linear attention has growing fluctuations",
            "needs the fluctuations at finite chi on the way to each transition: `copyhead fluctuations`",
            "not measured by this run",
        ),
        Claim(
            "the sizes behind the paper's figures",
            "not public to us; the preset `paper` gives the quoted 100, 300 and 322 to 400 at once",
            "not reproduced",
        ),
    ]


def _softmax(results: Measured, preset: bool) -> Claim:
    places = ", ".join(f"{t.kind} at P = {t.P:.1f}" for t in results.theory.transitions)
    first = next((t for t in results.theory.transitions if t.window), None)
    drop = "" if first is None else f", loss {float(first.before.loss):.3f} to {float(first.after.loss):.3f}"
    return Claim(
        "softmax attention: first-order transition in P near 300, with a sharp drop of the loss",
        f"theory: {places}{drop}",
        "no first-order transition at these sizes" if first is None else _within(first.P, QUOTED["P*"], preset),
    )


def _scaling(growth: Scaling) -> Claim:
    use = np.isfinite(growth.places["P*"])
    ratio, lengths = (growth.places["P*"] / growth.places["Eq. 21"])[use], growth.lengths[use]
    exponents = growth.exponent("P*")[1][-1], growth.exponent("Eq. 21")[1][-1]
    return Claim(
        "its place scales as P* ~ L ln^2 L (Eq. 21)",
        f"exact over leading order: {ratio[0]:.2f} at L = {lengths[0]:.0f}, {ratio[-1]:.2f} at L = {lengths[-1]:.0f}; "
        f"local exponent there {exponents[0]:.2f} against {exponents[1]:.2f} of Eq. 21",
        "compare the exponents; as a number Eq. 21 is too small by that ratio",
    )


def _gain(problem: Problem, measured: dict[str, Measured], growth: Scaling) -> Claim:
    scales = leading_order(problem)
    places = {name: [t.P for t in found.theory.transitions if t.kind != "second-order"] for name, found in measured.items()}
    both = places.get("softmax") and places.get("linear")
    expected = math.sqrt(problem.length * problem.vocab)
    gain = places["linear"][-1] / places["softmax"][-1] if both else math.nan
    length, last = growth.lengths[-1], {name: values[-1] for name, values in growth.places.items()}
    return Claim(
        "softmax needs O(sqrt(L V)) less data than linear attention",
        f"leading orders: ratio {scales.copying_linear / scales.copying_softmax:.2f}, with sqrt(L V) = "
        f"{expected:.1f} (logarithms and factors remain); exact places: ratio {_number(gain)}. A run "
        f"from small weights jumps not at P* but at the upper fold, whose exponent at L = {length:.0f} is "
        f"{_number(growth.exponent('upper fold')[1][-1])} against {_number(growth.exponent('crossover')[1][-1])} of the linear "
        f"one; there it needs {_number(last['upper fold'] / last['crossover'])} times the data of linear attention",
        f"as a number {_number(gain / expected)} of sqrt(L V); for the scaling see the exponents",
    )


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "(none)"


def _pooling(row: dict[str, Any] | None, preset: bool) -> Claim:
    return Claim(
        "linear attention: second-order transition to uniform pooling, P about 100",
        "theory: none" if row is None else f"P_c = {row['exact']:.1f}, Adam {_place(row)}",
        _verdict(row, QUOTED["P_c"], preset),
    )


def _quoted(problem: Problem) -> Claim:
    if not problem.cyclic:
        found = "the theory with tau_x = 1 needs the cyclic task"
    else:
        content = phases(problem.replace(attention="linear", token_scale=1.0, sequences=None))
        places = [t.P for t in content.transitions if t.kind == "second-order"]
        found = f"with tau_x = 1 the theory gives P_c = {places[0]:.1f}" if places else "with tau_x = 1 the theory gives none"
    return Claim(
        "a prediction of about 23 is also quoted for it",
        found,
        "not reproduced: sizes and kernel behind that number are not public to us",
    )


def _crossover(row: dict[str, Any] | None, preset: bool) -> Claim:
    found = "theory: none"
    if row is not None:
        found = f"steepest cG at P = {row['exact']:.1f}, scale of Eq. 17 {row['leading_order']:.1f}, Adam {_place(row)}"
    return Claim(
        "then a crossover to copying, P about 322 to 400, no transition",
        found,
        _verdict(row, QUOTED["crossover"], preset),
    )


def _tokens_in_the_kernel(problem: Problem, measured: dict[str, Measured]) -> Claim:
    """Places without tokens in the logits, with them in the prior alone (the paper's theory), and with attention that reads."""
    found, ratios = [], {}
    for attention, kind in (("softmax", "first-order"), ("linear", "second-order")):
        if attention in measured:
            variants = [{"token_scale": 0.0, "content": False}, {"content": False}, {}]
            places = []
            for variant in variants:
                own = phases(problem.replace(attention=attention, sequences=None, **variant))
                places.append(next((t.P for t in own.transitions if t.kind == kind), math.nan))
            none, prior, read = map(_number, places)
            found.append(f"{attention} ({kind}): P = {none} without, {prior} and {read} with tokens")
            ratios[attention] = places[2] / places[0]
    moved = ", ".join(f"{name} by a factor {_number(ratio)}" for name, ratio in ratios.items())
    return Claim(
        "tokens in the logits (tau_x) bring the pooling of linear attention to small P; the softmax transition stays in place",
        "; ".join(found) + " (in the prior alone, and with attention that reads them)",
        f"found: {moved}",
    )


def _equal_tokens(attention: str, results: Measured) -> Claim:
    """The range of cI over the grid, of theory and of converged training."""
    theory = [float(results.theory.minima(place)[0].order_parameters.cI) for place in results.adam.sequences]  # type: ignore[union-attr]
    data = results.adam.data
    trained = data.cI.where(data.gradient < GRADIENT_TOLERANCE).mean("seed").values
    trained = trained[np.isfinite(trained)]
    largest = max(map(abs, theory))
    copying = [float(results.theory.minima(place)[0].order_parameters.cG) for place in results.adam.sequences]
    found = f"theory: cI from {min(theory):.3f} to {max(theory):.3f} over the grid"
    if trained.size:
        found += f"; Adam, means over data sets: from {trained.min():.3f} to {trained.max():.3f}"
    return Claim(
        f"{attention} attention does not learn to attend to equal tokens (cI near zero)",
        found,
        f"|cI| up to {largest:.2f}, against cG up to {max(copying):.2f}"
        + (": a head looks away from tokens equal to its own" if max(theory) <= 0 else ""),
    )


def departure_remarks(found: dict[str, Departure]) -> list[str]:
    """What finite d_model does, and the inverse-width law, with the numbers of this run."""
    lines = []
    for attention, departure in found.items():
        for row in departure.rows():
            if row["quantity"] == "cG" and row["width"] in (departure.widths[0], departure.widths[-1]) and row["error"] > 0:
                lines.append(
                    f"{attention}, P = {row['P']}, g_E = {row['embedding_variance']:g}, d_model = {row['width']}: cG is "
                    f"{row['measured']:+.4f} ± {row['error']:.4f} from that of the kernel limit on the same data (theory of "
                    f"adapting embeddings {row['theory']:+.4f}; times d_model {row['measured_times_width']:+.2f})."
                )
    return lines


def _agreement(agreements: list[Agreement]) -> Claim:
    enough = all(a.fraction >= 0.95 for a in agreements if a.theory.startswith("exact"))
    return Claim(
        "order parameters and loss: theory agrees with Adam and with SGLD",
        "; ".join(f"{a.method} {a.attention} against {a.theory}: {a.agree}/{a.points}" for a in agreements),
        "reproduced, up to the finite-data shift of the population theory" if enough else "in part, see Agreement",
    )


def _place(row: dict[str, Any]) -> str:
    value = row["measured"]["Adam"]
    return "not resolved by this grid" if value["P"] is None else f"{value['P']:.1f} ± {value['error']:.1f}"


def _verdict(row: dict[str, Any] | None, quoted: tuple[float, float], preset: bool) -> str:
    """Judged by the theory's place against the quoted range, and by Adam's place against the theory's."""
    if row is None:
        return "not found"
    adam, theory = row["measured"]["Adam"], _within(row["exact"], quoted, preset)
    if adam["P"] is None:
        return f"{theory} by the theory; not resolved by training here"
    near = abs(adam["P"] - row["exact"]) <= AGREEMENT * adam["error"]
    return f"{theory}; Adam {'agrees with' if near else 'differs from'} the theory"


def _within(place: float, quoted: tuple[float, float], preset: bool) -> str:
    if not preset:
        return "found, at other sizes than the quoted number is for"
    return "reproduced" if quoted[0] <= place <= quoted[1] else "found, but not near the quoted number"


def network_remarks(spec: Reproduction) -> list[str]:
    """What the theory beside a network does not contain, or what its training does not minimise."""
    network, problem, found = spec.network, spec.problem, []
    if network.kind == "embedded" and problem.head_dimension is not None:
        found.append(
            f"Separate query and key matrices (d_h = {problem.head_dimension}): Adam with L2 on both minimises a nuclear "
            "norm of the logits, not the energy whose minimum the theory is (docs/theory.md, section 10). It is shown, not "
            "judged; SGLD samples the posterior."
        )
    if network.kind == "embedded" and network.embedding == "gaussian":
        share = (problem.length + problem.vocab) / network.width
        dearer = f"by a factor {1 / (1 - share) ** 2:.2f} here" if share < 1 else "without bound, d_model being below L + V"
        found.append(
            "Normal embeddings overlap: the theory beside them is that of orthonormal ones, and the cost of the logits differs "
            f"from it before any training, {dearer}."
        )
    if network.kind == "embedded" and network.embedding == "orthogonal" and network.width < problem.length + problem.vocab:
        found.append(
            f"d_model = {network.width} is below L + V = {problem.length + problem.vocab}: embeddings cannot be orthonormal, "
            "and the theory beside them is that of the kernel limit."
        )
    if spec.batch is not None:
        found.append(
            f"Mini-batches of {spec.batch}: the last steps of Adam scatter, so that its gradient does not pass the gate and "
            "its points are not judged. SGLD has the noise of the batches on top of its own, of relative size eps chi times "
            "the variance of the gradient over two; it samples exp(-chi E) only for eps chi -> 0."
        )
    return found


def remarks(rows: list[dict[str, Any]], measured: dict[str, Measured]) -> list[str]:
    """Why points disagree, with the numbers of this run."""
    found = []
    for attention in measured:
        own = [row for row in rows if row["attention"] == attention and not row["in_window"]]
        copying = [row for row in own if row["quantity"] == "cG"]
        shifts = [abs(row["exact"] / row["population"] - 1) for row in copying if abs(row["population"]) > 0.05]
        adam = [abs(row["adam"] - row["exact"]) for row in copying if row["adam_converged"] == 1]
        slow = sorted({(row["P"], row["start"]) for row in own if row["adam_converged"] < 1})
        other = sorted({(row["P"], row["start"]) for row in own if row["adam_worst"] > AGREEMENT})
        off = sorted({(row["P"], row["start"]) for row in own if abs(row["adam_z_paired"]) > AGREEMENT} - set(other))
        if shifts and adam:
            found.append(
                f"{attention}: the population theory replaces a data set by its expectation (equivalent kernel). Its cG "
                f"differs from that of the exact theory on the same data sets by up to {100 * max(shifts):.1f}% (median "
                f"{100 * float(np.median(shifts)):.1f}%). This shift is common to the data sets, so it "
                f"can be larger than the scatter between them. Converged Adam runs differ from the exact theory by at most "
                f"{max(adam):.1e} in cG."
            )
        if attention == "linear" and "signs" in measured[attention].adam.data:
            found.append(_mixed_signs(measured[attention]))
        if slow:
            found.append(
                f"{attention}: Adam had not converged in every data set (gradient above {GRADIENT_TOLERANCE:g}) at "
                f"{_listed(slow)}."
            )
        if other:
            found.append(
                f"{attention}: some runs of Adam ended on another branch than the exact theory on their data set (further from "
                f"it than {AGREEMENT:g} times its scatter over data sets) at {_listed(other)}."
            )
        if off:
            found.append(f"{attention}: Adam is more than {AGREEMENT:g} errors from the exact theory at {_listed(off)}.")
    return found


def _mixed_signs(results: Measured) -> str:
    """How many runs ended in a state where some tokens are served with the other sign, by start."""
    data = results.adam.data
    above = data.sel(P=[place for place in results.adam.sequences if place > results.theory.transitions[0].P])
    counts = {
        str(start): (int((above.signs.sel(start=start) < 1).sum()), int(above.signs.sel(start=start).size))
        for start in above.start.values
    }
    told = ", ".join(f"{mixed} of {total} from the {start} start" for start, (mixed, total) in counts.items())
    return (
        "linear: attention that reads tokens can pool each token with its own sign, and W undo it: 2^(V - 1) metastable "
        "states, in which c1 and cG are averages over signs. Adam's runs above the pooling transition that ended in a mixed "
        f"one: {told}. The order-parameter theory is for equal signs, the global minimum."
    )


def _listed(points: list[tuple[int, str]]) -> str:
    return ", ".join(f"P = {place} ({start} start)" for place, start in points)


def beyond_remarks(spec: Reproduction, measured: dict[str, Measured]) -> list[str]:
    """What the tables beyond the paper's task do not say themselves."""
    problem = spec.problem
    if not problem.beyond:
        return []
    found = [
        "Compared are c1, cG, a1, aG and the loss"
        + (", and cG of the rows that may attend to 2, 4, 8, ... positions" if problem.causal else "")
        + (", and cG of every head" if problem.heads > 1 else "")
        + (", and the attention on each lag" if len(problem.lags or {}) > 1 else "")
        + ". SGLD, jump searches and loss maps are made for the paper's task only."
    ]
    if problem.tokens != "uniform":
        law = describe(problem)
        found.append("Tokens: " + ", ".join(f"{name} {value}" for name, value in law.items() if value is not None) + ".")
    for attention, results in measured.items():
        if not results.theory.complete:
            found.append(f"{attention}: the theory could not be followed to its end; its verdict is undetermined.")
        jumps = sum(t.kind == "first-order" for t in results.theory.transitions)
        if jumps > 1:
            order = ", one row after the other" if problem.causal else ""
            found.append(f"{attention}: {jumps} first-order transitions{order}; the table has the last ones.")
        if results.exact is None:
            found.append(f"{attention}: too large for the minimum of S on every data set; compared with expected moments only.")
    return found
