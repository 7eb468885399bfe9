"""The LongSpec trainer: its loss, what it reads, that it learns, resumes exactly and writes a head that drafts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "smollm2"))

import collect
import train_longspec as trainer

from mediaspec.core.engine import Engine
from mediaspec.core.prompt import TokenPrompt
from mediaspec.core.types import Warp
from mediaspec.drafters import LongSpecDrafter
from mediaspec.models.longspec import LongSpecHead
from mediaspec.rules.exact import ExactRule
from mediaspec.targets.causal_lm import CausalLMTarget
from tests.targets.test_causal_lm import make_model


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and two shards of texts that count upwards in steps of their own."""
    folder = tmp_path_factory.mktemp("longspec")
    model = make_model(num_hidden_layers=2)
    model.save_pretrained(folder / "model")
    (folder / "shards").mkdir()
    for shard in range(2):
        texts = []
        for number in range(12):
            row = [3 + (number + (1 + number % 3) * place) % 40 for place in range(20 + number)]
            texts.append({"prompt": row[:8], "answer": row[8:]})
        file = folder / "shards" / f"shard_{shard:04d}.safetensors"
        collect.save(collect.Collector(model), texts, file, shard, longest=64, limit=256)
    return folder


def options(work: Path, out: str, *more: str) -> Any:
    common = ["--model", str(work / "model"), "--data", str(work / "shards"), "--out", str(work / out)]
    return trainer.arguments([*common, "--draft-vocab", "45", "--tokens", "96", "--window", "16", *more])


def test_the_fused_loss_is_the_plain_one() -> None:
    torch.manual_seed(0)
    model, ids = make_model(num_hidden_layers=1), torch.tensor([1, 4, 6, 9, 30])
    teacher = trainer.Teacher.of(model, ids, torch.float32)
    hidden, seen = torch.randn(9, 32, requires_grad=True), torch.randn(9, 32)
    labels = torch.tensor([4, 30, 6, 2, 1, 9, 9, 7, 6])  # 2 and 7 cannot be drafted
    weights = torch.tensor([1.0, 0.3, 1, 1, 1, 0.3, 1, 1, 1])
    for soft in (0.0, 0.7):
        logq = F.linear(hidden, model.lm_head.weight[ids]).log_softmax(-1)
        law = F.linear(model.model.norm(seen), model.lm_head.weight[ids]).softmax(-1)
        place = torch.tensor([1, 4, 2, 0, 0, 3, 3, 0, 2])
        kept = weights * torch.tensor([1.0, 1, 1, 0, 1, 1, 1, 0, 1])
        rows = (soft - 1) * logq.gather(1, place[:, None])[:, 0] - soft * (law * logq).sum(-1)
        goal = (rows * kept).sum() / kept.sum()
        hidden.grad = None
        goal.backward()
        loss, gradient = trainer.fused_loss(hidden.detach(), labels, seen, weights, teacher, soft)
        assert loss == pytest.approx(float(goal), rel=1e-5)
        assert torch.allclose(gradient, hidden.grad, atol=1e-6)


def test_texts_are_read_back(work: Path) -> None:
    shards = trainer.Shards(sorted((work / "shards").glob("*.safetensors")), 32)
    assert len(shards.index) == 24 and shards.held_out == [0] and 0 not in shards.trained
    text = shards[13]
    row = [3 + (1 + 2 * place) % 40 for place in range(21)]
    assert text.tokens.tolist() == row and text.first_answer == 7
    assert text.hidden.shape == (21, 32) and text.key.shape == text.value.shape == (21, 2, 8)
    jumps = [trained for trained in range(24) if int(shards[trained].positions[-1]) > 64]
    assert jumps and all(shards[one].positions[:4].tolist() == [0, 1, 2, 3] for one in jumps)
    frequent = shards.frequent(50, 40)
    assert frequent.tolist() == sorted(frequent.tolist()) and {0, 1, 2} & set(frequent.tolist()) == set()


def test_learns_exports_and_drafts(work: Path) -> None:
    trainer.main([*_given(options(work, "learn", "--steps", "40", "--lr", "3e-3", "--precision", "fp32"))])
    lines = [json.loads(line) for line in (work / "learn" / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    assert lines[0]["coverage"] == 1.0 and len(lines[-1]["agreement"]) == 5
    head = LongSpecHead.from_pretrained(work / "learn" / "head", dtype=torch.float32)
    model = make_model(num_hidden_layers=2)
    prompt, seeds = TokenPrompt.from_padded(torch.tensor([[3, 4, 5, 6]])), torch.tensor([0])
    target, greedy = CausalLMTarget(model, 12), Warp(temperature=0.0)
    plain = Engine(target, ExactRule()).decode(prompt, seeds, warp=greedy)
    fast = Engine(target, ExactRule(), LongSpecDrafter(head)).decode(prompt, seeds, warp=greedy)
    assert torch.equal(plain.tokens, fast.tokens)


def _given(wanted: Any) -> list[str]:
    words = []
    for name, value in vars(wanted).items():
        word = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words += [word] if value else []
        else:
            words += [word, str(value)]
    return words


def test_resumes_with_the_very_next_step(work: Path) -> None:
    whole = trainer.Trainer(options(work, "whole", "--steps", "7"))
    whole.train()

    class Killed(trainer.Trainer):
        def train_on(self, batch: Any) -> float:
            if self.step == 4:
                raise KeyboardInterrupt
            return super().train_on(batch)

    with pytest.raises(KeyboardInterrupt):
        Killed(options(work, "part", "--steps", "7", "--every", "0")).train()
    resumed = trainer.Trainer(options(work, "part", "--steps", "7", "--resume"))
    assert resumed.step == 4
    resumed.train()
    for name, weight in whole.head.state_dict().items():
        assert torch.equal(weight, resumed.head.state_dict()[name]), name
    assert (resumed.turn, resumed.place) == (whole.turn, whole.place)


def test_new_shards_come_with_the_next_turn(work: Path, tmp_path: Path) -> None:
    one = tmp_path / "shards"
    one.mkdir()
    first = work / "shards" / "shard_0000.safetensors"
    (one / first.name).write_bytes(first.read_bytes())
    given = options(work, "more", "--tokens", "4096")
    given.data, given.out = one, tmp_path / "out"
    batches = trainer.Trainer(given).batches()
    assert len(next(batches).texts) == 11
    second = work / "shards" / "shard_0001.safetensors"
    (one / second.name).write_bytes(second.read_bytes())
    batch = next(batches)
    assert len(batch.texts) == 23 and len(batch.behind[2]) == 2
    assert len(set(batch.lags)) > 1 and set(batch.lags) <= {1, 2, 3, 4, 5}


def test_says_what_is_missing(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = options(work, "none")
    given.data = tmp_path
    with pytest.raises(ValueError, match="no shard_"):
        trainer.Trainer(given)
    with pytest.raises(SystemExit):
        options(work, "none", "--soft", "2")
    assert "from 0 to 1" in capsys.readouterr().err
    assert options(work, "none", "--hard").soft == 0.0
