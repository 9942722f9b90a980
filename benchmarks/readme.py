"""Write the README's tables of measured results from benchmarks/results: `python -m benchmarks.readme [--check]`.

Each table is one file of results; a file that is missing leaves its table out. Both languages have the same figures.
`--check` writes nothing and fails if a README is not up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.readme_words import NAMES, WORDS

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
READMES = {"README.md": "en", "README.zh-CN.md": "zh"}
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"

Results = Mapping[str, Any]  # of one run, as a file has them

Words = Mapping[str, str]


# ---------------------------------------------------------------- tables


def training(runs: Sequence[Results], words: Words) -> str:
    run = runs[0]
    results = run["results"]
    columns = {words[workload]: {name: median(one) for name, one in by.items()} for workload, by in results.items()}
    columns[words["bytes"]] = {name: one["bytes_per_parameter"] for name, one in results["A"].items()}
    forms = [milliseconds] * len(results) + ["{:.1f}".format]
    caption = words["training"].format(size=size_of(run), ranks=run["ranks"], machine=machine("training", run, words))
    return f"{caption}\n\n{table(columns, forms, words)}"


def memory(runs: Sequence[Results], words: Words) -> str:
    columns = {}
    for run in runs:
        heading = f"{words['bytes']}, {words['ranks'].format(ranks=run['ranks'])}"
        columns[heading] = {name: one["peak"] for name, one in run["results"].items() if not one["failure"]}
    caption = words["memory"].format(size=size_of(runs[0]))
    return f"{caption}\n\n{table(columns, ['{:.1f}'.format] * len(columns), words)}"


def cluster(run: Results, words: Words) -> str:
    results = run["results"]["A"]
    sent = {name: one["bytes_sent"] / len(one["seconds"]) for name, one in results.items() if one["bytes_sent"]}
    columns = {words["step"]: {name: median(one) for name, one in results.items()}, words["sent"]: sent}
    caption = words["cluster"].format(
        hosts=run["hosts"],
        ranks=run["ranks_per_host"],
        megabits=f"{run['megabits']:,}",
        machine=machine("cluster", run, words),
    )
    return f"{caption}\n\n{table(columns, [milliseconds, megabytes], words)}"


def backend(run: Results, words: Words) -> str:
    results = run["results"]["A"]
    names = [name for name in NAMES if f"{name}-on-sherd" in results]
    gloo = {name: median(results[name]) for name in names}
    ours = {name: median(results[f"{name}-on-sherd"]) for name in names}
    rows = [
        [NAMES[name], milliseconds(gloo[name]), f"**{milliseconds(ours[name])}**", f"{gloo[name] / ours[name]:.2f}"]
        for name in names
    ]
    caption = words["backend"].format(ranks=run["ranks"], machine=machine("backend", run, words))
    return f"{caption}\n\n{markdown(['', words['gloo'], words['sherd'], words['times']], rows)}"


def resnet(runs: Sequence[Results], words: Words) -> str:
    rows = []
    for run in runs:
        times = {name: median(one) for name, one in run["results"].items() if one["seconds"]}
        for name in sorted(times, key=position):
            one = run["results"][name]
            rows.append(
                [
                    f"{words.get(name) or NAMES[name]}, {words['ranks'].format(ranks=run['ranks'])}"
                    if name in NAMES
                    else words[name],
                    f"{run['batch'] / times[name]:.1f}",
                    *(
                        f"{times[other] / times[name]:.2f}" if other in times else ""
                        for other in ("one-core", "all-cores")
                    ),
                    f"{one['bytes_per_parameter'] * run['parameters'] / 1e6:,.0f} MB",
                ]
            )
    caption = words["resnet"].format(
        size=runs[0]["size"], batch=runs[0]["batch"], machine=words["machine"].format(cores=runs[0]["cores"])
    )
    return f"{caption}\n\n{markdown(['', *(words[key] for key in ('images', 'one', 'all', 'peak'))], rows)}"


TABLES: dict[str, Callable[[Any, Words], str]] = {
    "training": training,
    "training_memory": memory,
    "cluster": cluster,
    "backend": backend,
    "resnet": resnet,
}


# ---------------------------------------------------------------- their parts


def median(one: Results) -> float:
    return float(statistics.median(one["seconds"]))


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
    found = re.search(r"on (\d+) cores", (RESULTS / f"{name}.txt").read_text())
    return words["machine"].format(cores=found[1]) if found else ""


def table(columns: Mapping[str, Mapping[str, float]], forms: Sequence[Callable[[float], str]], words: Words) -> str:
    """Contenders by row. In bold what is within 2% of the best that trains together: less is noise."""
    names = sorted({name for column in columns.values() for name in column}, key=position)
    rows = []
    for name in names:
        row = [NAMES.get(name) or words[name]]
        for column, form in zip(columns.values(), forms, strict=True):
            rivals = [value for other, value in column.items() if other in NAMES]
            compared = name in NAMES and name in column and any("sherd" not in other for other in column)
            bold = "**" if compared and column[name] <= 1.02 * min(rivals) else ""
            row.append(f"{bold}{form(column[name])}{bold}" if name in column else "")
        rows.append(row)
    return markdown(["", *columns], rows)


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
