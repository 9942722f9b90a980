"""`keep_fp32=`: which modules and parameters stay in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sherd import ConfigError
from sherd.engine.modules.casting import kept_modules
from tests.engine.modules.casting.models import BF16, FP32, Transformer, cast_model, conv, mlp, seen

pytestmark = pytest.mark.pure


class RowsRMSNorm(nn.Module):
    """A user's own norm."""

    def __init__(self, width=4):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * self.weight


class FrozenNorm2d(nn.Module):
    """A norm that has buffers only."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4))


class PreNorm(nn.Module):
    """Called a norm, but a norm and what follows it."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(4), nn.Linear(4, 4)


class Normaliser(RowsRMSNorm):
    """Not called a norm."""


def everything():
    return nn.ModuleDict(
        {
            "layer": nn.LayerNorm(4),
            "plain": nn.LayerNorm(4, elementwise_affine=False),
            "group": nn.GroupNorm(2, 4),
            "rms": nn.RMSNorm(4),
            "batch": nn.BatchNorm1d(4),
            "sync": nn.SyncBatchNorm(4),
            "instance": nn.InstanceNorm2d(4, affine=True),
            "own": RowsRMSNorm(),
            "frozen": FrozenNorm2d(),
            "loss": nn.CrossEntropyLoss(),
            "pre": PreNorm(),
            "other": Normaliser(),
            "response": nn.LocalResponseNorm(2),
            "linear": nn.Linear(4, 4),
        }
    )


def names_of(model, kept):
    return {name for name, module in model.named_modules() if module in kept.modules}


def test_by_default_norms_and_losses():
    model = everything()
    norms = {"layer", "group", "rms", "batch", "sync", "instance", "own"}
    kept = kept_modules([model], None)
    assert names_of(model, kept) == norms | {"plain", "frozen", "loss", "pre.norm"}
    parameters = {name for name, _ in model.named_parameters() if name.split(".")[0] in norms}
    assert set(kept.names) == parameters | {"pre.norm.weight", "pre.norm.bias"}
    assert kept.parameters == {p for name, p in model.named_parameters() if name in kept.names}


def test_lists_replace_the_default():
    model = everything()
    assert not kept_modules([model], []).modules and not kept_modules([model], []).names
    assert names_of(model, kept_modules([model], [nn.Linear])) == {"pre.layer", "linear"}
    assert names_of(model, kept_modules([model], ["pre", "l*r"])) == {"pre", "pre.norm", "pre.layer", "layer", "linear"}
    assert names_of(model, kept_modules([model], ["pre.*"])) == {"pre", "pre.norm", "pre.layer"}, "all of it is kept"
    both = names_of(model, kept_modules([model], [..., "linear"]))
    assert both == names_of(model, kept_modules([model], None)) | {"linear"}


def test_a_parameter_is_kept_alone():
    model = Transformer()
    kept = kept_modules([model], ["blocks.*.bias"])
    assert not kept.modules - set(model.blocks.modules()) and "blocks.0.mlp.bias" in kept.names
    kept = kept_modules([model], ["blocks.0.mlp.bias"])
    assert kept.names == ("blocks.0.mlp.bias",) and not kept.modules

    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift, self.layer = nn.Parameter(torch.zeros(4)), nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x + self.shift)

    shifted = cast_model(Shifted(), keep=["shift"])
    dtypes = seen(shifted)
    shifted(torch.randn(2, 4)).sum().backward()
    assert shifted.shift.grad.dtype is FP32 and shifted.layer.weight.grad.dtype is BF16
    assert dtypes[""][0] is dtypes["layer"][0] is BF16, "its module still computes in 16 bits"


def test_modules_that_share_a_kept_parameter_are_kept():
    model = Transformer()
    kept = kept_modules([model], ["head"])
    assert names_of(model, kept) == {"head", "embed"} and kept.names == ("embed.weight",)
    cast_model(model, keep=["head"])
    dtypes = seen(model)
    assert model(torch.randint(11, (2, 5)))["logits"].dtype is FP32
    assert dtypes["embed"][1] is dtypes["head"][0] is FP32 and dtypes["blocks.0"][0] is BF16


def test_several_models_are_named_as_a_list():
    models = [mlp(), conv()]
    assert kept_modules(models, ["0.2"]).names == ("0.2.weight", "0.2.bias")
    assert kept_modules(models, None).names == ("1.1.weight", "1.1.bias")


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (["heat"], r"'heat' matches no module and no parameter of the model; did you mean 'head'\?"),
        (["blocks.0.mpl.*"], r"did you mean 'blocks.0.mlp"),
        ([nn.BatchNorm1d], r"'BatchNorm1d' matches no module of the model; .*valid: .*'LayerNorm'"),
        ("head", r"found 'head'; write \['head'\]"),
        ([3], r"takes names, types of modules and \.\.\., found 3"),
        ([int], r"found <class 'int'>"),
    ],
)
def test_what_matches_nothing_is_refused(keep, message):
    with pytest.raises(ConfigError, match=message):
        kept_modules([Transformer()], keep)
