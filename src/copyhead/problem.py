"""Problem: the frozen, validated record of every control parameter (symbols in NOTATION.md)."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from jaxtyping import Float
from pydantic import Field, model_validator

from copyhead import files
from copyhead.record import ProblemError, Record

Attention = Literal["softmax", "linear"]
Unit = Literal["char", "byte", "word"]

_SIZE = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_NUMBER = rf"[+-]?{_SIZE}"
TOKENS = rf"^(uniform|zipf:{_SIZE}|(counts|markov|corpus):.+)$"
TARGETS = rf"^(lag:\d+|lags:\d+={_NUMBER}(,\d+={_NUMBER})*|matrix:.+)$"

# Kinds of tokens and targets that a file gives.
FILE_KINDS = ("counts", "markov", "corpus", "matrix")

PRESETS: dict[str, dict[str, Any]] = {
    # The paper's sizes are not public to us; these give all of its quoted numbers at once (docs/theory.md, preset).
    "paper": {"length": 32, "vocab": 4, "noise": 0.9, "logit_variance": 1.0, "output_variance": 1.0, "chi": 50.0},
}


class Problem(Record):
    """One copy task, one network and one prior; every number that the theory or a training run depends on.

    Scaling conventions (docs/theory.md, section 2): the loss is a mean over the scored positions and a sum over the
    V outputs, divided by 2 sigma^2; all three energies are multiplied by chi.
    """

    length: int = Field(ge=2, le=100_000, description="L, number of positions")
    vocab: int = Field(ge=2, le=1_000_000, description="V, number of tokens")
    noise: float = Field(gt=0, description="sigma^2, noise variance (ridge)")
    logit_variance: float = Field(default=1.0, gt=0, description="g_W, prior variance of a logit weight (times 1/chi)")
    output_variance: float = Field(default=1.0, gt=0, description="g_O, prior variance of an entry of W (times 1/chi)")
    chi: float = Field(default=50.0, gt=0, description="chi, mean-field scale of the posterior exp(-chi E)")
    position_scale: float = Field(default=1.0, gt=0, description="tau_p, weight of positions in the logit kernel")
    token_scale: float = Field(default=0.0, ge=0, description="tau_x, weight of tokens in the logit kernel")
    attention: Attention = Field(default="softmax", description="phi: softmax over positions, or linear G / L")
    content: bool = Field(
        default=False,
        description="attention reads the tokens: order parameters cI and cS beside c1 and cG; needs token_scale > 0 and cyclic",
    )
    cyclic: bool = Field(default=True, description="position 0 copies position L - 1; otherwise it is not scored")
    head_dimension: int | None = Field(
        default=None, ge=1, le=1_000_000, description="d_h, columns of separate query and key matrices (else one fused matrix)"
    )
    sequences: float | None = Field(default=None, gt=0, description="P, number of training sequences")
    causal: bool = Field(default=False, description="a position attends to itself and those before it; implies cyclic = False")
    heads: int = Field(default=1, ge=1, le=8, description="H, number of heads, f = sum_h A_h x W_h")
    tokens: str = Field(
        default="uniform",
        pattern=TOKENS,
        description="law of the tokens: uniform, zipf:S, counts:FILE, markov:FILE, corpus:FILE",
    )
    unit: Unit = Field(default="char", description="what a token of corpus:FILE is: char, byte or word")
    target: str = Field(
        default="lag:1", pattern=TARGETS, description="lag:K, lags:K=W,... or matrix:FILE, the target operator T"
    )

    @model_validator(mode="after")
    def _open_where_causal(self) -> Self:
        if self.causal and self.cyclic:
            raise ProblemError("causal = True: needs cyclic = False, since the last positions are hidden from the first")
        return self

    def replace(self, **overrides: Any) -> Self:
        """A validated copy with some fields replaced; causal = True brings cyclic = False with it."""
        if overrides.get("causal") in (True, "true", "True") and "cyclic" not in overrides:
            overrides["cyclic"] = False
        return super().replace(**overrides)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """The named parameter set (see PRESETS) with some fields replaced."""
        if name not in PRESETS:
            raise ProblemError(f"preset = {name!r}: must be one of {', '.join(sorted(PRESETS))}")
        return cls(**PRESETS[name]).replace(**overrides)

    @property
    def lags(self) -> dict[int, float] | None:
        """Lags of the target with their weights; None for a matrix.

        Raises:
            ProblemError: for lags that are not below the length, or all of weight zero.
        """
        kind, _, rest = self.target.partition(":")
        if kind == "matrix":
            return None
        pairs = [part.partition("=") for part in rest.split(",")]
        found: dict[int, float] = {}
        for lag, _, weight in pairs:
            found[int(lag)] = found.get(int(lag), 0.0) + float(weight or 1)
        if max(found) >= self.length or not any(found.values()):
            raise ProblemError(
                f"target = {self.target!r}: lags must be >= 0 and < length = {self.length}, with a weight that is not zero"
            )
        return {lag: weight for lag, weight in sorted(found.items()) if weight}

    @property
    def target_matrix(self) -> Float[np.ndarray, "L L"]:
        """T as the file of the target gives it.

        Raises:
            ProblemError: if it is no L x L table of numbers, is zero, or asks a row for what the causal mask hides.
        """
        path = self.target.partition(":")[2]
        found = files.matrix("target", path)
        if found.shape != (self.length, self.length):
            raise ProblemError(f"target file = {path!r}: must be {self.length} x {self.length} (length), is {found.shape}")
        if not np.any(found):
            raise ProblemError(f"target file = {path!r}: must not be zero everywhere")
        if self.causal and np.any(np.triu(found, 1)):
            raise ProblemError(f"target file = {path!r}: must be zero above the diagonal with causal = True")
        return found

    @property
    def scored(self) -> int:
        """Number of positions that enter the loss: those in which the target is not zero. L in the cyclic copy task."""
        lags = self.lags
        if lags is None:
            return int(np.any(self.target_matrix != 0, axis=1).sum())
        return self.length if self.cyclic else self.length - min(lags)

    @property
    def kappa(self) -> float:
        """Noise variance of one scalar output, kappa = scored * sigma^2 (the loss is a mean over positions)."""
        return self.scored * self.noise

    @property
    def positional(self) -> bool:
        """Whether attention is by position, with one fused query-key matrix."""
        return not self.content and self.head_dimension is None

    @property
    def beyond(self) -> tuple[str, ...]:
        """What takes the problem beyond the paper's copy task by one head on uniform tokens, as 'field = value'."""
        plain = {"causal": False, "heads": 1, "tokens": "uniform", "target": "lag:1"}
        return tuple(f"{name} = {getattr(self, name)!r}" for name, value in plain.items() if getattr(self, name) != value)

    @property
    def digests(self) -> dict[str, str]:
        """A name of the content of each file that the problem names, by field; equal only for equal contents.

        Raises:
            ProblemError: if one cannot be read.
        """
        named = {"tokens": self.tokens, "target": self.target}
        parts = {field: value.partition(":") for field, value in named.items()}
        return {field: files.digest(field, path) for field, (kind, _, path) in parts.items() if kind in FILE_KINDS}

    def require_paper(self, what: str) -> None:
        """Raises:
        ProblemError: for a problem beyond the paper's copy task; `what` is for that task only.
        """
        if self.beyond:
            raise ProblemError(
                f"{', '.join(self.beyond)}: {what} for copying by one head without mask, on uniform tokens, only"
            )

    def require_positional(self, what: str) -> None:
        """Raises:
        ProblemError: for attention that reads tokens, separate query and key matrices, or a problem beyond the paper's;
            `what` is for none of them.
        """
        self.require_paper(what)
        self.require_fused_positional(what)

    def require_fused_positional(self, what: str) -> None:
        """Raises:
        ProblemError: for attention that reads tokens, or separate query and key matrices; `what` is for neither.
        """
        if not self.positional:
            reason = "content = True" if self.content else f"head_dimension = {self.head_dimension}"
            raise ProblemError(f"{reason}: {what} for positional attention with a fused query-key matrix only")

    def to_json(self) -> str:
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**_mapping(json.loads(text), "JSON"))

    def to_toml(self) -> str:
        """The fields as TOML; a field that is None is left out (TOML has no null)."""
        return "".join(f"{name} = {json.dumps(value)}\n" for name, value in self.model_dump().items() if value is not None)

    @classmethod
    def from_toml(cls, text: str) -> Self:
        return cls(**tomllib.loads(text))

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Reads a .json or .toml file.

        Raises:
            ProblemError: if the suffix is another one, or the file is no such record.
        """
        path = Path(path)
        readers = {".json": cls.from_json, ".toml": cls.from_toml}
        if path.suffix not in readers:
            raise ProblemError(f"file = {str(path)!r}: must end in .json or .toml")
        try:
            return readers[path.suffix](path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ProblemError(f"file = {str(path)!r}: {error}") from None


def _mapping(value: Any, source: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ProblemError(f"{source}: must be an object of named fields")
    return value
