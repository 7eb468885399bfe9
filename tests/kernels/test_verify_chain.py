"""Chain verification: both implementations agree on every case, and the reference means what the contract says."""

from dataclasses import replace

import pytest
import torch

from mediaspec.core.rng import ACCEPT, TARGET, RowRng
from mediaspec.kernels import philox
from mediaspec.kernels.sample import Warp, sample
from mediaspec.kernels.verify_chain import verify_chain
from mediaspec.kernels.verify_chain.cases import Case, cases, run
from mediaspec.kernels.verify_chain.reference import band_residual

from .conftest import DEVICE, NUMPY_NOISE


def compare(case: Case, need_choices: bool = False, need_probs: bool = False) -> None:
    expected = run(case, "reference", need_choices, need_probs)
    given = run(case, "triton", need_choices, need_probs)
    assert torch.equal(given.num_accepted, expected.num_accepted)
    assert torch.equal(given.next_token, expected.next_token)
    torch.testing.assert_close(given.drift, expected.drift, rtol=1e-4, atol=1e-5)
    assert (given.choices is None) == (expected.choices is None)
    if expected.choices is not None:
        assert torch.equal(given.choices, expected.choices)
    assert (given.target_probs is None) == (expected.target_probs is None)
    if expected.target_probs is not None:
        torch.testing.assert_close(given.target_probs, expected.target_probs, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.filterwarnings(NUMPY_NOISE)
@pytest.mark.parametrize("case", cases(37, batch=2, length=3, device=DEVICE), ids=lambda case: case.name)
def test_triton_agrees(case):
    compare(case)


@pytest.mark.filterwarnings(NUMPY_NOISE)
@pytest.mark.parametrize(("vocab", "batch", "length"), [(5, 1, 1), (70, 1, 5), (16, 3, 2)])
def test_triton_agrees_at_other_sizes(vocab, batch, length):
    for case in cases(vocab, batch, length, device=DEVICE, seed=vocab):
        if case.name in ("exact", "ragged", "omega-band", "guided", "match"):
            compare(case, need_choices=case.name == "exact", need_probs=case.name in ("exact", "match"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "batch", "length"), [(1000, 3, 5), (16384, 2, 5), (65536, 2, 3)])
def test_triton_agrees_on_the_device(vocab, batch, length, dtype):
    for case in cases(vocab, batch, length, device="cuda"):
        compare(replace(case, target_logits=case.target_logits.to(dtype)))


@pytest.mark.gpu
def test_no_host_sync_on_the_device():
    for case in cases(1000, 2, 3, device="cuda"):
        run(case)
        torch.cuda.set_sync_debug_mode("error")
        try:
            verdict = run(case)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert verdict.next_token.shape == (2,)


# Four rows of three drafts over four tokens. Laws, uniforms and noise are written out; the expected values were
# computed in float64 from arXiv:2601.09212 (accept min(1, omega P / Q), residual [P - Q f]_+, argmax(w / noise)).
DRAFT = [[2, 3, 0], [1, 3, 1], [3, 1, 2], [1, 2, 3]]
A, B_, C, D = [0.4, 0.3, 0.2, 0.1], [0.1, 0.4, 0.3, 0.2], [0.2, 0.1, 0.4, 0.3], [0.3, 0.2, 0.1, 0.4]
TARGET_LAWS = [[A, B_, C, D], [B_, C, D, A], [C, D, A, B_], [D, A, B_, C]]
E_, F, G, H = [0.1, 0.2, 0.3, 0.4], [0.4, 0.1, 0.2, 0.3], [0.3, 0.4, 0.1, 0.2], [0.2, 0.3, 0.4, 0.1]
DRAFT_LAWS = [[E_, F, G], [G, H, E_], [E_, F, G], [G, H, E_]]
UNIFORMS = [[0.3, 0.9, 0.1], [0.97, 0.6, 0.99], [0.35, 0.65, 0.97], [0.85, 0.25, 0.25]]
NOISE = [[0.71, 1.93, 0.42, 1.13], [0.23, 0.94, 1.61, 0.55], [1.37, 0.64, 2.21, 0.47], [0.83, 0.36, 0.58, 1.74]]


@pytest.mark.filterwarnings(NUMPY_NOISE)
@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize(
    ("omega", "accepted", "emitted", "ledger"),
    [
        ([1.0, 1.0, 1.0], [1, 3, 3, 0], [2, 0, 1, 3], [0.0, 0.0, 0.0, 0.0]),
        ([2.0, 1.2, 0.8], [1, 2, 3, 3], [2, 0, 1, 2], [0.26, 0.12, 0.28, 0.24]),
        ([9.0, 9.0, 9.0], [3, 3, 3, 3], [0, 0, 1, 2], [1.2, 0.6, 0.6, 0.6]),
    ],
)
def test_written_out_example(impl, omega, accepted, emitted, ledger):
    verdict = verify_chain(
        torch.tensor(TARGET_LAWS).log()[:, None].to(DEVICE), torch.tensor(DRAFT, device=DEVICE),
        torch.full((4,), 3, device=DEVICE), Warp(), draft_probs=torch.tensor(DRAFT_LAWS).to(DEVICE),
        seeds=torch.zeros(4, dtype=torch.int64, device=DEVICE), start=torch.zeros(4, dtype=torch.int64, device=DEVICE),
        scale=torch.tensor(omega, device=DEVICE), uniforms=torch.tensor(UNIFORMS, device=DEVICE),
        noise=torch.tensor(NOISE, device=DEVICE)[:, None].expand(-1, 4, -1), impl=impl,
    )  # fmt: skip
    assert verdict.num_accepted.tolist() == accepted
    assert verdict.next_token.tolist() == emitted
    torch.testing.assert_close(verdict.drift.sum(1).cpu(), torch.tensor(ledger), rtol=0, atol=1e-5)


def test_band_residual_of_the_two_row_fixture():
    p, q = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    accepted = torch.minimum(q, 1.5 * p)
    emitted = accepted + band_residual(p, accepted)
    torch.testing.assert_close(emitted, torch.tensor([0.3142857, 0.2357143, 0.3, 0.15]))
    assert band_residual(p, p).abs().sum() < 1e-6


def test_rows_do_not_depend_on_their_neighbours():
    for case in cases(37, batch=3, length=3):
        if case.name not in ("omega", "guided", "match", "forced"):
            continue
        whole = run(case)
        for b in range(3):
            row = slice(b, b + 1)
            parts = {
                name: value[row]
                for name, value in vars(case).items()
                if isinstance(value, torch.Tensor) and name not in ("allowed", "scale", "offset")
            }
            alone = run(replace(case, **parts))
            assert torch.equal(alone.num_accepted, whole.num_accepted[row])
            assert torch.equal(alone.next_token, whole.next_token[row])


def test_stored_numbers_change_nothing():
    for case in cases(37, batch=2, length=3):
        if case.name not in ("omega", "point", "match"):
            continue
        rng = RowRng(case.seeds, 37, horizon=16)
        positions = case.start[:, None] + torch.arange(4)
        stored = replace(case, noise=rng.noise(positions, TARGET), uniforms=rng.uniform(positions[:, :3], ACCEPT))
        assert torch.equal(run(case).next_token, run(stored).next_token)
        assert torch.equal(run(case).num_accepted, run(stored).num_accepted)


def test_match_emits_the_tokens_of_plain_sampling():
    case = next(case for case in cases(37, batch=2, length=3) if case.name == "match-all")
    positions = case.start[:, None] + torch.arange(4)
    plain = sample(
        case.target_logits, case.warp, seeds=case.seeds, positions=positions, purpose=philox.TARGET,
        guidance=case.guidance, allowed=case.allowed, forced=case.forced, noise=case.noise,
    ).tokens  # fmt: skip
    for right in range(4):
        tokens = plain[:, :3].clone()
        if right < 3:
            tokens[:, right] = (tokens[:, right] + 1) % 37
        verdict = run(replace(case, tokens=tokens, lengths=torch.tensor([3, 3])))
        assert verdict.num_accepted.tolist() == [right, right]
        assert torch.equal(verdict.next_token, plain[:, right])
        assert torch.equal(verdict.choices, plain)


def test_none_is_scale_one():
    exact, ones = (next(case for case in cases(37) if case.name == name) for name in ("exact", "exact-ones"))
    first, second = run(exact), run(ones)
    assert torch.equal(first.num_accepted, second.num_accepted) and torch.equal(first.next_token, second.next_token)
    assert float(second.drift.abs().max()) < 1e-6 and not bool(first.drift.any())


def test_undefined_laws_are_reported_and_only_where_needed():
    found = {case.name: case for case in cases(37, batch=2, length=3)}
    verdict = run(found["broken"])
    assert verdict.next_token.tolist() == [-1, -1] and verdict.num_accepted.tolist() == [0, 0]
    assert not bool(verdict.drift.any())
    # A fault behind the first rejection does not matter: row 1 of `broken` fails at its last position only.
    refused = replace(found["broken"], uniforms=torch.full((2, 3), 1 - 2**-24), scale=torch.zeros(3))
    assert run(refused).next_token.tolist()[0] == -1 and run(refused).next_token.tolist()[1] >= 0
    nothing = replace(found["exact"], allowed=torch.zeros(37, dtype=torch.bool))
    assert run(nothing).next_token.tolist() == [-1, -1]


def test_forced_positions_need_no_draw_and_cost_nothing():
    found = {case.name: case for case in cases(37, batch=2, length=3)}
    forced = replace(found["forced"], uniforms=torch.full((2, 3), 1 - 2**-24))
    verdict = run(forced)
    assert int(verdict.num_accepted[0]) >= 1 and float(verdict.drift[0, 0]) == 0
    refused = found["refused"]
    verdict = run(replace(refused, uniforms=torch.zeros(2, 3)))
    assert verdict.num_accepted.tolist() == [1, 1]
    assert torch.equal(verdict.next_token, refused.forced[:, 1])


def test_no_token_of_zero_target_mass_is_emitted():
    """u = 0 is the strictness test: `<=` would accept a token the target excludes."""
    case = next(case for case in cases(37) if case.name == "exact")
    allowed = torch.ones(37, dtype=torch.bool)
    allowed[case.tokens[:, 0]] = False
    verdict = run(replace(case, allowed=allowed, uniforms=torch.zeros(2, 3)))
    assert verdict.num_accepted.tolist() == [0, 0] and bool(allowed[verdict.next_token].all())


def test_shapes_and_names_are_checked():
    case = cases(5)[0]
    with pytest.raises(ValueError, match="K >= 1"):
        run(replace(case, tokens=case.tokens[:, :2]))
    with pytest.raises(ValueError, match="scale has shape"):
        run(replace(case, scale=torch.ones(2)))
    with pytest.raises(ValueError, match="draft_probs has shape"):
        run(replace(case, draft_probs=case.draft_probs[:, :2]))
    with pytest.raises(ValueError, match="'ratio' or 'match'"):
        run(replace(case, mode="greedy"))
    with pytest.raises(ValueError, match="'gstar' or 'band'"):
        run(replace(case, residual="standard"))


@pytest.mark.parametrize("case", [c for c in cases(37, batch=3) if c.mode == "ratio"], ids=lambda case: case.name)
def test_a_row_alone_and_in_a_batch(case):
    """One row on the CPU takes a path of its own; it decides what the same row decides in a batch."""
    together = run(case, "reference")
    for b in range(3):
        one = {
            name: value[b : b + 1]
            for name, value in vars(case).items()
            if isinstance(value, torch.Tensor) and value.shape[:1] == (3,) and name not in ("allowed",)
        }
        if case.name not in ("omega-by-row",):
            one = {name: value for name, value in one.items() if name not in ("scale", "offset")}
        alone = run(replace(case, **one), "reference")
        assert torch.equal(alone.num_accepted[0], together.num_accepted[b])
        assert torch.equal(alone.next_token[0], together.next_token[b])
        torch.testing.assert_close(alone.drift[0], together.drift[b])
