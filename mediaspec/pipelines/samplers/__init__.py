"""Ways to draw a long video from a model that was trained on short clips; one file each."""

from __future__ import annotations

from .base import FrameText, Sampler, Step
from .fifo import Fifo
from .freelong import FreeLong
from .freenoise import FreeNoise
from .outpaint import Outpaint
from .plain import Plain

__all__ = ["SAMPLERS", "Fifo", "FrameText", "FreeLong", "FreeNoise", "Outpaint", "Plain", "Sampler", "Step"]

SAMPLERS: dict[str, type[Sampler]] = {
    "freenoise": FreeNoise,
    "fifo": Fifo,
    "freelong": FreeLong,
    "outpaint": Outpaint,
    "plain": Plain,
}
