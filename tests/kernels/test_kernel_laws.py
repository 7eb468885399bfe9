"""Laws that verification emits, by chi-square on fixed seeds: a correct kernel fails each 1 time in 1000."""

import pytest
import torch
from scipy import stats

from mediaspec.kernels import philox
from mediaspec.kernels.sample import Warp, probabilities, sample
from mediaspec.kernels.verify_chain import verify_chain
from mediaspec.kernels.verify_tree import verify_tree
from mediaspec.kernels.verify_tree.cases import make_tree

P4, Q4 = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.tensor([0.1, 0.2, 0.3, 0.4])


def p_value(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Chi-square of counts against a law; cells expected below 5 are pooled, impossible ones must be empty."""
    expected = law.double() * counts.sum()
    assert int(counts[law == 0].sum()) == 0
    small = expected < 5
    observed = torch.cat([counts[~small].double(), counts[small].sum()[None].double()])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    keep = expected > 0
    expected = expected[keep] * (observed[keep].sum() / expected[keep].sum())
    return float(stats.chisquare(observed[keep].numpy(), expected.numpy()).pvalue)


def first_tokens(vocab: int, rounds: int, chunk: int, scale: torch.Tensor | None = None):
    """Counts of the first token of guided, top-k'd chain rounds, and the target's law for it."""
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randn(1, 2, 2, vocab, generator=g) * 1.5
    guidance, warp = torch.tensor([2.0]), Warp(top_k=vocab // 3)
    target = probabilities(logits, warp, guidance)[0, 0]
    near = logits[:, :1, :1] * 1.3 + 0.4 * torch.randn(1, 1, 1, vocab, generator=g)
    counts = torch.zeros(vocab, dtype=torch.int64)
    for low in range(0, rounds, chunk):
        seeds = torch.arange(low, low + chunk)
        start = torch.full((chunk,), 17)
        drawn = sample(
            near.expand(chunk, 1, 1, vocab), warp, seeds=seeds, positions=start[:, None], purpose=philox.DRAFT,
            need_probs=True,
        )  # fmt: skip
        verdict = verify_chain(
            logits.expand(chunk, 2, 2, vocab), drawn.tokens, torch.ones(chunk, dtype=torch.int64), warp,
            draft_probs=drawn.probs, seeds=seeds, start=start, guidance=guidance.expand(chunk), scale=scale,
        )  # fmt: skip
        first = torch.where(verdict.num_accepted > 0, drawn.tokens[:, 0], verdict.next_token)
        counts += torch.bincount(first, minlength=vocab)
    return counts, target


def test_exact_chain_emits_the_target_law():
    counts, law = first_tokens(48, 200_000, 20_000)
    assert p_value(counts, law) > 1e-3


def test_the_test_sees_a_relaxed_chain():
    counts, law = first_tokens(48, 20_000, 20_000, scale=torch.tensor([1.5]))
    assert p_value(counts, law) < 1e-6


@pytest.mark.slow
def test_exact_chain_emits_the_target_law_at_1024_tokens():
    counts, law = first_tokens(1024, 200_000, 4_000)
    assert p_value(counts, law) > 1e-3


def one_level(tokens: torch.Tensor, q: torch.Tensor | None, omegas: list[float], rounds: int) -> torch.Tensor:
    """Counts of the emitted first token of a root with `tokens.shape[1]` children over P4."""
    width = tokens.shape[1]
    verdict = verify_tree(
        P4.log().expand(rounds, 1, width + 1, 4), tokens, torch.ones(rounds, dtype=torch.int64),
        make_tree([0] * width), Warp(), draft_probs=None if q is None else q.expand(rounds, 1, 4),
        seeds=torch.arange(rounds), start=torch.full((rounds,), 3), scale=torch.tensor([omegas]),
    )  # fmt: skip
    chosen = tokens.gather(1, (verdict.path - 1).clamp(min=0))[:, 0]
    first = torch.where(verdict.num_accepted > 0, chosen, verdict.next_token)
    return torch.bincount(first, minlength=4)


@pytest.mark.parametrize(
    ("omegas", "emitted"),
    [
        ([1.0, 1.0], [0.4, 0.3, 0.2, 0.1]),
        ([1.0, 1.0, 1.0], [0.4, 0.3, 0.2, 0.1]),
        ([1.5, 1.5], [0.266666666667, 0.283333333333, 0.3, 0.15]),
        ([1.5, 1.0], [0.2875, 0.2625, 0.3, 0.15]),
        ([1.0, 1.5], [0.371428571429, 0.328571428571, 0.2, 0.1]),
    ],
)
def test_sampled_siblings(omegas, emitted):
    """Emitted laws of P4 with children drawn from Q4 without replacement, computed in closed form."""
    rounds = 60_000
    tokens = sample(
        Q4.log().expand(rounds, 1, 1, 4), Warp(), seeds=torch.arange(rounds), positions=torch.full((rounds, 1), 3),
        purpose=philox.DRAFT, width=len(omegas),
    ).tokens[:, 0]  # fmt: skip
    assert p_value(one_level(tokens, Q4, omegas, rounds), torch.tensor(emitted)) > 1e-3


@pytest.mark.parametrize(
    ("omega", "emitted"), [(1.0, [0.4, 0.3, 0.2, 0.1]), (2.0, [0.253968253968, 0.190476190476, 0.355555555556, 0.2])]
)
def test_deterministic_siblings(omega, emitted):
    rounds = 60_000
    tokens = torch.tensor([[3, 2]]).expand(rounds, 2)
    assert p_value(one_level(tokens, None, [omega, omega], rounds), torch.tensor(emitted)) > 1e-3


@pytest.mark.parametrize("mode", ["ratio", "match"])
def test_two_level_tree_emits_the_joint_target_law(mode):
    """Root with two sampled children, each with one: the joint law of two tokens, unfinished rounds completed by P."""
    vocab, rounds = 6, 100_000
    g = torch.Generator().manual_seed(5)
    target = torch.randn(vocab + 1, vocab, generator=g)
    draft = target + 0.8 * torch.randn(vocab + 1, vocab, generator=g)
    tree = make_tree([0, 0, 1, 2])
    seeds, start = torch.arange(rounds), torch.full((rounds,), 9)
    purpose = philox.DRAFT if mode == "ratio" else philox.TARGET

    def children(rows, depth, width):
        return sample(
            draft[rows][:, None], Warp(), seeds=seeds, positions=(start + depth)[:, None].expand(-1, rows.shape[1]),
            purpose=purpose, width=width, need_probs=True,
        )  # fmt: skip

    root = torch.full((rounds, 1), vocab)
    first = children(root, 0, 2)
    level_one = first.tokens[:, 0]
    second = children(level_one, 1, 1)
    tokens = torch.cat([level_one, second.tokens], 1)
    verdict = verify_tree(
        target[torch.cat([root, tokens], 1)][:, None], tokens, torch.full((rounds,), 2), tree, Warp(),
        draft_probs=None if mode == "match" else torch.cat([first.probs, second.probs], 1), seeds=seeds, start=start,
        mode=mode,
    )  # fmt: skip
    walked = tokens.gather(1, (verdict.path - 1).clamp(min=0))
    n = verdict.num_accepted
    one = torch.where(n > 0, walked[:, 0], verdict.next_token)
    completed = sample(
        target[one][:, None, None], Warp(), seeds=seeds + 10**6, positions=start[:, None], purpose=0
    ).tokens[:, 0]  # fmt: skip
    two = torch.where(n > 1, walked[:, 1], torch.where(n == 1, verdict.next_token, completed))
    law = target[vocab].softmax(-1)[:, None] * target[:vocab].softmax(-1)
    assert p_value(torch.bincount(one * vocab + two, minlength=vocab**2), law.flatten()) > 1e-3
    if mode == "match":
        plain = sample(target[root][:, None], Warp(), seeds=seeds, positions=start[:, None], purpose=0).tokens[:, 0]
        assert torch.equal(one, plain)
