"""mediaspec: Diffusers-style pipelines for autoregressive media on one speculative core.

    >>> from mediaspec import AutoPipeline
    >>> pipe = AutoPipeline.from_pretrained("emoji-64")
    >>> out = pipe("a red apple on a blue background", rule="cool_sd", seeds=7)
    >>> out.images[0].save("apple.png"); print(out.stats["tokens_per_call"], out.stats["drift"])

Any language model of transformers decodes on the same core:

    >>> model.generate(**inputs, custom_generate=mediaspec.speculative, drafter="ngram")

Long prompts may keep fewer keys and values, until the handle is removed:

    >>> handle = mediaspec.enable(model, attention="light_transfer")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .core.engine import Engine
    from .integrations.enable import enable
    from .integrations.generate import speculative
    from .pipelines import AutoPipeline, ClassToImagePipeline, TextGenerationPipeline, TextToImagePipeline

__all__ = [
    "AutoPipeline",
    "ClassToImagePipeline",
    "Engine",
    "TextGenerationPipeline",
    "TextToImagePipeline",
    "__version__",
    "enable",
    "speculative",
]

# Resolved on first use, so that `import mediaspec` costs milliseconds and the core works without diffusers.
_LAZY = {
    "AutoPipeline": "mediaspec.pipelines",
    "ClassToImagePipeline": "mediaspec.pipelines",
    "TextToImagePipeline": "mediaspec.pipelines",
    "TextGenerationPipeline": "mediaspec.pipelines",
    "Engine": "mediaspec.core.engine",
    "enable": "mediaspec.integrations.enable",
    "speculative": "mediaspec.integrations.generate",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'mediaspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
