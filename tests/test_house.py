"""The house keeps its shape: imports run downwards, Hugging Face's `kernels` stays visible, module paths load back."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mediaspec"
FLOORS = {
    "kernels": 0,
    "core": 1,
    "rules": 2, "drafters": 3, "policies": 2, "attention": 2, "memory": 2,
    "models": 2, "targets": 3,
    "pipelines": 4,
    "testing": 4,
    "integrations": 5,
    "eval": 5,
    "cli": 6,
}  # fmt: skip


def imports_of(path: Path) -> set[str]:
    """First-level rooms of mediaspec that a file imports, absolute or relative, at any depth of the file."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            names = [".".join([*module, alias.name]) for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("mediaspec.") and "." in name}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_downwards(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room not in FLOORS:
        return
    above = {name for name in imports_of(path) if name != room and FLOORS.get(name, -1) >= FLOORS[room]}
    allowed = {"models"} if room in {"integrations"} else set()
    assert not above - allowed, f"{path.relative_to(ROOT)} imports upwards: {sorted(above)}"


def test_every_room_has_a_floor() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert rooms <= set(FLOORS), f"give these rooms a floor: {sorted(rooms - set(FLOORS))}"


def test_the_kernels_folder_does_not_shadow_hugging_face_kernels() -> None:
    assert not (PACKAGE / "kernels" / "__init__.py").exists()
    code = (
        "import importlib.util as u; s = u.find_spec('kernels'); "
        "assert s is None or s.origin is None or 'mediaspec' not in str(s.origin), s"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_root_doors_lead_into_the_package() -> None:
    for door in ("kernels", "pipelines", "configs", "eval"):
        assert (ROOT / door).is_symlink() and (ROOT / door).resolve() == PACKAGE / door


def test_no_component_folder_bears_the_name_of_a_diffusers_pipeline() -> None:
    pipelines = pytest.importorskip("diffusers.pipelines")
    from mediaspec.pipelines.text_to_image import TextToImagePipeline  # noqa: F401  (registers every component class)

    for path in PACKAGE.rglob("*.py"):
        parent = path.parent.name
        if parent in {"mediaspec", "pipelines"}:
            continue
        assert not hasattr(pipelines, parent), f"a class in {path.relative_to(ROOT)} would save but not load"


@pytest.mark.parametrize("blocked", ["diffusers", "triton", "matplotlib"])
def test_core_rules_kernels_and_models_import_without(blocked: str) -> None:
    code = (
        f"import sys; sys.modules[{blocked!r}] = None\n"
        "import mediaspec, mediaspec.core.engine, mediaspec.rules, mediaspec.drafters, mediaspec.targets.llamagen\n"
        "import mediaspec.kernels.sample, mediaspec.kernels.verify_chain, mediaspec.kernels.verify_tree\n"
        "import mediaspec.kernels.tree_attention, mediaspec.kernels.lse_merge, mediaspec.kernels.sparse_attention\n"
        "import mediaspec.models.llamagen.gpt, mediaspec.models.eagle, mediaspec.policies\n"
        "import mediaspec.memory, mediaspec.memory.arvdm, mediaspec.memory.gaussian, mediaspec.memory.loss_gap\n"
        "import mediaspec.kernels.frame_pool\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
