"""Carriers: video networks that `memory.arvdm.generate` can roll out, one file per family.

    carrier = carrier_for(WanPipeline.from_pretrained(...))

A carrier's file is imported when its network is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import Carrier

__all__ = ["available_carriers", "carrier_class", "carrier_for"]

_HOMES = {
    # files by name of the carrier, with its class; the first that matches is taken, special ones stand first
    "frame_dit": ("frame_dit", "FrameDiTCarrier"),
    "skyreels": ("skyreels", "SkyReelsCarrier"),
    "far": ("far", "FARCarrier"),
    "helios": ("helios", "HeliosCarrier"),
    "framepack": ("framepack", "FramePackCarrier"),
    "ltx": ("ltx", "LTXCarrier"),
    "wan": ("wan", "WanCarrier"),
}


def available_carriers() -> list[str]:
    """Names that `carrier_class` knows."""
    return sorted(_HOMES)


def carrier_class(name: str) -> type[Carrier]:
    """The carrier of a name.

    Raises:
        ValueError: an unknown name, with the nearest one.
    """
    from ..keywords import nearest

    if name not in _HOMES:
        raise ValueError(f"there is no carrier {name!r}; {nearest(name, _HOMES)}")
    file, made = _HOMES[name]
    found: type[Carrier] = getattr(import_module(f"{__name__}.{file}"), made)
    return found


def carrier_for(pipe_or_model: Any, name: str | None = None, **settings: Any) -> Carrier:
    """The carrier of a pipeline or a bare network.

    Args:
        pipe_or_model: of diffusers, or a `FrameWorld` or `FrameDiT` of our own.
        name: one of `available_carriers()`; None finds it by class name.
        settings: of the carrier.

    Raises:
        ValueError: no carrier fits.
    """
    if name is not None:
        return carrier_class(name)(pipe_or_model, **settings)
    for one in _HOMES:
        found = carrier_class(one)
        if found.matches(pipe_or_model):
            return found(pipe_or_model, **settings)
    inner = type(getattr(pipe_or_model, "transformer", None)).__name__
    raise ValueError(
        f"{type(pipe_or_model).__name__} (transformer: {inner}) has no carrier; there are {available_carriers()}, "
        "choose one with carrier= if the network is of that kind"
    )
