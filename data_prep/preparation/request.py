"""The settings of a preparation, which are the options of the scripts, and checks of the settings."""

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import httpx
from pydantic import BaseModel, ConfigDict
from typer import Option

from strands_rollout.client.transport import redacted
from strands_rollout.errors import ConfigError

HUB: Final = "https://huggingface.co"
NGRAM_WORDS: Final = 13
"""Number of consecutive words that make an overlap: problems that share so many probably have the same source."""
MAX_REJECTED_SHARE: Final = 0.01
"""Maximum share of unusable rows among the different rows; in a data set of 30 problems, it allows none."""


class Request(BaseModel):
    """The source, the output and the options of a preparation. If a column is None, it is detected by its name.

    If `benchmark` is set, rows are converted and graded as in this benchmark, and marked with its name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    benchmark: str | None = None
    seed: Annotated[int, Option(help="Seed of the order of choices, for gpqa-diamond.")] = 0
    dataset: Annotated[str, Option(help="Repository on the Hugging Face Hub.")]
    config: Annotated[str | None, Option(help="Configuration of the data set on the hub.")] = None
    split: Annotated[str, Option(help="Split of the data set.")] = "train"
    revision: Annotated[str, Option(help="Branch, tag or commit.")] = "main"
    path: Annotated[
        Path | None,
        Option(
            "--from",
            exists=True,
            resolve_path=True,
            help="Parquet, JSONL, JSON or CSV file, or a folder downloaded from the hub, to read instead of the hub.",
        ),
    ] = None
    endpoint: Annotated[str, Option("--mirror", envvar="HF_ENDPOINT", help="URL of a mirror of the hub.")] = HUB
    prompt_column: Annotated[
        str | None, Option(help="Column of the prompt; a.b is field b of column a.", show_default="detected")
    ] = None
    label_column: Annotated[
        str | None, Option(help="Column of the label; a.b is field b of column a.", show_default="detected")
    ] = None
    instruction: Annotated[
        Literal["remove", "keep"],
        Option(
            help="Remove or keep the data set's answer instruction. If you keep it, set system_prompt to match: the "
            "default system prompt asks for \\boxed{}."
        ),
    ] = "remove"
    keep_duplicates: Annotated[bool, Option("--keep-duplicates", help="Keep repeated rows.")] = False
    allow_rejected: Annotated[
        bool,
        Option("--allow-rejected", help=f"Continue if more than {MAX_REJECTED_SHARE:.0%} of the rows can't be used."),
    ] = False
    drop_contaminated: Annotated[
        bool, Option("--drop-contaminated", help="Leave out rows that share words with an evaluation problem.")
    ] = False
    ngram_words: Annotated[int, Option(help="Number of consecutive shared words that make an overlap.", min=2)] = (
        NGRAM_WORDS
    )
    limit: Annotated[int | None, Option(help="Maximum number of rows to write.", min=1)] = None
    against: Annotated[
        list[Path],
        Option(
            exists=True,
            dir_okay=False,
            resolve_path=True,
            help="Prepared evaluation file to compare with; can be given several times.",
            show_default="the evaluation sets in --data-dir",
        ),
    ] = []
    out: Annotated[
        Path,
        Option(help="File to write.", dir_okay=False, resolve_path=True, show_default="the set's name, in --data-dir"),
    ]

    @property
    def rejected_file(self) -> Path:
        """The file for rejected rows, each with the reason."""
        return self.out.with_name(f"{self.out.name}.rejected.jsonl")

    @property
    def manifest_file(self) -> Path:
        """The file for the manifest."""
        return self.out.with_name(f"{self.out.name}.manifest.json")

    @property
    def shown_endpoint(self) -> str:
        """The URL of the hub or mirror for messages and manifests, without user, password and query."""
        return redacted(httpx.URL(self.endpoint))

    def arguments(self) -> dict[str, Any]:
        """Return the settings that determine the file's content, as JSON values."""
        endpoint = self.shown_endpoint if self.path is None else None
        return {**self.model_dump(mode="json", exclude={"out", "against"}), "endpoint": endpoint}


def check_usage(request: Request, *, force: bool) -> None:
    """Check that no input and no file of another origin would be overwritten.

    If the hub is read, also check its URL, and that no local path has the data set's name.

    Raises:
        ConfigError: A check fails; the message has the remedy.
    """
    inputs = {path.resolve(): "--against" for path in request.against}
    if request.path is not None:
        inputs[request.path.resolve()] = "--from"
    for output in (request.out, request.rejected_file, request.manifest_file):
        if option := inputs.get(output.resolve()):
            raise ConfigError(f"--out {request.out} would overwrite {output}, which {option} reads; name another file")
    if request.path is not None and request.path.is_dir() and request.path.resolve() in request.out.resolve().parents:
        raise ConfigError(f"--out {request.out} lies in the folder that --from reads; name a file elsewhere")
    if request.out.exists() and not request.manifest_file.exists() and not force:
        raise ConfigError(
            f"{request.out} exists without {request.manifest_file.name}, so this script did not write it; name another "
            "file with --out, or replace the existing file with --force"
        )
    if request.path is None:
        _check_endpoint(request.endpoint)
        if Path(request.dataset).exists():
            raise ConfigError(
                f"--dataset {request.dataset}: the local path {Path(request.dataset).absolute()} would be read instead "
                f"of the hub; to read the local path, give --from {request.dataset}; to read the hub, run the script "
                "in another folder"
            )


def _check_endpoint(endpoint: str) -> None:
    expected = "expected http:// or https:// and a host in --mirror (or HF_ENDPOINT)"
    try:
        url = httpx.URL(endpoint)
    except httpx.InvalidURL as e:
        raise ConfigError(f"the mirror's URL can't be read; {expected}") from e
    if url.scheme not in ("http", "https") or not url.host:
        bare = endpoint.rpartition("@")[2]
        raise ConfigError(f"the mirror {bare!r} has no scheme http or https; {expected}, such as https://{bare}")
    if url.query or url.fragment:
        raise ConfigError(f"the mirror {redacted(url)} has a query or a fragment; {expected} alone")
