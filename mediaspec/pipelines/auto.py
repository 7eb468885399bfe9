"""Loads any saved mediaspec pipeline by the class its folder names."""

from __future__ import annotations

import os
from typing import Any

from .class_to_image import ClassToImagePipeline
from .image import ImagePipeline
from .keywords import nearest
from .loading import EMBEDDED, local_folder, read_index
from .text_to_image import TextToImagePipeline

__all__ = ["AutoPipeline"]

PIPELINES: dict[str, type[ImagePipeline]] = {
    "ClassToImagePipeline": ClassToImagePipeline,
    "TextToImagePipeline": TextToImagePipeline,
}


class AutoPipeline:
    """`AutoPipeline.from_pretrained` finds the class; `diffusers.DiffusionPipeline` cannot, it only knows its own.

    Example:
        >>> pipe = AutoPipeline.from_pretrained("emoji-64")  # doctest: +SKIP
    """

    def __init__(self) -> None:
        raise TypeError("AutoPipeline makes pipelines and is none itself; write AutoPipeline.from_pretrained(...)")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Loads a pipeline.

        Args:
            pretrained_model_name_or_path: an embedded model ("emoji-64"), a folder, or "owner/repository".
            kwargs: as in `ImagePipeline.from_pretrained`; an unknown one is an error there.

        Raises:
            ValueError: an unknown name (the nearest embedded one is named), or a folder of another library.
            TypeError: an unknown keyword.
        """
        name = os.fspath(pretrained_model_name_or_path)
        if "/" not in name and name not in EMBEDDED and not os.path.isdir(name):
            raise ValueError(
                f"there is no model or folder {name!r}; {nearest(name, EMBEDDED)}, or a folder, or owner/repository"
            )
        folder = local_folder(name, dict(kwargs))
        found = read_index(folder).get("_class_name")
        if found not in PIPELINES:
            raise ValueError(
                f"{folder} holds a {found}, which mediaspec cannot run; it runs {', '.join(PIPELINES)}. A pipeline of "
                "diffusers is loaded with diffusers.DiffusionPipeline"
            )
        return PIPELINES[found].from_pretrained(folder if name not in EMBEDDED else name, **kwargs)
