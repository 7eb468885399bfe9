"""The emoji-64 trainers' own mathematics: schedule, Muon, the fast forward pass, growth, the draft head's loss."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "emoji64"))

import common
import muon
import nets
import train_eagle

from mediaspec.models.eagle import EagleHead, EagleHeadConfig


@pytest.fixture(scope="module")
def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 40, (2, 16), generator=g)
    ids[0, :9] = 0
    return torch.randint(1024, (2, 256), generator=g), ids, ids != 0, torch.tensor([False, True])


@pytest.fixture(scope="module")
def trainer() -> nets.Trainer:
    torch.manual_seed(0)
    made = nets.Trainer(1, 40, compiled=False)
    torch.nn.init.normal_(made.gpt.output.weight, std=0.1)
    return made


def test_schedule_rises_holds_and_ends_at_zero() -> None:
    assert common.schedule(0.01, warmup=0.02) == pytest.approx(0.5)
    assert common.schedule(0.3, hold=0.4) == 1.0
    assert common.schedule(0.7, hold=0.4) == pytest.approx(0.5)
    assert common.schedule(1.0, hold=0.4) == pytest.approx(0.0, abs=1e-12)


def test_muon_makes_updates_nearly_orthogonal() -> None:
    torch.manual_seed(0)
    out = muon.orthogonalise(torch.randn(3, 32, 96)).float()
    values = torch.linalg.svdvals(out)
    assert values.min() > 0.5 and values.max() < 1.4


def test_muon_steps_against_the_gradient_part_by_part() -> None:
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(96, 32))
    p.grad = torch.cat([torch.eye(32), 2 * torch.eye(32), 3 * torch.eye(32)])
    muon.Muon([p], unit=32).step(0.1)
    for part in p.data.split(32):
        diagonal = part.diagonal()
        assert (diagonal < 0).all()
        assert torch.allclose(part, torch.diag(diagonal), atol=1e-3)
    assert torch.allclose(p.data[:32], p.data[64:], atol=1e-2)


def test_the_fast_loss_is_the_models_own(trainer: nets.Trainer, batch: tuple[torch.Tensor, ...]) -> None:
    tokens, ids, mask, drop = batch
    fast = trainer.loss(tokens, ids, mask, drop)
    fast.backward()
    quick = [p.grad.clone() for p in trainer.gpt.parameters()]
    trainer.gpt.zero_grad(), trainer.text.zero_grad()
    out = trainer.gpt(tokens, trainer.features(ids, mask), mask, labels=tokens, drop_ids=drop)
    out.loss.backward()
    assert float(fast) == pytest.approx(float(out.loss), rel=2e-3)
    for a, p in zip(quick, trainer.gpt.parameters(), strict=True):
        assert (a - p.grad).norm() <= 0.05 * p.grad.norm()
    trainer.gpt.zero_grad(), trainer.text.zero_grad()


def test_growth_keeps_the_function(batch: tuple[torch.Tensor, ...]) -> None:
    torch.manual_seed(1)
    trainer = nets.Trainer(1, 40, compiled=False)
    torch.nn.init.normal_(trainer.gpt.output.weight, std=0.1)
    with torch.no_grad():
        before = float(trainer.loss(*batch))
        trainer.grow(3)
        assert len(trainer.gpt.layers) == trainer.gpt.config.n_layer == 3
        assert [layer.attention.layer for layer in trainer.gpt.layers] == [0, 1, 2]
        assert float(trainer.loss(*batch)) == pytest.approx(before, abs=1e-6)
    with pytest.raises(ValueError, match="multiple of 3"):
        trainer.grow(4)


@pytest.mark.parametrize("guided", [False, True])
def test_draft_acceptance_is_a_probability(
    trainer: nets.Trainer, batch: tuple[torch.Tensor, ...], guided: bool
) -> None:
    tokens, ids, mask, _ = batch
    target = train_eagle.Target.__new__(train_eagle.Target)
    target.net, target.gpt, target.scale = trainer, trainer.gpt, 3.0
    hidden = target.hidden(tokens, ids, mask)
    assert hidden.shape == (4, 256, nets.WIDTH)
    head = EagleHead(EagleHeadConfig(hidden_size=nets.WIDTH, grid=(16, 16), guided=guided))
    loss, accepted = train_eagle.losses(head, target, tokens, hidden, steps=2)
    assert accepted.shape == (2,) and bool(((accepted >= 0) & (accepted <= 1)).all())
    loss.backward()
    assert head.fc.weight.grad is not None and bool(head.fc.weight.grad.isfinite().all())
