"""The choice between reference and Triton: explicit choices run or raise, automatic ones follow the device."""

import pytest
import torch

from mediaspec.kernels.backend import ENVIRONMENT_VARIABLE, choose, describe


def test_automatic_choice_follows_the_device(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    assert choose("op", torch.zeros(1)) == "reference"
    assert choose("op", torch.zeros(1), "reference") == "reference"


def test_explicit_triton_that_cannot_run_raises_with_the_reason(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="tensors are on 'cpu'"):
        choose("verify_chain", torch.zeros(1), "triton")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "triton")
    with pytest.raises(ValueError, match="MEDIASPEC_KERNELS='triton' cannot run"):
        choose("verify_chain", torch.zeros(1))


def test_environment_variable_chooses(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "triton")
    assert choose("op", torch.zeros(1)) == "triton"
    assert choose("op", torch.zeros(1), "reference") == "reference"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "cuda")
    with pytest.raises(ValueError, match="write 'reference', 'triton'"):
        choose("op", torch.zeros(1))


def test_description_for_the_doctor(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    report = describe()
    assert report["on_cpu"] == "reference" and "verify_chain" in report["operations"]
    assert report["cuda"] is torch.cuda.is_available()
