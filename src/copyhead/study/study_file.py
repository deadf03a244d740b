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

A method may have problem, grid, starts and seeds of its own: fields of its problem are laid over those of the file, the others
stand in their place.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import tomli_w
from pydantic import Field, field_validator

from copyhead.model.network import Network, Start
from copyhead.problem import PRESETS, Problem, ProblemError
from copyhead.record import Record

# Longest axis, and number of cells, that a study may have: beyond, a mistyped count is likelier than a wish.
MOST_VALUES, MOST_CELLS = 1_000_000, 100_000_000
STARTS: tuple[Start, ...] = get_args(Start)
# Seed of what has none: expected moments in place of a data set.
EXPECTED = -1
# Fields of a study that a method may have of its own.
SHARED = ("problem", "grid", "starts", "seeds")
# Fields of which a range or a geometric axis takes whole numbers.
INTEGERS = ("length", "vocab", "heads", "head_dimension", "sequences")
AXIS = "{ range = [first, last, step] } or { geometric = [first, last, count] }"


class _Kind(Record):
    """What a method needs. seeded: data sets. started: a start. at_P: "must", "may" or "never" be given P."""

    seeded: ClassVar[bool] = True
    started: ClassVar[bool] = True
    at_P: ClassVar[Literal["must", "may", "never"]] = "must"


class Theory(_Kind):
    """Order parameters at P of the branch of each start on expected moments, verdict and places. Without P: places only."""

    kind: Literal["theory"] = "theory"
    seeded: ClassVar[bool] = False
    at_P: ClassVar[Literal["must", "may", "never"]] = "may"


class Exact(_Kind):
    """The minimum of S over all logits on each data set, from the branch of each start."""

    kind: Literal["exact"] = "exact"


class _Training(_Kind):
    steps: int = Field(default=4000, ge=100, le=10_000_000, description="updates of one training run")
    rate: float = Field(default=0.03, gt=0, lt=1, description="learning rate of Adam at the start")
    network: Network = Field(default_factory=Network, description="a table of the fields of Network")
    batch: int | None = Field(default=None, ge=1, description="sequences in one step's gradient; not given: all of them")


class Adam(_Training):
    """Training with Adam."""

    kind: Literal["adam"] = "adam"


class Jump(_Training):
    """The P at which training with Adam from each start changes branch, for each data set, by repeated section."""

    kind: Literal["jump"] = "jump"
    sections: int = Field(default=12, ge=1, le=100, description="values of P tried at a time inside every bracket")
    bracket: tuple[int, int] | None = Field(
        default=None, description="P between which the jump is looked for; not given: around the window of the theory"
    )
    at_P: ClassVar[Literal["must", "may", "never"]] = "never"

    @field_validator("bracket")
    @classmethod
    def _ascending(cls, bracket: tuple[int, int] | None) -> tuple[int, int] | None:
        if bracket is not None and not 1 <= bracket[0] < bracket[1]:
            raise ValueError("must be two ascending integers >= 1")
        return bracket


class Ladder(_Kind):
    """F(aG), branch weights and P* at the chi of the problem, from ladders of biased chains at P; seed -1: expected moments."""

    kind: Literal["ladder"] = "ladder"
    warmup: int = Field(default=150, ge=0, le=1_000_000, description="trajectories before the first draw")
    draws: int = Field(default=120, ge=50, le=1_000_000, description="draws of each window of a ladder")
    repeats: int = Field(default=4, ge=4, le=100, multiple_of=2, description="independent ladders, half from either start")
    started: ClassVar[bool] = False


class Langevin(_Kind):
    """Sampling with SGLD at the chi of the problem; one chain is a cell."""

    kind: Literal["sgld"] = "sgld"
    warmup: int = Field(default=3000, ge=0, le=10_000_000, description="steps before the first draw")
    draws: int = Field(default=160, ge=20, le=1_000_000, description="recorded states of a chain")
    thin: int = Field(default=50, ge=1, le=100_000, description="steps from one draw to the next")
    network: Network = Field(default_factory=Network, description="a table of the fields of Network")
    batch: int | None = Field(default=None, ge=1, description="sequences in one step's gradient; not given: all of them")
    trace: bool = Field(default=False, description="whether every draw is kept, beside means and errors")


Method = Theory | Exact | Adam | Langevin | Jump | Ladder
KINDS: dict[str, type[Method]] = {str(kind.model_fields["kind"].default): kind for kind in get_args(Method)}


class Block(Record):
    """One method with the grid, the starts and the data sets that it is run on."""

    method: Method = Field(description="a table [[method]]")
    problem: Problem = Field(description="fields of Problem, and preset")
    grid: dict[str, tuple[Any, ...]] = Field(default_factory=dict, description="values of fields of Problem")
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
        """Values of P; (None,) if there are none, or the method looks for them itself."""
        return (None,) if self.method.at_P == "never" else self.grid.get("sequences", (self.problem.sequences,))

    @property
    def planned(self) -> int:
        """Number of cells."""
        points = math.prod(len(values) for name, values in self.grid.items() if name != "sequences") * len(self.sequences)
        return points * (len(self.starts) if self.method.started else 1) * (len(self.seeds) if self.method.seeded else 1)

    def to_toml(self) -> dict[str, Any]:
        """The table [[method]] that this block is read from."""
        method = self.method.model_dump(mode="json", exclude_none=True)
        problem = self.problem.model_dump(mode="json", exclude_none=True)
        grid = {name: list(values) for name, values in self.grid.items()}
        return {**method, "starts": list(self.starts), "seeds": list(self.seeds), "problem": problem, "grid": grid}


class Study(Record):
    """A validated study: one block for each method of the file."""

    title: str = Field(default="", description="a line of text")
    blocks: tuple[Block, ...] = Field(min_length=1, description="one or more tables [[method]]")

    @property
    def planned(self) -> int:
        """Number of cells."""
        return sum(block.planned for block in self.blocks)

    @property
    def axes(self) -> dict[str, list[Any]]:
        """Fields of Problem, but P, with the values that they take, where these are more than one."""
        found: dict[str, list[Any]] = {}
        for name in Problem.model_fields:
            values = [v for b in self.blocks for v in b.grid.get(name, (getattr(b.problem, name),))]
            distinct = list({repr(value): value for value in values}.values())
            if name != "sequences" and len(distinct) > 1:
                found[name] = distinct
        return found

    def to_toml(self) -> str:
        """A study file that this study is read from."""
        return tomli_w.dumps({"title": self.title, "method": [block.to_toml() for block in self.blocks]})


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
        known = ("title", "method", *SHARED)
        for key in found:
            if key not in known:
                raise self.refused((key,), f"no such field; fields are {', '.join(known)}")
        tables = found.get("method")
        if not isinstance(tables, list) or not tables or not all(isinstance(one, dict) for one in tables):
            raise self.refused(("method",), "must be one or more tables [[method]] with a kind")
        shared = self.shared(found, ())
        blocks: list[Block] = []
        for number, fields in enumerate(tables):
            blocks.append(self.block(fields, ("method", number), found, shared))
            if blocks[-1] in blocks[:-1]:
                raise self.refused(("method", number, "kind"), "is the same as an earlier method")
        try:
            study = Study(blocks=tuple(blocks), **{key: found[key] for key in ("title",) if key in found})
        except ProblemError as error:
            raise self.refused((re.split(r"[ :]", str(error), maxsplit=1)[0],), error) from None
        if study.planned > MOST_CELLS:
            raise self.refused(("grid",), f"makes {study.planned} cells; must be at most {MOST_CELLS}")
        return study

    def shared(self, fields: dict[str, Any], place: tuple[str | int, ...], under: Any = None) -> dict[str, Any]:
        """Problem, grid, starts and seeds, as far as they are given; fields of the problem are laid over those of `under`."""
        found: dict[str, Any] = {}
        if "problem" in fields or not place:
            found["problem"] = self.problem(fields.get("problem", {}), (*place, "problem"), under or {})
        if "grid" in fields:
            found["grid"] = self.grid(fields["grid"], (*place, "grid"))
        if "starts" in fields:
            starts = fields["starts"]
            if not isinstance(starts, list) or not starts or any(one not in STARTS for one in starts):
                raise self.refused((*place, "starts"), f"{starts!r}: must be a list of {', '.join(STARTS)}")
            if len(set(starts)) < len(starts):
                raise self.refused((*place, "starts"), f"{starts!r}: must not repeat")
            found["starts"] = tuple(starts)
        if "seeds" in fields:
            least = EXPECTED if fields.get("kind") == "ladder" else 0
            found["seeds"] = self.seeds(fields["seeds"], (*place, "seeds"), least)
        return found

    def block(
        self, fields: dict[str, Any], place: tuple[str | int, ...], study: dict[str, Any], shared: dict[str, Any]
    ) -> Block:
        if fields.get("kind") not in KINDS:
            raise self.refused((*place, "kind"), f"{fields.get('kind')!r}: must be one of {', '.join(KINDS)}")
        kind = KINDS[fields["kind"]]
        own = {name: value for name, value in fields.items() if name not in SHARED}
        if "network" in own and "network" in kind.model_fields:
            own["network"] = self.record(Network, own["network"], (*place, "network"))
        method = self.record(kind, own, place)
        block = Block(method=method, **{**shared, **self.shared(fields, place, study.get("problem"))})
        if method.at_P == "must" and None in block.sequences:
            at = (*place, "grid") if "grid" in fields else ("grid",)
            raise self.refused(at, f"sequences: must be given, here or in problem, with method = {method.kind!r}")
        return block

    def problem(self, fields: Any, place: tuple[str | int, ...], under: dict[str, Any]) -> Problem:
        if not isinstance(fields, dict):
            raise self.refused(place, "must be a table of named fields")
        fields = {**under, **fields}
        preset, rest = fields.get("preset", "paper"), {k: v for k, v in fields.items() if k != "preset"}
        if preset not in PRESETS:
            raise self.refused((*place, "preset"), f"{preset!r}: must be one of {', '.join(sorted(PRESETS))}")
        return self.record(lambda **given: Problem.preset(preset, **given), rest, place)

    def seeds(self, value: Any, place: tuple[str | int, ...], least: int) -> tuple[int, ...]:
        good = (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_VALUES) or (
            isinstance(value, list)
            and value
            and all(isinstance(one, int) and not isinstance(one, bool) and one >= least for one in value)
            and len(set(value)) == len(value)
        )
        if not good:
            raise self.refused(
                place, f"{value!r}: must be a number >= 1 of data sets, or a list of different integers >= {least}"
            )
        return tuple(range(value)) if isinstance(value, int) else tuple(value)

    def grid(self, axes: Any, place: tuple[str | int, ...]) -> dict[str, tuple[Any, ...]]:
        if not isinstance(axes, dict):
            raise self.refused(place, "must be a table of axes")
        return {name: self.axis((*place, name), name, value) for name, value in axes.items()}

    def axis(self, place: tuple[str | int, ...], name: str, value: Any) -> tuple[Any, ...]:
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
