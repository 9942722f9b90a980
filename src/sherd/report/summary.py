"""A run in text: its key figures, and what it was started with."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sherd.observe.runs import RunRecord
from sherd.report.wording import (
    UNKNOWN,
    counted,
    of_bytes,
    of_count,
    of_number,
    of_ranks,
    of_seconds,
    of_share,
)


def state(record: RunRecord) -> tuple[str, str]:
    """The state of the run, as a word for people and one for the page's style."""
    if record.ok is False or (record.ok is None and any(each.kind in FAILURES for each in record.messages)):
        return "failed", "bad"
    return ("finished", "good") if record.ok else ("no end recorded", "open")


FAILURES = ("error", "comm.lost", "comm.diverged")


def subtitle(record: RunRecord) -> str:
    """One line: strategy, ranks, model size."""
    start = record.start or {}
    parts = [str(start.get("strategy") or "unknown strategy"), counted(record.world, "rank")]
    if len(record.hosts) > 1:
        parts[-1] += f" on {counted(len(record.hosts), 'host')}"
    if elements := (start.get("model") or {}).get("elements"):
        parts.append(f"{of_count(elements)} parameters")
    return ", ".join(parts)


def key_figures(record: RunRecord, tokens: bool) -> dict[str, str]:
    """The numbers to compare runs by. The rate is in tokens or samples."""
    rows = list(record.steps)
    _, losses = record.steps.losses()
    _, durations = record.steps.column("duration")
    _, rates = record.steps.column("tokens_per_second" if tokens else "samples_per_second")
    shares = [row.communication_share for row in rows]
    known = [share for share in shares if share is not None]
    hosts = [sum(kinds.values()) for row in rows for kinds in row.host_memory.values()]
    told = {
        "Steps": f"{len(rows):,}",
        "Time": of_seconds(record.end_time - record.start_time) if record.end_time and record.start_time else UNKNOWN,
        f"Last {record.steps.loss_name}": of_number(losses[-1]) if losses else UNKNOWN,
        "Median step": of_seconds(_median(durations)) if durations else UNKNOWN,
        "Tokens/s" if tokens else "Samples/s": of_count(_median(rates)) if rates else UNKNOWN,
        "Communication": of_share(sum(known) / len(known)) if known else UNKNOWN,
        "Memory of a host": of_bytes(max(hosts)) if hosts else UNKNOWN,
    }
    if skipped := sum(row.skipped for row in rows):
        told["Skipped steps"] = f"{skipped:,}"
    return told


def details(record: RunRecord) -> dict[str, str]:
    """What the run was started with, and on what."""
    start = record.start or {}
    machine: Mapping[str, Any] = start.get("machine") or {}
    model: Mapping[str, Any] = start.get("model") or {}
    options: Mapping[str, Any] = start.get("options") or {}
    versions = [f"{name} {machine[key]}" for key, name in VERSIONS.items() if machine.get(key)]
    hosts = [f"{host.name} (ranks {of_ranks(host.ranks)})" for host in record.hosts]
    told = {
        "Started": _moment(record.start_time),
        "Command": shlex.join(map(str, start["command"])) if start.get("command") else "",
        "Strategy": str(start.get("strategy") or ""),
        "Its options": _named(start.get("strategy_options") or {}),
        "Options": _named(options) or ("defaults" if start else ""),
        "World": f"{counted(record.world, 'rank')}, {start.get('transport') or 'unknown'} transport",
        "Hosts": "; ".join(hosts),
        "Threads": f"{start['threads']} per rank" if start.get("threads") else "",
        "Model": _model(model),
        "Global batch": _batch(start),
        "CPU": _cpu(machine),
        "Memory": _installed(machine.get("memory")),
        "Software": ", ".join(versions),
        "Platform": str(machine.get("platform") or ""),
        "Logged for a step that was not finished": _named(record.unfinished),
    }
    absent = set(range(record.world)) - set(record.starts) if record.starts else set()
    if absent:
        told["No events"] = f"ranks {of_ranks(absent)} left no events in this directory"
    return {name: text for name, text in told.items() if text}


VERSIONS = {"sherd": "sherd", "torch": "torch", "python": "Python"}


def _named(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _model(model: Mapping[str, Any]) -> str:
    if not model.get("elements"):
        return ""
    tensors = f" in {counted(model['parameters'], 'tensor')}" if model.get("parameters") else ""
    frozen = f", {of_count(model['frozen'])} frozen" if model.get("frozen") else ""
    return f"{model['elements']:,} parameters{tensors}{frozen}"


def _batch(start: Mapping[str, Any]) -> str:
    parts = [str(start["batch"])] if start.get("batch") else []
    if (start.get("accumulate") or 1) > 1:
        parts.append(f"accumulated over {start['accumulate']} backwards")
    return ", ".join(parts)


def _cpu(machine: Mapping[str, Any]) -> str:
    cores = counted(machine["cores"], "core") if isinstance(machine.get("cores"), int) else machine.get("cores")
    return ", ".join(str(part) for part in (machine.get("cpu"), cores) if part)


def _installed(memory: object) -> str:
    return of_bytes(memory) if isinstance(memory, (int, float)) else str(memory or "")


def _moment(t: float | None) -> str:
    return "" if t is None else datetime.fromtimestamp(t).astimezone().strftime("%d %B %Y, %H:%M:%S %Z")


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
