"""Models of all kinds: what they consist of and how they are called."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

from tests.helpers.training import double, loss_of, sgd, train, weights
from tests.what_works.cases import case, refused


def _trained(run, model, optimizer=sgd, steps=3, **options):
    """The usual loop over a model, and its weights."""
    model, optimizer = run.distribute(model, optimizer(model), **options)
    train(model, optimizer, run.batches(steps))
    return weights(model)


class Of(nn.Module):
    """A model made of a function of itself and its input."""

    def __init__(self, forward, **parts):
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, part)
        self.double()

    def forward(self, x):
        return self._forward(self, x)


def _linear(*shape):
    torch.manual_seed(sum(shape))
    return nn.Linear(*shape)


# -------------------------------------------------------------------- how it is called


class Autoencoder(nn.Module):
    """There is no `forward`."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = _linear(15, 4), _linear(4, 15)
        self.double()

    def encode(self, x):
        return torch.tanh(self.inner(x))

    def decode(self, code):
        return self.outer(code)


@case("Models", "Methods other than `forward`", "`model.encode(x)`, `model.decode(z)`; there need be no `forward`")
def other_methods(run):
    model = Autoencoder()
    model, optimizer = run.distribute(model, sgd(model))
    for x, _ in run.batches():
        (model.decode(model.encode(x)) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case("Models", "A submodule used directly", "`model.encoder(x)` without the rest of the model")
def submodule(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    for step, (x, y) in enumerate(run.batches(4)):
        loss = model[0](x).square().mean() if step % 2 else loss_of(model, (x, y))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case("Models", "`torch.func.functional_call`", "with the model's parameters, or with what was computed from them")
def functional_call(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    for x, y in run.batches():
        own = dict(model.named_parameters())
        shrunk = {name: parameter * 0.9 for name, parameter in own.items()}
        first, second = (torch.func.functional_call(model, values, (x,)) for values in (own, shrunk))
        ((first - y).square().mean() + (second - y).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x**3 * scale

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        return gradient * 3 * x**2 * scale, (gradient * x**3).sum()


@case("Models", "A custom `autograd.Function`", "on activations and parameters")
def custom_function(run):
    model = Of(
        lambda self, x: self.out(Cube.apply(self.layer(x), self.scale)),
        layer=_linear(15, 4),
        out=_linear(4, 5),
        scale=nn.Parameter(torch.tensor(0.5)),
    )
    return _trained(run, model)


# -------------------------------------------------------------------- what it consists of


@case("Models", "Tied weights", "trained once, and still tied afterwards")
def tied(run):
    model = Of(
        lambda self, x: self.out(torch.tanh(self.mid(torch.tanh(self.inner(x))))) @ self.head,
        inner=_linear(15, 7),
        mid=_linear(7, 7),
        out=_linear(7, 7),
        head=nn.Parameter(torch.linspace(-1, 1, 35).view(7, 5)),
    )
    model.out.weight = model.mid.weight
    found = _trained(run, model)
    assert model.out.weight is model.mid.weight
    return found


@case("Models", "`ParameterList`, `ParameterDict`, `ModuleDict`, `ModuleList`", "as any other")
def containers(run):
    model = Of(
        lambda self, x: self.blocks["b"](self.blocks["a"](x) * self.scales["a"]) + self.shifts[0] - self.more[0](x),
        blocks=nn.ModuleDict({"a": _linear(15, 4), "b": _linear(4, 5)}),
        scales=nn.ParameterDict({"a": nn.Parameter(torch.ones(4)), "unused": nn.Parameter(torch.ones(3))}),
        shifts=nn.ParameterList([nn.Parameter(torch.zeros(5))]),
        more=nn.ModuleList([_linear(15, 5)]),
    )
    return _trained(run, model)


@case("Models", "LSTM, with `flatten_parameters()`", "in every step if you like")
def lstm(run):
    def forward(self, x):
        self.lstm.flatten_parameters()
        out, _ = self.lstm(x.view(len(x), 5, 3))
        return self.out(out[:, -1])

    torch.manual_seed(0)
    return _trained(run, Of(forward, lstm=nn.LSTM(3, 4, num_layers=2, batch_first=True), out=_linear(4, 5)))


@case("Models", "`nn.TransformerEncoder`", "dropout 0")
def transformer(run):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, dropout=0.0, batch_first=True)
    model = Of(
        lambda self, x: self.out(self.encoder(self.lift(x.view(len(x), 5, 3))).flatten(1)),
        lift=_linear(3, 4),
        encoder=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        out=_linear(20, 5),
    )
    return _trained(run, model)


@case("Models", "`parametrizations.weight_norm`, `spectral_norm`, `orthogonal`", "applied before `distribute`")
def parametrized(run):
    model = nn.Sequential(
        parametrizations.weight_norm(_linear(15, 7).double()),
        nn.Tanh(),
        parametrizations.spectral_norm(_linear(7, 7).double()),
        parametrizations.orthogonal(_linear(7, 5).double()),
    )
    return _trained(run, model)


@case("Models", "Parameters of float32 and float64 in one model", "each is reduced in its own", rtol=1e-5)
def mixed_dtypes(run):
    model = Of(lambda self, x: self.out(self.layer(x.float()).double()), layer=_linear(15, 7), out=_linear(7, 5))
    model.layer.float()
    return _trained(run, model)


@case("Models", "Parameters of bfloat16, float32 and float64", "each is reduced in its own", rtol=None)
def three_dtypes(run):
    def forward(self, x):
        return self.out(self.mid(self.layer(x.float()).bfloat16()).double())

    model = Of(forward, layer=_linear(15, 7), mid=_linear(7, 7), out=_linear(7, 5))
    model.layer.float()
    model.mid.bfloat16()
    return _trained(run, model)


@case("Models", "Complex inputs and buffers", "parameters are real")
def complex_buffers(run):
    model = Of(lambda self, x: self.out((x * self.layer.weight.sum() * self.phase).abs()), layer=_linear(1, 1))
    model.out = _linear(15, 5).double()
    model.register_buffer("phase", torch.polar(torch.ones(15), torch.arange(15.0)).to(torch.complex128))
    return _trained(run, model)


@case("Models", "Scalar parameters", "of no dimension")
def scalars(run):
    forward = lambda self, x: self.layer(x) * self.gain + self.shift  # noqa: E731
    gain, shift = (nn.Parameter(torch.tensor(value)) for value in (1.5, -0.5))
    return _trained(run, Of(forward, layer=_linear(15, 5), gain=gain, shift=shift))


@case("Models", "Parameters without elements", "used or not")
def no_elements(run):
    model = Of(
        lambda self, x: self.layer(torch.cat([x, (x[:, :0] * self.used)], dim=1)),
        layer=_linear(15, 5),
        used=nn.Parameter(torch.empty(0)),
        unused=nn.Parameter(torch.empty(3, 0)),
    )
    return _trained(run, model)


@case("Models", "Parameters that are not contiguous", "transposed or strided, before `distribute`")
def not_contiguous(run):
    torch.manual_seed(0)
    strided = nn.Parameter(torch.randn(5, 15, dtype=torch.float64).t())
    model = Of(lambda self, x: self.convolution(x.view(-1, 3, 5, 1)).mean((2, 3)) + x @ self.strided, strided=strided)
    model.convolution = nn.Conv2d(3, 5, 1).double().to(memory_format=torch.channels_last)
    return _trained(run, model)


@case("Models", "Parameters that are views of one tensor", "each is trained by itself")
def views(run):
    whole = torch.linspace(-1, 1, 80, dtype=torch.float64)
    weight, bias = nn.Parameter(whole[:75].view(15, 5)), nn.Parameter(whole[75:])
    return _trained(run, Of(lambda self, x: x @ self.weight + self.bias, weight=weight, bias=bias))


@case("Models", "Empty parameter groups", "before and after others")
def empty_groups(run):
    def optimizer(model):
        return torch.optim.SGD([{"params": []}, {"params": model.parameters()}, {"params": [], "lr": 1.0}], lr=0.1)

    return _trained(run, double(), optimizer)


@case("Models", "A model without parameters", "nothing is trained, and nothing is wrong with it")
def no_parameters(run):
    model = run.distribute(nn.Sequential(nn.Tanh(), nn.Flatten()))
    x = next(run.batches())[0].requires_grad_(True)
    model(x).square().mean().backward()
    return {"slope": run.mean(x.grad.abs().sum())}


@case("Models", "A model of nothing but frozen parameters", "with no optimizer; inputs have gradients")
def all_frozen(run):
    model = run.distribute(double().requires_grad_(False))
    x = next(run.batches())[0].requires_grad_(True)
    model(x).square().mean().backward()
    return {"slope": run.mean(x.grad.abs().sum())}


@case("Models", "Dropout and other randomness", "each rank draws its own", rtol=None)
def dropout(run):
    model = nn.Sequential(*double(), nn.Dropout(0.5))
    model, optimizer = run.distribute(model, sgd(model))
    torch.manual_seed(run.rank)
    train(model, optimizer, run.batches())
    return weights(model)


# -------------------------------------------------------------------- changed after distribute


def _changed(run, change):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    train(model, optimizer, run.batches(1))
    change(model)
    dtype = next(model.parameters()).dtype
    train(model, optimizer, [(x.to(dtype), y.to(dtype)) for x, y in run.batches()])


BEFORE = r".*before sherd\.distribute"


@refused("Models", "A module added later", "add it before `sherd.distribute`", match=rf"'3\.weight' .*added{BEFORE}")
def module_added(run):
    _changed(run, lambda model: model.append(_linear(5, 5).double()))


@refused("Models", "A parameter added later", "add it before `sherd.distribute`", match=rf"'0\.extra' .*added{BEFORE}")
def parameter_added(run):
    def change(model):
        model[0].register_parameter("extra", nn.Parameter(torch.zeros(7, dtype=torch.float64)))
        model[0].register_forward_hook(lambda module, _, out: out + module.extra)

    _changed(run, change)


@refused("Models", "A module replaced later", "replace it before `sherd.distribute`", match=r"'2\.weight' was replaced")
def module_replaced(run):
    def change(model):
        model[2] = _linear(7, 5).double()

    _changed(run, change)


@refused(
    "Models",
    "A parameter replaced later",
    "write into it inside `with sherd.full_parameters(model):`",
    match=r"'2\.bias' was replaced .*inside `with sherd\.full_parameters",
)
def parameter_replaced(run):
    def change(model):
        model[2].bias = nn.Parameter(torch.zeros(5, dtype=torch.float64))

    _changed(run, change)


@refused(
    "Models",
    "A parameter removed later",
    "remove it before `sherd.distribute`, or freeze it",
    match=rf"'2\.bias' was (replaced|removed){BEFORE}",
)
def parameter_removed(run):
    def change(model):
        model[2].bias = None

    _changed(run, change)


@refused(
    "Models", "A module removed later", "remove it before `sherd.distribute`", match=rf"'1\.weight' was .*{BEFORE}"
)
def module_removed(run):
    model = nn.Sequential(double(), _linear(5, 5).double())
    model, optimizer = run.distribute(model, sgd(model))
    train(model, optimizer, run.batches(1))
    del model[1]
    train(model, optimizer, run.batches())


@refused(
    "Models",
    "`model.to(dtype)` later",
    "convert it before `sherd.distribute`",
    match=rf"'0\.weight' is now torch\.float.*; call model\.to\(\.\.\.\){BEFORE}",
)
def converted(run):
    _changed(run, lambda model: model.to(torch.float32))


@refused(
    "Models",
    "`model.half()` later",
    "convert it before `sherd.distribute`",
    match=rf"'0\.weight' is now torch\.float.*; call model\.to\(\.\.\.\){BEFORE}",
)
def halved(run):
    _changed(run, lambda model: model.half())


@refused(
    "Models",
    "A parametrization registered later",
    "register it before `sherd.distribute`",
    match=rf"'0\.(weight|parametrizations.*)' was {BEFORE}",
)
def parametrized_later(run):
    _changed(run, lambda model: parametrizations.weight_norm(model[0]))


def _wrapped(run, wrap):
    model = wrap(double())
    model, optimizer = run.distribute(model, sgd(model))
    train(model, optimizer, run.batches())


@refused(
    "Models",
    "`DistributedDataParallel` around the model",
    "pass the model itself: `sherd.distribute` takes its place",
    match=r"wrapped in torch's DistributedDataParallel; pass the model inside: sherd\.distribute\(model\.module",
)
def wrapped_by_ddp(run):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    _wrapped(run, DistributedDataParallel)


@refused(
    "Models",
    "`nn.DataParallel` around the model",
    "pass the model itself: one process per device takes its place",
    match=r"wrapped in torch's DataParallel; pass the model inside: sherd\.distribute\(model\.module",
)
def data_parallel(run):
    _wrapped(run, nn.DataParallel)


@refused(
    "Models",
    "`nn.Embedding(max_norm=...)`",
    "each rank's forward would edit the weights: limit them inside `sherd.full_parameters`",
    match="'0' has max_norm=1.0.*full_parameters",
)
def max_norm(run):
    run.distribute(nn.Sequential(nn.Embedding(5, 3, max_norm=1.0)))
