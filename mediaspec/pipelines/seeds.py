"""One int64 seed per picture: given, drawn from a generator, or from the system's entropy."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["row_seeds"]

LOWEST, HIGHEST = -(2**63), 2**63 - 1


def row_seeds(
    count: int,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    seeds: int | Sequence[int] | Tensor | None = None,
) -> list[int]:
    """The seeds of `count` pictures.

    Args:
        count: pictures of the call, prompt by prompt.
        generator: one generator draws all seeds in order (so that calls go on where the last one stopped); a list has
            one generator per picture, each draws one seed. A CPU generator gives the same seeds on every device.
        seeds: an int s stands for s, s + 1, ..., s + count - 1; a list or tensor holds one int64 per picture.

    Returns:
        `count` ints within int64; without either argument they come from the system's entropy (read them in
        `stats["seeds"]`).

    Raises:
        ValueError: both arguments, a wrong number of seeds or generators, or a seed outside int64.
    """
    if generator is not None and seeds is not None:
        raise ValueError("generator and seeds were both given; seeds=... names every seed, so leave generator out")
    if seeds is not None:
        return _given(count, seeds)
    if generator is None:
        return [secrets.randbits(63) for _ in range(count)]
    if isinstance(generator, torch.Generator):
        return _draw(generator, count)
    if len(generator) != count:
        raise ValueError(f"{len(generator)} generators were given for {count} pictures; give one for all, or {count}")
    return [seed for one in generator for seed in _draw(one, 1)]


def _draw(generator: torch.Generator, count: int) -> list[int]:
    return torch.randint(0, HIGHEST, (count,), generator=generator, device=generator.device).tolist()


def _given(count: int, seeds: int | Sequence[int] | Tensor) -> list[int]:
    if isinstance(seeds, (Tensor, np.ndarray, np.integer)):
        seeds = seeds.tolist() if seeds.ndim == 0 else seeds.flatten().tolist()
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        values = [seeds + i for i in range(count)]
    elif isinstance(seeds, Sequence) and not isinstance(seeds, str):
        values = [int(one) if isinstance(one, np.integer) else one for one in seeds]
    else:
        raise ValueError(f"seeds={seeds!r}; write an int, or a list of {count} ints, one per picture")
    if len(values) != count:
        raise ValueError(
            f"{len(values)} seeds were given for {count} pictures (prompts x num_images_per_prompt); give {count}, or "
            "one int to count up from"
        )
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or not LOWEST <= value <= HIGHEST:
            raise ValueError(f"seed {value!r} is no int64; write an integer between {LOWEST} and {HIGHEST}")
    return values
