"""A linear picture codec: patches of 8 x 8 pixels on principal components, one basis for every row of patches.

Rows of patches show different things (sky, objects, floor), and a picture of a room keeps its fine detail in few of
them. With one basis per row 40 components keep a 64-pixel PanoRoom frame at 35 dB and every binary glyph readable; one
shared basis of 40 components keeps 33 dB and no glyph.
Components are scaled by a power of their deviation, so that rare detail is not drowned by the large components.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

__all__ = ["PatchCodec", "fit_codec", "from_patches", "to_patches"]

PATCH = 8


def to_patches(frames: Tensor) -> Tensor:
    """Patches [N, H / 8, W / 8, 192] of frames [N, H, W, 3].

    Raises:
        ValueError: sides that are no multiples of 8.
    """
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.shape[1] % PATCH or frames.shape[2] % PATCH:
        raise ValueError(
            f"frames {tuple(frames.shape)}; give [N, height, width, 3] with sides that are multiples of 8"
        )
    n, h, w, _ = frames.shape
    parts = frames.reshape(n, h // PATCH, PATCH, w // PATCH, PATCH, 3).transpose(2, 3)
    return parts.reshape(n, h // PATCH, w // PATCH, PATCH * PATCH * 3)


def from_patches(patches: Tensor) -> Tensor:
    """Frames [N, H, W, 3] of patches [N, H / 8, W / 8, 192]."""
    n, h, w, _ = patches.shape
    parts = patches.reshape(n, h, w, PATCH, PATCH, 3).transpose(2, 3)
    return parts.reshape(n, h * PATCH, w * PATCH, 3)


class PatchCodec(nn.Module):
    """Frames to latents and back.

    Args:
        rows: rows of patches, 8 for 64 pixels.
        components: kept per patch.

    Attributes:
        mean: [rows, 192]; basis: [rows, 192, components], orthonormal; scale: [rows, components], what a component is
            divided by; deviation: [rows, components], of the latents over the data the codec was fitted to.

    Example:
        >>> codec = fit_codec(torch.rand(32, 64, 64, 3), components=40)
        >>> latents = codec.encode(torch.rand(5, 64, 64, 3))
        >>> latents.shape, codec.decode(latents).shape
        (torch.Size([5, 40, 8, 8]), torch.Size([5, 64, 64, 3]))
    """

    mean: Tensor
    basis: Tensor
    scale: Tensor
    deviation: Tensor

    def __init__(self, rows: int = 8, components: int = 40) -> None:
        super().__init__()
        values = PATCH * PATCH * 3
        self.rows, self.components = rows, components
        self.register_buffer("mean", torch.zeros(rows, values))
        self.register_buffer("basis", torch.eye(values, components).expand(rows, -1, -1).clone())
        self.register_buffer("scale", torch.ones(rows, components))
        self.register_buffer("deviation", torch.ones(rows, components))

    def encode(self, frames: Tensor) -> Tensor:
        """Latents [N, components, rows, W / 8] of frames [N, 8 rows, W, 3] in 0..1; any W, as of a whole panorama.

        Raises:
            ValueError: another height, a width that is no multiple of 8, or values that are not finite.
        """
        if not torch.isfinite(frames).all():
            raise ValueError("a frame holds NaN or infinity; give colours in 0..1")
        patches = to_patches(frames.to(self.mean.dtype))
        if patches.shape[1] != self.rows:
            raise ValueError(f"frames of {frames.shape[1]} rows; this codec takes {PATCH * self.rows}")
        values = torch.einsum("nrcv,rvk->nkrc", patches - self.mean[:, None], self.basis)
        return values / self.scale.T[..., None]

    def decode(self, latents: Tensor) -> Tensor:
        """Frames [N, 8 rows, W, 3] in 0..1 of latents [N, components, rows, W / 8]."""
        values = latents.to(self.mean.dtype) * self.scale.T[..., None]
        patches = torch.einsum("nkrc,rvk->nrcv", values, self.basis) + self.mean[:, None]
        return from_patches(patches).clamp(0, 1)

    def save(self, path: str | Path) -> None:
        """Writes one safetensors file, under a temporary name first."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        save_file({name: value.contiguous() for name, value in self.state_dict().items()}, str(part))
        part.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> PatchCodec:
        """Reads what `save` wrote.

        Raises:
            ValueError: the file is missing, damaged or no codec.
        """
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"there is no codec {path}; a frame model is saved with codec.safetensors beside it")
        try:
            state = load_file(str(path))
        except Exception as error:
            raise ValueError(f"{path} is damaged ({error}); export or train the model again") from error
        if not {"mean", "basis", "scale", "deviation"} <= set(state):
            raise ValueError(f"{path} holds {sorted(state)}, no codec")
        codec = cls(state["basis"].shape[0], state["basis"].shape[2])
        codec.load_state_dict(state)
        return codec


def fit_codec(
    frames: Tensor, components: int = 40, *, weights: Tensor | None = None, power: float = 0.5
) -> PatchCodec:
    """Fits a codec by principal components.

    Args:
        frames: [N, H, W, 3] in 0..1.
        components: kept per patch, at most 192.
        weights: [N, H / 8, W / 8] how much each patch counts; None counts all alike. Detail that matters more than its
            share of pixels (a glyph) is given more.
        power: a component is divided by its deviation to this power: 0 keeps pixels' own scale, 1 whitens.

    Raises:
        ValueError: too many components, or fewer frames than give a basis.
    """
    patches = to_patches(frames.double())
    n, rows, columns, values = patches.shape
    if not 1 <= components <= values:
        raise ValueError(f"components={components} is not allowed; write 1 to {values}")
    if n * columns < components:
        raise ValueError(f"{n} frames give {n * columns} patches a row, too few for {components} components")
    codec = PatchCodec(rows, components).double()
    weight = torch.ones(n, rows, columns, dtype=torch.float64) if weights is None else weights.double()
    deviations = torch.empty(rows, components, dtype=torch.float64)
    for row in range(rows):
        flat, share = patches[:, row].reshape(-1, values), weight[:, row].reshape(-1, 1)
        mean = flat.mean(0)
        centred = flat - mean
        _, vectors = torch.linalg.eigh((centred * share).T @ centred)
        basis = vectors.flip(1)[:, :components]
        # an eigenvector's sign is free; the largest entry positive makes the basis the same on every machine
        basis = basis * basis.gather(0, basis.abs().argmax(0, keepdim=True)).sign()
        codec.mean[row], codec.basis[row] = mean, basis
        deviations[row] = (centred @ basis).std(0, unbiased=False)
    # components that never vary get the scale of the least one that does
    deviations = deviations.clamp(min=1e-3 * float(deviations.max()))
    scale = deviations**power
    scale = scale * float(np.sqrt(((deviations / scale) ** 2).mean()))
    codec.scale.copy_(scale)
    codec.deviation.copy_(deviations / scale)
    return codec.float()
