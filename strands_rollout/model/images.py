"""Images as prompts and tools hand them over -> bytes, and where their tokens stand in a trajectory.

Knows Pillow, which the extra `[images]` brings and which is imported when the first image occurs; nothing of models,
messages or HTTP.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from strands_rollout.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from PIL.Image import Image

_LONGEST_PATH: Final = 4096


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image among the context tokens of a trajectory.

    Attributes:
        start: Index in `Trajectory.token_ids` of its first token.
        end: Index after its last token; all between are `token_id`.
        token_id: The model's image token.
        data_url: The image as PNG, as SGLang's `image_data` takes it.
        train_inputs: What the model's processor made of it, by name; one array each, images along the first axis.
    """

    start: int
    end: int
    token_id: int
    data_url: str
    train_inputs: Mapping[str, np.ndarray[Any, Any]]


def train_inputs_of(images: Sequence[PlacedImage]) -> dict[str, Any] | None:
    """The processor's outputs of all images, joined by name; None without images.

    As slime's examples/geo3k_vlm_multi_turn joins them: along the first axis. PyTorch tensors where torch is installed,
    else NumPy arrays, of which slime makes tensors (slime/observability/rollout_data_utils.py).

    Raises:
        ConfigError: The arrays can't be joined.
    """
    if not images:
        return None
    from transformers import BatchFeature
    from transformers.utils import is_torch_available

    try:
        joined = {
            name: np.concatenate([image.train_inputs[name] for image in images]) for name in images[0].train_inputs
        }
    except (KeyError, ValueError) as e:
        raise ConfigError(
            f"the processor's outputs of {len(images)} images can't be joined along their first axis: {e}; expected "
            "those of a processor like Qwen2-VL's, whose images are rows"
        ) from e
    return dict(BatchFeature(joined, tensor_type="pt" if is_torch_available() else None))


def read_rgb(data: bytes) -> Image:
    """The image of a file's bytes, in RGB.

    Raises:
        PromptError: It is no image.
        ConfigError: Pillow is not installed.
    """
    pillow = _pillow()
    try:
        with pillow.open(io.BytesIO(data)) as image:
            read: Image = image.convert("RGB")
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as e:
        raise PromptError(f"got an image of {len(data)} bytes that can't be read: {e}") from e
    return read


def to_png(image: Image) -> bytes:
    """The image as a PNG in RGB: no pixel is lost, so that the engine and the trainer see the same."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG")
    return buffer.getvalue()


def to_data_url(png: bytes) -> str:
    """The PNG as a data URL."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def image_block(source: object) -> dict[str, Any]:
    """Strands' content block of an image.

    Args:
        source: As slime's data sets have it: a PIL image, a file's path, a data URL, base64, a file's bytes, or
            `{"bytes": ..., "path": ...}` as `datasets` keeps images in Parquet.

    Raises:
        PromptError: It is none of these, or no image.
        ConfigError: Pillow is not installed.
    """
    pillow = _pillow()
    image = source if isinstance(source, pillow.Image) else read_rgb(_bytes_of(source))
    return {"image": {"format": "png", "source": {"bytes": to_png(image)}}}


def _bytes_of(source: object) -> bytes:
    if isinstance(source, Mapping) and (source.get("bytes") or source.get("path")):
        source = source.get("bytes") or source["path"]
    if isinstance(source, bytes):
        return source
    if isinstance(source, str | Path):
        return _bytes_of_text(str(source))
    raise PromptError(
        f"got an image of type {type(source).__name__}; expected a PIL image, a path, a data URL, base64 or bytes"
    )


def _bytes_of_text(text: str) -> bytes:
    if text.startswith(("http://", "https://")):
        raise PromptError(
            f"got the image {text[:100]!r}; expected one that is at hand: nothing is fetched from a network during a "
            "rollout. Save it to a file and name its path."
        )
    path = Path(text.removeprefix("file://"))
    try:
        if len(text) < _LONGEST_PATH and path.is_file():
            return path.read_bytes()
        return base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
    except (OSError, ValueError, binascii.Error) as e:
        raise PromptError(
            f"got the image {text[:100]!r}, which is neither a file's path nor a data URL nor base64: {e}"
        ) from e


def _pillow() -> Any:  # noqa: ANN401 - a module
    try:
        from PIL import Image
    except ImportError as e:
        raise ConfigError("got an image, and Pillow is not installed: pip install 'strands-rollout[images]'") from e
    return Image
