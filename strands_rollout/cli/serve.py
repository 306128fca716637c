"""The command `strands-rollout serve`: its arguments; the one place that starts the embedded engine in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of a Qwen3 model; default: the shipped one.", exists=True, file_okay=False),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for a free one.", min=0, max=65535)] = 30000,
    served_model_name: Annotated[str | None, typer.Option(help="Name at /v1/models; default: the folder.")] = None,
    context_length: Annotated[
        int | None, typer.Option(help="Tokens of prompt and answer; default: the model's own.", min=8)
    ] = None,
    max_running_requests: Annotated[
        int, typer.Option(help="Generations that decode together; the others wait.", min=1)
    ] = 32,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable, given the order of requests.")] = None,
    stop_with_stdin: Annotated[bool, typer.Option("--stop-with-stdin", hidden=True)] = False,
) -> None:
    """Serve a small Qwen3 on this CPU behind SGLang's API, until Ctrl-C.

    Prints a line of JSON with its base_url on stdout when it accepts requests.
    """
    from strands_rollout import engine
    from strands_rollout.engine import process as engine_process

    if stop_with_stdin:
        engine_process.stop_with_stdin()
    engine.serve(
        model,
        host,
        port,
        on_ready=engine_process.announce,
        served_model_name=served_model_name,
        context_length=context_length,
        max_running_requests=max_running_requests,
        random_seed=seed,
    )
