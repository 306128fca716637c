"""Gives an engine new weights from disk, under a version that its answers then carry.

Knows SGLang's control endpoints (0.5.23, /update_weights_from_disk); nothing of training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import httpx

from strands_rollout.errors import EngineError, EngineUnavailableError
from strands_rollout.sglang_connection import create_client

_TIMEOUT_S: Final = 120.0


class WeightSync:
    """Steers one engine; of use while its block lasts."""

    def __init__(self, base_url: str) -> None:
        self._http = create_client(base_url)

    async def __aenter__(self) -> WeightSync:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._http.aclose()

    async def load(self, folder: Path, version: int | str) -> None:
        """Load the weights of a model folder, an absolute path that the engine can read; its prefix cache is emptied.

        Raises:
            EngineError: It refused.
            EngineUnavailableError: It did not answer.
        """
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        answer = await self._post("/update_weights_from_disk", body)
        if not answer.get("success"):
            raise EngineError(f"the engine did not load the weights of {folder}: {answer.get('message')!r:.500}")

    async def abort_all(self) -> None:
        """End every request that runs or waits; each answers with what it has sampled."""
        await self._post("/abort_request", {"abort_all": True})

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            response = await self._http.post(path, json=body, timeout=_TIMEOUT_S)
        except httpx.HTTPError as e:
            raise EngineUnavailableError(f"the engine did not answer {path}: {type(e).__name__} {e}") from e
        if response.status_code not in (200, 400):
            raise EngineError(f"the engine answered {path} with {response.status_code}: {response.text[:500]!r}")
        try:
            answer = response.json()
        except ValueError:
            return {}
        return answer if isinstance(answer, dict) else {}
