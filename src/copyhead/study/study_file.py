"""Study file: a problem, the axes of a grid, methods with their settings, starts and seeds, as TOML.

title = "P* against length"
starts = ["small", "copy"]
seeds = 8                                       # 0 .. 7; or a list

[problem]                                       # fields of Problem; what is not given is from the preset
preset = "paper"
attention = "softmax"

[grid]                                          # every combination of values; any field of Problem
length = [16, 24, 32]
sequences = { geometric = [50, 2000, 24] }      # from, to, number of values; or { range = [50, 2000, 50] }

[[method]]
kind = "theory"

[[method]]
kind = "adam"
steps = 4000
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from pydantic import Field

from copyhead.model.network import Network, Start
from copyhead.problem import PRESETS, Problem, ProblemError
from copyhead.record import Record

# Longest axis, and number of cells, that a study may have: beyond, a mistyped count is likelier than a wish.
MOST_VALUES, MOST_CELLS = 1_000_000, 100_000_000
STARTS: tuple[Start, ...] = get_args(Start)
# Fields of which a range or a geometric axis takes whole numbers.
INTEGERS = ("length", "vocab", "heads", "head_dimension", "sequences")
AXIS = "{ range = [first, last, step] } or { geometric = [first, last, count] }"


class Theory(Record):
    """Order parameters at P of the branch of each start on expected moments, verdict and places. Without P: places only."""

    kind: Literal["theory"] = "theory"
    seeded: ClassVar[bool] = False


class Exact(Record):
    """The minimum of S over all logits on each data set, from the branch of each start."""

    kind: Literal["exact"] = "exact"
    seeded: ClassVar[bool] = True


class Adam(Record):
    """Training with Adam."""

    kind: Literal["adam"] = "adam"
    steps: int = Field(default=4000, ge=100, le=10_000_000, description="updates of one training run")
    rate: float = Field(default=0.03, gt=0, lt=1, description="learning rate of Adam at the start")
    network: Network = Field(default_factory=Network, description="a table of the fields of Network")
    batch: int | None = Field(default=None, ge=1, description="sequences in one step's gradient; not given: all of them")
    seeded: ClassVar[bool] = True


class Langevin(Record):
    """Sampling with SGLD at the chi of the problem; one chain is a cell."""

    kind: Literal["sgld"] = "sgld"
    warmup: int = Field(default=3000, ge=0, le=10_000_000, description="steps before the first draw")
    draws: int = Field(default=160, ge=20, le=1_000_000, description="recorded states of a chain")
    thin: int = Field(default=50, ge=1, le=100_000, description="steps from one draw to the next")
    network: Network = Field(default_factory=Network, description="a table of the fields of Network")
    batch: int | None = Field(default=None, ge=1, description="sequences in one step's gradient; not given: all of them")
    seeded: ClassVar[bool] = True


Method = Theory | Exact | Adam | Langevin
KINDS: dict[str, type[Method]] = {str(kind.model_fields["kind"].default): kind for kind in (Theory, Exact, Adam, Langevin)}


class Study(Record):
    """A validated study; `text` is the file that it was read from."""

    title: str = Field(default="", description="a line of text")
    problem: Problem = Field(description="fields of Problem, and preset")
    grid: dict[str, tuple[Any, ...]] = Field(default_factory=dict, description="values of fields of Problem")
    methods: tuple[Method, ...] = Field(min_length=1, description="one or more tables [[method]]")
    starts: tuple[Start, ...] = Field(default=STARTS, min_length=1, description=f"different ones of {', '.join(STARTS)}")
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1, description="a number of data sets, or a list of integers >= 0")

    def problems(self) -> Iterator[Problem]:
        """Every combination of the grid but sequences, which is left None.

        Raises:
            ProblemError: for a combination that is no Problem, with the values of the axes.
        """
        axes = {name: values for name, values in self.grid.items() if name != "sequences"}
        base = self.problem.replace(sequences=None)
        for index in np.ndindex(*(len(values) for values in axes.values())):
            chosen = {name: values[place] for place, (name, values) in zip(index, axes.items(), strict=True)}
            try:
                yield base.replace(**chosen)
            except ProblemError as error:
                raise ProblemError(f"grid at {', '.join(f'{k} = {v!r}' for k, v in chosen.items())}: {error}") from None

    @property
    def sequences(self) -> tuple[float | None, ...]:
        """Values of P; (None,) if there are none."""
        return self.grid.get("sequences", (self.problem.sequences,))

    @property
    def planned(self) -> int:
        """Number of cells."""
        points = math.prod(len(values) for values in self.grid.values())
        return sum(points * len(self.starts) * (len(self.seeds) if method.seeded else 1) for method in self.methods)


def read(path: str | Path) -> Study:
    """A study from a TOML file.

    Raises:
        ProblemError: if it cannot be read or is no study: file, line, field, value and what is allowed.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ProblemError(f"study = {str(path)!r}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ProblemError(f"study = {str(path)!r}: must be text in UTF-8") from None
    return parse(text, str(path))


def parse(text: str, name: str = "study") -> Study:
    """A study from TOML text; `name` stands for the file in errors."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ProblemError(f"{name}: {error}") from None
    return _Reader(text, name).study(found)


class _Reader:
    """Builds the records of a study, and says in which line one is refused."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name

    def refused(self, place: tuple[str | int, ...], message: object) -> ProblemError:
        line = line_of(self.text, place)
        shown = ".".join(str(part) for part in place if not isinstance(part, int))
        return ProblemError(f"{self.name}{f', line {line}' if line else ''}: {f'{shown}: ' if shown else ''}{message}")

    def record(self, kind: Any, fields: Any, place: tuple[str | int, ...]) -> Any:
        """A record from a table; its error names the field first."""
        if not isinstance(fields, dict):
            raise self.refused(place, "must be a table of named fields")
        try:
            return kind(**fields)
        except ProblemError as error:
            field = re.split(r"[ :]", str(error), maxsplit=1)[0]
            raise self.refused((*place, field) if field in fields else place, error) from None

    def study(self, found: dict[str, Any]) -> Study:
        known = ("title", "problem", "grid", "method", "starts", "seeds")
        for key in found:
            if key not in known:
                raise self.refused((key,), f"no such field; fields are {', '.join(known)}")
        grid = self.grid(found.get("grid", {}))
        fields = {
            "problem": self.problem(found.get("problem", {})),
            "grid": grid,
            "methods": self.methods(found.get("method")),
            **{key: found[key] for key in ("title", "starts") if key in found},
            **({"seeds": self.seeds(found["seeds"])} if "seeds" in found else {}),
        }
        if len(set(map(str, found.get("starts", [])))) < len(found.get("starts", [])):
            raise self.refused(("starts",), f"{found['starts']!r}: must not repeat")
        try:
            study = Study(**fields)
        except ProblemError as error:
            raise self.refused((re.split(r"[ :]", str(error), maxsplit=1)[0],), error) from None
        if study.planned > MOST_CELLS:
            raise self.refused(("grid",), f"makes {study.planned} cells; must be at most {MOST_CELLS}")
        for method in study.methods:
            if None in study.sequences and method.kind != "theory":
                raise self.refused(("grid",), f"sequences: must be given, here or in problem, with method = {method.kind!r}")
        return study

    def problem(self, fields: Any) -> Problem:
        if isinstance(fields, dict):
            preset, rest = fields.get("preset", "paper"), {k: v for k, v in fields.items() if k != "preset"}
            if preset not in PRESETS:
                raise self.refused(("problem", "preset"), f"{preset!r}: must be one of {', '.join(sorted(PRESETS))}")
            return self.record(lambda **given: Problem.preset(preset, **given), rest, ("problem",))
        raise self.refused(("problem",), "must be a table of named fields")

    def methods(self, tables: Any) -> tuple[Method, ...]:
        if not isinstance(tables, list) or not tables or not all(isinstance(one, dict) for one in tables):
            raise self.refused(("method",), "must be one or more tables [[method]] with a kind")
        made = []
        for number, fields in enumerate(tables):
            place = ("method", number)
            if fields.get("kind") not in KINDS:
                raise self.refused((*place, "kind"), f"{fields.get('kind')!r}: must be one of {', '.join(KINDS)}")
            kind = KINDS[fields["kind"]]
            if "network" in fields and "network" in kind.model_fields:
                fields = {**fields, "network": self.record(Network, fields["network"], (*place, "network"))}
            made.append(self.record(kind, fields, place))
            if made[-1] in made[:-1]:
                raise self.refused((*place, "kind"), "is the same as an earlier method")
        return tuple(made)

    def seeds(self, value: Any) -> tuple[int, ...]:
        good = (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_VALUES) or (
            isinstance(value, list)
            and value
            and all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in value)
            and len(set(value)) == len(value)
        )
        if not good:
            raise self.refused(
                ("seeds",), f"{value!r}: must be a number >= 1 of data sets, or a list of different integers >= 0"
            )
        return tuple(range(value)) if isinstance(value, int) else tuple(value)

    def grid(self, axes: Any) -> dict[str, tuple[Any, ...]]:
        if not isinstance(axes, dict):
            raise self.refused(("grid",), "must be a table of axes")
        return {name: self.axis(name, value) for name, value in axes.items()}

    def axis(self, name: str, value: Any) -> tuple[Any, ...]:
        place = ("grid", name)
        if name not in Problem.model_fields:
            raise self.refused(place, f"no such field; fields are {', '.join(Problem.model_fields)}")
        values = self.spread(place, value) if isinstance(value, dict) else value
        if not isinstance(values, list) or not 1 <= len(values) <= MOST_VALUES:
            raise self.refused(place, f"{value!r}: must be a list, {AXIS}")
        if isinstance(value, dict) and name in INTEGERS:
            values = list(dict.fromkeys(round(one) for one in values))
        if len({repr(one) for one in values}) < len(values):
            raise self.refused(place, f"{value!r}: values must not repeat")
        for one in values:
            try:
                self.base(name, one)
            except ProblemError as error:
                raise self.refused(place, error) from None
        return tuple(values)

    @staticmethod
    def base(name: str, value: Any) -> Problem:
        """A problem with this value alone, for the range of the field."""
        roomy = {"length": 100_000} if name == "target" else {}
        return Problem.preset("paper").replace(**{**roomy, name: value})

    def spread(self, place: tuple[str | int, ...], value: dict[str, Any]) -> list[float]:
        """The values of a range, ends included, or of a geometric axis."""
        kind, numbers = next(iter(value.items()), ("", None))
        numbers = numbers if isinstance(numbers, list) else []
        finite = all(isinstance(one, int | float) and math.isfinite(one) for one in numbers)
        if kind not in ("range", "geometric") or len(value) > 1 or not finite or len(numbers) != 3:
            raise self.refused(place, f"{value!r}: must be {AXIS}")
        first, last, third = numbers
        if kind == "range":
            if third <= 0 or last < first or (last - first) / third >= MOST_VALUES:
                raise self.refused(place, f"{value!r}: must have first <= last, and a step > 0")
            # half a step in a million: 0.1 is no binary fraction
            return [first + index * third for index in range(math.floor((last - first) / third + 5e-7) + 1)]
        if not 0 < first < last or third != int(third) or not 2 <= third <= MOST_VALUES:
            raise self.refused(place, f"{value!r}: must have 0 < first < last, and a count >= 2")
        return [float(one) for one in np.geomspace(first, last, int(third))]


def line_of(text: str, place: tuple[str | int, ...]) -> int | None:
    """The line of a key of TOML text, counted from 1; that of the nearest table around it where it is not found.

    Args:
        place: keys from the top; a number after a key is the place in an array of tables.
    """
    wanted = [str(part) for part in place]
    table: list[str] = []
    counts: dict[str, int] = {}
    best: tuple[int, int | None] = (0, None)
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]", line)
        key = re.match(r"\s*([A-Za-z0-9_.\"'-]+)\s*=", line)
        if header:
            table = [part.strip().strip("\"'") for part in header[2].split(".")]
            if header[1] == "[[":
                counts[table[0]] = counts.get(table[0], -1) + 1
            if table[0] in counts:
                table[1:1] = [str(counts[table[0]])]
            here = table
        elif key:
            here = [*table, *(part.strip("\"'") for part in key[1].split("."))]
        else:
            continue
        if here == wanted[: len(here)] and len(here) > best[0]:
            best = len(here), number
    return best[1]
