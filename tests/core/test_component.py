"""Saved components with and without diffusers: the same classes, the same file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mediaspec.core import component

WITHOUT = """
import sys
sys.modules["diffusers"] = None
import torch
from mediaspec.core import component
from mediaspec.rules import CoolSDRule, make_rule
from mediaspec.testing import check_rule
assert not component.HAS_DIFFUSERS
folder = sys.argv[1]
loaded = CoolSDRule.from_pretrained(folder + "/with")
assert loaded.config.delta == 2.0 and loaded.config["schedule"] == "cool" and loaded.linear(1)[0].item() > 5
assert CoolSDRule.from_pretrained(folder, subfolder="with").omega == loaded.omega
make_rule("cool_sd", omega=[2.0, 1.5], residual="band").save_pretrained(folder + "/without")
try:
    loaded.config["delta"] = 3.0
except TypeError as error:
    assert "read-only" in str(error)
else:
    raise AssertionError("the config can be written")
try:
    CoolSDRule.from_pretrained(folder + "/nothing")
except OSError as error:
    assert "scheduler_config.json" in str(error)
else:
    raise AssertionError("nothing was loaded without an error")
assert "CoolSDRule" in repr(loaded)
check_rule(make_rule("cool_sd", eps=0.1), rounds=2000)
assert "diffusers.configuration_utils" not in sys.modules
print("done")
"""

LIGHT = """
import sys
import mediaspec.core.component
loaded = [name for name in sys.modules if name.startswith(("diffusers.models.", "diffusers.pipelines."))]
heavy = [name for name in loaded if name.count(".") > 2]
assert not heavy, heavy[:5]
print("light")
"""


def run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_one_file_for_both(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    from mediaspec.rules import CoolSDRule, make_rule

    assert component.HAS_DIFFUSERS
    make_rule("cool_sd", delta=2.0).save_pretrained(tmp_path / "with")
    assert run(WITHOUT, str(tmp_path)).strip() == "done"
    there = CoolSDRule.from_pretrained(tmp_path / "without")
    assert there.omega == [2.0, 1.5] and there.residual == "band"
    here, other = (json.loads((tmp_path / name / "scheduler_config.json").read_text()) for name in ("with", "without"))
    assert {key for key in here if key[0] != "_"} == {key for key in other if key[0] != "_"}
    assert here["_class_name"] == other["_class_name"] == "CoolSDRule"


def test_the_import_loads_no_models() -> None:
    pytest.importorskip("diffusers")
    assert run(LIGHT).strip() == "light"


def test_the_local_equivalent_by_itself(tmp_path: Path) -> None:
    class Lamp(component._LocalSchedulerMixin, component._LocalConfigMixin):
        @component._local_register_to_config
        def __init__(self, height: int, colour: str = "red") -> None:
            assert self.config.height == height  # registered before the body runs

    lamp = Lamp(3)
    assert dict(lamp.config) == {"height": 3, "colour": "red"}
    lamp.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "scheduler_config.json").read_text()) == {
        "_class_name": "Lamp",
        "colour": "red",
        "height": 3,
    }
    assert Lamp.from_pretrained(tmp_path, colour="blue").config.colour == "blue"
    with pytest.raises(AttributeError, match="no setting named 'weight'"):
        _ = lamp.config.weight
    with pytest.raises(TypeError, match="read-only"):
        lamp.config.update(height=4)
    with pytest.raises(ValueError, match="is a file"):
        lamp.save_pretrained(tmp_path / "scheduler_config.json")
