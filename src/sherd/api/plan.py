"""What a call of `distribute` will do: checked on this rank, then compared between ranks. Nothing is changed yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from sherd import data
from sherd.api.arguments import sort_out
from sherd.api.training import refuse_shared, refuse_strangers
from sherd.comm import Communicator
from sherd.config import LoaderOptions, StepOptions
from sherd.engine.assembly import check_groups, check_optimizer, check_precision, check_scaling, settle
from sherd.engine.buckets.groups import Groups
from sherd.engine.buckets.inventory import Inventory
from sherd.engine.buckets.precision import Precision
from sherd.engine.consistency.settings import compare_optimizers
from sherd.engine.gradients.gradient import name_of
from sherd.engine.modules.casting import Kept, kept_modules
from sherd.engine.parameters.mesh import Teams
from sherd.engine.policy import ExchangePolicy
from sherd.errors import ConfigError, Diverged
from sherd.strategies import Strategy
from sherd.strategies.local import Alone


@dataclass(frozen=True)
class Plan:
    """What to do on this rank."""

    strategy: Strategy
    options: StepOptions
    loading: LoaderOptions
    models: list[nn.Module]
    optimizers: list[Optimizer]
    inventory: Inventory
    shardings: list[data.Sharding]
    kept: Kept | None
    """what stays in fp32, if the rest becomes 16 bits"""

    @classmethod
    def of(
        cls, things: Sequence[Any], strategy: Strategy, options: StepOptions, loading: LoaderOptions, comm: Communicator
    ) -> Plan:
        """Refuses whatever this rank can see is wrong by itself. Not collective."""
        models, optimizers, loaders = sort_out(things)
        if not loaders and loading != LoaderOptions():
            raise ConfigError(f"{loading} is about a loader; pass it: sherd.distribute(model, optimizer, loader)")
        if not optimizers and options.accumulate > 1:
            raise ConfigError(
                f"accumulate={options.accumulate} counts the optimizer's step() calls, and no optimizer was passed; "
                f"write sherd.distribute(model, optimizer, accumulate={options.accumulate})"
            )
        kept = kept_modules(models, options.keep_fp32) if options.converts else None
        inventory = _inventory(models[0] if len(models) == 1 else nn.ModuleList(models), options, comm, kept)
        names = {each: name_of(each, at) if len(optimizers) > 1 else "" for at, each in enumerate(optimizers)}
        for optimizer, name in names.items():
            for index, group in enumerate(optimizer.param_groups):
                whose = f"group {index} of {name}" if name else f"the optimizer's group {index}"
                refuse_strangers(group["params"], inventory.parameters, whose)
        refuse_shared(names, inventory)
        others = loading.replace(global_batch=None)  # only the first loader is for training
        shardings = [
            data.plan(loader, comm, others if index else loading, options.accumulate, strategy.team(comm))
            for index, loader in enumerate(loaders)
        ]
        return cls(strategy, options, loading, models, optimizers, inventory, shardings, kept)

    def policy(self, teams: Teams) -> ExchangePolicy:
        """The policy of these ranks. Refuses optimizers that cannot follow it."""
        policy = self.strategy.policy(teams.team, self.inventory.device)
        check_scaling(self.options, policy, teams.everyone.world, self.strategy.name)
        check_precision(self.options, policy, teams.count, self.strategy.name, len(self.optimizers))
        # A loss scale leaves a gradient, and masters read it, where it is summed.
        needs_sums = self.options.converts or self.options.loss_scale is not None
        if teams.everyone.world == 1 and not (needs_sums and policy.sums(0)):
            policy = ExchangePolicy() if needs_sums else Alone()  # there is nobody to exchange anything with
        settle(policy, self.options)
        check_groups(self.inventory.groups, policy, teams.count, self.strategy.name)
        for index, optimizer in enumerate(self.optimizers):
            name = name_of(optimizer, index) if len(self.optimizers) > 1 else ""
            check_optimizer(optimizer, policy, self.strategy.name, name, self.options.converts)
        return policy

    @property
    def model(self) -> nn.Module:
        """All models as one module."""
        return self.inventory.model

    @property
    def passed(self) -> str:
        """What was passed, in words."""
        models = f"{len(self.models)} model{'s' if len(self.models) > 1 else ''}"
        kinds = [type(optimizer).__name__ for optimizer in self.optimizers]
        optimizers = f"{len(kinds)} optimizers ({', '.join(kinds)})" if len(kinds) > 1 else "an optimizer"
        return f"{models}, {optimizers if kinds else 'no optimizer'} and {len(self.shardings)} loaders"

    def compare(self, comm: Communicator) -> None:
        """Refuse options, models, optimizers and loaders that differ between ranks. Collective."""
        _compare(comm, (str(self.strategy), str(self.options), str(self.loading), self.passed))
        self.inventory.compare(comm)
        if self.optimizers:
            compare_optimizers(comm, self.optimizers, self.inventory)
        data.compare(comm, self.shardings)


def _inventory(model: nn.Module, options: StepOptions, comm: Communicator, kept: Kept | None) -> Inventory:
    groups = Groups(options.groups, comm.world)
    if groups and comm.dry:
        raise ConfigError("groups= cannot be tried without ranks: what each holds is not known; leave it out")
    groups.check([name for name, _ in (*model.named_parameters(), *model.named_buffers())], comm.rank)
    return Inventory.of(model, comm.dry, groups, Precision.of(options, () if kept is None else kept.names))


def _compare(comm: Communicator, mine: tuple[str, ...]) -> None:
    """Refuse options that differ between ranks. Collective."""
    everybody, rank = comm.compare_object(mine)
    for first, other in zip(everybody[0], everybody[rank], strict=True):
        if first != other:
            raise Diverged(
                f"the ranks' options differ: rank 0 has {first} where rank {rank} has {other}; "
                f"call sherd.distribute with the same options on every rank",
                ranks=(0, rank),
            )
