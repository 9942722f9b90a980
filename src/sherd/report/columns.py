"""The numbers of a step by name, for files that other programs read."""

from __future__ import annotations

from sherd.observe.rows import LOSS, StepRow


def columns(row: StepRow) -> dict[str, float | int | None]:
    """All numbers of a step, flat; memory and bytes are summed over ranks. Figures come last.

    `loss` is the reported loss, and `root` what the backwards started from, which may be a scaled loss or part of one.
    A figure with the name of another number is called `log.<name>`.
    """
    named: dict[str, float | int | None] = {
        "step": row.step,
        "time": row.t,
        "loss": row.reported_loss,
        "root": row.root,
        "norm": row.norm,
        "lr": row.lr[0] if row.lr else None,
        "samples": row.samples,
        "tokens": row.tokens,
        "seconds": row.duration,
        "samples_per_second": row.samples_per_second,
        "tokens_per_second": row.tokens_per_second,
        "skipped": int(row.skipped),
    }
    named |= {f"lr.{number}": lr for number, lr in enumerate(row.lr[1:], start=1)}
    named |= {f"seconds.{phase}": value for phase, value in row.seconds.items()}
    named |= {f"bytes.{kind}": value for kind, value in row.bytes.items()}
    named |= {f"memory.{kind}": value for kind, value in row.held.sums().items()}
    if row.distance is not None:
        named["distance"] = row.distance
    if resident := row.host_resident:
        named["resident"] = sum(resident.values())
    return named | {
        f"log.{name}" if name in named else name: value for name, value in row.figures.items() if name != LOSS
    }
