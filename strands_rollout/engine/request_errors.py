"""Why a request is refused, and the JSON that SGLang answers in that case.

Knows SGLang 0.5.23's three shapes of an error body, which depend on who refuses: its JSON schema, its validation, or
its OpenAI endpoints.
"""

from __future__ import annotations

from strands_rollout.errors import RolloutError


class RequestRefusedError(RolloutError):
    """A request that can't be served; its message goes to the client with status 400."""

    def body(self) -> dict[str, object]:
        """The answer's JSON."""
        return {"error": {"message": str(self)}}

    def chat_body(self) -> dict[str, object]:
        """The answer's JSON at the OpenAI endpoints."""
        return {"object": "error", "message": str(self), "type": "BadRequestError", "param": None, "code": 400}


class ContractError(RequestRefusedError):
    """A sampling parameter is unknown or of the wrong type."""

    def body(self) -> dict[str, object]:
        """The answer's JSON."""
        return {"error": str(self)}


class SchemaError(RequestRefusedError):
    """The body is not JSON, or a top-level field is of the wrong type."""

    def body(self) -> dict[str, object]:
        """The answer's JSON."""
        return {"object": "error", "message": str(self), "type": "Bad Request", "param": None, "code": 400}
