"""`mediaspec doctor` tells what runs where, and what is wrong."""

from __future__ import annotations

import json

from mediaspec.integrations import _diffusers, _transformers


def test_a_sound_machine_has_no_problems(command, model) -> None:
    result = command("doctor", "--model", model, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["problems"] == [] and found["model"]["vocabularies_match"]
    assert found["model"]["target_vocabulary"] == 16 and found["model"]["drafter"] == "EagleHead"
    assert found["kernels"]["on_cpu"] == "reference"
    assert set(found["versions"]) >= {"python", "torch", "diffusers", "transformers", "triton"}
    assert len(found["prepared_linear"]) == 3
    speed = found["speculation"]
    assert speed["expected_speed_up"] > 0 and speed["tokens_per_call"] >= 1 and speed["plain_round_ms"] > 0
    assert speed["pays"] == (speed["expected_speed_up"] > 1) or abs(speed["expected_speed_up"] - 1) < 0.01


def test_the_readable_form_lists_every_section(command, model) -> None:
    result = command("doctor", "--model", model, "--no-measure")
    for word in ("versions", "device", "kernels", "prepared linear", "model", "no problems found"):
        assert word in result.stdout


def test_a_missing_model_is_a_problem_and_code_1(command, tmp_path) -> None:
    result = command("doctor", "--model", tmp_path, "--json")
    assert result.exit_code == 1 and "model_index.json" in json.loads(result.stdout)["problems"][0]


def test_a_device_that_is_not_there_is_a_problem(command, model) -> None:
    result = command("doctor", "--model", model, "--device", "foo", "--json")
    assert result.exit_code == 1 and "cannot be used here" in json.loads(result.stdout)["problems"][0]


def test_versions_outside_the_range_are_problems() -> None:
    assert _transformers.check_version("5.17.0") is None and _transformers.check_version("5.24.0") is None
    assert "pip install" in (_transformers.check_version("4.56.0") or "") and _transformers.check_version("6.0.0")
    assert _diffusers.check_version("0.42.1") is None and "pip install" in (_diffusers.check_version("0.35.2") or "")
