"""The command `strands-rollout`: reads arguments, calls what does the work, makes exit codes of errors.

Exit codes: 0 ok, 1 failed, 2 usage. Imports nothing heavy before a command runs, so that --help answers at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from strands_rollout import __version__
from strands_rollout.errors import ConfigError, RolloutError

app = typer.Typer(
    name="strands-rollout",
    help="Train Strands agents with slime: token-in/token-out rollouts on SGLang.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command line; never returns."""
    try:
        app(prog_name="strands-rollout")
    except RolloutError as e:
        typer.echo(f"error: {e}", err=True)
        sys.exit(2 if isinstance(e, ConfigError) else 1)


def _print_version(*, value: bool) -> None:
    if value:
        typer.echo(f"strands-rollout {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The group's own options."""


@app.command(epilog="Example: strands-rollout demo --samples 8 --seed 1")
def demo(
    base_url: Annotated[
        str | None, typer.Option(help="An SGLang server or router; default: the embedded engine is started.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="What the embedded engine serves; default: the shipped model.", exists=True, file_okay=False),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="The served model's tokenizer; default: as the server names it.", exists=True, file_okay=False
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="JSONL with prompt and label; default: the shipped problems.", exists=True, dir_okay=False),
    ] = None,
    samples: Annotated[int, typer.Option(help="Episodes to run.", min=1)] = 32,
    concurrency: Annotated[int, typer.Option(help="Episodes at once.", min=1)] = 16,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.", min=0.0)] = 1.0,
    max_new_tokens: Annotated[
        int, typer.Option(help="Tokens of a whole response, tool results included.", min=1)
    ] = 1024,
    seed: Annotated[
        int | None, typer.Option(help="Sampling seed of the first episode; the next one's is one more.")
    ] = None,
    dump: Annotated[Path, typer.Option(help="Folder of the samples that are written.", file_okay=False)] = Path(
        "demo_dump"
    ),
    json_only: Annotated[bool, typer.Option("--json", help="Print only the line of JSON on stdout.")] = False,
) -> None:
    """Run math problems through `generate` and `reward_func`, check every token, and show what is trained.

    The last line on stdout is a JSON summary. Exits with 1 if a check fails or no episode completes.
    """
    if base_url is not None and model is not None:
        raise typer.BadParameter("--model is what the embedded engine serves; it can't be used with --base-url")
    # transformers would advise to install torch, which nothing here needs
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from strands_rollout.demo import DemoOptions, run_demo

    summary = run_demo(
        DemoOptions(
            base_url=base_url,
            model_dir=model,
            tokenizer_dir=tokenizer,
            data=data,
            samples=samples,
            concurrency=concurrency,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            seed=seed,
            dump_dir=dump,
            json_only=json_only,
        )
    )
    raise typer.Exit(0 if summary.ok else 1)


@app.command(epilog="Example: strands-rollout serve --port 30000")
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
    from strands_rollout import engine, engine_process

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


@app.command(epilog="Example: strands-rollout doctor --json")
def doctor(
    isolation: Annotated[
        str, typer.Option(help="What the code sandbox must enforce: full, seccomp or rlimits.")
    ] = "full",
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead.")] = False,
) -> None:
    """Show versions, and what the code sandbox enforces on this machine.

    Exits with 1 if the sandbox can't enforce what was asked for.
    """
    from rich.console import Console

    from strands_rollout import doctor as checks

    diagnosis = checks.examine(checks.to_isolation(isolation))
    if as_json:
        typer.echo(checks.to_json(diagnosis))
    else:
        checks.show(diagnosis, Console())
    raise typer.Exit(0 if diagnosis.ok else 1)


if __name__ == "__main__":
    main()
