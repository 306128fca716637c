"""An image processor for a text model's tokenizer, so that a benchmark can have images without a vision model."""

from pathlib import Path
from typing import Any, Final

from benchmarks.variants import IMAGE_TOKENS

_TOKENS: Final = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
_SIDE, _PATCH = 224, 14  # pixels; CLIP's
_PARTS: Final = (
    "{%- macro text_of(content) -%}"
    "{%- if content is string -%}{{- content -}}"
    "{%- elif content -%}{%- for part in content -%}"
    "{%- if part.type == 'image' -%}{{- '" + "".join(_TOKENS) + "' -}}{%- else -%}{{- part.text -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- endmacro -%}"
)


def save_image_processor(tokenizer_dir: Path, folder: Path) -> None:
    """Save a LLaVA processor with this tokenizer and CLIP's image processor, which need no torch.

    The chat template is the tokenizer's, with Qwen's tokens where a message has an image.
    """
    from transformers import AutoTokenizer, LlavaProcessor

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tokenizer.add_tokens(list(_TOKENS), special_tokens=True)
    tokenizer.chat_template = _PARTS + tokenizer.chat_template.replace("message.content", "text_of(message.content)")
    images = _image_processor()(
        size={"shortest_edge": _SIDE}, crop_size={"height": _SIDE, "width": _SIDE}, do_convert_rgb=True
    )
    assert (_SIDE // _PATCH) ** 2 == IMAGE_TOKENS
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        image_token=_TOKENS[1],
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )
    processor.save_pretrained(folder)


def _image_processor() -> Any:
    try:
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    except ImportError:  # before transformers 5
        from transformers import CLIPImageProcessor

        return CLIPImageProcessor
    return CLIPImageProcessorPil
