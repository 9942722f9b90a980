"""Write the README's tables of measured results from benchmarks/results: `python -m benchmarks.readme [--check]`.

Each table is one file of results; a file that is missing leaves its table out. Both languages have the same figures.
`--check` writes nothing and fails if a README is not up to date.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.readme_words import NAMES, WORDS
from benchmarks.training_report import best_median

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
READMES = {"README.md": "en", "README.zh-CN.md": "zh"}
NOISE = 1.02  # what differs by less is the same
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"

Results = Mapping[str, Any]  # of one run, as a file has them

Words = Mapping[str, str]


# ---------------------------------------------------------------- tables


def training(runs: Sequence[Results], words: Words) -> str:
    return "\n\n".join(training_run(run, words) for run in runs)


def training_run(run: Results, words: Words) -> str:
    results = run["results"]
    columns = {
        words[workload]: {name: time_of(one) for name, one in trained(by).items()} for workload, by in results.items()
    }
    columns[words["bytes"]] = {name: one["bytes_per_parameter"] for name, one in trained(results["A"]).items()}
    forms = [milliseconds] * len(results) + ["{:.1f}".format]
    words_of_it = words["fused" if run.get("optimizer") == "fused" else "training"]
    caption = words_of_it.format(size=size_of(run), ranks=run["ranks"], machine=machine("training", run, words))
    return f"{caption}\n\n{table(columns, forms, words)}"


def memory(runs: Sequence[Results], words: Words) -> str:
    columns = {}
    for run in runs:
        heading = f"{words['bytes']}, {words['ranks'].format(ranks=run['ranks'])}"
        columns[heading] = {name: one["peak"] for name, one in run["results"].items() if not one["failure"]}
    caption = words["memory"].format(size=size_of(runs[0]))
    return f"{caption}\n\n{table(columns, ['{:.1f}'.format] * len(columns), words)}"


def cluster(run: Results, words: Words) -> str:
    results = trained(run["results"]["A"])
    sent = {name: one["bytes_sent"] / len(one["seconds"]) for name, one in results.items() if one["bytes_sent"]}
    columns = {words["step"]: {name: time_of(one) for name, one in results.items()}, words["sent"]: sent}
    caption = words["cluster"].format(
        hosts=run["hosts"],
        ranks=run["ranks_per_host"],
        megabits=f"{run['megabits']:,}",
        machine=machine("cluster", run, words),
    )
    return f"{caption}\n\n{table(columns, [milliseconds, megabytes], words)}"


def backend(run: Results, words: Words) -> str:
    results = trained(run["results"]["A"])
    names = [name for name in NAMES if {name, f"{name}-on-sherd"} <= results.keys()]
    gloo = {name: time_of(results[name]) for name in names}
    ours = {name: time_of(results[f"{name}-on-sherd"]) for name in names}
    rows = [
        [
            NAMES[name],
            milliseconds(gloo[name]),
            bold(milliseconds(ours[name]), ours[name] < gloo[name]),
            f"{gloo[name] / ours[name]:.2f}",
        ]
        for name in names
    ]
    caption = words["backend"].format(ranks=run["ranks"], machine=machine("backend", run, words))
    return f"{caption}\n\n{markdown(['', words['gloo'], words['sherd'], words['times']], rows)}"


def resnet(runs: Sequence[Results], words: Words) -> str:
    """One process comes first and once: its figures of the first run."""
    rows = []
    for run in runs:
        measured = trained(run["results"])
        memory = {name: one["bytes_per_parameter"] * run["parameters"] for name, one in measured.items()}
        one, whole = (time_of(measured[name]) for name in ("one-core", "all-cores"))
        fastest = min(time_of(found) for name, found in measured.items() if name in NAMES)
        smallest = min(count for name, count in memory.items() if name in NAMES)
        for name in sorted(measured, key=position):
            if name not in NAMES and run is not runs[0]:
                continue
            time = time_of(measured[name])
            fast, small = name in NAMES and time <= NOISE * fastest, name in NAMES and memory[name] <= NOISE * smallest
            ranks = f", {words['ranks'].format(ranks=run['ranks'])}" if name in NAMES else ""
            figures = [f"{run['batch'] / time:.1f}", f"{one / time:.2f}", f"{whole / time:.2f}"]
            rows.append([title(name, words) + ranks, *(bold(figure, fast) for figure in figures)])
            rows[-1].append(bold(f"{memory[name] / 1e6:,.0f} MB", small))
    where = machine("resnet", runs[0], words)
    caption = words["resnet"].format(size=runs[0]["size"], batch=runs[0]["batch"], machine=where)
    return f"{caption}\n\n{markdown(['', *(words[key] for key in ('images', 'one', 'all', 'peak'))], rows)}"


TABLES: dict[str, Callable[[Any, Words], str]] = {
    "training": training,
    "training_memory": memory,
    "cluster": cluster,
    "backend": backend,
    "resnet": resnet,
}


# ---------------------------------------------------------------- their parts


def trained(results: Results) -> dict[str, Results]:
    """Without those that failed."""
    return {name: one for name, one in results.items() if one["seconds"]}


def time_of(one: Results) -> float:
    """Of a step."""
    return best_median(one["seconds"], len(one["disturbances"]))


def size_of(run: Results) -> str:
    return f"{run['size'].removesuffix('m')} M"


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


def megabytes(count: float) -> str:
    return f"{count / 1e6:.0f} MB"


def position(name: str) -> int:
    return [*WORDS["en"], *NAMES].index(name)


def machine(name: str, run: Results, words: Words) -> str:
    """As the file has it. Older files know the number of cores alone, from the title of the table beside them."""
    if "machine" in run:
        return f"{words['machine'].format(cores=run['machine']['cores'])} ({run['machine']['cpu']})"
    text = RESULTS / f"{name}.txt"
    found = re.search(r"on (\d+) cores", text.read_text() if text.exists() else "")
    cores = run.get("cores") or (found[1] if found else "?")
    return words["machine"].format(cores=cores)


def table(columns: Mapping[str, Mapping[str, float]], forms: Sequence[Callable[[float], str]], words: Words) -> str:
    """Contenders by row; in bold the best of those that train together, where there are others than ours."""
    rows = []
    for name in sorted({name for column in columns.values() for name in column}, key=position):
        row = [title(name, words)]
        for column, form in zip(columns.values(), forms, strict=True):
            best = min(value for other, value in column.items() if other in NAMES)
            compared = name in NAMES and name in column and any("sherd" not in other for other in column)
            row.append(bold(form(column[name]), compared and column[name] <= NOISE * best) if name in column else "")
        rows.append(row)
    return markdown(["", *columns], rows)


def title(name: str, words: Words) -> str:
    return NAMES.get(name) or words[name]


def bold(text: str, really: bool) -> str:
    return f"**{text}**" if really else text


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (headings, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(headings), *lines[1:]]).replace("|  |", "| |")


def written(text: str, language: str) -> str:
    """A README with today's tables between its markers."""
    parts = []
    for name, made in TABLES.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            parts.append(made(json.loads(path.read_text()), WORDS[language]))
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{READMES} need the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n" + "\n\n".join(parts) + f"\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a README is not up to date")
    check = parser.parse_args().check
    stale = []
    for name, language in READMES.items():
        path = ROOT / name
        if not path.exists():
            continue
        text = path.read_text()
        if (new := written(text, language)) != text:
            stale.append(name)
            if not check:
                path.write_text(new)
    if check and stale:
        raise SystemExit(
            f"{' and '.join(stale)}: not up to date with benchmarks/results; run python -m benchmarks.readme"
        )


if __name__ == "__main__":
    main()
