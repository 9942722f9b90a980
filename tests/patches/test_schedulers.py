"""Schedulers obey the accumulation window, wherever and whenever their class was defined."""

from __future__ import annotations

import gc
import weakref

from torch.optim.lr_scheduler import LRScheduler, StepLR

from sherd import patches
from tests.helpers.training import batch, connected, distributed

K = 3


def halving(base):
    """A scheduler class of the user's own, which is only defined now."""

    class Halving(base):
        def get_lr(self):
            return [rate * 0.5**self.last_epoch for rate in self.base_lrs]

        def step(self, epoch=None):
            super().step(epoch)

    return Halving


def rates(model, optimizer, scheduler, c):
    found = []
    for step in range(2 * K):
        model(batch(c.rank, step)[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


def defined_later():
    with connected() as c:
        model, optimizer = distributed(c, "zero2", accumulate=K)
        rate = optimizer.param_groups[0]["lr"]
        expected = [rate] * (K - 1) + [rate / 2] * K + [rate / 4]
        assert rates(model, optimizer, halving(LRScheduler)(optimizer), c) == expected
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = rate

        class OfTorchs(StepLR):  # with no step of its own
            pass

        assert rates(model, optimizer, OfTorchs(optimizer, 1, gamma=0.5), c) == expected


def test_classes_defined_after_distribute_count_real_steps(ranks):
    ranks(2).run(defined_later)


def let_go():
    with connected() as c:
        distributed(c, "zero2", accumulate=K)
        kind = halving(LRScheduler)
        own = vars(kind)["step"].__wrapped__
        assert vars(kind)["step"] is not own
        patches.uninstall_all()
        assert vars(kind)["step"] is own and "__init_subclass__" not in vars(LRScheduler)
        distributed(c, "zero2", accumulate=K)
        gone = weakref.ref(kind)
        del kind, own
        gc.collect()
        assert gone() is None


def test_a_patch_keeps_no_class_alive(ranks):
    ranks(1).run(let_go)
