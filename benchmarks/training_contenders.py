"""Who takes part in the training benchmark: each contender is one function from a model to a training step.

All use the same `torch.optim.AdamW(lr=3e-4)`, in its default or its fused implementation, and otherwise their own
defaults.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from benchmarks.gpt import Gpt, cross_entropy

RATE = 3e-4
EVERY = 50  # steps between two exchanges of parameters, of those that exchange no gradients
CORES = len(os.sched_getaffinity(0))
EARLIER = "SHERD_EARLIER_SOURCE"
"""Where the package of an earlier revision is, for those who take part as they were `before`."""
Step = Callable[[Tensor, Tensor], Tensor]  # a batch in, its loss out; the model was updated
Options = Mapping[str, Any]  # of AdamW
OPTIMIZERS: dict[str, Options] = {"default": {"lr": RATE}, "fused": {"lr": RATE, "fused": True}}


def _alone(model: Gpt, options: Options) -> Step:
    return _loop(model, AdamW(model.parameters(), **options))


def _torch_ddp(model: Gpt, options: Options) -> Step:
    return _loop(DistributedDataParallel(model), AdamW(model.parameters(), **options))


def _torch_ddp_bf16(model: Gpt, options: Options) -> Step:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, bf16_compress_hook)
    return _loop(wrapped, AdamW(model.parameters(), **options))


def _torch_zero(model: Gpt, options: Options) -> Step:
    wrapped = DistributedDataParallel(model)
    return _loop(wrapped, ZeroRedundancyOptimizer(model.parameters(), AdamW, **options))


def _fsdp2(model: Gpt, options: Options) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _loop(model, AdamW(model.parameters(), **options))


def _loop(forward: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(forward(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _deepspeed(model: Gpt, options: Options, *, stage: int) -> Step:
    config = {
        "train_micro_batch_size_per_gpu": 1,  # it has to be there; nothing checks it against the batches that come
        "gradient_clipping": 0.0,  # its default is 1.0, and nobody else clips
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,  # the same AdamW as everybody
        "zero_allow_untested_optimizer": True,
    }
    deepspeed: Any = importlib.import_module("deepspeed")
    engine, *_ = deepspeed.initialize(model=model, optimizer=AdamW(model.parameters(), **options), config=config)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _sherd(model: Gpt, options: Options, *, strategy: str, wire: str | None = None, **chosen: Any) -> Step:
    """With `chosen` options, `strategy` is the name of its class."""
    sherd: Any = importlib.import_module("sherd")
    how = getattr(sherd, strategy)(**chosen) if chosen else strategy
    more = {} if wire is None else {"wire_dtype": wire}  # an earlier revision does not know it
    model, optimizer = sherd.distribute(model, AdamW(model.parameters(), **options), strategy=how, **more)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model.loss(x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@dataclass(frozen=True)
class Contender:
    title: str
    build: Callable[[Gpt, Options], Step]
    connected: bool = True  # its ranks have a process group
    backend: str = "gloo"  # of that group
    whole: bool = False  # one process trains on what all ranks of the others see
    threads: int = 1
    package: str = "torch"  # imported before its memory is counted
    environment: dict[str, str] = field(default_factory=dict)
    before: bool = False  # the package as it was at an earlier revision

    @property
    def variables(self) -> dict[str, str]:
        """Of its processes."""
        return self.environment | ({"PYTHONPATH": os.environ[EARLIER]} if self.before else {})

    @property
    def missing(self) -> str | None:
        """Why it cannot take part here."""
        if self.before and EARLIER not in os.environ:
            return "needs --against REVISION"
        if importlib.util.find_spec(self.package) is None:
            return "not installed: extra `bench`"
        return None


def _of_deepspeed(stage: int) -> Contender:
    build = partial(_deepspeed, stage=stage)
    return Contender(f"DeepSpeed {stage}", build, package="deepspeed", environment={"DS_ACCELERATOR": "cpu"})


def _of_sherd(strategy: str) -> Contender:
    return Contender(f"sherd {strategy}", partial(_sherd, strategy=strategy), package="sherd")


def _before(strategy: str) -> Contender:
    """The same as `_of_sherd`, of an earlier revision."""
    return Contender(f"{strategy} before", partial(_sherd, strategy=strategy), package="sherd", before=True)


def _bf16_wire(strategy: str) -> Contender:
    """Gradients travel in bf16."""
    return Contender(f"sherd {strategy}, bf16 wire", partial(_sherd, strategy=strategy, wire="bf16"), package="sherd")


def _averaging(title: str, **chosen: Any) -> Contender:
    """The ranks of a host train together, and hosts meet every EVERY steps."""
    build = partial(_sherd, strategy="DiLoCo", every=EVERY, over="hosts", **chosen)
    return Contender(title, build, package="sherd")


CONTENDERS = {
    "one-core": Contender("one process, one core", _alone, connected=False, whole=True),
    "all-cores": Contender("one process, all cores", _alone, connected=False, whole=True, threads=CORES),
    "unconnected": Contender("no communication", _alone, connected=False),
    "torch-ddp": Contender("torch DDP", _torch_ddp),
    "torch-zero": Contender("torch ZeroRedundancy", _torch_zero),
    "fsdp2": Contender("torch FSDP2", _fsdp2),
    "deepspeed-1": _of_deepspeed(1),
    "deepspeed-2": _of_deepspeed(2),
    "deepspeed-3": _of_deepspeed(3),
    "sherd-ddp": _of_sherd("ddp"),
    "sherd-zero1": _of_sherd("zero1"),
    "sherd-zero2": _of_sherd("zero2"),
    "sherd-zero3": _of_sherd("zero3"),
    "sherd-diloco": _averaging("sherd diloco"),
    "sherd-streaming": _averaging("sherd diloco, 4 fragments", fragments=4, delay=10),
    "before-ddp": _before("ddp"),
    "before-zero1": _before("zero1"),
    "before-zero2": _before("zero2"),
    "before-zero3": _before("zero3"),
    "torch-ddp-bf16": Contender("torch DDP, bf16 hook", _torch_ddp_bf16),
    "sherd-ddp-bf16": _bf16_wire("ddp"),
    "sherd-zero2-bf16": _bf16_wire("zero2"),
    "sherd-zero3-bf16": _bf16_wire("zero3"),
    "torch-ddp-on-sherd": Contender("torch DDP on sherd", _torch_ddp, backend="sherd", package="sherd"),
    "fsdp2-on-sherd": Contender("torch FSDP2 on sherd", _fsdp2, backend="sherd", package="sherd"),
}


def chosen(names: Iterable[str]) -> list[str]:
    """The keys that these names mean: a key itself, or the beginning of several ("sherd", "deepspeed")."""
    keys = []
    for name in names:
        found = [key for key in CONTENDERS if key == name] or [key for key in CONTENDERS if key.startswith(name)]
        if not found:
            raise ValueError(f"no contender is called {name!r}; there are {', '.join(CONTENDERS)}")
        keys += found
    return [key for key in CONTENDERS if key in keys]


def of_training() -> list[str]:
    """All but those that `benchmarks.backend`, `benchmarks.resnet` and `benchmarks.cluster` have for themselves."""
    others = ("one-core", "sherd-diloco", "sherd-streaming")
    special = [key for key, one in CONTENDERS.items() if one.before or key.endswith("-bf16")]
    plain = [key for key in CONTENDERS if key not in (*others, *special)]
    return [key for key in plain if CONTENDERS[key].backend == "gloo"]
