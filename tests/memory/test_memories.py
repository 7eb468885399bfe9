"""Every memory keeps the promises of the interface, and packed ones say what they are said to say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mediaspec.memory.base import FrameGroup, FrameMemory, MemoryTokens, load_state
from mediaspec.memory.full import FullMemory
from mediaspec.memory.modulated import ModulatedMemory
from mediaspec.memory.pack import FRAMEPACK, PackMemory, split_history
from mediaspec.memory.packers import MeanPacker, PatchPacker, block_layout, token_count
from mediaspec.memory.queries import QueryMemory, QueryPacker
from mediaspec.memory.references import ReferenceRule
from mediaspec.memory.registry import available_memories, make_memory, memory_for
from mediaspec.memory.retrieve import RetrieveMemory
from mediaspec.memory.rotary import block_rope, merged_phase
from mediaspec.memory.sink_window import SinkWindowMemory
from mediaspec.memory.window import WindowMemory
from mediaspec.testing import check_memory

from .cases import CASES

torch.manual_seed(0)
PROJ = nn.Conv3d(4, 16, (1, 2, 2), (1, 2, 2))
BASE = PatchPacker.from_base(PROJ, "k1")
QUERIES = QueryPacker(4, 16, queries=3, frames=4, heads=2)
MODULATED = ModulatedMemory(PROJ).packers
CHECKS = CASES["memory_checks"]
SHORT = ((8, "k4"), (2, "k2"), (1, "k1"))

FACTORIES = {
    "full": (lambda: FullMemory(), False),
    "full with tokens": (lambda: FullMemory(packer=BASE), False),
    "window": (lambda: WindowMemory(5), True),
    "window of nothing": (lambda: WindowMemory(0), True),
    "sink_window": (lambda: SinkWindowMemory(2, 4, packer=BASE), True),
    "sink_window, anchors": (lambda: SinkWindowMemory(0, 3, anchors=(6,)), True),
    "pack, raw": (lambda: PackMemory(), True),
    "pack, mean": (lambda: PackMemory.mean(PROJ), True),
    "pack, endless": (lambda: PackMemory.mean(PROJ, ((None, "k4"), (2, "k2"), (1, "k1"))), False),
    "pack, tokens": (lambda: PackMemory.mean(PROJ, store="tokens"), True),
    "pack, tokens, mean tail": (lambda: PackMemory.mean(PROJ, SHORT, store="tokens", tail="mean"), True),
    "pack, tokens, append tail": (
        lambda: PackMemory.mean(PROJ, SHORT, store="tokens", tail="append"),
        False,
    ),
    "queries": (lambda: QueryMemory(8, QUERIES, BASE, recent=2), True),
    "queries, tokens, endless": (lambda: QueryMemory(None, QUERIES, BASE, recent=2, store="tokens"), False),
    "modulated": (lambda: _with_packers(ModulatedMemory(PROJ), MODULATED), True),
    "retrieve": (lambda: RetrieveMemory(3, 2), False),
    "retrieve, pose": (lambda: RetrieveMemory(3, 2, score="pose", packer=BASE), False),
    "retrieve, hybrid": (lambda: RetrieveMemory(3, score="hybrid"), False),
}  # fmt: skip


def _with_packers(memory: PackMemory, packers) -> PackMemory:
    memory.packers = packers
    return memory


@pytest.mark.parametrize("name", FACTORIES)
def test_conformance(name):
    factory, bounded = FACTORIES[name]
    check_memory(factory, bounded=bounded)


def test_the_suite_finds_broken_memories():
    class Forgets(WindowMemory):
        def _contents(self):
            return {"ids": torch.zeros(0, dtype=torch.int64)}

    class Mixes(FullMemory):
        def _read(self, *args):
            read = super()._read(*args)
            return self._shown(FrameGroup(read.frames.flip(2), read.frame_ids))

    with pytest.raises(AssertionError, match="after loading|loaded"):
        check_memory(lambda: Forgets(3))
    with pytest.raises(AssertionError, match="other frames than written"):
        check_memory(lambda: Mixes())
    with pytest.raises(AssertionError, match="grows"):
        check_memory(lambda: FullMemory(), bounded=True)


def test_names():
    assert available_memories() == sorted(
        ["full", "window", "sink_window", "pack", "queries", "modulated", "retrieve"]
    )
    assert make_memory("window", last=2).last == 2
    with pytest.raises(ValueError, match="did you mean 'sink_window'"):
        make_memory("sink-windo")
    with pytest.raises(ValueError, match="cannot be made with"):
        make_memory("window", size=3)
    assert memory_for(ReferenceRule()) is None
    rules: dict[type[FrameMemory], ReferenceRule] = {
        WindowMemory: ReferenceRule.recent(3),
        SinkWindowMemory: ReferenceRule.sink_last(2, 3),
        PackMemory: ReferenceRule.packed(((4, "k2"), (1, "k1"))),
        RetrieveMemory: ReferenceRule.retrieve(2, 1),
        FullMemory: ReferenceRule.all_kv(),
    }
    frames = torch.randn(1, 4, 12, 8, 8)
    for kind, rule in rules.items():
        memory = memory_for(rule)
        assert type(memory) is kind
        memory.write(frames)
        if rule.kind != "retrieve":
            assert memory.read().frame_ids[0].tolist() == rule.frame_ids(range(12))


# ---- packing


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_mean_weights_are_average_pooling(k, dtype):
    """The packer with mean weights, its shortcut, and the base patch of pooled latents written out."""
    g = torch.Generator().manual_seed(k)
    base = nn.Conv3d(3, 2, (1, 2, 2), (1, 2, 2), dtype=dtype)
    frames = torch.randn(2, 3, 4, 8, 8, generator=g, dtype=dtype)
    pooled = frames.unflatten(4, (-1, k)).unflatten(3, (-1, k)).unflatten(2, (-1, k)).mean((3, 5, 7))
    wanted = base(pooled).flatten(2).transpose(1, 2)
    tolerance = 1e-9 if dtype == torch.float64 else 2e-5
    case = CHECKS[f"mean_init_equals_avgpool_k{k}"]
    assert (
        case["max_gap"] < 1e-12
        and list(wanted.transpose(1, 2).unflatten(2, case["shape"][1:]).shape[2:]) == case["shape"][1:]
    )
    for packer in (PatchPacker.from_base(base, f"k{k}"), MeanPacker(base, f"k{k}")):
        torch.testing.assert_close(packer(frames), wanted, rtol=tolerance, atol=tolerance)


def test_packed_memory_without_training_is_pooled_latents():
    """What the k4 group shows is the base embedding of 4x average-pooled frames, no more and no less."""
    frames = torch.randn(1, 4, 20, 8, 8, generator=torch.Generator().manual_seed(3))
    memory = PackMemory.mean(PROJ)
    with torch.no_grad():
        memory.write(frames)
        tokens = memory.read().tokens
        pooled = torch.nn.functional.avg_pool3d(frames[:, :, 1:17], 4)
        wanted = PROJ(pooled).flatten(2).transpose(1, 2)
    torch.testing.assert_close(tokens.values[:, 16:20], wanted, rtol=1e-5, atol=1e-5)
    assert tokens.counts[16:20].tolist() == [64] * 4 and tokens.counts[:16].tolist() == [1] * 16
    assert tokens.times[0, 16].tolist() == [1, 2, 3, 4] and tokens.positions[0, 16].tolist() == [2.5, 1.5, 1.5]


def test_rotary_phases_of_merged_tokens():
    for case in CHECKS["rope_pool"]:
        centre = torch.tensor(case["n"] + (case["k"] - 1) / 2, dtype=torch.float64)
        rate = torch.tensor([case["theta"]], dtype=torch.float64)
        cos, sin = merged_phase(centre, torch.tensor(case["k"]), rate, "mean")
        assert float(cos) == pytest.approx(case["re"], abs=1e-12)
        assert float(sin) == pytest.approx(case["im"], abs=1e-12)
        cos, sin = merged_phase(centre, torch.tensor(case["k"]), rate, "centre")
        assert case["shrink"] * float(cos) == pytest.approx(case["re"], abs=1e-12)
        assert float(cos) ** 2 + float(sin) ** 2 == pytest.approx(1)
    with pytest.raises(ValueError, match="allowed are 'mean'"):
        merged_phase(torch.tensor(0.0), torch.tensor(1), torch.ones(1), "center")  # type: ignore[arg-type]


def test_rotary_of_a_memory_is_the_average_over_its_cells():
    ids = torch.tensor([[3, 4, 9, 12]])
    layout = block_layout(ids, 8, 12, (2, 4, 4))
    tokens = MemoryTokens(torch.zeros(1, len(layout[3]), 1), *layout)
    rates = tuple(torch.tensor([1.0, r], dtype=torch.float64) for r in (0.3, 2.0, 0.7))
    cos, sin = block_rope(tokens, rates, "mean")  # type: ignore[arg-type]
    for l, (times, place) in enumerate(zip(tokens.times[0], tokens.positions[0])):
        cells = [times.double(), place[1] + torch.tensor([-0.5, 0.5]), place[2] + torch.tensor([-0.5, 0.5])]
        wanted = torch.cat([torch.exp(1j * c.double()[:, None] * r).mean(0) for c, r in zip(cells, rates)])
        torch.testing.assert_close(cos[0, l], wanted.real)
        torch.testing.assert_close(sin[0, l], wanted.imag)
    centre = block_rope(tokens, rates)  # type: ignore[arg-type]
    torch.testing.assert_close(centre[0] ** 2 + centre[1] ** 2, torch.ones_like(centre[0]))


def test_log_count_bias():
    """Merged keys with ln(count) added attend exactly like the keys that they stand for."""
    g = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(1, n, 4, generator=g, dtype=torch.float64) for n in (2, 3, 3))
    count = torch.tensor([1, 4, 2])
    tokens = MemoryTokens(k, torch.zeros(1, 3, 3), torch.zeros(1, 3, 1), torch.ones(3, 2), count)
    attend = torch.nn.functional.scaled_dot_product_attention
    whole = attend(q, k.repeat_interleave(count, 1), v.repeat_interleave(count, 1))
    bias = tokens.log_count_bias().expand(1, 2, 3)
    assert float((attend(q, k, v, bias) - whole).abs().max()) < max(CHECKS["log_count_bias"]["gap_with_bias"], 1e-12)
    assert float((attend(q, k, v) - whole).abs().max()) > 0.01 and CHECKS["log_count_bias"]["gap_without"] > 0.01


def test_edges_repeat_and_do_not_count():
    layout = block_layout(torch.tensor([[5, 6, 7]]), 5, 7, (2, 4, 4))
    positions, times, spans, counts = layout
    assert positions.shape == (1, token_count(3, 5, 7, "k2"), 3) == (1, 8, 3)
    assert times[0, -1].tolist()[0] == 7 and bool(times[0, -1, 1].isnan())
    assert spans.tolist()[:4] == [[2, 2], [2, 2], [1, 2], [1, 2]]
    assert int(counts.sum()) == 3 * 3 * 4  # base patches of 3 frames of 5 x 7 cells
    packer = PatchPacker(4, 8, "k2")
    assert packer(torch.zeros(1, 4, 3, 5, 7)).shape == (1, 8, 8)
    assert MeanPacker(PROJ, "k2")(torch.zeros(1, 4, 3, 5, 7)).shape == (1, 8, 16)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 60), st.integers(0, 3), st.booleans())
def test_groups_hold_the_newest_frames_at_the_finest_rate(count, sink, tokens):
    memory = PackMemory.mean(PROJ, sink=sink, store="tokens" if tokens else "frames")
    with torch.no_grad():
        for i in range(count):
            memory.write(torch.full((1, 4, 1, 8, 8), float(i)))
        read = memory.read()
    if count == 0:
        assert read.is_empty
        return
    assert memory.max_frames == sink + 19 + (4 if tokens else 0)
    assert memory.frames_held <= memory.max_frames
    held = read.tokens
    rate = {i: float("inf") for i in range(count)}
    for l in range(len(held)):
        for t in held.times[0, l].tolist():
            if t == t:
                rate[int(t)] = min(rate[int(t)], int(held.counts[l]))
    assert all(rate[i] == 1 for i in range(min(sink, count)))
    older = [rate[i] for i in range(sink, count)]
    assert all(a >= b for a, b in zip(older, older[1:]))
    recent = max(count - sink, 0)
    assert all(r == 1 for r in older[recent - min(recent, 1) :])
    assert all(r < float("inf") for r in older[recent - min(recent, 19) :])
    if not tokens:
        places = split_history(min(recent, 19), (16, 2, 1))
        sizes = [end - start for start, end in places]
        assert [len({i for i, r in enumerate(older) if r != float("inf")})] == [sum(sizes)]


def test_an_endless_memory_compresses():
    """480 frames: as latents 7.9 MB, as tokens at k4 a few per cent of it; the first frames are still there."""
    groups = ((None, "k4"), (2, "k2"), (1, "k1"))
    memory, full = PackMemory.mean(PROJ, groups, store="tokens"), FullMemory()
    with torch.no_grad():
        for start in range(0, 480, 12):
            frames = torch.randn(1, 4, 12, 16, 16, generator=torch.Generator().manual_seed(start))
            memory.write(frames)
            full.write(frames)
        tokens = memory.read().tokens
    assert memory.nbytes < 0.07 * full.nbytes
    assert float(tokens.times[0, 64:].nan_to_num(1e9).min()) == 1 and memory.frames_held == 480


def test_tails():
    groups = ((4, "k4"), (2, "k2"), (1, "k1"))
    frames = torch.randn(1, 4, 40, 8, 8, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        mean, append, delete = (
            PackMemory.mean(PROJ, groups, sink=0, store="tokens", tail=tail) for tail in ("mean", "append", "delete")
        )
        for memory in (mean, append, delete):
            memory.write(frames)
        gone = mean._lost
        wanted = PROJ(torch.nn.functional.avg_pool3d(frames[:, :, : 4 * gone].mean(2, keepdim=True), (1, 4, 4)))
        held, each, plain = mean.read().tokens, append.read().tokens, delete.read().tokens
    torch.testing.assert_close(held.values[:, :1], wanted.flatten(2).transpose(1, 2), rtol=1e-4, atol=1e-4)
    assert gone == 8 and int(held.counts[0]) == 64 * gone and len(held) == len(plain) + 1
    assert len(each) == len(plain) + gone and each.times[0, 1].tolist() == [4, 5, 6, 7]
    assert each.spans[0].tolist() == [4, 4] and int(each.counts[0]) == 64
    assert mean.frames_held == append.frames_held == 40 > delete.frames_held
    with torch.no_grad():
        aged = ModulatedMemory(PROJ, groups, sink=0, store="tokens", tail="mean")
        aged.write(frames)
        before = aged.read([40]).tokens.values
        for packer in aged.packers:
            packer.net[-1].bias.fill_(0.5)
        after = aged.read([40]).tokens.values
    torch.testing.assert_close(after, before * 1.5 + 0.5)  # the tail too


def test_gradients_reach_the_packers():
    proj = nn.Conv3d(4, 16, (1, 2, 2), (1, 2, 2))
    packers = [PatchPacker.from_base(proj, k) for _, k in FRAMEPACK]
    memory = PackMemory(FRAMEPACK, packers)
    memory.write(torch.randn(1, 4, 20, 8, 8))
    memory.read().tokens.values.square().sum().backward()
    assert all(float(p.proj.weight.grad.abs().max()) > 0 for p in packers)
    queries = QueryPacker(4, 16, 3, 4, heads=2)
    held = QueryMemory(8, queries, packers[-1])
    held.write(torch.randn(1, 4, 12, 8, 8))
    held.read().tokens.values.square().sum().backward()
    assert float(queries.queries.grad.abs().max()) > 0


def test_modulation_starts_as_the_identity_and_sees_age():
    memory, plain = ModulatedMemory(PROJ, actions=2), PackMemory.mean(PROJ)
    frames = torch.randn(2, 4, 20, 8, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        memory.write(frames)
        plain.write(frames)
        with pytest.raises(ValueError, match="set_condition"):
            memory.read([20])
        memory.set_condition(torch.ones(2, 2), 0.5)
        torch.testing.assert_close(memory.read([20]).tokens.values, plain.read().tokens.values)
        for packer in memory.packers:
            packer.net[-1].weight.fill_(0.1)
        early, late = memory.read([20]).tokens.values, memory.read([40]).tokens.values
    assert float((early - late).abs().max()) > 1e-3


def test_retrieval_finds_the_needle_for_each_video():
    frames = torch.randn(2, 4, 30, 8, 8, generator=torch.Generator().manual_seed(4))
    memory = RetrieveMemory(1, 2)
    memory.write(frames)
    query = torch.stack([frames[0, :, 7], frames[1, :, 11]])[:, :, None]
    assert memory.read(query=query).frame_ids.tolist() == [[7, 28, 29], [11, 28, 29]]
    angles = torch.linspace(0, 6.0, 30)[None, :, None].expand(2, -1, -1)
    turning = RetrieveMemory(1, score="pose", period=2 * torch.pi)
    turning.write(frames, poses=angles)
    assert turning.read(pose=torch.tensor([[-0.3], [0.2]])).frame_ids.tolist() == [[29], [1]]
    with pytest.raises(ValueError, match="needs the pose"):
        turning.read()
    with pytest.raises(ValueError, match="needs poses"):
        turning.write(frames)
    with pytest.raises(ValueError, match="poses hold NaN"):
        turning.write(frames, range(30, 60), poses=angles * float("nan"))
    own = angles.clone()
    copied = RetrieveMemory(1, score="pose")
    copied.write(frames, poses=own)
    own.zero_()
    assert copied.read(pose=torch.tensor([[6.0], [6.0]])).frame_ids.tolist() == [[29], [29]]


def test_wrong_settings_are_refused(tmp_path):
    for call in (
        lambda: WindowMemory(-1),
        lambda: RetrieveMemory(1, score="size"),
        lambda: PackMemory(((1, "k1"), (None, "k2"))),
        lambda: PackMemory(((1, "k3"),)),
        lambda: PackMemory(store="tokens"),
        lambda: PackMemory(FRAMEPACK, [BASE]),
        lambda: PackMemory.mean(PROJ, ((6, "k4"), (1, "k1")), store="tokens"),
        lambda: PackMemory.mean(PROJ, tail="mean"),
        lambda: PatchPacker.from_base(PROJ, (1, 3, 3)),
        lambda: FullMemory(level=1.0),
    ):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(ValueError, match="memory 'full', not 'window'"):
        WindowMemory(3).load_state_dict(FullMemory().state_dict())
    (tmp_path / "bad.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(ValueError, match="damaged"):
        load_state(tmp_path / "bad.safetensors")
    with pytest.raises(ValueError, match="no state file"):
        load_state(tmp_path / "none.safetensors")
