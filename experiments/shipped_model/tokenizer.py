"""Train a byte-level BPE with Qwen3's pre-tokenizer, control tokens and chat format, and write its files."""

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
QWEN3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTEXT_LENGTH: Final = 2048
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CHAT_TEMPLATE: Final = Path(__file__).with_name("chat_template.jinja")


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """Train a BPE that encodes every text and splits numbers into digits.

    Args:
        texts: Texts to learn from; control tokens in them are cut out first.
        vocabulary_size: Number of ids, added tokens included; at least 265, for the bytes and the added tokens.
    """
    added = [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    added += [AddedToken(text, special=False, normalized=False) for text in MARKUP_TOKENS]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN3_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size - len(added),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    control_tokens = re.compile("|".join(re.escape(text) for text in SPECIAL_TOKENS + MARKUP_TOKENS))
    tokenizer.train_from_iterator((piece for text in texts for piece in control_tokens.split(text)), trainer)
    tokenizer.add_tokens(added)
    return tokenizer


def chat_renderer() -> PreTrainedTokenizerBase:
    """Return a tokenizer without a vocabulary, which can only render conversations."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=CHAT_TEMPLATE.read_text())


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context_length: int = CONTEXT_LENGTH) -> PreTrainedTokenizerBase:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja, and return the loaded tokenizer."""
    settings = {
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": context_length,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    shutil.copyfile(CHAT_TEMPLATE, folder / "chat_template.jinja")
    return AutoTokenizer.from_pretrained(folder)


def copy_tokenizer(parent: Path, folder: Path) -> PreTrainedTokenizerBase:
    """Copy a tokenizer to another folder, and return the tokenizer loaded from there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copyfile(parent / name, folder / name)
    return AutoTokenizer.from_pretrained(folder)
