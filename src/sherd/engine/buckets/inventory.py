"""What a model consists of: its parameters by name, each once, compared between the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from sherd.comm import Communicator
from sherd.engine.buckets.groups import Groups, Item, Ranks, words
from sherd.engine.buckets.precision import Precision
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.errors import ConfigError, Diverged
from sherd.layout.entry import ITEMSIZE, dtype_name, memory_order


@dataclass(frozen=True)
class Inventory:
    """A model's parameters by name, in the order of registration, tied ones once."""

    model: nn.Module
    members: tuple[TrackedParameter, ...]
    buffers: tuple[Tensor, ...]
    groups: Groups = field(default_factory=Groups)
    """which ranks hold what"""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        dry: bool = False,
        groups: Groups | None = None,
        precision: Precision = Precision(),  # noqa: B008 - it is frozen
    ) -> Inventory:
        """The inventory of `model`. Refuses what cannot be distributed, and meta tensors unless the run is `dry`."""
        found = list(model.named_parameters())
        for name, parameter in found:
            _check(name, parameter, dry)
            precision.check(name, parameter)
            if parameter.device != found[0][1].device:
                raise ConfigError(
                    f"parameter {name!r} is on {parameter.device} and {found[0][0]!r} on {found[0][1].device}; "
                    f"put the whole model on one device before sherd.distribute"
                )
        _check_modules(model)
        groups = groups or Groups()
        members = tuple(
            TrackedParameter(name, parameter, groups.ranks_of(name), precision.dtypes(name, parameter))
            for name, parameter in found
        )
        return cls(model, members, tuple(buffer for buffer in model.buffers() if buffer is not None), groups)

    def buffers_of(self, ranks: Ranks) -> list[Tensor]:
        """The buffers that these ranks hold; None: all ranks."""
        if not self.groups:
            return [*self.buffers]
        return [buffer for name, buffer in self.model.named_buffers() if self.groups.ranks_of(name) == ranks]

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next((parameter.device for parameter in self.parameters), torch.device("cpu"))

    @cached_property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters themselves."""
        return tuple(member.parameter for member in self.members)

    @cached_property
    def by_parameter(self) -> dict[nn.Parameter, TrackedParameter]:
        """The tracked parameter of each parameter."""
        return {member.parameter: member for member in self.members}

    def of_module(self, module: nn.Module) -> list[TrackedParameter]:
        """The parameters that `module` shares with this model."""
        return [self.by_parameter[p] for p in module.parameters() if p in self.by_parameter]

    def compare(self, comm: Communicator) -> None:
        """Refuse models that differ between ranks, before anything is shared. Collective."""
        mine: list[Item] = []
        for name, p in self.model.named_parameters():
            mine.append((name, tuple(p.shape), dtype_name(p), p.requires_grad, memory_order(p)))
        mine += [(name, tuple(b.shape), dtype_name(b), None, None) for name, b in self.model.named_buffers()]
        if self.groups:
            self.groups.compare(comm, mine)
            return
        by_rank, rank = comm.compare_object(mine)
        if rank:
            pair = comm.numbers[0], comm.numbers[rank]
            raise Diverged(_difference(by_rank[0], by_rank[rank], pair), ranks=pair)


def _check(name: str, parameter: nn.Parameter, dry: bool) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ConfigError(f"parameter {name!r} has no shape yet; run one batch through the model before distribute")
    if parameter.is_meta and not dry:
        raise ConfigError(f"parameter {name!r} is on the meta device; give it values: model.to_empty(device='cpu')")
    if dtype_name(parameter) not in ITEMSIZE:
        raise ConfigError(f"parameter {name!r} is of {parameter.dtype}, which cannot be distributed")


def _check_modules(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided:
            raise ConfigError(
                f"buffer {name!r} is sparse ({buffer.layout}), which cannot be sent; keep it as a plain attribute of "
                f"its module, or make it dense"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ConfigError(
                f"module {name!r} has max_norm={module.max_norm}: each rank's forward would edit the weights that its "
                f"own batch uses; leave it out, and limit the weights inside sherd.full_parameters"
            )


def _difference(first: list[Item], theirs: list[Item], pair: tuple[int, int]) -> str:
    one, two = pair
    for here, there in zip(first, theirs, strict=False):
        if here != there:
            detail = f"rank {one} has {words(here)} where rank {two} has {words(there)}"
            break
    else:
        detail = f"rank {one} has {len(first)} parameters and buffers, rank {two} has {len(theirs)}"
    return (
        f"the ranks' models differ: {detail}; build the same model on every rank before sherd.distribute, or say which "
        f'ranks hold what: groups={{"experts.0.*": [0, 1]}}'
    )
