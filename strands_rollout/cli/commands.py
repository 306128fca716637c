"""The commands `demo`, `init`, `try`, `serve`, `gateway`, `eval`, `train` and `tasks`, and the list of all commands.

Exit codes: 0 success, 1 failure, 2 wrong usage, 130 Ctrl-C or SIGTERM (0 for the servers of `serve`, `gateway` and
`view`). Heavy imports stand inside the commands, so that --help is fast.
"""

import asyncio
import os
import re
import secrets
import signal
import time
from contextlib import suppress
from dataclasses import fields
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Annotated, Final, Literal

import typer

from strands_rollout import __version__
from strands_rollout.cli.diagnose import check_template, doctor, drift, export, replay, rescore, validate, view
from strands_rollout.cli.options import (
    OptionValues,
    add_field_options,
    build_options,
    check_engine_options,
    config,
    is_given,
    run,
    set_help_format,
)
from strands_rollout.errors import ConfigError
from strands_rollout.play.options import (
    SHIPPED_MODEL,
    DemoOptions,
    EvalOptions,
    Sampling,
    TrainOptions,
    TryOptions,
    UpdateSettings,
    check_url,
)

app = typer.Typer(
    name="strands-rollout",
    help="Train Strands agents with slime: token-in/token-out rollouts on SGLang.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Kind = Literal["tools", "factory", "environment", "mcp", "program", "harness"]

# `init` makes a project from the files in `data/project/` and from rows of the data sets in `data/`
_DATA_DIR: Final = Path(str(files("strands_rollout") / "data"))
_PROJECT_FILES: Final = (
    "agent.py",
    "reward.py",
    "test_agent.py",
    "rollout.yaml",
    "turns.yaml",
    "run_slime.sh",
    "README.md",
)
_KIND_FILES: Final = {
    "factory": ("factory.py",),
    "environment": ("environment.py",),
    "mcp": ("server.py",),
    "program": ("program.py",),
    "harness": ("harness.py",),
}
_KIND_REQUIREMENTS: Final = {"program": ("openai", "openai"), "harness": ("strands_harness", "harness")}
"""The package that a kind of project imports, and the extra of strands-rollout for that package."""
_AGENT_SETTINGS: Final[dict[Kind, str]] = {
    "tools": "tools: [agent.look_up_price, agent.execute_python_code]\n  reward: reward.score",
    "factory": "agent_factory: factory.build\n  tools: []\n  reward: reward.score",
    "environment": "environment: environment.Shop # its score, computed with reward.py, is the reward\n  tools: []",
    "mcp": "tools:\n    - name: shop\n      command: python server.py\n      cwd: .\n  reward: reward.score",
    "program": "agent_program: program.run\n  tools: [] # the program has its own\n  reward: reward.score",
    "harness": """\
agent_factory: harness.build
  resources:
    scratch: harness.scratch
  tools: [agent.look_up_price, agent.execute_python_code] # in addition to the harness' tools
  reward: reward.score
  transient_context: keep # the harness' reminders stay in the history, so that an episode is one sample
  # fan_out: true would train sub-agents and shortened histories too; remove --log-passrate from run_slime.sh then""",
}
"""The agent's settings in rollout.yaml, by kind of project."""
_PROJECT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SHOP_PROBLEM: Final = re.compile(r"dollars each|dollars and \w+ cost")
"""Matches the shipped problems that fit the project's shop."""
_MAX_ROWS: Final = 96


def main() -> None:
    """Run the command line and exit with its exit code."""
    # most commands need no torch: silence transformers' advice to install it
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    previous = signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        run(app, "strands-rollout")
    finally:
        signal.signal(signal.SIGTERM, previous)


def _on_sigterm(_signum: int, frame: FrameType | None) -> None:
    """Handle SIGTERM like Ctrl-C, so that a terminated job prints how to resume.

    Calls SIGINT's handler instead of sending SIGINT, because a shell's background jobs ignore SIGINT.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)


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
    """Options of `strands-rollout` itself."""


def serve(
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of a Qwen3 model. Default: the shipped model.", exists=True, file_okay=False),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free port.", min=0, max=65535)] = 30000,
    served_model_name: Annotated[
        str | None, typer.Option(help="Model name at /v1/models. Default: the folder's path.")
    ] = None,
    context_length: Annotated[
        int | None, typer.Option(help="Maximum tokens of prompt plus answer. Default: the model's limit.", min=8)
    ] = None,
    max_running_requests: Annotated[
        int, typer.Option(help="Maximum number of requests decoded at once; more are queued.", min=1)
    ] = 32,
    seed: Annotated[
        int | None, typer.Option(help="Seed of requests that set no sampling seed. Default: random.")
    ] = None,
    stop_with_stdin: Annotated[bool, typer.Option("--stop-with-stdin", hidden=True)] = False,
) -> None:
    """Serve a small model on this CPU through SGLang's API.

    Also serves OpenAI's and Anthropic's chat APIs. Prints a line of JSON with the base_url on stdout as soon as the
    server accepts requests. Ctrl-C stops the server.
    """
    from strands_rollout import engine
    from strands_rollout.integrations.sessions import chat_endpoint

    if stop_with_stdin:
        engine.stop_with_stdin()
    elif model is None:
        typer.echo(
            "note: the shipped model is trained on math with the code tool only; it uses no other tools", err=True
        )
    engine.serve(
        model,
        host,
        port,
        on_ready=engine.print_ready,
        routes=chat_endpoint(model or engine.SHIPPED_MODEL_DIR).routes(),
        served_model_name=served_model_name,
        context_length=context_length,
        max_running_requests=max_running_requests,
        random_seed=seed,
    )


def gateway(
    base_url: Annotated[str, typer.Option(help="URL of an SGLang server or router.", callback=check_url)],
    tokenizer: Annotated[
        str, typer.Option(help="Folder of the policy's tokenizer, or a model's id on the Hugging Face Hub.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free port.", min=0, max=65535)] = 8700,
    tool_parser: Annotated[
        str, typer.Option(help="Format of tool calls; auto detects it from the chat template.")
    ] = "auto",
    model_name: Annotated[str, typer.Option(help="Model name at /v1/models.")] = "policy",
    idle: Annotated[
        float,
        typer.Option(
            help="End sessions without a request for a turn or for samples in this many seconds; checked when a new "
            "session begins.",
            min=1,
        ),
    ] = 3600,
    key: Annotated[
        str | None,
        typer.Option(
            help="API key required to open, read and end sessions. Without a key, --host must be local.",
            envvar="STRANDS_ROLLOUT_GATEWAY_KEY",
        ),
    ] = None,
) -> None:
    """Serve a policy to any agent and record its exact tokens.

    Use it with trainers other than slime. POST /sessions returns an API key for OpenAI and Anthropic clients; GET
    /sessions/ID/samples returns the tokens that the policy read and sampled in the session. Prints a line of JSON with
    the base_url on stdout as soon as the server accepts requests. Ctrl-C stops the server.
    """
    from strands_rollout.engine import print_ready
    from strands_rollout.integrations.sessions import SessionServer, serve_sessions
    from strands_rollout.slime_plugin.slime_adapter import load_tokenizer

    settings = {"tool_parser": tool_parser, "model_id": model_name}
    sessions = SessionServer(load_tokenizer(tokenizer), base_url, owner_key=key, idle_s=idle, **settings)
    with suppress(KeyboardInterrupt):
        asyncio.run(serve_sessions(sessions, host, port, print_ready))


def init(
    folder: Annotated[Path, typer.Argument(help="Folder to create the project in.", metavar="DIR")],
    kind: Annotated[
        Kind,
        typer.Option(
            help="Kind of agent: tools (functions), factory (a function that builds the agent), environment (tools "
            "with a state and a score), mcp (an MCP server), program (any OpenAI or Anthropic client), or harness "
            "(Strands' harness with a shell, files and sub-agents)."
        ),
    ] = "tools",
) -> None:
    """Create a project with an agent, a reward and tests.

    The project runs as created: it has data, a configuration, and a script that trains with slime. The folder must
    be new or empty.
    """
    folder = folder.expanduser()
    project = folder.resolve()
    if not _PROJECT_NAME.fullmatch(project.name):
        suggestion = re.sub(r"[^A-Za-z0-9._-]+", "-", project.name).strip("._-") or "my-agent"
        raise ConfigError(
            f"got a folder named {project.name!r}; expected a letter or digit, then letters, digits, dots, dashes and "
            f"underscores, such as {suggestion}"
        )
    texts = _project_files(kind, project)
    try:
        project.mkdir(parents=True, exist_ok=True)
        if existing := sorted(path.name for path in project.iterdir()):
            raise ConfigError(f"{folder} is not empty (it contains {', '.join(existing[:3])}); name a new folder")
        for name, text in texts.items():
            (project / name).write_text(text, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"can't write {folder}: {e.strerror}; name another folder") from e
    from strands_rollout.dump.terminal import show_next

    typer.echo(f"wrote {', '.join(texts)}")
    package, extra = _KIND_REQUIREMENTS.get(kind, (None, None))
    if package is not None and find_spec(package) is None:
        typer.echo(
            f"note: the project needs {package}; to install it, run: pip install 'strands-rollout[{extra}]'", err=True
        )
    show_next("try", "rollout.yaml", "--script", "turns.yaml", folder=None if project == Path.cwd() else folder)


def _project_files(kind: Kind, project: Path) -> dict[str, str]:
    texts = {}
    for name in (*_PROJECT_FILES, *_KIND_FILES.get(kind, ())):
        text = (_DATA_DIR / "project" / name).read_text(encoding="utf-8").replace("@AGENT@", _AGENT_SETTINGS[kind])
        texts[name] = text.replace("@NAME@", project.name)
    for name, source in (("train.jsonl", "train.jsonl"), ("held_out.jsonl", "demo.jsonl")):
        rows = (_DATA_DIR / source).read_text(encoding="utf-8").splitlines(keepends=True)
        texts[name] = "".join([row for row in rows if _SHOP_PROBLEM.search(row)][:_MAX_ROWS])
    return texts


_SERVER_DEFAULTS: Final = {"samples": 16, "concurrency": 64, "max_new_tokens": 16384}
_EMBEDDED_DEFAULTS: Final = {"samples": 4, "concurrency": 16, "max_new_tokens": 1024}


@add_field_options(DemoOptions)
def demo(values: OptionValues) -> None:
    """Play math problems and show the training samples.

    Calls `generate` and `reward_func` as slime does, and checks every token. The last line on stdout is a JSON
    summary. Exits with 1 if a check fails or no episode completes.
    """
    check_engine_options(values["base_url"], values["model_dir"])
    from strands_rollout.evaluation.run import run_demo

    if values["seed"] is None:  # drawn here and recorded, so that `replay` samples the same tokens
        values["seed"] = secrets.randbelow(1 << 30)
    raise typer.Exit(0 if run_demo(DemoOptions(**values)).ok else 1)


@add_field_options(EvalOptions, Sampling)
def evaluate(
    values: OptionValues,
    *,
    context: typer.Context,
    k: Annotated[
        str | None,
        typer.Option(
            help="Values of k for pass@k; values above --samples-per-problem are left out. Default: 1,4,8,16.",
            metavar="N,N,...",
        ),
    ] = None,
) -> None:
    """Evaluate a policy on data sets and report accuracy.

    Reports pass@k and the accuracy of the majority answer too. Episodes run through `generate` and `reward_func`, as
    in training.

    Results are saved as they arrive: to resume an interrupted run and retry its failed samples, run the same command
    with the same --out. The last line on stdout is the report as JSON. Exits with 1 if a check failed, or if a sample
    failed, was aborted or could not be graded. Exits with 130 after Ctrl-C.
    """
    check_engine_options(values["base_url"], values["model_dir"])
    # an option's bounds can't express these limits, and an engine would reject every sample
    if not 0 < values["top_p"] <= 1:
        raise typer.BadParameter(f"got --top-p {values['top_p']}; expected more than 0 and at most 1")
    if values["top_k"] == 0:
        raise typer.BadParameter("got --top-k 0; expected -1 for all tokens, or at least 1")
    ks = None if k is None else _parse_ks(k)
    from strands_rollout.evaluation.run import run_evaluation

    overrides = {
        field.name: values[field.name]
        for field in fields(Sampling)
        if values.get(field.name) is not None and is_given(context, field.name)
    }
    defaults = _SERVER_DEFAULTS if values["base_url"] is not None else _EMBEDDED_DEFAULTS
    values |= {name: values[name] or default for name, default in defaults.items()}
    values["data"] = values["data"] or []
    values["out"] = values["out"] or Path("eval_results") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    sampling = build_options(Sampling, values)
    options = build_options(EvalOptions, values, sampling=sampling, sampling_overrides=overrides, ks=ks)
    raise typer.Exit(run_evaluation(options))


def _parse_ks(text: str) -> list[int]:
    try:
        ks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        ks = []
    if not ks or ks[0] < 1:
        raise typer.BadParameter(f"got --k {text!r}; expected comma-separated integers of at least 1, as in 1,4,8")
    return ks


@add_field_options(TryOptions)
def try_row(
    values: OptionValues,
    *,
    config: Annotated[
        Path | None,
        typer.Argument(
            help="Settings file, as for slime's --custom-config-path. Without it, all settings have their defaults.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
) -> None:
    """Play one row and print the episode as it runs.

    Prints the prompt, each turn, tool call and result, the reward and the status.

    The turns come from one source: a file (--script), your keyboard (--you), an API (--api-base and --api-model), an
    SGLang server (--base-url), or the embedded engine (--model). --script, --you and --api-base need no local
    model. The chat template, tool parser, tools and reward work as in training, whatever the source. By default, the
    embedded engine serves the shipped model, which is trained on math with the code tool only.

    Exits with 1 if the episode, its reward or a check of its tokens fails, or if slime would not train the sample. Also
    exits with 1 if the episode does not end with the last turn of --script. Exits with 130 after Ctrl-C or Ctrl-D.
    """
    sources = [name for name in ("script", "you", "api_base", "base_url", "model_dir") if values[name]]
    if len(sources) > 1:
        given = ", ".join(f"--{name.removesuffix('_dir').replace('_', '-')}" for name in sources)
        raise typer.BadParameter(f"got {given}; expected only one of them, as the source of the turns")
    if (values["api_base"] is None) != (values["api_model"] is None):
        raise typer.BadParameter("got only one of --api-base and --api-model; expected both or neither")
    from strands_rollout.evaluation.try_row import run_try

    raise typer.Exit(run_try(TryOptions(config=config, **values)))


@add_field_options(TrainOptions, UpdateSettings)
def train(
    values: OptionValues,
    *,
    context: typer.Context,
    unchecked: Annotated[
        bool,
        typer.Option(
            "--unchecked",
            help="Continue if logprobs differ by more than --gap-limit, or a sample is unusable for slime's trainer.",
        ),
    ] = False,
) -> None:
    """Train a small model with GRPO on this CPU.

    Each step plays groups of episodes through `generate` and `reward_func`, as slime does. The step then normalizes
    rewards within groups, updates the policy, and lets the engine load the new weights from disk.

    At the first step, the trainer's logprobs of the sampled tokens may differ from the rollout's by at most
    --gap-limit. Otherwise, the run stops and prints the tokens that differ. The trained model is in the folder weights/
    of --out. The last line on stdout is the summary as JSON. Exits with 1 if a check or the engine fails, and with 130
    after Ctrl-C.
    """
    if find_spec("torch") is None:
        cpu_build = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
        raise ConfigError(
            f"training needs torch, which is not installed; run: {cpu_build} && pip install 'strands-rollout[train]'"
        )
    from strands_rollout.train.rollouts import TrainingMethod

    _check_and_complete(values)
    method = context.find_object(TrainingMethod) or TrainingMethod()  # set by an experiment's command line
    options = build_options(
        TrainOptions,
        values,
        rollout=method.rollout,
        ablation=method.ablation,
        checks=not unchecked,
        update=build_options(UpdateSettings, values),
    )
    from strands_rollout.train.trainer import run_training

    raise typer.Exit(run_training(options, method))


def _check_and_complete(values: OptionValues) -> None:
    """Check limits that an option's bounds can't express, and fill in the default paths."""
    from strands_rollout.play.rows import shipped_rows

    if values["temperature"] <= 0:
        raise typer.BadParameter(
            f"got --temperature {values['temperature']}; expected more than 0: without randomness, all samples of a "
            "group are equal"
        )
    if values["is_async"] and values["extra_prompts"]:
        raise typer.BadParameter(
            "got --async and --extra-prompts; expected only one of them: with --async, each step plays all of its "
            "episodes to their end"
        )
    values["out"] = (
        values["out"] or Path("train_runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-seed{values['seed']}-{os.getpid()}"
    )
    values["model_dir"] = values["model_dir"] or SHIPPED_MODEL
    values["data"] = values["data"] or shipped_rows().with_name("train.jsonl")
    values["held_out"] = values["held_out"] or shipped_rows()


def tasks(
    environment: Annotated[
        Path,
        typer.Argument(
            help="TOML file of a verifiers environment, as for the setting environment_config.", metavar="ENV.TOML"
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write the rows to, as JSON lines.", dir_okay=False)],
    split: Annotated[
        str | None, typer.Option(help="Value for the taskset's field `split`. Default: the taskset's value.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Maximum number of rows. Default: all.", min=1)] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed to shuffle the tasks with. Default: the taskset's order.")
    ] = None,
) -> None:
    """Write the tasks of a verifiers taskset as rows.

    To train on the rows, run slime with --prompt-data FILE --input-key prompt --label-key label --metadata-key
    metadata. The metadata of a row names the task. The same seed gives the same rows. An endless taskset, such as a
    game, needs --limit.
    """
    if find_spec("verifiers") is None:
        raise ConfigError(
            "this command needs verifiers, which is not installed; run: pip install 'strands-rollout[verifiers]'"
        )
    from strands_rollout.environments.verifiers import task_rows
    from strands_rollout.files.json_codec import encode_json
    from strands_rollout.files.safe_files import atomic_replacement

    rows = task_rows(environment, split=split, limit=limit, seed=seed)
    try:
        with atomic_replacement(out) as partial:
            partial.write_bytes(b"".join(encode_json(row) + b"\n" for row in rows))
    except OSError as e:
        raise ConfigError(f"can't write {out}: {e.strerror or e}; choose another --out") from e
    typer.echo(f"{len(rows)} rows written to {out}")


app.command(epilog="Example: strands-rollout demo --samples 8 --seed 1")(demo)
app.command(epilog="Example: strands-rollout init my-agent --kind tools")(init)
app.command("try", epilog="Example: strands-rollout try rollout.yaml --script turns.yaml")(try_row)
app.command(epilog="Example: strands-rollout serve --port 30000")(serve)
app.command(epilog="Example: strands-rollout gateway --base-url http://127.0.0.1:30000 --tokenizer models/Qwen3-8B")(
    gateway
)
app.command(
    "eval", epilog="Example: strands-rollout eval --base-url http://127.0.0.1:30000 --data aime.jsonl --out aime"
)(evaluate)
app.command(epilog="Example: strands-rollout tasks env.toml --out rows.jsonl --limit 500")(tasks)
app.command(epilog="Example: strands-rollout doctor --training")(doctor)
app.command(epilog="Example: strands-rollout train --steps 60 --seed 0 --out run")(train)
app.command(epilog="Example: strands-rollout view demo_dump --out samples.html")(view)
app.command(epilog="Example: strands-rollout config configs/math_code.yaml")(config)
app.command("check-template", epilog="Example: strands-rollout check-template models/Qwen3-8B")(check_template)
app.command(epilog="Example: strands-rollout validate data/dapo-math-17k.jsonl")(validate)
app.command(epilog="Example: strands-rollout drift demo_dump")(drift)
app.command(epilog="Example: strands-rollout rescore rollouts.jsonl.gz --reward my_package.my_reward")(rescore)
app.command(epilog="Example: strands-rollout replay demo_dump --sample 3")(replay)
app.command(epilog="Example: strands-rollout export rollouts.jsonl.gz --to otel --endpoint http://127.0.0.1:4318")(
    export
)
set_help_format(app.registered_commands)
