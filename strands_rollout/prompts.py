"""The words that the policy reads from this package: the default system prompt and the code tool's specification.

The shipped model is trained on exactly these; `prompts_sha256` ties a checkpoint to them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final

SYSTEM_PROMPT: Final = (
    "You are a careful math solver. Reason briefly, use the execute_python_code tool for every computation, "
    "and give the final answer in \\boxed{}."
)

CODE_TOOL_NAME: Final = "execute_python_code"
CODE_TIMEOUT_S: Final = 60.0
CODE_MEMORY_MB: Final = 4096
CODE_OUTPUT_CHARS: Final = 20_000
CODE_LIBRARIES: Final = ("numpy", "sympy")


def code_tool_description(
    *,
    timeout_s: float = CODE_TIMEOUT_S,
    output_chars: int = CODE_OUTPUT_CHARS,
    memory_mb: int | None = CODE_MEMORY_MB,
    libraries: Sequence[str] | None = CODE_LIBRARIES,
    isolated: bool = True,
    keeps_state: bool = False,
) -> str:
    """What the policy is told of the code tool; nothing is said of what is not known.

    Args:
        timeout_s: Limit of one call in seconds.
        output_chars: Characters of output that are returned.
        memory_mb: Memory of one call in mebibytes; None where the executor does not say.
        libraries: What can be imported besides the standard library; None where the executor does not say.
        isolated: Whether network and other programs are out of reach.
        keeps_state: Whether the calls of one episode share an interpreter.
    """
    memory = f", {memory_mb} MB of memory" if memory_mb is not None else ""
    sentences = [
        "Run Python code and return what it prints, and the value of a last expression.",
        "Variables and files are kept between calls."
        if keeps_state
        else "Each call starts fresh: variables and files are not kept.",
        f"Installed besides the standard library: {', '.join(libraries) or 'nothing'}."
        if libraries is not None
        else "",
        "No network, no other programs." if isolated else "",
        f"At most {timeout_s:g} s{memory} and {output_chars} characters of output.",
    ]
    return " ".join(filter(None, sentences))


CODE_TOOL_DESCRIPTION: Final = code_tool_description()
CODE_TOOL_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "The Python code to run."}},
    "required": ["code"],
}


def prompts_sha256() -> str:
    """Hex digest of the system prompt and the tool specification, as stored in the shipped model's config."""
    words = [SYSTEM_PROMPT, CODE_TOOL_NAME, CODE_TOOL_DESCRIPTION, CODE_TOOL_SCHEMA]
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()
