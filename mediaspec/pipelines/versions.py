"""Versions of the libraries that decide a result, for stats and manifests."""

from __future__ import annotations

import diffusers
import torch
import transformers

from .._version import __version__

__all__ = ["versions"]


def versions() -> dict[str, str]:
    """Name to version."""
    return {
        "mediaspec": __version__,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
    }
