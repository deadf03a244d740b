"""Order of a transition from data: rates of false verdicts on synthetic tables, the network's own transitions, bad tables.

A verdict is false if it is one of the three orders and not the true one; "undetermined" is not false. The rates are measured on
N tables. If the true rate were 5%, fewer than `few(N)` false ones would turn up with a probability below 2.5%, so a test that
finds fewer shows, at that level, that the rate is below 5%.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from copyhead.experiment.classify import classify
from copyhead.experiment.table import Table, read
from copyhead.problem import Problem, ProblemError
from copyhead.theory.transition import phases
from synthetic import Draw, Ranges, crossover, first_order, second_order

KINDS = {
    "first-order, two starts": ("first-order", first_order),
    "first-order, one start": ("first-order", lambda seed, ranges: first_order(seed, ranges, starts=1)),
    "second-order": ("second-order", second_order),
    "second-order, random sign": ("second-order", lambda seed, ranges: second_order(seed, ranges, mirrored=True)),
    "crossover": ("crossover", crossover),
    "crossover, two starts": ("crossover", lambda seed, ranges: crossover(seed, ranges, starts=2)),
}
# Ranges on which no threshold was chosen: other spans, places, noise, folds, saturation, and steps that are not symmetric.
FRESH = Ranges(
    span=(0.8, 5.0),
    place=(0.3, 0.7),
    noise=(0.01, 0.12),
    slope=(-0.2, 0.4),
    flat=(-0.03, 0.06),
    window=(2.2, 8.0),
    fold=(0.0, 0.4),
    scatter=(0.0, 0.8),
    width=(1.7, 5.0),
    skew=(-0.7, 0.7),
    saturation=(0.0, 2.5),
    rounding=(0.0, 0.15),
)
# Scatter of the mean over repeats, in heights, below which a table is a clear case.
CLEAR = 0.03


def few(tables: int) -> int:
    """Largest number of false verdicts that a rate of 5% would give with a probability below 2.5%."""
    return int(binom.ppf(0.025, tables, 0.05)) - 1


def measure(kind: str, seeds: range, ranges: Ranges) -> tuple[float, float, float]:
    """Share of false verdicts, of true ones, and of true ones among the clear cases."""
    truth, make = KINDS[kind]
    found = np.array([classify(make(seed, ranges)).verdict for seed in seeds])
    draws = [Draw(seed, ranges, 20) for seed in seeds]
    clear = np.array([draw.noise / np.sqrt(draw.repeats) < CLEAR for draw in draws])
    true = found == truth
    return float(np.mean(~true & (found != "undetermined"))), float(true.mean()), float(true[clear].mean())


@pytest.mark.slow
@pytest.mark.parametrize("order", ["first-order", "second-order", "crossover"])
def test_false_verdicts_are_rarer_than_five_percent(order):
    kinds = [kind for kind, (truth, _) in KINDS.items() if truth == order]
    shares = np.array([measure(kind, range(100_000, 100_150), Ranges()) for kind in kinds])
    false, true, clear = shares.mean(axis=0)
    assert false * 150 * len(kinds) <= few(150 * len(kinds))
    # "undetermined" is no easy way out; the measured rates are in docs/theory.md, section 13
    assert true > 0.55
    assert clear > 0.75


def test_few_tables_of_each_kind():
    shares = [measure(kind, range(200_000, 200_008), Ranges()) for kind in KINDS]
    # 48 tables at a rate of 2%: more than 3 false ones have a probability below 2%
    assert sum(false for false, _, _ in shares) * 8 <= 3
    assert all(true > 0.3 for _, true, _ in shares)


NARROW = Ranges(window=(0.05, 0.8), scatter=(0.0, 0.1), width=(0.03, 0.3))


@pytest.mark.parametrize(
    "make", [lambda s: first_order(s, NARROW, starts=1), lambda s: first_order(s, NARROW), lambda s: crossover(s, NARROW)]
)
def test_a_grid_coarser_than_the_window_is_undetermined(make):
    found = [classify(make(seed)).verdict for seed in range(300_000, 300_010)]
    # scatter can carry single runs over a window of nearly one spacing
    assert sum(verdict == "undetermined" for verdict in found) >= 9


@pytest.fixture(scope="module")
def theory():
    return {kind: phases(Problem.preset("paper", attention=kind), reach=[30, 3000]) for kind in ("softmax", "linear")}


def branch_table(found, quantity, grid, starts, seed, noise=0.02, repeats=4) -> Table:
    """What training from the given starts would show: a minimum of the theory with scatter."""
    rng = np.random.default_rng(seed)
    pick = {"small": min, "copy": max}
    rows = []
    for place in grid:
        minima = found.minima(place) if len(found.transitions) == 1 else found.minima(place)[:1]
        for start in starts:
            state = pick[start](minima, key=lambda one: one.order_parameters.cG).order_parameters
            rows += [(place, float(getattr(state, quantity)), float(state.loss), start)] * repeats
    control, order, loss, start = (np.array(column) for column in zip(*rows, strict=True))
    order = order + noise * np.ptp(order) * rng.normal(size=order.shape)
    return Table(control, order, loss=loss, start=start if len(starts) == 2 else None)


def test_transitions_of_the_network(theory):
    grid = np.geomspace(150, 600, 20)
    for seed in range(3):
        found = classify(branch_table(theory["softmax"], "cG", grid, ("small", "copy"), seed))
        assert found.verdict == "first-order"
        # folds at 278.4 and 337.2, each between two grid points
        assert found.interval is not None
        assert np.abs(np.log(np.array(found.interval) / [278.4, 337.2])).max() < np.log(grid[1] / grid[0])
        assert classify(branch_table(theory["softmax"], "cG", grid, ("small",), seed)).verdict == "undetermined"
        pooling = classify(branch_table(theory["linear"], "c1", np.geomspace(60, 260, 20), ("small",), seed))
        assert pooling.verdict == "second-order"
        assert abs(pooling.P / 115.0 - 1) < 0.05
    copying = [classify(branch_table(theory["linear"], "cG", np.geomspace(150, 1500, 20), ("small",), s)) for s in range(8)]
    assert sum(one.verdict == "crossover" for one in copying) >= 4
    assert sum(one.verdict in ("first-order", "second-order") for one in copying) <= 1
    assert all(abs(one.P / 385.1 - 1) < 0.1 for one in copying if one.verdict == "crossover")


def stacked(tables: dict[float, Table], name: str) -> Table:
    """One table with a column chi or size."""
    parts = list(tables.values())
    values = np.concatenate([np.full(len(part.control), value) for value, part in tables.items()])
    joined = {key: np.concatenate([getattr(part, key) for part in parts]) for key in ("control", "order", "start")}
    return Table(**joined, **{name: values})


def steps(width: float, seed: int) -> Table:
    x = np.repeat(np.linspace(3, 6, 40), 6)
    y = 0.5 * (1 + np.tanh((x - 4.5) / width)) + 0.02 * np.random.default_rng(seed).normal(size=x.shape)
    return Table(np.exp(x), y, start=np.tile(["a", "b"], len(x) // 2))


def test_a_step_that_narrows_with_size_is_no_crossover():
    same = stacked({size: steps(0.5, int(size)) for size in (8.0, 16.0, 32.0)}, "size")
    narrower = stacked({size: steps(4.8 / size, int(size)) for size in (8.0, 16.0, 32.0)}, "size")
    assert classify(same).verdict == "crossover"
    found = classify(narrower)
    assert found.verdict == "undetermined"
    assert "narrows" in found.reason
    power = next(one for one in found.evidence if one.name.startswith("power of size"))
    assert power.value < -0.5


def test_a_gap_that_closes_with_chi_is_not_first_order():
    rng = np.random.default_rng(1)
    x = np.tile(np.repeat(np.linspace(3, 6, 20), 3), 2)
    start = np.repeat(["small", "copy"], 60)
    upper = np.where(start == "small", x > 4.9, x > 4.2)

    def table(gap: float) -> Table:
        return Table(np.exp(x), gap * upper + 0.02 * gap * rng.normal(size=x.shape), start=start)

    finite = classify(stacked({chi: table(1.0) for chi in (10.0, 40.0, 160.0)}, "chi"))
    closing = classify(stacked({chi: table(chi**-0.5) for chi in (10.0, 40.0, 160.0)}, "chi"))
    assert finite.verdict == "first-order"
    assert closing.verdict == "undetermined"
    assert "gap closes" in closing.reason


def test_signs_starts_and_loss():
    # mirror images (m, -m) from two starts are one phase
    draw = Draw(5, Ranges(), 20)
    x = np.repeat(draw.x, 4)
    start = np.tile(["plus", "minus"], 40)
    m = np.sqrt(np.maximum(np.tanh(np.exp(x - draw.place) - 1), 0))
    mirrored = Table(np.exp(x), np.where(start == "plus", m, -m) + 0.02 * draw.rng.normal(size=x.shape), start=start)
    found = classify(mirrored)
    assert found.verdict == "second-order"
    assert any("|order parameter|" in note for note in found.notes)
    assert classify(mirrored, signed=True).verdict == "undetermined"
    # two branches with the same loss are not two phases with a latent heat
    coexisting = first_order(3)
    assert coexisting.loss is not None
    assert classify(coexisting).verdict == "first-order"
    same_loss = 1 - 0.1 * np.log(coexisting.control)
    assert "latent heat" in classify(replace(coexisting, loss=same_loss)).reason
    # the order does not depend on the sense of the order parameter
    assert classify(replace(coexisting, order=-coexisting.order)).verdict == "first-order"


def test_what_is_no_transition():
    rng = np.random.default_rng(0)
    x = np.linspace(3, 6, 20)
    for y in (x, x**2, 0 * x):
        assert classify(Table(np.exp(x), y + 0.05 * rng.normal(size=20))).verdict == "undetermined"
    assert "too few" in classify(Table(np.exp(x[:8]), np.tanh(x[:8] - 4))).reason


def test_record(capsys):
    found = classify(crossover(2))
    again = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert set(again) == {"verdict", "P", "interval", "reason", "evidence", "notes"}
    assert again["interval"][0] < again["P"] < again["interval"][1]
    assert set(again["evidence"][0]) == {"name", "value", "error", "needed"}
    assert str(found).startswith(found.verdict)


ROWS = "\n".join(f"{place},{value}" for place, value in zip(range(10, 90, 10), (0, 0, 0.1, 0.2, 0.5, 0.8, 0.9, 1), strict=True))
BAD = [
    (b"", "must have a header and at least one row"),
    (b"P,m\n", "must have a header and at least one row"),
    (b"\x7fELF\x00\xff\xfe", "must be a CSV file, text in UTF-8"),
    (b"P,m\n1,2\x00\n", "must be a CSV file, text in UTF-8"),
    (b"P,m\n10,1\n20,\n", "m = '' in line 3: must be a finite number"),
    (b"P,m\n10,1\n20,nan\n", "m = 'nan' in line 3: must be a finite number"),
    (b"P,m\n-10,1\n", "P = '-10' in line 2: must be a finite number > 0"),
    (b"P,m\n10,1,2\n", "table, line 2: 3 values; must be 2, as in the header"),
    (b"P,P\n10,1\n", "two columns are called 'P'"),
    (b"P,m\n10,1\n20,2\n", "control: 2 different values; must be at least 6"),
    (b"P,foo\n10,1\n", "order: no column cG, aG, order, order_parameter, m; must be named, one of P, foo"),
    (b"x,m\n10,1\n", "control: no column P, sequences; must be named, one of x, m"),
    (("P,m\n" + "\n".join(f"{p},3" for p in range(1, 9))).encode(), "order = 3 in every row: must not be constant"),
    (
        ("P,m,start\n" + "\n".join(f"{p},{p},s{p}" for p in range(1, 9))).encode(),
        "start: 8 different values; must be at most 2",
    ),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_a_bad_table_is_answered_by_one_line(tmp_path, text, message):
    path = tmp_path / "table.csv"
    path.write_bytes(text)
    with pytest.raises(ProblemError) as caught:
        read(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_columns_by_name(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(
        "﻿ tokens , acc ,note\n\n" + "\n".join(f"{row},hello" for row in reversed(ROWS.split("\n"))), encoding="utf-8"
    )
    table = read(path, control="tokens", order="acc")
    assert sorted(table.control) == list(range(10, 90, 10))
    assert table.unused == ("note",)
    assert "columns not used: note" in classify(table).notes
    with pytest.raises(ProblemError, match="order = 'loss': must be a column of the table, one of tokens, acc, note"):
        read(path, control="tokens", order="loss")
    with pytest.raises(ProblemError, match="order = 'tokens': must be another column"):
        read(path, control="tokens", order="tokens")


def test_a_hump_is_classified_on_its_steeper_side():
    rng = np.random.default_rng(4)
    x = np.linspace(3, 7, 30)
    rise = np.sqrt(np.maximum(1 - np.exp(-2 * (x - 4)), 0)) * np.exp(-0.3 * np.maximum(x - 5.5, 0) ** 2)
    found = classify(Table(np.exp(x), rise + 0.01 * rng.normal(size=30)))
    assert found.verdict == "second-order"
    assert abs(found.P / np.exp(4) - 1) < 0.1
    assert any("not monotone" in note for note in found.notes)
    short = np.concatenate([np.linspace(0, 1, 4), np.linspace(1, 0.4, 12)])
    assert "too few" in classify(Table(np.exp(x[:16]), short)).reason


def test_exact_and_many_values():
    x = np.linspace(3, 6, 400)
    assert classify(Table(np.exp(x), np.tanh(2 * (x - 4.5)))).verdict == "crossover"
    edges = np.repeat(np.linspace(3, 6, 20), 2)
    start = np.tile(["a", "b"], 20)
    exact = np.where(start == "a", edges > 4.8, edges > 4.1).astype(float)
    json.dumps(classify(Table(np.exp(edges), exact, start=start)).to_dict(), allow_nan=False)
    assert classify(Table(np.exp(edges), exact, start=start)).verdict == "first-order"
