"""The trainer of EAGLE-3 heads: its data, its hand-made gradients, exact resume, and a head that learns its target."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "smollm2"))

import shards as data
import train_eagle3 as trainer

from mediaspec.core.engine import Engine
from mediaspec.core.prompt import TokenPrompt
from mediaspec.core.types import Warp
from mediaspec.drafters import Eagle3Drafter
from mediaspec.models.eagle3 import Eagle3Head
from mediaspec.rules import CoupledRule
from mediaspec.targets.causal_lm import CausalLMTarget
from tests.attention.models import make_model

VOCAB, PROMPT, NEW = 40, 4, 36


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(num_hidden_layers=4, vocab_size=VOCAB)


def prompts(count: int) -> Tensor:
    return torch.randint(3, VOCAB, (count, PROMPT), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def written(model: Any) -> Tensor:
    """[5, PROMPT + NEW]: what the model writes greedily; text 0 of a shard is held out."""
    ids = prompts(5)
    engine = Engine(CausalLMTarget(model, NEW), CoupledRule())
    tokens = engine.decode(TokenPrompt.from_padded(ids), torch.arange(5), warp=Warp(temperature=0.0)).tokens
    return torch.cat([ids, tokens], 1)


def write_shard(folder: Path, number: int, model: Any, texts: list[Tensor]) -> None:
    """A shard as collect.py writes it."""
    heard: dict[int, Tensor] = {}
    layers = trainer.default_feature_layers(len(model.model.layers))
    hooks = [
        model.model.layers[layer].register_forward_hook(
            lambda m, given, out, layer=layer: heard.__setitem__(layer, out if isinstance(out, Tensor) else out[0])
        )
        for layer in layers
    ]
    features = []
    for text in texts:
        with torch.no_grad():
            model(input_ids=text[None])
        features.append(torch.cat([heard[layer][0] for layer in layers], -1).half())
    for hook in hooks:
        hook.remove()
    lengths = torch.tensor([0, *map(len, texts)])
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {
            "tokens": torch.cat(texts).int(), "starts": lengths.cumsum(0), "features": torch.cat(features),
            "positions": torch.cat([torch.arange(len(text)) for text in texts]).int(),
            "answer": torch.cat([(torch.arange(len(text)) >= PROMPT).to(torch.uint8) for text in texts]),
        },
        folder / f"shard_{number:04d}.safetensors",
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(model: Any, written: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("features")
    write_shard(made, 0, model, list(written))
    return made


def test_pieces_cover_every_slot_once_and_rows_hold_them(folder: Path) -> None:
    shards = data.Shards(folder)
    found = data.pieces(shards, shards.names(), 16, lambda text: text > 0)
    assert {piece.slots for piece in found} == {16, 7}
    slots = sorted(first for piece in found for first in range(piece.first, piece.stop - 1))
    starts = shards.small("shard_0000.safetensors")["starts"].tolist()
    assert slots == [i for begin, end in zip(starts[1:-1], starts[2:], strict=True) for i in range(begin, end - 1)]
    rows = data.pack(found, 16)
    assert sorted(piece.first for row in rows for piece in row) == sorted(piece.first for piece in found)
    assert max(sum(piece.slots for piece in row) for row in rows) <= 16 and len(rows) == 10


def test_a_row_reads_what_the_slots_mean(folder: Path, written: Tensor) -> None:
    shards = data.Shards(folder)
    name, n = shards.names()[0], PROMPT + NEW
    slots = shards.read([[data.Piece(name, n, n + 11), data.Piece(name, 3 * n - 6, 3 * n)]], 20)
    text, end = written[1], written[2]
    assert slots.tokens[0, :10].tolist() == text[1:11].tolist()
    assert slots.label[0, :10].tolist() == [*text[2:11].tolist(), -1]
    assert slots.own[0, :10].tolist() == [i + 2 >= PROMPT for i in range(10)]
    assert slots.tokens[0, 10:15].tolist() == end[-5:].tolist() and slots.local[0, 9:15].tolist() == [9, 0, 1, 2, 3, 4]
    assert slots.positions[0, 10:15].tolist() == list(range(n - 6, n - 1))
    assert slots.real[0].tolist() == [True] * 15 + [False] * 5
    assert torch.equal(slots.features[0, 1:10], slots.following[0, :9])


def test_the_gradient_is_that_of_the_stated_loss(model: Any, folder: Path) -> None:
    shards, ids = data.Shards(folder), torch.arange(0, VOCAB, 2)
    teacher, rows = trainer.Teacher(model, ids), data.pack(data.pieces(shards, shards.names(), 16, bool), 16)
    slots = shards.read(rows[:2], 16)
    torch.manual_seed(0)
    reads = [torch.randn(2, 16, 32, requires_grad=True) for _ in range(2)]
    chosen = slots.real.flatten().nonzero()[::3, 0]
    loss, gradients, hits = trainer.loss_and_gradients(reads, slots, teacher, chosen, hard=0.25)
    law = (teacher.hidden(slots.following).flatten(0, 1)[chosen] @ teacher.draft_rows.T).softmax(-1)
    goal = 0.75 * law + 0.25 * torch.nn.functional.one_hot(law.argmax(-1), len(ids))
    entropy, total = -(law * law.log()).sum(-1), torch.zeros(())
    for k, read in enumerate(reads):
        live = slots.local.flatten()[chosen] >= k
        logits = read.flatten(0, 1)[chosen] @ teacher.draft_rows.T
        cross = -(goal * logits.log_softmax(-1)).sum(-1) - entropy
        total = total + trainer.DECAY**k / (1 + trainer.DECAY) * cross[live].mean()
        assert hits[k] == pytest.approx(float((logits.argmax(-1) == law.argmax(-1))[live].float().mean()))
    assert loss == pytest.approx(float(total.detach()), rel=1e-4)
    for got, wanted in zip(gradients, torch.autograd.grad(total, reads), strict=True):
        assert torch.allclose(got, wanted, atol=1e-5)


def make_training(model: Any, folder: Path, ids: Tensor | None = None, **settings: Any) -> trainer.Training:
    ids = torch.arange(0, VOCAB, 2) if ids is None else ids
    head = Eagle3Head.from_target(model, ids, feature_scale=data.Shards(folder).scale(32))
    chosen = trainer.Settings(**{"rows": 2, "length": 24, "steps": 3, **settings})
    return trainer.Training(head, trainer.Teacher(model, ids), data.Shards(folder), chosen)


def test_a_resumed_run_is_the_same_run(model: Any, folder: Path, tmp_path: Path) -> None:
    places = [0.05, 0.15, 0.35, 0.5, 0.7, 0.9]
    whole = make_training(model, folder)
    for place in places:
        whole.update(place)
    first, second = make_training(model, folder), make_training(model, folder)
    for place in places[:3]:
        first.update(place)
    trainer.save_checkpoint(tmp_path / "run.pt", first.state_dict())
    second.load_state_dict(torch.load(tmp_path / "run.pt", weights_only=True))
    for place in places[3:]:
        second.update(place)
    assert second.step == whole.step == 6 and (second.epoch, second.batch) == (whole.epoch, whole.batch)
    assert whole.epoch > 0  # the run has gone through all data at least once
    for mine, other in zip(whole.head.parameters(), second.head.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_new_shards_join_at_the_next_epoch(model: Any, written: Tensor, tmp_path: Path) -> None:
    write_shard(tmp_path, 0, model, list(written[:3]))
    training = make_training(model, tmp_path)
    training.update(0.5)
    write_shard(tmp_path, 1, model, list(written[3:]))
    assert training.names == ["shard_0000.safetensors"]
    while training.epoch == 0:
        training.update(0.5)
    training.update(0.5)
    assert training.names == ["shard_0000.safetensors", "shard_0001.safetensors"]


def test_no_shards_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="collect features"):
        data.Shards(tmp_path)


def test_a_run_writes_log_checkpoint_and_head(model: Any, folder: Path, tmp_path: Path) -> None:
    settings = trainer.Settings(steps=2, rows=2, length=24)
    options: dict[str, Any] = dict(held_out=24)
    for steps, options["draft_vocab"] in ((2, 9), (3, 16)):
        trainer.train(model, data.Shards(folder), tmp_path, settings, 60.0, max_steps=steps, resume=True, **options)
    lines = [json.loads(line) for line in (tmp_path / "eagle3.jsonl").read_text().splitlines()]
    events = [line["event"] for line in lines if "event" in line]
    assert events == ["draft vocabulary", "end", "draft vocabulary", "resumed", "end"]
    assert lines[-1]["step"] == 3 and len(lines[-2]["held_out_own"]) == 5
    assert lines[-1]["best"] == max(line["tokens_per_call_own"] for line in lines if "epoch" in line)
    head = Eagle3Head.from_pretrained(tmp_path / "eagle3", dtype=torch.float32)
    used = data.Shards(folder).frequencies(VOCAB, settings.text_share)
    assert used[head.draft_ids].min() >= used.sort().values[-16] and len(head.draft_ids) == 16


def test_unseen_tokens_join_the_vocabulary_by_their_ids(model: Any, tmp_path: Path) -> None:
    write_shard(tmp_path, 0, model, [torch.tensor([20, 21, 20, 30, 30, 30])])
    ids = trainer.draft_vocabulary(data.Shards(tmp_path), VOCAB, 5, 1.0, trainer.Log(tmp_path / "log", 0))
    assert ids.tolist() == [0, 1, 20, 21, 30]


def test_a_head_that_has_learned_its_texts_drafts_them(
    model: Any, folder: Path, written: Tensor, tmp_path: Path
) -> None:
    """End to end: train on what the target wrote, export, load, draft: nearly everything is accepted."""
    training = make_training(model, folder, rows=4, length=40, lr=3e-3, muon_lr=1e-2, ids=torch.arange(VOCAB))
    steps = 150
    agreement = [training.update(0.1 + 0.9 * step / steps)[1] for step in range(steps)]
    assert min(agreement[-1]) > 0.95 > agreement[0][0]
    trainer.export(training.head, tmp_path / "eagle3")
    head = Eagle3Head.from_pretrained(tmp_path / "eagle3", dtype=torch.float32).eval()
    engine = Engine(CausalLMTarget(model, NEW), CoupledRule(), Eagle3Drafter(head))
    rows = TokenPrompt.from_padded(prompts(5)[1:])
    result = engine.decode(rows, torch.arange(4), warp=Warp(temperature=0.0), num_draft_tokens=3)
    assert torch.equal(result.tokens, written[1:, PROMPT:])
    assert result.stats.tokens_per_call > 3.5
