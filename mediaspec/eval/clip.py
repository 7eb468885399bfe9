"""CLIP score through transformers, for where CLIP weights are on the machine.

    score = mean over images of max(0, 100 cos(image, prompt))           (arXiv:2104.08718, eq. 1, with w = 100)

The figure depends on the checkpoint and on the prompt prefix, so both stand beside it. Prompts longer than the text
tower's context are refused: a silently cut prompt scores another sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .features import FeatureExtractor

__all__ = ["CLIP_DEFAULT", "ClipScorer", "load_clip"]

CLIP_DEFAULT = "openai/clip-vit-base-patch32"


class ClipScorer:
    """A CLIP checkpoint as picture features and as text-image score.

    Args:
        model: transformers `CLIPModel` in evaluation mode.
        processor: its `CLIPProcessor`, or any object with `tokenizer` and `image_processor`.
        name: the checkpoint's name, printed beside scores.
        sha256: of its weights file.
    """

    def __init__(self, model: Any, processor: Any, name: str, sha256: str) -> None:
        self.model, self.processor, self.name, self.sha256 = model, processor, name, sha256

    @torch.inference_mode()
    def embed_images(self, images: Tensor) -> Tensor:
        """uint8 [n, 3, H, W] -> [n, D] float32 image embeddings of unit length."""
        pixels = self.processor.image_processor(images=list(images), return_tensors="pt")["pixel_values"]
        return _unit(self.model.get_image_features(pixel_values=pixels))

    @torch.inference_mode()
    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """[n] texts -> [n, D] float32 text embeddings of unit length.

        Raises:
            ValueError: a text is longer than the text tower's context.
        """
        limit = self.model.config.text_config.max_position_embeddings
        tokens = self.processor.tokenizer(list(texts), padding=True, return_tensors="pt")
        lengths = tokens["attention_mask"].sum(1)
        if int(lengths.max()) > limit:
            worst = texts[int(lengths.argmax())]
            raise ValueError(
                f"{worst[:60]!r}... has {int(lengths.max())} tokens and {self.name} reads {limit}; shorten the prompt"
            )
        return _unit(
            self.model.get_text_features(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
        )

    def scores(self, images: Tensor, texts: Sequence[str]) -> Tensor:
        """CLIP score of every (picture, prompt) pair.

        Args:
            images: [n, 3, H, W] uint8.
            texts: n prompts, used as they are (no prefix).

        Returns:
            [n] float32 in 0..100.
        """
        if len(images) != len(texts):
            raise ValueError(f"{len(images)} pictures and {len(texts)} prompts; give one prompt per picture")
        return (100 * (self.embed_images(images) * self.embed_texts(texts)).sum(1)).clamp_min(0)

    def extractor(self) -> FeatureExtractor:
        """The image tower as a feature extractor."""
        from .features import FeatureExtractor

        side = self.model.config.vision_config.image_size
        width = self.model.config.projection_dim
        title = f"Frechet distance (CLIP {self.name})"
        return FeatureExtractor("clip", title, width, side, "bicubic", self.sha256, self.embed_images)


def _unit(output: Any) -> Tensor:
    """Unit rows of an embedding; transformers returns a tensor or an output object with `pooler_output`."""
    rows: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return torch.nn.functional.normalize(rows.float(), dim=1)


def load_clip(name: str | Path | None = None) -> ClipScorer:
    """Loads a CLIP checkpoint that is already on this machine.

    Args:
        name: a folder, or a name in the local Hugging Face cache; default `CLIP_DEFAULT`.

    Raises:
        FileNotFoundError: it is not here; nothing is downloaded.
    """
    from transformers import CLIPModel, CLIPProcessor

    from .features import sha256_of

    source = str(name if name is not None else CLIP_DEFAULT)
    try:
        model: Any = CLIPModel.from_pretrained(source, local_files_only=True)
        model = model.eval().requires_grad_(False)
        processor = CLIPProcessor.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"no CLIP model {source!r} on this machine ({str(error).splitlines()[0]}); give a local folder with "
            "--weights, or use --features efficientnet"
        ) from error
    weights = _weights_file(source)
    return ClipScorer(model, processor, source, sha256_of(weights) if weights else "unknown")


def _weights_file(source: str) -> Path | None:
    from transformers.utils.hub import cached_file

    for file in ("model.safetensors", "pytorch_model.bin"):
        try:
            path = cached_file(source, file, local_files_only=True)
        except OSError:
            continue
        if path is not None:
            return Path(path)
    return None
