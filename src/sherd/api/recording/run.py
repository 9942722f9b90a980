"""The start of a run in its events, and the losses that backwards start from.

Nothing here is collective. Each rank records its own part; readers of the events put them together.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from sherd import observe
from sherd.api.plan import Plan
from sherd.api.recording.steps import StepRecorder
from sherd.api.training import training_of
from sherd.comm import Communicator
from sherd.comm.handle import time_waits
from sherd.config import Options
from sherd.observe import monitor
from sherd.observe.monitor import RunMonitor
from sherd.observe.process import command, machine
from sherd.patches import backward, grad_scaler
from sherd.patches.grad_scaler import scale_of


def record(plan: Plan, comm: Communicator) -> None:
    """Record that a run begins, and every step from now on."""
    run = monitor.current
    if run is None or (run.steps and not plan.optimizers):  # another model of the current run
        return
    if run.steps:
        run = observe.begin_anew()
    time_waits()
    grad_scaler.install(_notice_scaler)
    backward.record_with(_recorded)
    run.grad_enabled = torch.is_grad_enabled
    run.loads |= bool(plan.shardings)
    run.clock.follow_this_thread()
    number = {} if plan.optimizers and run.optimizers == 0 else {"optimizer": run.optimizers}
    observe.start_run(**_beginning(plan, comm), **number)
    for optimizer in plan.optimizers:
        training = training_of(optimizer)
        training.engine.measures = True
        training.recorders[optimizer] = StepRecorder(training, optimizer, run.optimizers, run)
        run.optimizers += 1
    run.end_step()


def _beginning(plan: Plan, comm: Communicator) -> dict[str, Any]:
    training = training_of(plan.models[0])
    layout = training.engine.layout
    batch = plan.shardings[0].batch if plan.shardings else None
    accumulate = plan.options.accumulate
    frozen = sum(each.entry.numel for each in training.engine.buckets.asleep)
    return {
        "world": comm.world,
        "strategy": plan.strategy.name,
        "options": {**_chosen(plan.options), **_chosen(plan.loading)},
        "strategy_options": _chosen(plan.strategy),
        "transport": comm.transport,
        "hosts": [list(host) for host in comm.hosts],
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "model": {"elements": layout.numel, "parameters": len(layout.entries), "frozen": frozen},
        "batch": None if batch is None else batch * comm.world * accumulate,
        "accumulate": accumulate,
        "total_steps": observe.expected_steps(),
        "machine": machine(),
        "command": command(),
        "threads": torch.get_num_threads(),
    }


def _chosen(options: Options) -> dict[str, Any]:
    """The options that differ from their defaults."""
    fields = dataclasses.fields(cast(Any, options))
    found = {field.name: (getattr(options, field.name), field.default) for field in fields}
    plain = (str, int, float, bool, type(None))
    return {
        name: value if isinstance(value, plain) else str(value)
        for name, (value, default) in found.items()
        if value != default
    }


def _notice_scaler() -> None:
    """A GradScaler has scaled a loss."""
    if monitor.current is not None:
        monitor.current.scaled = True


@contextmanager
def _recorded(roots: Any) -> Iterator[None]:
    """Record the outermost backward, from these roots, that runs inside."""
    run = monitor.current
    if run is None:
        yield
        return
    run.begin_backward(_unscaled(_losses(roots), run))
    try:
        yield
    finally:
        run.end_backward()


def _losses(roots: Any) -> list[Tensor]:
    """The roots of a backward that are scalars on the CPU."""
    if not isinstance(roots, (list, tuple)):
        roots = (roots,)
    # A value on an accelerator would have to be waited for; and not all roots are tensors.
    here = (root for root in roots if type(root) is Tensor and root.device.type == "cpu" and root.numel() == 1)
    return [root for root in here if not root.is_complex()]


def _unscaled(losses: list[Tensor], run: RunMonitor) -> list[float]:
    """Their values before scaling; while a GradScaler is in use, those it has not scaled are not taken for losses."""
    if not run.scaled:
        return [float(loss.detach()) for loss in losses]
    scales = [scale_of(loss) for loss in losses]
    return [float(loss.detach()) / scale for loss, scale in zip(losses, scales, strict=True) if scale]
