"""The noise levels of a sampler, and one denoising step between neighbouring levels with a level per frame.

Long samplers hold frames at different levels in one call and stop anywhere to go on later, which diffusers'
schedulers, with one timestep per call and a history inside, do not offer. So they take the levels (and the kind of
prediction) from the pipeline's scheduler and step by themselves: DDIM for diffusion models (arXiv:2010.02502, eq. (12)
and (16)), Euler for flow matching, which is the same formula with other coefficients. x = signal * x0 + noise * e at
every level.

T levels with noise, index 0 the cleanest; index i steps down to index i - 1, index 0 to the clean picture.
C channels, N frames, h x w latents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DDIMScheduler
from torch import Tensor

__all__ = ["NoiseLevels"]

PREDICTIONS = ("epsilon", "v_prediction", "sample", "flow_prediction")


@dataclass(frozen=True)
class NoiseLevels:
    """Levels and the step between them.

    Args:
        times: [T] what the model gets as timestep, cleanest first.
        signal: [T + 1] float64 factor of the clean picture; entry 0 is the end of sampling, entry i + 1 level i.
        noise: [T + 1] float64 factor of the noise, likewise.
        prediction: what the model returns: "epsilon", "v_prediction", "sample" or "flow_prediction" (noise minus
            data).
        clip: bound of the predicted clean latents, or None.
    """

    times: Tensor
    signal: Tensor
    noise: Tensor
    prediction: str
    clip: float | None = None

    @classmethod
    def of(cls, scheduler: Any, num_inference_steps: int) -> NoiseLevels:
        """The levels of a diffusers scheduler, which is left as it is.

        Args:
            scheduler: one with `alphas_cumprod` (DDIM, PNDM, DPM, Euler, ...) or a flow matching one with `sigmas`.
            num_inference_steps: levels T.

        Raises:
            ValueError: no step at all, or a scheduler without known levels or with thresholding.
        """
        if num_inference_steps < 1:
            raise ValueError(f"num_inference_steps={num_inference_steps}; at least 1 is needed")
        config = scheduler.config
        if config.get("thresholding", False):
            raise ValueError("long samplers do not support thresholding=True; set it to False in the scheduler")
        flow = config.get("prediction_type") == "flow_prediction" or "FlowMatch" in type(scheduler).__name__
        if flow:
            copy = type(scheduler).from_config(config)
            copy.set_timesteps(num_inference_steps)
            sigmas = copy.sigmas.to(torch.float64).cpu().flip(0)
            sigmas = sigmas if len(sigmas) == len(copy.timesteps) + 1 else torch.cat([sigmas.new_zeros(1), sigmas])
            return cls(copy.timesteps.cpu().flip(0), 1 - sigmas, sigmas, "flow_prediction")
        if not hasattr(scheduler, "alphas_cumprod"):
            raise ValueError(
                f"{type(scheduler).__name__} has neither alphas_cumprod nor flow sigmas; give the pipeline a "
                "DDIMScheduler, or a FlowMatchEulerDiscreteScheduler for a flow model"
            )
        ddim: Any = DDIMScheduler.from_config(config)
        ddim.set_timesteps(num_inference_steps)
        times = ddim.timesteps.cpu().flip(0)
        kept = torch.cat([ddim.final_alpha_cumprod.reshape(1), ddim.alphas_cumprod[times]]).to(torch.float64)
        prediction = config.get("prediction_type", "epsilon")
        if prediction not in PREDICTIONS:
            raise ValueError(f"prediction_type={prediction!r}; allowed are {', '.join(PREDICTIONS)}")
        clip = float(config.get("clip_sample_range", 1.0)) if config.get("clip_sample", False) else None
        return cls(times, kept.sqrt(), (1 - kept).sqrt(), prediction, clip)

    def __len__(self) -> int:
        return len(self.times)

    def add_noise(self, clean: Tensor, noise: Tensor, index: Tensor) -> Tensor:
        """Clean latents [C, N, h, w] at the levels `index` [N]; index -1 is the end of sampling."""
        signal, factor = self._at(self.signal, index, clean), self._at(self.noise, index, clean)
        return signal * clean + factor * noise

    def clean(self, latents: Tensor, output: Tensor, index: Tensor) -> Tensor:
        """The clean latents that a model output stands for; arguments as in `step`."""
        return self._parts(latents, output, index)[0]

    def step(
        self, latents: Tensor, output: Tensor, index: Tensor, eta: float = 0.0, noise: Tensor | None = None
    ) -> Tensor:
        """One step of every frame to the next cleaner level.

        Args:
            latents: [C, N, h, w], frame n at level `index[n]`.
            output: model output of that shape.
            index: [N] int64 levels, 0 the cleanest.
            eta: share of fresh noise (0 deterministic, 1 as in DDPM); flow models take 0.
            noise: [C, N, h, w] standard normal, needed for eta > 0.

        Returns:
            [C, N, h, w] of the dtype of `latents`; computed in float32 or better.
        """
        clean, error = self._parts(latents, output, index)
        signal, factor = self._at(self.signal, index - 1, clean), self._at(self.noise, index - 1, clean)
        if eta == 0:
            return (signal * clean + factor * error).to(latents.dtype)
        if self.prediction == "flow_prediction":
            raise ValueError(f"eta={eta}; flow matching models are sampled without fresh noise, write eta=0")
        if noise is None:
            raise ValueError(f"eta={eta} needs noise")
        before, above = self._at(self.signal, index, clean), self._at(self.noise, index, clean)
        spread = eta * (factor / above) * (1 - (before / signal) ** 2).clamp_min(0).sqrt()
        error = (factor**2 - spread**2).clamp_min(0).sqrt() * error
        return (signal * clean + error + spread * noise.to(clean.dtype)).to(latents.dtype)

    def renoise(self, latents: Tensor, noise: Tensor, index: int) -> Tensor:
        """Latents at level `index - 1` taken back up to level `index` with fresh noise (all frames)."""
        ratio = float(self.signal[index + 1] / self.signal[index])
        spread = max(float(self.noise[index + 1]) ** 2 - (ratio * float(self.noise[index])) ** 2, 0.0) ** 0.5
        return ratio * latents + spread * noise

    def _parts(self, latents: Tensor, output: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(latents.dtype, torch.float32)
        latents, output = latents.to(wide), output.to(wide)
        signal, factor = self._at(self.signal, index, latents), self._at(self.noise, index, latents)
        if self.prediction == "epsilon":
            clean, error = (latents - factor * output) / signal, output
        elif self.prediction == "v_prediction":
            clean, error = signal * latents - factor * output, signal * output + factor * latents
        elif self.prediction == "sample":
            clean, error = output, (latents - signal * output) / factor
        else:
            clean, error = latents - factor * output, latents + signal * output
        return (clean if self.clip is None else clean.clamp(-self.clip, self.clip)), error

    @staticmethod
    def _at(table: Tensor, index: Tensor, like: Tensor) -> Tensor:
        """Entries of a [T + 1] table for levels [N], shaped for [C, N, h, w]."""
        return table[index.cpu() + 1].to(like.device, like.dtype)[None, :, None, None]
