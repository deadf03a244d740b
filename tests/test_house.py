"""The arrows of the house point down, and light commands stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "copyhead"
# A package may import itself and what is listed; top-level modules other than these two belong to nobody.
ALLOWED = {
    "record": set(),
    "files": {"record"},
    "problem": {"files", "record"},
    "induction": {"record"},
    "model": {"files", "induction", "problem", "record"},
    "theory": {"induction", "model", "problem", "record"},
    "experiment": {"induction", "model", "problem", "record"},
    "study": {"files", "theory", "experiment", "induction", "model", "problem", "record"},
    "report": {"study", "theory", "experiment", "induction", "model", "problem", "record"},
}


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("copyhead"):
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return {name for name in found if not name.startswith("__")}


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_imports_point_down(room):
    files = [SOURCE / f"{room}.py"] if (SOURCE / f"{room}.py").exists() else sorted((SOURCE / room).glob("*.py"))
    assert files
    for path in files:
        up = imported(path) - ALLOWED[room] - {room}
        assert not up, f"{path.name} imports {sorted(up)}"


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_prediction_imports_no_plotting_training_or_storage():
    heavy = ["matplotlib", "optax", "xarray", "arviz_stats", "jinja2", "copyhead.theory.fluctuations"]
    code = "import sys, copyhead; copyhead.predict(copyhead.Problem.preset('paper')); "
    assert run_python(code + f"print([name for name in {heavy} if name in sys.modules])").strip() == "[]"


def test_no_global_jax_flag_is_set():
    code = (
        "import jax; before = jax.config.jax_enable_x64; import copyhead; copyhead.predict(copyhead.Problem.preset('paper')); "
    )
    assert run_python(code + "print(before, jax.config.jax_enable_x64)").strip() == "False False"
