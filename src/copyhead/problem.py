"""Problem: the frozen, validated record of every control parameter (symbols in NOTATION.md)."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from copyhead.record import ProblemError, Record

Attention = Literal["softmax", "linear"]

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

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """The named parameter set (see PRESETS) with some fields replaced."""
        if name not in PRESETS:
            raise ProblemError(f"preset = {name!r}: must be one of {', '.join(sorted(PRESETS))}")
        return cls(**{**PRESETS[name], **overrides})

    @property
    def scored(self) -> int:
        """Number of positions that enter the loss: L, or L - 1 when the task is not cyclic."""
        return self.length if self.cyclic else self.length - 1

    @property
    def kappa(self) -> float:
        """Noise variance of one scalar output, kappa = scored * sigma^2 (the loss is a mean over positions)."""
        return self.scored * self.noise

    @property
    def positional(self) -> bool:
        """Whether attention is by position, with one fused query-key matrix."""
        return not self.content and self.head_dimension is None

    def require_positional(self, what: str) -> None:
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
