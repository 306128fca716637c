"""Processors of vision-language models without network or torch, and an engine script that reads images like SGLang."""

import base64
import io
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from fake_sglang import Reply
from family_templates import HERMES
from harness import ids_of
from transformers import AutoTokenizer

VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
FAMILIES = ["Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor"]
# content may be text or parts, as in the template of Qwen3-VL
TEMPLATE = """
{%- macro shown(content) -%}
  {%- if content is string -%}{{ content }}
  {%- else -%}
    {%- for part in content -%}
      {%- if part.type == 'image' -%}
        {%- if count_images -%}{%- set seen.n = seen.n + 1 -%}Picture {{ seen.n }}: {% endif -%}
        <|vision_start|><|image_pad|><|vision_end|>
      {%- else -%}{{ part.text }}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set seen = namespace(n=0) -%}
""" + HERMES.replace("message.content", "shown(message.content)")


def vision_tokenizer(template: str = TEMPLATE) -> Any:
    """Return the shipped tokenizer with Qwen's image tokens."""
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "strands_rollout/engine/checkpoint")
    tokenizer.add_tokens(VISION_TOKENS, special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def vision_processor(family: str, tokenizer: Any) -> Any:
    """Return a Qwen processor with a NumPy image processor and without the video processor, which needs torch."""
    try:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Images
    except ImportError:  # before transformers 5
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor as Images
    without_videos = type(
        family, (getattr(transformers, family),), {"check_argument_for_proper_class": lambda *_arguments: None}
    )
    return without_videos(image_processor=Images(), tokenizer=tokenizer)


def picture(width: int = 64, height: int = 56, *, seed: int = 0, mode: str = "RGB") -> Any:
    from PIL import Image

    return Image.frombytes(mode, (width, height), random.Random(seed).randbytes(width * height * len(mode)))


def encoded(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def image_block(image: Any) -> dict[str, Any]:
    return {"image": {"format": "png", "source": {"bytes": encoded(image)}}}


def _opened(data_url: str) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(data_url.removeprefix("data:image/png;base64,"))))


class VisionEngine:
    """Script for `FakeSGLang` that reads the images of each request with the model's own processor, like SGLang.

    Attributes:
        read: For each request, the ids that the processor makes of the decoded text and the images.
        inputs: For each request all outputs of the processor.
        images: For each request its images.
    """

    def __init__(self, processor: Any, turns: Sequence[str], *, miscounts: int = 0) -> None:
        self._processor, self._turns, self._miscounts = processor, turns, miscounts
        self.read: list[list[int]] = []
        self.inputs: list[dict[str, Any]] = []
        self.images: list[list[Any]] = []

    def __call__(self, body: dict[str, Any], number: int) -> Reply:
        tokenizer = self._processor.tokenizer
        images = [_opened(url) for url in body["image_data"]]
        text = tokenizer.decode(body["input_ids"], skip_special_tokens=False)
        made = self._processor(text=[text], images=images, images_kwargs={"return_tensors": "np"})
        self.read.append(list(made["input_ids"][0]))
        self.inputs.append(dict(made))
        self.images.append(images)
        ids = ids_of(tokenizer, self._turns[number])
        reply = Reply.tokens(ids, prompt_tokens=len(self.read[-1]) + self._miscounts)
        return reply.limited(body["sampling_params"].get("max_new_tokens"))


def save_llava(folder: Path) -> Any:
    """Save and return a LLaVA processor with Qwen's image token; `AutoProcessor` loads it without torch."""
    from transformers import LlavaProcessor

    try:
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil as Images
    except ImportError:  # before transformers 5
        from transformers import CLIPImageProcessor as Images
    tokenizer = vision_tokenizer()
    images = Images(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token=VISION_TOKENS[2],
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(folder)
    return processor
