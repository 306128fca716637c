"""`strands-rollout` and its commands; exit codes of errors.

Exit codes: 0 ok, 1 failed, 2 usage. Imports nothing heavy before a command runs, so that --help answers at once.
"""

import asyncio
import os
import re
import secrets
import signal
import time
from contextlib import suppress
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Annotated, Final, Literal

import typer

from strands_rollout import __version__
from strands_rollout.cli.diagnose import check_template, doctor, drift, export, replay, rescore, validate, view
from strands_rollout.cli.options import Given, check_engine, config, finish, made, run, takes
from strands_rollout.errors import ConfigError
from strands_rollout.play.options import (
    SHIPPED_MODEL,
    DemoOptions,
    EvalOptions,
    Sampling,
    TrainOptions,
    TryOptions,
    UpdateSettings,
    checked_url,
)

app = typer.Typer(
    name="strands-rollout",
    help="Train Strands agents with slime: token-in/token-out rollouts on SGLang.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Kind = Literal["tools", "factory", "environment", "mcp", "program", "harness"]

# what `init` writes: the files of `data/project/`
_DATA: Final = Path(str(files("strands_rollout") / "data"))
_COMMON: Final = ("agent.py", "reward.py", "test_agent.py", "rollout.yaml", "turns.yaml", "run_slime.sh", "README.md")
_FURTHER: Final = {
    "factory": ("factory.py",),
    "environment": ("environment.py",),
    "mcp": ("server.py",),
    "program": ("program.py",),
    "harness": ("harness.py",),
}
_NEEDS: Final = {"program": ("openai", "openai"), "harness": ("strands_harness", "harness")}
"""The package that a kind imports, and this package's extra that installs it."""
_AGENTS: Final[dict[Kind, str]] = {
    "tools": "tools: [agent.look_up_price, agent.execute_python_code]\n  reward: reward.score",
    "factory": "agent_factory: factory.build\n  tools: []\n  reward: reward.score",
    "environment": "environment: environment.Shop # its score, made of reward.py's, is the reward\n  tools: []",
    "mcp": "tools:\n    - name: shop\n      command: python server.py\n      cwd: .\n  reward: reward.score",
    "program": "agent_program: program.run\n  tools: [] # the program has its own\n  reward: reward.score",
    "harness": """\
agent_factory: harness.build
  resources:
    scratch: harness.scratch
  tools: [agent.look_up_price, agent.execute_python_code] # beside the harness' own
  reward: reward.score
  transient_context: keep # what the harness reminds of stays, so that an episode is one sample
  # fan_out: true would train sub-agents and shortened histories, too; leave --log-passrate out of run_slime.sh then""",
}
"""What rollout.yaml says of the agent."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SHOP_PROBLEM: Final = re.compile(r"dollars each|dollars and \w+ cost")
"""Those of the shipped problems that a shop's till can answer."""
_TRAINING_ROWS: Final = 96


def main() -> None:
    """Run the command line; never returns."""
    # transformers would advise to install torch, which most commands don't need
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        run(app, "strands-rollout")
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_signum: int, frame: FrameType | None) -> None:
    """Do as after Ctrl-C, so that a job that is ended says what was kept; a shell's background job ignores SIGINT."""
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
    """The group's own options."""


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
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop_with_stdin: Annotated[bool, typer.Option("--stop-with-stdin", hidden=True)] = False,
) -> None:
    """Serve a small Qwen3 on this CPU behind SGLang's API.

    It ends by Ctrl-C. Prints a line of JSON with its base_url on stdout when it accepts requests.
    """
    from strands_rollout import engine
    from strands_rollout.integrations.sessions import chat_endpoint

    if stop_with_stdin:
        engine.stop_with_stdin()
    elif model is None:
        typer.echo("note: the shipped model knows only math with the code tool, no other tools", err=True)
    engine.serve(
        model,
        host,
        port,
        on_ready=engine.announce,
        routes=chat_endpoint(model or engine.SHIPPED_MODEL_DIR).routes(),
        served_model_name=served_model_name,
        context_length=context_length,
        max_running_requests=max_running_requests,
        random_seed=seed,
    )


def gateway(
    base_url: Annotated[str, typer.Option(help="URL of an SGLang server or router.", callback=checked_url)],
    tokenizer: Annotated[str, typer.Option(help="The policy's tokenizer: a folder, or an id of the hub.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for a free one.", min=0, max=65535)] = 8700,
    tool_parser: Annotated[str, typer.Option(help="Format of tool calls; auto: the template's own.")] = "auto",
    model_name: Annotated[str, typer.Option(help="Name at /v1/models.")] = "policy",
    idle: Annotated[float, typer.Option(help="Seconds after which an unused session is ended.", min=1)] = 3600,
    key: Annotated[
        str | None, typer.Option(help="What the owner's requests must carry.", envvar="STRANDS_ROLLOUT_GATEWAY_KEY")
    ] = None,
) -> None:
    """Serve a policy to agents anywhere.

    Its exact tokens are kept, for other trainers: POST /sessions gives a key for clients of OpenAI's and Anthropic's
    APIs, and GET /sessions/ID/samples gives what was read and sampled with it. It ends by Ctrl-C. Prints a line of JSON
    with its base_url on stdout when it accepts requests.
    """
    from strands_rollout.engine import announce
    from strands_rollout.integrations.sessions import SessionServer, serve_sessions
    from strands_rollout.slime_plugin.slime_adapter import load_tokenizer

    settings = {"tool_parser": tool_parser, "model_id": model_name}
    sessions = SessionServer(load_tokenizer(tokenizer), base_url, owner_key=key, idle_s=idle, **settings)
    with suppress(KeyboardInterrupt):
        asyncio.run(serve_sessions(sessions, host, port, announce))


def init(
    folder: Annotated[Path, typer.Argument(help="The project's folder, which is made.", metavar="DIR")],
    kind: Annotated[
        Kind,
        typer.Option(
            help="What the agent is made of. tools: functions; factory: a function that builds it; environment: a "
            "world with tools, a state and a score; mcp: an MCP server; program: any client of OpenAI's or Anthropic's "
            "API; harness: Strands' harness, with a shell, files and sub-agents."
        ),
    ] = "tools",
) -> None:
    """Write a small project to start from, which works at once.

    It has an agent, a reward, their tests, rows, and what tries and trains them. Writes nothing into a folder that has
    files.
    """
    folder = folder.expanduser()
    place = folder.resolve()
    if not _NAME.fullmatch(place.name):
        near = re.sub(r"[^A-Za-z0-9._-]+", "-", place.name).strip("._-") or "my-agent"
        raise ConfigError(
            f"got the name {place.name!r}; expected a letter or digit, then letters, digits, dots, dashes and "
            f"underscores, such as {near}"
        )
    texts = _project_files(kind, place)
    try:
        place.mkdir(parents=True, exist_ok=True)
        if held := sorted(path.name for path in place.iterdir()):
            raise ConfigError(f"{folder} is not empty, it holds {', '.join(held[:3])}; name a new folder")
        for name, text in texts.items():
            (place / name).write_text(text, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"can't write {folder}: {e.strerror}; name another folder") from e
    from strands_rollout.dump.terminal import show_next

    typer.echo(f"wrote {', '.join(texts)}")
    package, extra = _NEEDS.get(kind, (None, None))
    if package is not None and find_spec(package) is None:
        typer.echo(
            f"note: it needs {package}, which is not installed: pip install 'strands-rollout[{extra}]'", err=True
        )
    show_next("try", "rollout.yaml", "--script", "turns.yaml", folder=None if place == Path.cwd() else folder)


def _project_files(kind: Kind, place: Path) -> dict[str, str]:
    """The project's files by name."""
    texts = {}
    for name in (*_COMMON, *_FURTHER.get(kind, ())):
        text = (_DATA / "project" / name).read_text(encoding="utf-8").replace("@AGENT@", _AGENTS[kind])
        texts[name] = text.replace("@NAME@", place.name)
    for name, source in (("train.jsonl", "train.jsonl"), ("held_out.jsonl", "demo.jsonl")):
        rows = (_DATA / source).read_text(encoding="utf-8").splitlines(keepends=True)
        texts[name] = "".join([row for row in rows if _SHOP_PROBLEM.search(row)][:_TRAINING_ROWS])
    return texts


_REAL: Final = {"samples": 16, "concurrency": 64, "max_new_tokens": 16384}
_EMBEDDED: Final = {"samples": 4, "concurrency": 16, "max_new_tokens": 1024}


@takes(DemoOptions)
def demo(given: Given) -> None:
    """Play math problems and show what would be trained.

    They go through `generate` and `reward_func`, as slime calls them, and every token is checked. The last line on
    stdout is a JSON summary. Exits with 1 if a check fails or no episode completes.
    """
    check_engine(given["base_url"], given["model_dir"])
    from strands_rollout.evaluation.run import run_demo

    if given["seed"] is None:  # recorded, so that `replay` samples the same tokens
        given["seed"] = secrets.randbelow(1 << 30)
    raise typer.Exit(0 if run_demo(DemoOptions(**given)).ok else 1)


@takes(EvalOptions, Sampling)
def evaluate(
    given: Given,
    *,
    k: Annotated[
        str | None,
        typer.Option(help="For pass@k, as far as there are so many samples; default: 1,4,8,16.", metavar="N,N,..."),
    ] = None,
) -> None:
    """Sample the problems of data sets, and report accuracy.

    Beside it: pass@k, and the majority's accuracy. The samples are of `generate` and `reward_func`, as in training.

    Results are kept as they come: the same command with the same --out resumes where it was cut, and tries again what
    failed. A failed sample, or one that could not be graded, is the infrastructure's doing and counts nowhere; the
    report says how many are missing. When as many in a row as run at once, at least 8, fail alike, the run stops. The
    last line on stdout is the report as JSON. Exits with 1 if a sample is missing or a check fails, with 130 after
    Ctrl-C.
    """
    check_engine(given["base_url"], given["model_dir"])
    # what an option's bounds can't say, and an engine would refuse for each sample
    if not 0 < given["top_p"] <= 1:
        raise typer.BadParameter(f"got --top-p {given['top_p']}; expected more than 0, and at most 1")
    if given["top_k"] == 0:
        raise typer.BadParameter("got --top-k 0; expected -1 for all, or 1 and more")
    ks = None if k is None else _parse_ks(k)
    from strands_rollout.evaluation.run import run_evaluation

    defaults = _REAL if given["base_url"] is not None else _EMBEDDED
    given |= {name: given[name] or default for name, default in defaults.items()}
    given["data"] = given["data"] or []
    given["out"] = given["out"] or Path("eval_results") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    raise typer.Exit(run_evaluation(made(EvalOptions, given, sampling=made(Sampling, given), ks=ks)))


def _parse_ks(text: str) -> list[int]:
    try:
        ks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        ks = []
    if not ks or ks[0] < 1:
        raise typer.BadParameter(f"got --k {text!r}; expected numbers from 1 with commas between, as in 1,4,8")
    return ks


@takes(TryOptions)
def try_row(
    given: Given,
    *,
    config: Annotated[
        Path | None,
        typer.Argument(
            help="slime's --custom-config-path YAML; default: this package's settings.", exists=True, dir_okay=False
        ),
    ] = None,
) -> None:
    """Play one row, and show it as it goes.

    Shown are what is read, each turn, call and result, reward and status. Turns come from one of: --script, --you,
    --api-base with --api-model, an SGLang server (--base-url), or a model on the embedded engine (--model; default: the
    shipped one, which knows math with the code tool only). With the first three no model is needed, and the rest is
    real: template, tokens, parser, tools, reward. Exits with 1 if the episode fails, or a script does not end with it.
    """
    sources = [name for name in ("script", "you", "api_base", "base_url", "model_dir") if given[name]]
    if len(sources) > 1:
        named = ", ".join(f"--{name.removesuffix('_dir').replace('_', '-')}" for name in sources)
        raise typer.BadParameter(f"got {named}; expected one source of turns")
    if (given["api_base"] is None) != (given["api_model"] is None):
        raise typer.BadParameter("got one of --api-base and --api-model; expected both, or none")
    from strands_rollout.evaluation.try_row import run_try

    raise typer.Exit(run_try(TryOptions(config=config, **given)))


@takes(TrainOptions, UpdateSettings)
def train(
    given: Given,
    *,
    context: typer.Context,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Go on where the logprobs, or slime's contract, do not hold.")
    ] = False,
) -> None:
    """Train a small model by GRPO on this CPU.

    Each step plays groups of episodes, through `generate` and `reward_func` as slime calls them, normalises their
    rewards by group, updates the policy and gives the engine the new weights from disk under a new version. At the
    first step the trainer's logprobs of the sampled tokens must equal the rollout's; if they don't, the run stops and
    shows the tokens. The run's folder holds options.json, steps.jsonl, summary.json, curves.png, checkpoints, and the
    policy as a model folder in weights/. The last line on stdout is the summary as JSON. Exits with 1 if a check fails
    or the engine does, with 2 for bad options, with 130 after Ctrl-C.
    """
    if find_spec("torch") is None:
        cpu_build = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
        raise ConfigError(
            f"training needs torch, which is not installed; {cpu_build} && pip install 'strands-rollout[train]'"
        )
    from strands_rollout.train.rollouts import TrainingMethod

    _complete(given)
    method = context.find_object(TrainingMethod) or TrainingMethod()  # an experiment's command line gives its own
    options = made(
        TrainOptions,
        given,
        rollout=method.rollout,
        ablation=method.ablation,
        checks=not unchecked,
        update=made(UpdateSettings, given),
    )
    from strands_rollout.train.trainer import run_training

    raise typer.Exit(run_training(options, method))


def _complete(given: Given) -> None:
    """Refuse what an option's bounds can't say, and fill in what depends on other options, or on the package."""
    from strands_rollout.play.rows import shipped_rows

    if given["temperature"] <= 0:
        raise typer.BadParameter(
            f"got --temperature {given['temperature']}; expected more than 0: a greedy group has no spread"
        )
    if given["is_async"] and given["extra_prompts"]:
        raise typer.BadParameter("--async plays whole steps ahead; leave out --extra-prompts with it")
    given["out"] = (
        given["out"] or Path("train_runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-seed{given['seed']}-{os.getpid()}"
    )
    given["model_dir"] = given["model_dir"] or SHIPPED_MODEL
    given["data"] = given["data"] or shipped_rows().with_name("train.jsonl")
    given["held_out"] = given["held_out"] or shipped_rows()


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
finish(app.registered_commands)
