"""A `step` event for every real step. Nothing here is collective."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from sherd import observe
from sherd.api.recording.layers import LayerMeter
from sherd.api.training import Closure, Training
from sherd.config import flag_from_env
from sherd.observe import monitor
from sherd.observe.monitor import RunMonitor, Tally
from sherd.observe.process import Resident

RECOUNT_SECONDS = 30.0
"""How often the sizes of all parameters and state tensors are counted again, even if nothing seems to have changed."""


class StepRecorder:
    """Records the steps of one optimizer, the `number`-th of the process."""

    def __init__(self, training: Training, optimizer: Optimizer, number: int, run: RunMonitor) -> None:
        self._training = training
        self._optimizer = optimizer
        self._gradient = training.gradient(optimizer)
        self._number = number
        self._run = run
        self._steps = 0
        self._memory = _Memory(training)
        self._resident = Resident()
        self._layers = LayerMeter(training.engine, self._gradient) if flag_from_env("SHERD_LAYERS", False) else None
        self._reader = run.reader()
        self._sent = self._bytes()
        self._scale: float | None = None

    def record(self, closure: Closure | None, step: Callable[[Closure | None], Any]) -> Any:
        """Take the step `step(closure)`, and record it if it was a real one."""
        run, gradient = self._run, self._gradient
        if monitor.current is not run:  # that run is over
            return step(closure)
        before, loss = (gradient.steps, gradient.skipped), None
        scale = self._training.engine.scale
        self._scale = None if scale is None else scale.value  # the step may change it
        run.begin_step()
        if self._layers is not None:
            self._layers.before()
        try:
            loss = step(None if closure is None else run.evaluation(closure))
            return loss
        finally:
            run.end_step()
            if (gradient.steps, gradient.skipped) != before:
                self._emit(loss, skipped=gradient.skipped > before[1])

    def _emit(self, loss: Any, skipped: bool) -> None:
        (tally, seconds), sent, step = self._reader.read(), self._bytes(), self._steps
        self._steps += 1
        engine = self._training.engine
        fields: dict[str, Any] = {
            "loss": _number(loss),
            "root": self._root(tally),
            "samples": tally.samples if tally.batches else None,
            "seconds": seconds,
            "bytes": {kind: sent[kind] - self._sent[kind] for kind in sent},
            "memory": self._memory.read(),
            "resident": self._resident.read(),
            "skipped": skipped,
            "lr": [_number(group.get("lr")) for group in self._optimizer.param_groups],
            # Each team has a gradient of its own; readers add up those of all ranks.
            "norm_squared": self._gradient.own_squared(engine.trained.of(self._gradient)) / engine.teams.count,
        }
        self._sent = sent
        if engine.scale is not None:
            fields["loss_scale"] = self._scale
        drift = engine.policy.drift
        if drift is not None:
            fields["since_exchange"] = drift.since
            if drift.squared is not None:
                fields["distance_squared"] = drift.squared / engine.teams.count
        if self._layers is not None:
            fields["layers"] = self._layers.after(step, fields["lr"], skipped)
        if self._number:
            fields["optimizer"] = self._number
        self._run.stepped(self._number)
        observe.emit("step", step, **fields)

    def _root(self, tally: Tally) -> float | None:
        # With several optimizers, it is unknown whose loss a backward started from.
        return tally.roots / tally.backwards if tally.backwards and self._run.optimizers == 1 else None

    def _bytes(self) -> dict[str, int]:
        total = self._training.engine.comm.counters.total()
        return {"payload": total.payload, "control": total.control}


class _Memory:
    """Bytes by kind, counted again only where they may have changed.

    Parameters and state are many tensors. Unfreezing adds parameters, and the first step of a parameter adds state. For
    optimizers that add state later, everything is counted again once in a while.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._known: tuple[int, int] | None = None
        self._due = 0.0
        self._kinds: dict[str, int] = {}

    def read(self) -> dict[str, int]:
        training, engine = self._training, self._training.engine
        known, now = (len(engine.buckets.parameters), training.state_entries()), time.monotonic()
        if known != self._known or now >= self._due:
            self._known, self._due = known, now + RECOUNT_SECONDS
            self._kinds = training.memory()
        else:
            self._kinds = {**self._kinds, **engine.gradient_bytes()}
            self._kinds["buckets"] += engine.store.gathered_bytes()
        return self._kinds


def _number(value: Any) -> float | None:
    """The result of a closure, or a learning rate, as a number, or None if it is not one."""
    if isinstance(value, Tensor):
        return float(value.detach()) if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None
