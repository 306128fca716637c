"""The embedded engine: a small Qwen3 on NumPy behind SGLang's API, with the model that ships with the package.

Importing this is cheap; NumPy and aiohttp are imported when an engine starts.
"""

from strands_rollout.engine.serving import SHIPPED_MODEL_DIR, EngineSettings, running_engine, serve

__all__ = ["SHIPPED_MODEL_DIR", "EngineSettings", "running_engine", "serve"]
