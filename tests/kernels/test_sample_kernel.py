"""Sampling: both implementations agree on every case, and the reference alone means what the contract says."""

import pytest
import torch
from scipy import stats

from mediaspec.kernels import philox
from mediaspec.kernels.sample import Warp, probabilities, sample
from mediaspec.kernels.sample.cases import Case, cases

from .conftest import DEVICE, NUMPY_NOISE


def run(case: Case, impl: str, need_probs: bool = True):
    return sample(
        case.logits, case.warp, seeds=case.seeds, positions=case.positions, purpose=philox.TARGET,
        guidance=case.guidance, allowed=case.allowed, forced=case.forced, noise=case.noise, width=case.width,
        need_probs=need_probs, impl=impl,
    )  # fmt: skip


def compare(case: Case) -> None:
    expected, given = run(case, "reference"), run(case, "triton")
    assert torch.equal(given.tokens, expected.tokens)
    assert torch.equal(given.probs == 0, expected.probs == 0)
    torch.testing.assert_close(given.probs, expected.probs, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.filterwarnings(NUMPY_NOISE)
@pytest.mark.parametrize("case", cases(37, device=DEVICE), ids=lambda case: case.name)
def test_triton_agrees(case):
    compare(case)


@pytest.mark.filterwarnings(NUMPY_NOISE)
@pytest.mark.parametrize("vocab", [2, 130])
def test_triton_agrees_at_other_sizes(vocab):
    for case in cases(vocab, batch=1, rows=3, device=DEVICE):
        if case.name in ("top-k", "all", "width", "top-k-ties"):
            compare(case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1000, 16384, 65536])
def test_triton_agrees_on_the_device(vocab, dtype):
    for case in cases(vocab, device="cuda"):
        compare(Case(**{**vars(case), "logits": case.logits.to(dtype)}))


@pytest.mark.parametrize("case", cases(37), ids=lambda case: case.name)
def test_log_law_changes_no_token_and_sums_to_one(case):
    with_law = run(case, "reference")
    assert torch.equal(with_law.tokens, run(case, "reference", need_probs=False).tokens)
    defined = ~with_law.probs.isnan().any(-1)
    torch.testing.assert_close(with_law.probs.sum(-1)[defined], torch.ones(int(defined.sum())))
    first = with_law.tokens if case.width == 1 else with_law.tokens[..., 0]
    assert torch.equal(first >= 0, defined)
    chosen = with_law.probs.gather(-1, first.clamp(min=0)[..., None])[..., 0][defined]
    assert bool((chosen > float("-inf")).all())


def law(logits, warp, **more):
    return probabilities(torch.tensor(logits)[None, :, None] if more.get("guidance") is not None
                       else torch.tensor(logits)[None, None, None], warp, **more)[0, 0]  # fmt: skip


def test_truncations():
    p = torch.tensor([0.4, 0.3, 0.2, 0.1])
    logits = p.log().tolist()
    torch.testing.assert_close(law(logits, Warp(top_k=2)), torch.tensor([4 / 7, 3 / 7, 0, 0]))
    torch.testing.assert_close(law(logits, Warp(top_p=0.5)), torch.tensor([4 / 7, 3 / 7, 0, 0]))
    torch.testing.assert_close(law(logits, Warp(top_p=0.4 - 1e-3)), torch.tensor([1.0, 0, 0, 0]))
    torch.testing.assert_close(law(logits, Warp(top_k=4)), p)
    # top-k first renormalises: 4/9 < .6 <= 7/9 keeps two; top-p first needs .4 + .3 too, but of the whole mass.
    torch.testing.assert_close(law(logits, Warp(top_k=3, top_p=0.75)), torch.tensor([4 / 7, 3 / 7, 0, 0]))
    other = Warp(top_k=3, top_p=0.75, order=("top_p", "top_k"))
    torch.testing.assert_close(law(logits, other), torch.tensor([4 / 9, 3 / 9, 2 / 9, 0]))
    tied = [1.0, 2.0, 1.0, 1.0]
    assert int((law(tied, Warp(top_k=2)) > 0).sum()) == 4
    assert law([3.0, 7.0, 7.0], Warp(temperature=0.0)).tolist() == [0, 1, 0]


def test_guidance_mask_and_forced_token():
    c, u, s = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([0.3, -1.0, 0.0]), 3.0
    guided = law([c.tolist(), u.tolist()], Warp(temperature=2.0), guidance=torch.tensor([s]))
    torch.testing.assert_close(guided, ((u + s * (c - u)) / 2).softmax(-1))
    allowed = torch.tensor([True, False, True])
    masked = law(c.tolist(), Warp(), allowed=allowed)
    torch.testing.assert_close(masked, c.masked_fill(~allowed, float("-inf")).softmax(-1))
    forced = law(c.tolist(), Warp(), allowed=allowed, forced=torch.tensor([[1]]))
    assert forced.tolist() == [0, 1, 0]


def test_rows_do_not_depend_on_their_neighbours():
    case = next(case for case in cases(37, batch=3) if case.name == "top-k-top-p")
    whole = run(case, "reference").tokens
    for b in range(3):
        alone = sample(
            case.logits[b : b + 1],
            case.warp,
            seeds=case.seeds[b : b + 1],
            positions=case.positions[b : b + 1],
            purpose=0,
        )
        assert torch.equal(alone.tokens[0], whole[b])


def test_draws_follow_the_law_and_width_draws_without_replacement():
    """Chi-square at 1e-3 on 40000 fixed draws."""
    p = torch.tensor([0.5, 0.25, 0.15, 0.1])
    rounds = 40000
    logits = p.log().expand(rounds, 1, 1, 4)
    seeds, positions = torch.arange(rounds), torch.full((rounds, 1), 5)
    one = sample(logits, Warp(), seeds=seeds, positions=positions, purpose=0).tokens[:, 0]
    assert stats.chisquare(torch.bincount(one, minlength=4).numpy(), (p * rounds).numpy()).pvalue > 1e-3
    two = sample(logits, Warp(), seeds=seeds, positions=positions, purpose=1, width=2).tokens[:, 0]
    pairs = p[:, None] * p[None] / (1 - p[:, None])
    keep = ~torch.eye(4, dtype=torch.bool)
    counts = torch.bincount(two[:, 0] * 4 + two[:, 1], minlength=16).view(4, 4)
    assert int(counts[~keep].sum()) == 0
    assert (
        stats.chisquare(counts[keep].numpy(), (pairs[keep] * rounds).double().numpy(), sum_check=False).pvalue > 1e-3
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "finite number >= 1e-6"),
        ({"temperature": float("nan")}, "finite number >= 1e-6"),
        ({"temperature": 1e-40}, "0 is greedy"),
        ({"top_k": -1}, "integer >= 0"),
        ({"top_k": 1.5}, "integer >= 0"),
        ({"top_k": 2.0}, "integer >= 0"),
        ({"top_k": float("inf")}, "integer >= 0"),
        ({"top_p": 0.0}, r"\(0, 1\]"),
        ({"order": ("top_k", "top_k")}, "top_p"),
    ],
)
def test_warp_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        Warp(**settings)


def test_shapes_are_checked():
    seeds, positions = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="G = 1 or 2"):
        sample(torch.zeros(1, 3, 1, 4), Warp(), seeds=seeds, positions=positions, purpose=0)
    with pytest.raises(ValueError, match="guidance"):
        sample(torch.zeros(1, 2, 1, 4), Warp(), seeds=seeds, positions=positions, purpose=0)
    with pytest.raises(ValueError, match="width=5"):
        sample(torch.zeros(1, 1, 1, 4), Warp(), seeds=seeds, positions=positions, purpose=0, width=5)
