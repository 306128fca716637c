"""Writes a Qwen3 folder whose weights are made by hand, so that it plays a small tool-using script greedily.

Every token has one successor (a one-hot embedding and a head that names it), except that the first token of a turn
depends on whether the prompt holds a tool result: a uniform attention head looks for `</tool_response>`.
"""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from tiny_qwen3 import TinyQwen3, save_tensors
from tokenizers import AddedToken, Tokenizer

THINK_AND_CALL = (
    "<think>",
    "\nI add.\n",
    "</think>",
    "\n\nLet me see.\n",
    "<tool_call>",
    '\n{"name": "add", ',
    '"arguments": {"a": 2, ',
    '"b": 3}}\n',
    "</tool_call>",
)
ANSWER = ("The sum is ", "\\boxed{5}.")
_END = "<|im_end|>"
_LINE_FEED = "\u010a"  # how byte-level BPE writes the last token of a generation prompt


def write_scripted_qwen3(folder: Path) -> Path:
    """Write the folder: first turn THINK_AND_CALL, and after a tool result ANSWER."""
    shape = TinyQwen3(layers=1, heads=1, kv_heads=1, head_dim=2, intermediate=2, tied=False, context_length=1024)
    shape.write_configs(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    extra = [text for text in (*THINK_AND_CALL, *ANSWER) if text[0] != "<"]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in extra])
    vocab_size = tokenizer.get_vocab_size()
    replace(shape, vocab_size=vocab_size, hidden=vocab_size + 1).write_configs(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    save_tensors(_tensors(tokenizer, vocab_size), folder / "model.safetensors")
    return folder


def _tensors(tokenizer: Tokenizer, vocab_size: int) -> dict[str, np.ndarray]:
    hidden, layer = vocab_size + 1, "model.layers.0."
    texts = (*THINK_AND_CALL, *ANSWER, _END, _LINE_FEED, "</tool_response>")
    ids = {text: tokenizer.token_to_id(text) for text in texts}
    head = np.zeros((vocab_size, hidden), np.float32)
    for chain in ((_LINE_FEED, *THINK_AND_CALL, _END), (*ANSWER, _END)):
        for text, successor in pairwise(chain):
            head[ids[successor], ids[text]] = 1
    saw_tool_result = hidden - 1
    first_answer = ids[ANSWER[0]]
    head[first_answer] = -1000
    head[first_answer, ids[_LINE_FEED]] = 0.5
    head[first_answer, saw_tool_result] = 10
    values = np.zeros((2, hidden), np.float32)
    values[0, ids["</tool_response>"]] = 1
    out = np.zeros((hidden, 2), np.float32)
    out[saw_tool_result, 0] = 20
    tensors = {
        "model.embed_tokens.weight": np.eye(vocab_size, hidden, dtype=np.float32),
        "lm_head.weight": head,
        "model.norm.weight": np.ones(hidden, np.float32),
        layer + "input_layernorm.weight": np.ones(hidden, np.float32),
        layer + "post_attention_layernorm.weight": np.ones(hidden, np.float32),
        layer + "self_attn.v_proj.weight": values,
        layer + "self_attn.o_proj.weight": out,
    }
    for name in ("q_norm", "k_norm"):
        tensors[layer + f"self_attn.{name}.weight"] = np.zeros(2, np.float32)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj"):
        tensors[layer + name + ".weight"] = np.zeros((2, hidden), np.float32)
    tensors[layer + "mlp.down_proj.weight"] = np.zeros((hidden, 2), np.float32)
    return tensors
