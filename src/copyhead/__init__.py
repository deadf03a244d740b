"""copyhead: how much data an attention head needs before it snaps into a copy head, and whether training agrees."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from copyhead.induction import Induction
    from copyhead.induction_prediction import InductionPrediction, predict_induction
    from copyhead.prediction import Prediction, predict
    from copyhead.problem import Problem, ProblemError

__version__ = "0.1.0"
__all__ = [
    "Induction",
    "InductionPrediction",
    "Prediction",
    "Problem",
    "ProblemError",
    "__version__",
    "predict",
    "predict_induction",
]

_HOMES = {
    "Induction": "copyhead.induction",
    "InductionPrediction": "copyhead.induction_prediction",
    "predict_induction": "copyhead.induction_prediction",
    "Prediction": "copyhead.prediction",
    "predict": "copyhead.prediction",
    "Problem": "copyhead.problem",
    "ProblemError": "copyhead.problem",
}


def __getattr__(name: str) -> Any:
    # JAX is imported with the first name that needs it, so `copyhead --help` does not wait for it.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'copyhead' has no attribute {name!r}")
