"""The words that the policy reads from this package: the default system prompt and the code tool's specification.

The shipped model is trained on exactly these; `prompts_sha256` ties a checkpoint to them.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

SYSTEM_PROMPT: Final = (
    "You are a careful math solver. Reason briefly, use the execute_python_code tool for every computation, "
    "and give the final answer in \\boxed{}."
)

CODE_TOOL_NAME: Final = "execute_python_code"
CODE_TOOL_DESCRIPTION: Final = (
    "Run Python code and return what it prints, and the value of a last expression. Each call starts fresh: "
    "variables and files are not kept. numpy and sympy are installed. No network."
)
CODE_TOOL_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "The Python code to run."}},
    "required": ["code"],
}


def prompts_sha256() -> str:
    """Hex digest of the system prompt and the tool specification, as stored in the shipped model's config."""
    words = [SYSTEM_PROMPT, CODE_TOOL_NAME, CODE_TOOL_DESCRIPTION, CODE_TOOL_SCHEMA]
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()
