"""Conformance suite for acceptance rules: does the rule do what it says of itself?

B rows, K draft length, V vocabulary; P, Q, a, m as in `core.law`. All numbers come from the counter-based generator: a
run is reproducible. A right rule fails one of the about ten chi-square tests with probability 1e-6 each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ..core import rng as purposes
from ..core.law import RESIDUALS, emitted_law, one_step_drift
from ..core.ledger import LEDGERS
from ..core.rng import RowRng
from ..core.tree import TreeSpec
from ..core.types import Draft, Verdict, Warp
from ..core.verify import VerifyInputs
from ..kernels.sample import sample
from ..rules.base import GUARANTEES, AcceptanceRule

__all__ = ["check_rule", "chi_square_p_value"]

LENGTH = 3
TOLERANCE = 2e-5
ALARM = 1e-6


def check_rule(
    rule: AcceptanceRule,
    *,
    vocab_size: int = 24,
    seed: int = 0,
    rounds: int = 20_000,
    prepare: Callable[[AcceptanceRule], None] | None = None,
) -> None:
    """Checks a rule's statements about itself: by exact laws, by whole rounds, and through saving and loading.

    Args:
        rule: the rule, prepared (codebook set) if it needs that.
        vocab_size: V of the test rows.
        seed: of the rows and of the rounds.
        rounds: verification rounds per statistical test; 20,000 see a TV error of about 0.02.
        prepare: called on the copy that is loaded back, e.g. `lambda rule: rule.set_codebook(book)`.

    Raises:
        AssertionError: naming the rule, the statement that fails, and the numbers.

    Example:
        >>> from mediaspec.rules import make_rule
        >>> check_rule(make_rule("exact"), rounds=2000)
    """
    _statements(rule)
    for name, p, q in _rows(vocab_size, seed):
        _accepted_mass(rule, name, p, q)
        _emitted_law(rule, name, p, q)
    name, p, q = next(_rows(vocab_size, seed + 1))
    _permutation(rule, p, q)
    _monotone(rule, p, q)
    _saved(rule, p, q, prepare)
    _alone_or_in_a_batch(rule, p, q, seed)
    _edges(rule, p, q, seed)
    _chain_rounds(rule, p[0, 0], q[0, 0], seed, rounds)
    _tree_rounds(rule, p[1, 0], q[1, 0], seed, rounds)


def chi_square_p_value(counts: Tensor, law: Tensor) -> float:
    """p-value of observed counts [V] under a law [V]; tokens expected less than 5 times are pooled.

    A count on a token of probability 0 gives 0.
    """
    counts, law = counts.double(), law.double()
    if bool((counts[law == 0] > 0).any()):
        return 0.0
    expected = law / law.sum() * counts.sum()
    rare = expected < 5
    seen = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    if len(seen) < 2:
        return 1.0
    statistic = ((seen - wanted).square() / wanted).sum()
    freedom = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def _require(ok: bool | Tensor, rule: AcceptanceRule, message: str) -> None:
    if not bool(ok):
        raise AssertionError(f"{type(rule).__name__} ({rule.name}): {message}")


def _rows(vocab: int, seed: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Pairs of rows [R, K, V] of every kind that models produce."""
    rows = 16
    rng = RowRng(torch.arange(rows) + 1000 * seed, vocab, 8 * LENGTH)
    blocks = [rng.exponential(torch.arange(LENGTH * i, LENGTH * (i + 1)).expand(rows, -1), 1) for i in range(4)]

    def law(weights: Tensor) -> Tensor:
        return weights / weights.sum(-1, keepdim=True)

    p, q = law(blocks[0]), law(blocks[1])
    yield "flat rows", p, q
    yield "peaked rows", law(blocks[0] ** 4), law(blocks[1] ** 4)
    kept_p, kept_q = blocks[2] > 0.7, blocks[3] > 0.7
    kept_p[..., 0] = kept_q[..., 1] = True
    yield "truncated rows", law(blocks[0] * kept_p), law(blocks[1] * kept_q)
    yield "equal rows", p, p.clone()
    half = torch.arange(vocab) < vocab // 2
    yield "disjoint rows", law(p * half), law(q * ~half)
    one_hot = (torch.arange(vocab) == 3).float().expand(rows, LENGTH, -1)
    yield "point-mass drafts", p, one_hot
    yield "forced tokens", one_hot, one_hot.clone()


def _statements(rule: AcceptanceRule) -> None:
    _require(hasattr(rule, "config"), rule, "its settings are not saved; decorate __init__ with `register_to_config`")
    _require(rule.guarantee in GUARANTEES, rule, f"guarantee {rule.guarantee!r} is none of {GUARANTEES}")
    exact = rule.guarantee in ("exact-law", "exact-tokens")
    _require(rule.lossless == exact, rule, f"lossless={rule.lossless} contradicts guarantee {rule.guarantee!r}")
    tokens = rule.guarantee == "exact-tokens"
    _require(tokens == rule.coupled, rule, f"coupled={rule.coupled} contradicts guarantee {rule.guarantee!r}")
    _require(rule.residual in RESIDUALS, rule, f"residual {rule.residual!r} is none of {RESIDUALS}")
    _require(rule.ledger in LEDGERS, rule, f"ledger {rule.ledger!r} is none of {LEDGERS}")
    bound = rule.bound(LENGTH)
    _require(bound.shape == (LENGTH,), rule, f"bound({LENGTH}) has shape {tuple(bound.shape)}, not [{LENGTH}]")
    _require((bound >= 0).all() and (bound <= 1).all(), rule, f"bound {bound.tolist()} leaves [0, 1]")
    if rule.lossless:
        _require((bound == 0).all(), rule, f"a lossless rule has bound 0, not {bound.tolist()}")
    known, _ = AcceptanceRule.registry.get(rule.name, (None, {}))
    _require(known is type(rule), rule, f"make_rule({rule.name!r}) would build {known}, not this class")


def _accepted_mass(rule: AcceptanceRule, name: str, p: Tensor, q: Tensor) -> None:
    before = p.clone(), q.clone()
    a = rule.accepted_mass(p, q)
    _require(torch.equal(before[0], p) and torch.equal(before[1], q), rule, "accepted_mass writes to its inputs")
    _require(a.shape == p.shape, rule, f"accepted_mass of {tuple(p.shape)} rows has shape {tuple(a.shape)}")
    _require(a.isfinite().all(), rule, f"accepted mass is not finite on {name}")
    low, high = float(a.min()), float((a - q).max())
    _require(low >= 0 and high <= 1e-6, rule, f"on {name} a must lie in [0, Q], found {low:.3g} and Q + {high:.3g}")
    if not rule.may_leave_support:
        left = float(a[p == 0].amax()) if bool((p == 0).any()) else 0.0
        _require(left == 0, rule, f"on {name} a token of target probability 0 is accepted with mass {left:.3g}")
    tail = rule.accepted_mass(p[:, 1:], q[:, 1:], 1)
    _require(torch.allclose(tail, a[:, 1:], atol=1e-6), rule, "`first` does not shift the position within the round")


def _emitted_law(rule: AcceptanceRule, name: str, p: Tensor, q: Tensor) -> None:
    a = rule.accepted_mass(p, q)
    drift, m = one_step_drift(p, a), emitted_law(p, a, rule.residual)
    distance = 0.5 * (m - p).abs().sum(-1)
    gap = float((distance - drift).abs().max())
    _require(gap < TOLERANCE, rule, f"on {name} TV(emitted law, P) differs from the drift by {gap:.3g}")
    over = (drift - rule.bound(LENGTH)).amax(0)
    _require((over < TOLERANCE).all(), rule, f"on {name} the drift exceeds `bound` by {over.tolist()} per position")
    if rule.lossless:
        worst = float(distance.max())
        _require(worst < TOLERANCE, rule, f"states to be lossless, but its law on {name} has TV {worst:.3g} to P")


def _permutation(rule: AcceptanceRule, p: Tensor, q: Tensor) -> None:
    if rule.permutation_equivariant:
        order = torch.arange(p.shape[-1]).flip(-1).roll(3)
        gap = (rule.accepted_mass(p[..., order], q[..., order]) - rule.accepted_mass(p, q)[..., order]).abs().max()
        _require(gap < 1e-6, rule, f"renaming tokens changes the accepted mass by {float(gap):.3g}")


def _monotone(rule: AcceptanceRule, p: Tensor, q: Tensor) -> None:
    if rule.monotone:
        token = torch.eye(p.shape[-1])[:, None, None]  # one raised token per leading row
        raised = p + 0.05 * (token - p)
        fall = (rule.accepted_mass(p, q) - rule.accepted_mass(raised, q.expand_as(raised))) * token
        worst = float(fall.max())
        _require(worst < 1e-6, rule, f"raising a token's target probability lowers its accepted mass by {worst:.3g}")


def _saved(rule: AcceptanceRule, p: Tensor, q: Tensor, prepare: Callable[[AcceptanceRule], None] | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rule.save_pretrained(folder)
        written = (Path(folder) / "scheduler_config.json").is_file()
        _require(written, rule, "save_pretrained wrote no scheduler_config.json")
        loaded = type(rule).from_pretrained(folder)
    if prepare is not None:
        prepare(loaded)
    kept, got = (
        {key: list(value) if isinstance(value, tuple) else value for key, value in one.config.items() if key[0] != "_"}
        for one in (rule, loaded)
    )
    _require(kept == got, rule, f"settings change when saved and loaded: {kept} became {got}")
    same = torch.equal(loaded.accepted_mass(p, q), rule.accepted_mass(p, q))
    _require(same, rule, "accepts differently after being saved and loaded; is every setting in the constructor?")


def _inputs(
    rule: AcceptanceRule, p: Tensor, q: Tensor, seed: int, tree: TreeSpec | None = None, lengths: Tensor | None = None
) -> VerifyInputs:
    """One drafted round per row, from p [B, N, V] and q [B, rows, V] as target and drafter of a run give them."""
    batch, vocab = p.shape[0], p.shape[-1]
    rng = RowRng(torch.arange(batch) + 7919 * seed, vocab, LENGTH + 4)
    start = torch.arange(batch) % 3
    purpose = purposes.TARGET if rule.coupled else purposes.DRAFT
    laws, depth = q.log()[:, None], torch.arange(q.shape[1])
    if tree is not None:
        depth = torch.tensor([tree.depth[row] for row in tree.internal])
    width = 1 if tree is None else max(len(below) for below in tree.children)
    drawn = sample(
        laws, Warp(), seeds=rng.seeds, positions=start[:, None] + depth, purpose=purpose, width=width
    ).tokens
    if tree is not None:
        ranks = [(index, rank) for index, row in enumerate(tree.internal) for rank in range(len(tree.children[row]))]
        drawn = torch.stack([drawn[:, index, rank] for index, rank in ranks], 1)
    levels = q.shape[1] if tree is None else tree.max_depth
    lengths = torch.full((batch,), levels) if lengths is None else lengths
    draft = Draft(drawn, lengths, q, tree)
    ledger = None if tree is None else "tv"
    return VerifyInputs(p.log()[:, None], draft, Warp(), rng, start, ledger=ledger)


def _alone_or_in_a_batch(rule: AcceptanceRule, p: Tensor, q: Tensor, seed: int) -> None:
    p = torch.cat([p, p[:, :1].roll(1, 0)], 1)
    inputs = _inputs(rule, p, q, seed)
    together = rule.verify(inputs)
    for row in range(0, p.shape[0], 5):
        pick = torch.tensor([row])
        draft = Draft(inputs.draft.tokens[pick], inputs.draft.lengths[pick], q[pick])
        single = VerifyInputs(inputs.target_logits[pick], draft, Warp(), inputs.rng.select(pick), inputs.start[pick])
        alone = rule.verify(single)
        same = (
            torch.equal(alone.num_accepted, together.num_accepted[pick])
            and torch.equal(alone.next_token, together.next_token[pick])
            and torch.allclose(alone.drift, together.drift[pick], atol=1e-6)
        )
        _require(same, rule, f"row {row} is decided differently alone and in a batch of {p.shape[0]}")


def _edges(rule: AcceptanceRule, p: Tensor, q: Tensor, seed: int) -> None:
    """Nothing drafted, a forced token, faulty logits."""
    p = torch.cat([p, p[:, :1]], 1)
    inputs = _inputs(rule, p, q, seed, lengths=torch.zeros(p.shape[0], dtype=torch.int64))
    verdict = rule.verify(inputs)
    plain = _plain(inputs, p, 1)[:, 0]
    _require((verdict.num_accepted == 0).all(), rule, "accepts tokens of a draft of length 0")
    _require((verdict.drift == 0).all(), rule, "books drift for a draft of length 0")
    _require(torch.equal(verdict.next_token, plain), rule, "a draft of length 0 must emit the target's own draw")
    broken = _inputs(rule, p, q, seed)
    broken.target_logits[0] = torch.nan
    verdict = rule.verify(broken)
    faulty = int(verdict.next_token[0]), int(verdict.num_accepted[0])
    _require(faulty == (-1, 0), rule, f"NaN logits must give next_token -1 and num_accepted 0, got {faulty}")
    _require((verdict.next_token[1:] >= 0).all(), rule, "a row with NaN logits spoils its neighbours")


def _plain(inputs: VerifyInputs, p: Tensor, length: int) -> Tensor:
    """[B, length]: what plain sampling draws at the round's positions."""
    positions = inputs.start[:, None] + torch.arange(length)
    return sample(
        p[:, :length].log()[:, None], Warp(), seeds=inputs.rng.seeds, positions=positions, purpose=purposes.TARGET
    ).tokens


def _emitted(draft: Draft, verdict: Verdict) -> Tensor:
    """[B, K+1]: the round's tokens, -1 behind the last."""
    tokens = draft.tokens
    if verdict.path is not None:
        tokens = tokens.gather(1, (verdict.path - 1).clamp(min=0))
    last = verdict.num_accepted[:, None]
    out = torch.cat([tokens, tokens[:, :1]], 1).scatter(1, last, verdict.next_token[:, None])
    return torch.where(torch.arange(out.shape[1]) <= last, out, -1)


def _chain_rounds(rule: AcceptanceRule, p: Tensor, q: Tensor, seed: int, rounds: int) -> None:
    vocab = p.shape[-1]
    inputs = _inputs(rule, p.expand(rounds, LENGTH + 1, -1), q.expand(rounds, LENGTH, -1), seed)
    verdict = rule.verify(inputs)
    emitted = _emitted(inputs.draft, verdict)
    rows_p, rows_q = p.expand(LENGTH, -1), q.expand(LENGTH, -1)
    a = rule.accepted_mass(rows_p, rows_q)
    laws = torch.cat([emitted_law(rows_p, a, rule.residual), p[None]])
    for i in range(LENGTH + 1):
        reached = verdict.num_accepted >= i
        counts = torch.bincount(emitted[reached, i], minlength=vocab)
        value = chi_square_p_value(counts, laws[i])
        where = f"position {i}" if i < LENGTH else "the bonus position"
        _require(value > ALARM, rule, f"{int(counts.sum())} rounds do not follow its law at {where} (p = {value:.2g})")
        if i < LENGTH:
            rate, wanted = float((verdict.num_accepted[reached] > i).double().mean()), float(a[i].sum())
            error = 5 * (wanted * (1 - wanted) / max(int(reached.sum()), 1)) ** 0.5 + 1e-4
            _require(abs(rate - wanted) < error, rule, f"accepts {rate:.4f} at {where} where a sums to {wanted:.4f}")
    drift = one_step_drift(rows_p, a)
    tested = torch.arange(LENGTH) <= verdict.num_accepted[:, None]
    gap = (verdict.drift - torch.where(tested, drift, 0.0)).abs().max()
    _require(gap < TOLERANCE, rule, f"the verdict's drift is off by {float(gap):.3g} from TV(emitted law, P)")
    if rule.coupled:
        plain = _plain(inputs, p.expand(rounds, LENGTH + 1, -1), LENGTH + 1)
        same = ((emitted == plain) | (emitted < 0)).all()
        _require(same, rule, "is coupled, but its tokens are not those of plain sampling with the same seed")


def _tree_rounds(rule: AcceptanceRule, p: Tensor, q: Tensor, seed: int, rounds: int) -> None:
    tree, vocab = TreeSpec.from_widths([2, 2]), p.shape[-1]
    rows, parents = tree.num_nodes + 1, len(tree.internal)
    inputs = _inputs(rule, p.expand(rounds, rows, -1), q.expand(rounds, parents, -1), seed, tree)
    verdict = rule.verify(inputs)
    emitted = _emitted(inputs.draft, verdict)
    for level in range(tree.max_depth):
        reached = verdict.num_accepted >= level
        counts = torch.bincount(emitted[reached, level], minlength=vocab)
        if rule.lossless:
            value = chi_square_p_value(counts, p)
            _require(value > ALARM, rule, f"tree rounds do not follow P at depth {level} (p = {value:.2g})")
        else:
            total = int(counts.sum())
            measured = 0.5 * float((counts / total - p).abs().sum())
            booked = float(verdict.drift[reached, level].mean())
            noise = (vocab / max(total, 1)) ** 0.5  # mean plus several deviations of the TV of so many samples
            _require(measured < booked + noise, rule, f"tree depth {level}: TV {measured:.3f} over drift {booked:.3f}")
