"""Format the client benchmark's figures as Markdown tables."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.variants import FLOOR, FLOOR_WITH_ORJSON, WITH_IMAGES, WORKERS

Row = Mapping[str, Any]
_LABELS: Final = {
    "ours": "strands-rollout",
    "ours-hook": "with a hook on every event",
    "ours-plugin": "with an agent factory and a plugin",
    "ours-factory": "with an agent factory",
    "ours-journal": "with a journal",
    WITH_IMAGES: "with images and reward",
    **{variant: f"the driver of {count} worker{'s' if count > 1 else ''}" for variant, count in WORKERS.items()},
    "one-model": "sub-agents on one model",
    "own-model": "sub-agents, each on its own model",
    **{f"gateway-{api}": f"the gateway, {api}" for api in ("chat", "responses", "messages")},
    FLOOR: "floor: the requests alone",
    FLOOR_WITH_ORJSON: "floor with orjson",
    "strands-sglang": "strands-sglang",
    "openai": "Strands' OpenAI model, tokenized again",
}
_MAX_PACKAGES: Final = 14
_COLLECTORS: Final = {
    "own": "",
    "frozen": " All variants excluded their objects from garbage collection (`gc.freeze`).",
    "unfrozen": " No variant excluded objects from garbage collection.",
}


def result_tables(result: Mapping[str, Any]) -> str:
    """Return all tables of a result of `run_client_benchmark`, each with a caption."""
    rows: Sequence[Row] = result["medians"]
    parts = [heading(result)]
    concurrencies = sorted({row["concurrency"] for row in rows if row["kind"] == "cpu"})
    parts += [_cpu_table(rows, result["ratios"], at_once) for at_once in concurrencies]
    parts += [
        _turn_table(rows, result["ratios"]),
        _ratio_table(result["ratios"]),
        _wire_table(rows),
        _lag_table(rows),
        _memory_table(rows),
    ]
    parts += [_profile_table(one) for one in result["measurements"] if one["kind"] == "profile"]
    return "\n\n".join(filter(None, parts))


def heading(result: Mapping[str, Any]) -> str:
    versions, machine = result["versions"], result["machine"]
    names = ("strands-rollout", "strands-agents", "openai")
    shown = ", ".join(f"{name} {versions[name]}" for name in names if versions[name])
    peer = result.get("peer")
    other = f"strands-sglang {peer['strands-sglang']}, Python {peer['python']}; " if peer else ""
    return (
        f"`{result['command']}`: {shown}, Python {versions['python']}; {other}{machine['processor']}, "
        f"{machine['cores']} cores; tokenizer {result['tokenizer']['name']} of "
        f"{result['tokenizer']['vocab_size']} tokens.{_COLLECTORS[result.get('collector', 'own')]}"
    )


def _cpu_table(rows: Sequence[Row], ratios: Sequence[Row], at_once: int) -> str:
    """Return a line per variant: its CPU, the ratio of "ours" to it, and its concurrent episodes if below `at_once`."""
    here = [row for row in rows if row["kind"] == "cpu" and row["concurrency"] == at_once]
    found = {(row["variant"], row["turns"]): row for row in here}
    ours = {
        (ratio["ratio"].removeprefix("ours / "), ratio["turns"]): ratio["value"]
        for ratio in ratios
        if ratio["concurrency"] == at_once
    }
    turns = sorted({row["turns"] for row in here})
    heads = [f"{count} tool turn{'' if count == 1 else 's'}" for count in turns]
    lines = [
        [_LABELS[variant], *(_cpu_cell(found.get((variant, count)), ours.get((variant, count))) for count in turns)]
        for variant in dict.fromkeys(row["variant"] for row in here)
    ]
    return markdown([f"client CPU, ms per episode, {at_once} at once unless noted", *heads], lines)


def _cpu_cell(row: Row | None, ratio: float | None) -> str:
    if row is None:
        return ""
    at_once = min(row["concurrency"], row["episodes"])
    notes = [] if ratio is None else [f"ours: {ratio:.2f}x"]
    notes += [f"{at_once} at once"] if at_once < row["concurrency"] else []
    return format_number(row["cpu_ms_per_trajectory"]) + (f" ({'; '.join(notes)})" if notes else "")


def _turn_table(rows: Sequence[Row], ratios: Sequence[Row]) -> str:
    """Return a table of the cost of a turn, its growth, and its ratio to the cost of a turn of "ours"."""
    figures = ("cpu_ms_per_turn", "cpu_ms_of_8th_turn", "cpu_ms_of_last_turn", "growth", "turns_per_s_and_core")
    found = {(one["ratio"], one["turns"], one["concurrency"]): one["value"] for one in ratios}
    lines = []
    for row in rows:
        if row["kind"] == "turns":
            ratio = found.get((f"{row['variant']} / ours", row["turns"], row["concurrency"]))
            lines.append(
                [*_row_head(row), *(format_number(row[name]) for name in figures), f"{ratio:.2f}x" if ratio else ""]
            )
    heads = (
        "tool turns",
        "at once",
        "per turn",
        "8th",
        "last",
        "last / 8th",
        "turns/s and core",
        "per turn / in-process",
    )
    return markdown(["CPU of the process, ms", *heads], lines)


def _ratio_table(ratios: Sequence[Row]) -> str:
    """Return the ratios that are not in `_cpu_table`: of this package's variants to "ours", and of 80 to 20 turns."""
    lines = [
        [
            row["ratio"] + ("" if "turns /" in row["ratio"] else f", {row['turns']} tool turns"),
            str(row["concurrency"]),
            f"{row['value']:.2f}",
            f"{row['least']:.2f} to {row['most']:.2f}",
            str(row["rounds"]),
        ]
        for row in ratios
        if not row["ratio"].startswith("ours / ")
    ]
    return markdown(["CPU per episode", "at once", "ratio", "in single rounds", "rounds"], lines)


def _wire_table(rows: Sequence[Row]) -> str:
    figures = {
        "CPU per request, ms": ("cpu_ms_per_request", 1),
        "wall / trajectories, ms": ("wall_ms_per_trajectory", 1),
        "client busy, %": ("client_busy_percent", 1),
        "engine busy, %": ("engine_busy_percent", 1),
        "sent, KiB": ("bytes_sent_per_trajectory", 1024),
        "received, KiB": ("bytes_received_per_trajectory", 1024),
    }
    lines = [
        [*_row_head(row), *(format_number(row[name] / unit) for name, unit in figures.values())]
        for row in rows
        if row["kind"] == "cpu"
    ]
    return markdown(["variant", "tool turns", "at once", *figures], lines)


def _row_head(row: Row) -> list[str]:
    label = _LABELS[row["variant"]] + (", code tool" if row["runs_code"] else "")
    return [label, str(row["turns"]), str(min(row["concurrency"], row["episodes"]))]


def _lag_table(rows: Sequence[Row]) -> str:
    lines = [
        [*_row_head(row), *(format_number(row[f"lag_{name}_ms"]) for name in ("p50", "p99", "max"))]
        for row in rows
        if row["kind"] == "lag"
    ]
    return markdown(["event-loop lag, ms", "tool turns", "at once", "p50", "p99", "max"], lines)


def _memory_table(rows: Sequence[Row]) -> str:
    """Return a line per variant, with the resident and the allocated memory, each measured by its own process."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["kind"] in ("rss", "traced"):
            found.setdefault(row["variant"], {}).update(row)
    figures = {
        "peak, resident": "peak_rss_bytes_per_episode",
        "peak, allocated": "peak_traced_bytes_per_episode",
        "a finished sample": "kept_bytes_per_sample",
        "its token arrays": "array_bytes_per_sample",
        "after the sample is freed": "left_behind_bytes_per_episode",
    }
    lines = [
        [
            *_row_head(row),
            *(format_number(row[name] / 1024) for name in figures.values()),
            f"{row['kept_per_array_byte']:.2f}x",
        ]
        for row in found.values()
    ]
    return markdown(["memory, KiB per episode", "tool turns", "at once", *figures, "sample / arrays"], lines)


def _profile_table(one: Row) -> str:
    shares: Mapping[str, float] = one["figures"]["share_percent_by_package"]
    lines = [[name, f"{share:.1f}"] for name, share in list(shares.items())[:_MAX_PACKAGES]]
    return markdown([f"profile of {_LABELS[one['variant']]}, {one['turns']} tool turns", "% of CPU"], lines)


def format_number(value: float) -> str:
    """Format a number with at least three significant digits if it has them, and without an exponent if it is large."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; "" if there are no lines."""
    if not lines:
        return ""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))
