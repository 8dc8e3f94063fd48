"""Imports point down, siblings do not import each other, and the core needs none of the optional packages."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "reversible_trainer"
LEVELS = [
    {"tree"},
    {"layers", "optimizers", "streaming", "data", "checkpoint", "metrics", "report"},
    {"models", "reversal", "checks"},
    {"passes"},
    {"schedule", "probe"},
    {"sweeps"},
    {"planning"},
    {"trainer"},
    {"loop", "profiling", "interop"},
    {"__main__", "__init__"},
]
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
FILES = sorted(PACKAGE.rglob("*.py"))


def part(path):
    """The part of the package that a file belongs to: its folder, or its name at the top."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path):
    """Modules of the package that a file imports, as tuples of names below the package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "reversible_trainer":
            below = node.module.split(".")[1:]
            yield from [tuple(below)] if below else [(alias.name,) for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("reversible_trainer."):
                    yield tuple(alias.name.split(".")[1:])


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    for module in imported(path):
        assert module[0] in LEVEL, f"{path} imports {module[0]}, which no level lists"
        assert module[0] == part(path) or LEVEL[module[0]] < LEVEL[part(path)], f"{path} imports {'.'.join(module)}"


def test_the_trainer_names_no_concrete_layer_and_no_optimizer():
    for name in ("passes", "reversal", "schedule", "probe", "trainer"):
        for module in imported(PACKAGE / f"{name}.py"):
            assert module[0] not in ("models", "optimizers")
            assert module[0] != "layers" or module[1] in ("base", "fixed_point")


def test_the_package_imports_no_optional_package():
    program = "import sys, reversible_trainer, reversible_trainer.interop; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    )
    assert "reversible_trainer.trainer" in loaded
    assert not loaded & {"trax", "flax", "equinox", "tensorflow", "tensorflow_datasets", "torch"}
