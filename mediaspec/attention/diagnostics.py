"""What every head of a model attends to, from one strip of queries per layer: `diagnose` and its report.

Sinks (arXiv:2410.10781), slashes and their cause (arXiv:2601.08297), lazy ratios (arXiv:2410.13846) and the static
pattern that keeps most of a head's mass. Nothing of size [H, w, n] is held and the forward pass is not changed.

Letters: L layers, H query heads, Hkv key heads, G = H / Hkv, w strip rows, n keys, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .collector import LayerTail, Moments
from .logits import LogitForm, strip_positions
from .pattern import HeadPattern, build_pattern
from .report import AttentionReport, HeadReport
from .rope_profile import Rotary, closed_form, rank_one
from .sinks import sink_scores, sink_set
from .slash import slash_dominant, slash_samples, slash_scores
from .strip import LazyWindow, StripSums, strip_pass

__all__ = ["AttentionReport", "HeadReport", "Settings", "diagnose", "kept_mass"]

WINDOWS = (256, 1024, 4096)
TOP = 8  # strongest slashes and columns listed per head
TILE = 1024


@dataclass(frozen=True)
class Settings:
    """What the report is measured with.

    Args:
        rows: w, last queries that form the strip.
        epsilon: mean attention above which a key is a sink.
        kappa: slash score above which a distance counts.
        lazy_at: lazy ratio above which a head counts as lazy.
        lazy: keys a lazy layer would keep.
        target: mass a pattern should keep; budget: keys per query it may use, None for an eighth of the prompt, at
            least 256.
    """

    rows: int = 64
    epsilon: float = 0.3
    kappa: float = 0.1
    lazy_at: float = 0.95
    lazy: LazyWindow = field(default_factory=LazyWindow)
    target: float = 0.95
    budget: int | None = None


def diagnose(
    tails: Sequence[LayerTail],
    keys: Tensor,
    values: Tensor,
    length: int,
    *,
    rotary: Sequence[Rotary | None] = (),
    settings: Settings | None = None,
    model: str = "",
    prompt_sha256: str = "",
) -> AttentionReport:
    """The report of one prompt (row 0) after its prefill.

    Args:
        tails: what a `Collector` kept, layer by layer.
        keys, values: [L, R, Hkv, >= n, D] as the store holds them.
        length: n.
        rotary: how each layer rotates; empty or None leaves out the closed form.
        settings: thresholds and sizes.
        model, prompt_sha256: named in the report.

    Raises:
        ValueError: fewer layers than the store has, or a prompt without keys.
    """
    settings = settings if settings is not None else Settings()
    if len(tails) != len(keys) or length < 1:
        raise ValueError(f"{len(tails)} tails and {length} tokens for {len(keys)} layers; watch a whole prefill")
    lengths = torch.tensor([length], device=keys.device)
    strips = []
    for tail, layer_keys in zip(tails, keys):
        part = layer_keys[:1, :, :length]
        strips.append(strip_pass(tail.queries[:1], part, lengths, tail.form, lazy=settings.lazy))
    count = min(settings.rows, length)
    means = torch.stack([sums.columns[0] for sums in strips]) / count
    sinks = sink_set(means, length, margin=min(1024, length // 2))
    norms = values[:, 0, :, :length].float().norm(dim=-1)
    strongest = max(sinks, key=lambda key: float(means[:, :, key].mean()))
    ratio = norms[..., strongest] / norms.median(-1).values.clamp(min=1e-12)
    heads: list[HeadReport] = []
    for layer, (tail, sums) in enumerate(zip(tails, strips)):
        turn = rotary[layer] if layer < len(rotary) else None
        heads += _layer(layer, tail, keys[layer, :1, :, :length], sums, turn, sinks, settings)
    return AttentionReport(
        model=model,
        prompt_sha256=prompt_sha256,
        dtype=str(keys.dtype).removeprefix("torch."),
        tokens=length,
        rows=count,
        epsilon=settings.epsilon,
        kappa=settings.kappa,
        lazy_at=settings.lazy_at,
        sink_set=tuple(sinks),
        value_ratio=tuple(round(one, 4) for one in ratio.mean(1).tolist()),
        heads=tuple(heads),
    )


def _layer(
    layer: int,
    tail: LayerTail,
    keys: Tensor,
    sums: StripSums,
    rotary: Rotary | None,
    sinks: list[int],
    settings: Settings,
) -> Iterable[HeadReport]:
    heads, length = sums.columns.shape[1:]
    groups = keys.shape[1]
    group = heads // groups
    rows = int(sums.rows)
    budget = settings.budget if settings.budget is not None else max(256, length // 8)
    patterns = [
        build_pattern(_group_mass(tail, keys, sums, one), sinks, target=settings.target, budget=budget)
        for one in range(groups)
    ]
    kept = kept_mass(tail.queries[:1], keys, tail.form, sums.lse, patterns)
    alpha = sink_scores(sums.columns, sums.lengths, sums.rows)[0, :, 0]
    slashes = slash_dominant(slash_scores(sums)[0], slash_samples(sums)[0], settings.kappa, rows)
    means = sums.columns[0] / rows
    columns = means.clone()
    columns[:, sinks] = 0
    columns[:, max(length - rows, 0) :] = 0
    top = columns.topk(min(TOP, length), 1)
    effective, recent = sums.effective_keys[0], {window: sums.recent_mass(window)[0] for window in WINDOWS}
    share_q, share_k, tv = _rotation(tail, keys, sums, rotary, group)
    inside = tail.form.window is None or tail.form.window >= length
    for head in range(heads):
        pattern = patterns[head // group]
        yield HeadReport(
            layer=layer,
            head=head,
            key_head=head // group,
            kind=_kind(
                float(effective[head]) / length,
                sum(score for _, score in slashes[head]),
                float(means[head, sinks].sum() + recent[WINDOWS[0]][head]),
            ),
            sink_score=float(alpha[head]) if inside else None,
            sink_set=tuple(key for key in sinks if float(means[head, key]) > 0.05),
            lazy_ratio=float(sums.lazy[0, head]),
            recent_mass={window: float(mass[head]) for window, mass in recent.items()},
            slash=tuple(slashes[head][:TOP]),
            vertical_top=tuple(
                (int(key), float(mass)) for mass, key in zip(top.values[head], top.indices[head]) if float(mass) > 0
            ),
            effective_keys=float(effective[head]),
            q_rank1=None if share_q is None else float(share_q[head]),
            k_rank1=None if share_k is None else float(share_k[head // group]),
            closed_form_tv=None if tv is None else float(tv[head]),
            pattern=pattern,
            pattern_mass=float(kept[head]),
        )


def kept_mass(queries: Tensor, keys: Tensor, form: LogitForm, lse: Tensor, patterns: Sequence[HeadPattern]) -> Tensor:
    """[H] mean mass of one prompt's strip that the key heads' patterns keep, measured tile by tile.

    Args:
        queries: [1, H, w, D]; keys: [1, Hkv, n, D], exactly n of them; lse: [1, H, w].
        patterns: one per key head.
    """
    length, heads, device = keys.shape[2], queries.shape[1], keys.device
    at = strip_positions(torch.tensor([length], device=device), queries.shape[2])
    kept = lse.new_zeros(heads)
    for start in range(0, length, TILE):
        key_at = torch.arange(start, min(start + TILE, length), device=device)
        mass = (form.tile(queries, keys[:, :, start : start + TILE], at, key_at) - lse[..., None]).exp()[0]
        seen = torch.stack([one.mask(at[0], key_at) for one in patterns]).to(mass.dtype)
        kept += (mass.unflatten(0, (len(patterns), -1)) * seen[:, None]).sum((2, 3)).flatten()
    return kept / (at[0] >= 0).sum()


def _group_mass(tail: LayerTail, keys: Tensor, sums: StripSums, one: int) -> Tensor:
    """[rows, n] mean probabilities over the query heads of one key head: the only matrix, one head at a time."""
    group = tail.queries.shape[1] // keys.shape[1]
    rows, length = int(sums.rows), keys.shape[2]
    at = strip_positions(sums.lengths, tail.queries.shape[2])[:, -rows:]
    queries = tail.queries[:1, one * group : (one + 1) * group, -rows:]
    lse = sums.lse[:, one * group : (one + 1) * group, -rows:, None]
    parts = []
    for start in range(0, length, TILE):
        part = keys[:, one : one + 1, start : start + TILE]
        key_at = torch.arange(start, start + part.shape[2], device=keys.device)
        parts.append((tail.form.tile(queries, part, at, key_at) - lse).exp().mean(1)[0])
    return torch.cat(parts, -1)


def _kind(spread: float, on_distances: float, on_window: float) -> str:
    if spread > 1 / 8:
        return "diffuse"
    if on_distances >= 0.5:
        return "slash"
    return "streaming" if on_window >= 0.95 else "vertical"


def _rotation(
    tail: LayerTail, keys: Tensor, sums: StripSums, rotary: Rotary | None, group: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Rank-one shares of queries [H] and keys [Hkv] and the closed form's distance from the measured profile [H]."""
    if rotary is None or tail.query_moments is None or tail.key_moments is None:
        return None, None, None
    length, rows = keys.shape[2], int(sums.rows)
    shares = [rank_one(moments.gram[0]).share for moments in (tail.query_moments, tail.key_moments)]
    query, key = (_mean(moments, length) for moments in (tail.query_moments, tail.key_moments))
    first = keys[0, :, 0].float()  # position 0 is not rotated
    profile = closed_form(
        query, key.repeat_interleave(group, 0), rotary, length, tail.form.scaling, first.repeat_interleave(group, 0)
    )
    measured = sums.offsets[0] / rows
    sink = sums.leading[0, :, :, 0].sum(1) / rows
    inner = max(length - rows, 0)
    parts = (profile[:, :inner] - measured[:, :inner]).abs().sum(1)
    rest = profile[:, inner : length - 1].sum(1) - (measured[:, inner:].sum(1) - sink)
    return shares[0], shares[1], 0.5 * (parts + (profile[:, -1] - sink).abs() + rest.abs())


def _mean(moments: Moments, length: int) -> Tensor:
    return (moments.total[0] / length).float()
