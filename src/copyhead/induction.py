"""Induction: the record of every control parameter of the two-layer tasks, beside `Problem` for the copy task."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from copyhead.record import ProblemError, Record

Task = Literal["recall", "next-token"]

# The preset of docs/induction.md: small enough for ensembles of runs, large enough for three branches.
PRESETS: dict[str, dict[str, Any]] = {"induction": {"length": 16, "vocab": 16, "noise": 0.3}}


class Induction(Record):
    """One induction task, the prior of the minimal two-layer network and its noise.

    Recall: a context of L - 1 distinct tokens in random order, then one of them once more; the target is the token
    that followed it. Next-token: every position is scored; segments are repeated at random offsets.
    Scaling as for `Problem`: the loss is a mean over scored positions and a sum over the V outputs, divided by
    2 sigma^2; all energies are multiplied by chi (docs/induction.md).
    """

    task: Task = Field(default="recall", description="recall: one target per sequence; next-token: every position is scored")
    length: int = Field(ge=4, le=1024, description="L, number of positions")
    vocab: int = Field(ge=4, le=4096, description="V, number of tokens")
    noise: float = Field(gt=0, description="sigma^2, noise variance")
    position_variance: float = Field(default=1.0, gt=0, description="g_W1, prior variance of C1 and C2 (times 1/chi)")
    match_variance: float = Field(default=1.0, gt=0, description="g_W2, prior variance of an entry of M (times 1/chi)")
    output_variance: float = Field(default=1.0, gt=0, description="g_O, prior variance of an entry of W (times 1/chi)")
    chi: float = Field(default=50.0, gt=0, description="chi, mean-field scale of the posterior exp(-chi E)")
    sequences: float | None = Field(default=None, gt=0, description="P, number of training sequences")

    @model_validator(mode="after")
    def _distinct_context(self) -> Self:
        if self.task == "recall" and self.length > self.vocab:
            raise ProblemError(
                f"length = {self.length}: must be <= vocab = {self.vocab} for recall, whose context of L - 1 tokens is distinct"
            )
        return self

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """The named parameter set (see PRESETS) with some fields replaced."""
        if name not in PRESETS:
            raise ProblemError(f"preset = {name!r}: must be one of {', '.join(sorted(PRESETS))}")
        return cls(**PRESETS[name]).replace(**overrides)

    @property
    def scored(self) -> int:
        """Scored positions of a sequence: 1 for recall, L - 1 for next-token."""
        return 1 if self.task == "recall" else self.length - 1

    @property
    def kappa(self) -> float:
        """Noise variance of one scalar output, scored positions times sigma^2."""
        return self.scored * self.noise
