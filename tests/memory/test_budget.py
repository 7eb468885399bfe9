"""Tokens, operations and bytes of a memory, before a run and during it, and the end of the trained length."""

from __future__ import annotations

import ast

import pytest
import torch

from mediaspec.memory.budget import TrainedLength, call_cost, geometric_tokens, history_tokens, step_cost
from mediaspec.memory.full import FullMemory
from mediaspec.memory.pack import PackMemory
from mediaspec.memory.packers import PatchPacker, token_count
from mediaspec.memory.schedule_presets import make_schedule

from .cases import CASES

WANTED = CASES["compression"]
WAN = {"dim": 1536, "ffn": 8960, "layers": 30}
FRAME = WANTED["frame_tokens"]


def test_tokens():
    height, width = WANTED["latent_hw"]
    assert token_count(1, height, width, "k1") == FRAME
    groups = [(1, "k1"), (1, "k1"), (2, "k2"), (16, "k4")]
    assert history_tokens(height, width, groups) == (WANTED["framepack_groups"], WANTED["framepack_history"])
    assert token_count(9, height, width, "k1") == WANTED["framepack_new9"]
    assert token_count(20, height, width, "k1") == WANTED["framepack_uncompressed_20"]
    assert token_count(1, height, width, "far") == WANTED["far_compressed_frame"]
    for kernel, count in WANTED["kernels"].items():
        assert token_count(16, height, width, ast.literal_eval(kernel)) == count
    square = WANTED["square_64"]
    assert token_count(1, 8, 8, "k1") == square["px64_vae8"]
    assert token_count(1, 64, 64, (1, 8, 8)) == square["px64_pixel"]
    assert [token_count(48, 8, 8, k) for k in ("k1", "k2", "k4")] == [
        square[f"hist48_{k}"] for k in ("k1", "k2", "k4")
    ]


def test_a_real_memory_has_those_tokens():
    """FramePack's history at 480p, counted on the memory itself."""
    packers = [PatchPacker(1, 1, k) for k in ("k4", "k2", "k1")]
    memory = PackMemory(packers=packers)
    with torch.no_grad():
        memory.write(torch.zeros(1, 1, 30, *WANTED["latent_hw"]))
        read = memory.read()
    assert len(read.tokens) == WANTED["framepack_history"]
    assert int(read.tokens.counts.sum()) == 20 * FRAME
    assert memory.nbytes == 20 * 60 * 104 * 4


def test_geometric_budget():
    for count, wanted in WANTED["geometric"].items():
        made = geometric_tokens(FRAME, 2.0, int(count), 9)
        for key, value in wanted.items():
            assert made[key] == pytest.approx(value, rel=1e-9)
        assert made["hist"] <= 2 * FRAME
    with pytest.raises(ValueError, match="more than 1"):
        geometric_tokens(FRAME, 1.0, 4, 9)


COSTS = {
    "none": (0, "cache"),
    "full18_cache": (18 * FRAME, "cache"),
    "full18_recompute": (18 * FRAME, "recompute"),
    "full117_cache": (117 * FRAME, "cache"),
    "packed_cache": (WANTED["framepack_history"], "cache"),
    "packed_recompute": (WANTED["framepack_history"], "recompute"),
    "sink3_local9_cache": (9 * FRAME, "cache"),
}


def test_every_cost_is_here():
    assert set(COSTS) == set(WANTED["cost_wan13b"])


@pytest.mark.parametrize("name", COSTS)
def test_cost_of_a_call(name):
    history, mode = COSTS[name]
    cost, wanted = call_cost(3 * FRAME, history, **WAN, mode=mode), WANTED["cost_wan13b"][name]
    for key, value in wanted.items():
        assert getattr(cost, key) == value


def test_cost_of_other_entries():
    plain = call_cost(4680, 0, **WAN)
    channel = call_cost(4680, 999, **WAN, mode="channel", channel_cells=16 * 3 * 4)
    assert channel.total_flops == plain.total_flops + 2 * 4680 * 192 * 1536 and channel.kv_bytes == 0
    cross = call_cost(4680, 1560, **WAN, mode="cross", cross_layers=2)
    assert cross.attn_flops == plain.attn_flops + 4 * 4680 * 1560 * 1536 * 2
    assert cross.linear_flops == plain.linear_flops + 2 * (2 * 4680 + 2 * 1560) * 1536**2 * 2
    with pytest.raises(ValueError, match="allowed are recompute"):
        call_cost(1, 1, **WAN, mode="none")


def test_cost_of_a_step():
    schedule = make_schedule("self_forcing")
    cost = step_cost(schedule, FRAME, 18 * FRAME, **WAN)
    one = call_cost(3 * FRAME, 18 * FRAME, **WAN).total_flops
    assert cost["calls"] == 4 and cost["flops"] == 5 * one and cost["flops_per_frame"] == 5 * one / 3
    assert (
        step_cost(make_schedule("fifo"), FRAME, 0, **WAN)["flops"] == 8 * call_cost(16 * FRAME, 0, **WAN).total_flops
    )


def test_trained_length():
    memory = FullMemory(packer=PatchPacker(4, 8))
    with torch.no_grad():
        memory.write(torch.randn(1, 4, 10, 4, 4))
        read = memory.read()
    window = [10, 11]
    assert TrainedLength(12).fit(read, window) is read
    with pytest.raises(ValueError, match="ids 0 to 11"):
        TrainedLength(11).fit(read, window)
    with pytest.raises(ValueError, match="window of 2 frames"):
        TrainedLength(1, "crop").fit(read, window)
    crop = TrainedLength(6, "crop").fit(read, window)
    assert crop.frame_ids.tolist() == [[6, 7, 8, 9]] and len(crop.tokens) == 4 * 4
    assert torch.equal(crop.frames, read.frames[:, :, 6:])
    moved = TrainedLength(6, "reindex", keep=1).fit(read, window)
    assert moved.frame_ids.tolist() == [[6, 7, 8, 9]]  # the first frame now stands right before the last three
    assert torch.equal(moved.frames, read.frames[:, :, [0, 7, 8, 9]])
    assert sorted(set(moved.tokens.positions[0, :, 0].tolist())) == [6, 7, 8, 9]
    assert torch.equal(moved.tokens.values[:, :4], read.tokens.values[:, :4])
    later = TrainedLength(6, "reindex").fit(read, [20, 21])
    assert later.frame_ids.tolist() == [[16, 17, 18, 19]]
    with pytest.raises(ValueError, match="allowed are 'error'"):
        TrainedLength(6, "stop")  # type: ignore[arg-type]
    nothing = TrainedLength(2, "reindex").fit(read, window)
    assert nothing.is_empty
