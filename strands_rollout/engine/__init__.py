"""The embedded engine: a small Qwen3 on NumPy behind SGLang's API, with the model that ships with the package.

Importing this is cheap; NumPy and aiohttp are imported when an engine starts.
"""

from strands_rollout.engine.serving import running_engine, serve
from strands_rollout.engine.settings import SHIPPED_MODEL_DIR, EngineSettings

__all__ = ["SHIPPED_MODEL_DIR", "EngineSettings", "running_engine", "serve"]
