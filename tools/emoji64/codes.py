"""Canonical codes of a picture: what the transformer learns to write.

The tokenizer's encoder looks at the whole picture, so the same apple gets other codes on another background and a flat
background gets a patchwork of near-equal codes. Both are noise to a language model. Canonical codes take

* one fixed code per background colour where nothing but background is near,
* the codes of the same drawing on white where nothing but drawing is near,
* for a pair, each half from the picture that holds this half alone,

and the encoder's own codes on the outline only. The decoder is polished on canonical codes (`train_vq.py --stage
decoder`), so pictures lose nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from render import PAIR, SIDE, SMALL, Renderer, Spec
from torch import Tensor

from concepts import BACKGROUNDS  # isort: skip

CELL = 4
NEAR = 2  # pixels around a cell that count as near


class Composer:
    """Canonical codes of specs; encodings and coverages are kept.

    Args:
        renderer: draws the pictures.
        encode: [n, 3, 64, 64] in -1..1 -> codes [n, 16, 16].
    """

    def __init__(self, renderer: Renderer, encode: object) -> None:
        self.renderer, self._encode = renderer, encode
        self._codes: dict[Spec, Tensor] = {}
        self._cover: dict[tuple[str, str, str], tuple[Tensor, Tensor]] = {}
        self.flat = {c: self._flat_code(c) for c in BACKGROUNDS}

    def _run(self, pictures: list[np.ndarray]) -> Tensor:
        x = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1
        with torch.no_grad():
            return torch.cat([self._encode(part) for part in x.split(64)])  # type: ignore[operator]

    def _flat_code(self, colour: str) -> int:
        """The code most often given to pure background next to a few drawings."""
        specs = [Spec(c, "shaded", colour, "small") for c in list(self.renderer.names)[::12]]
        codes = self._run([self.renderer.draw(s) for s in specs])
        empty = torch.stack([self.cover(s)[0] for s in specs])
        return int(codes[empty].mode().values)

    def cover(self, spec: Spec) -> tuple[Tensor, Tensor]:
        """Cells [16, 16] with nothing but background near, and with nothing but drawing near."""
        key = (spec.concept, spec.style, spec.size)
        if key not in self._cover:
            alpha = torch.zeros(SIDE, SIDE)
            side = SMALL if spec.size == "small" else SIDE
            at = (SIDE - side) // 2
            icon = torch.from_numpy(self.renderer.icon(spec.concept, spec.style, side)[..., 3].copy())
            alpha[at : at + side, at : at + side] = icon.flip(1) if spec.size == "mirrored" else icon
            self._cover[key] = _cells(alpha)
        return self._cover[key]

    def prepare(self, specs: list[Spec]) -> None:
        """Encode whatever pictures the codes of `specs` need, in batches."""
        wanted = dict.fromkeys(part for s in specs for part in self._parts(s) if part not in self._codes)
        parts = list(wanted)
        for start in range(0, len(parts), 512):
            some = parts[start : start + 512]
            pictures = [self._half(p) if p.other else self.renderer.draw(p) for p in some]
            self._codes.update(zip(some, self._run(pictures), strict=True))

    def _parts(self, spec: Spec) -> list[Spec]:
        if spec.other:  # "left" and "right" in place of the other concept mean that half alone
            left, right = Spec(spec.concept, spec.style, other="left"), Spec(spec.other, spec.style, other="right")
            return [left, right]
        spec = replace(spec, says_style=True)
        return [spec, replace(spec, background="white")]

    def _half(self, spec: Spec) -> np.ndarray:
        out = np.ones((SIDE, SIDE, 3), np.float32)
        icon = self.renderer.icon(spec.concept, spec.style, PAIR)
        x, y = (0 if spec.other == "left" else PAIR), (SIDE - PAIR) // 2
        area = out[y : y + PAIR, x : x + PAIR]
        area *= 1 - icon[..., 3:]
        area += icon[..., :3]
        return (out * 255 + 0.5).clip(0, 255).astype(np.uint8)

    def codes(self, specs: list[Spec]) -> Tensor:
        """Canonical codes [n, 256] int64."""
        self.prepare(specs)
        return torch.stack([self._one(s) for s in specs]).flatten(1)

    def _one(self, spec: Spec) -> Tensor:
        if spec.other:
            left, right = (self._codes[p] for p in self._parts(spec))
            out = torch.cat([left[:, :8], right[:, 8:]], 1)
            for concept, columns in ((spec.concept, slice(0, 8)), (spec.other, slice(8, 16))):
                alpha = torch.zeros(SIDE, PAIR)
                top = (SIDE - PAIR) // 2
                alpha[top : top + PAIR] = torch.from_numpy(
                    self.renderer.icon(concept, spec.style, PAIR)[..., 3].copy()
                )
                out[:, columns][_cells(alpha)[0]] = self.flat["white"]
            return out
        own, white = (self._codes[p] for p in self._parts(spec))
        empty, full = self.cover(spec)
        out = torch.where(full, white, own)
        return torch.where(empty, torch.tensor(self.flat[spec.background]), out)


def _cells(alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Cells near no drawing and cells near drawing only, of an alpha map [h, w]."""
    size, pad = CELL + 2 * NEAR, (NEAR,) * 4
    most = F.max_pool2d(F.pad(alpha[None, None], pad), size, CELL)[0, 0]
    least = -F.max_pool2d(F.pad(-alpha[None, None], pad, value=-1.0), size, CELL)[0, 0]
    return most < 1 / 255, least > 0.99
