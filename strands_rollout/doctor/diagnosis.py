"""All checks of one machine, and what they found, for people and for programs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from strands_rollout.doctor.check_run import Check, run_checks
from strands_rollout.doctor.data_file import check_data
from strands_rollout.doctor.disk_space import check_disk, check_shared_memory, places_of
from strands_rollout.doctor.finding import Finding, Status, skipped
from strands_rollout.doctor.gpus import check_gpus
from strands_rollout.doctor.model_folder import check_converted_model, check_model
from strands_rollout.doctor.python_packages import check_packages, check_python
from strands_rollout.doctor.question import Question
from strands_rollout.doctor.ray_cluster import check_ray
from strands_rollout.doctor.rollout_config import check_config
from strands_rollout.doctor.sandbox_layers import check_sandbox
from strands_rollout.doctor.slime_checkout import check_megatron, check_slime
from strands_rollout.doctor.surroundings import check_memory, check_open_files, check_proxies
from strands_rollout.doctor.tokenizer_folder import check_tokenizer
from strands_rollout.doctor.wandb_login import check_wandb

_STYLES: Final[dict[Status, str]] = {"ok": "green", "warning": "yellow", "error": "bold red", "skipped": "dim"}
_INDENT: Final = 9


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found, in the order of the checks."""

    findings: tuple[Finding, ...]

    def ok(self, *, strict: bool = False) -> bool:
        """Whether there is no error; nor, if `strict`, a warning."""
        bad = {"error", "warning"} if strict else {"error"}
        return not any(finding.status in bad for finding in self.findings)

    def to_json(self, *, strict: bool = False) -> str:
        """For programs, on one line: the verdict, each check, and the facts that checks found, by name."""
        checks = [
            {"name": finding.name, "status": finding.status, "found": finding.found, "remedy": finding.remedy}
            for finding in self.findings
        ]
        facts: dict[str, Any] = {}
        for finding in self.findings:
            facts |= finding.facts
        return json.dumps({"ok": self.ok(strict=strict), "checks": checks, **facts})

    def show(self, console: Console) -> None:
        """Print it for people."""
        for finding in self.findings:
            status = (f"{finding.status:<{_INDENT}}", _STYLES[finding.status])
            console.print(Text.assemble(status, f"{finding.name}: {finding.found}"), soft_wrap=True)
            if finding.remedy is not None:
                console.print(f"{'':<{_INDENT}}-> {finding.remedy}", highlight=False, markup=False, soft_wrap=True)
        counts = Counter(finding.status for finding in self.findings)
        totals = ", ".join(f"{counts[status]} {status}" for status in _STYLES if counts[status])
        console.print(f"\n{totals}", highlight=False, soft_wrap=True)


def examine(question: Question) -> Diagnosis:
    """Look at this machine; takes seconds, and leaves nothing behind."""
    return Diagnosis(tuple(run_checks(checks_of(question))))


def checks_of(question: Question) -> list[Check]:
    """All checks, in the order in which they are shown."""
    env = question.env
    return [
        Check("python", check_python),
        Check("packages", check_packages),
        Check("slime", partial(check_slime, question), waits=True),
        Check("megatron", partial(check_megatron, question), waits=True),
        Check("gpus", partial(check_gpus, question), waits=True),
        Check("memory", check_memory),
        Check("open files", check_open_files),
        Check("proxies", partial(check_proxies, env)),
        Check("disk", lambda: check_disk(places_of(question)), waits=True),
        Check("shared memory", check_shared_memory, waits=True),
        Check("ray", partial(check_ray, env, training=question.training), waits=True),
        Check("wandb", partial(check_wandb, env)),
        Check("model", partial(check_model, question)),
        Check("converted model", partial(check_converted_model, question)),
        Check("tokenizer", partial(check_tokenizer, question)),
        Check("config", partial(check_config, question.config_file)),
        Check("data", partial(check_data, question)),
        Check("sandbox", partial(check_sandbox, question.isolation), waits=True),
        *_server_checks(question),
    ]


def _server_checks(question: Question) -> list[Check]:
    if not question.base_urls:
        return [Check("server", lambda: [skipped("server", "no --base-url: no SGLang was asked")])]
    return [Check("server", partial(_check_server, question, url), waits=True) for url in question.base_urls]


def _check_server(question: Question, base_url: str) -> list[Finding]:
    from strands_rollout.doctor.engine_server import Expected, check_server

    is_shipped = question.tokenizer_dir == question.shipped_tokenizer_dir and question.tokenizer is None
    tokenizer = None if is_shipped else question.tokenizer_dir
    expected = Expected(question.max_context_length, tokenizer, tokenizer_is_named=question.tokenizer is not None)
    return check_server(base_url, expected)
