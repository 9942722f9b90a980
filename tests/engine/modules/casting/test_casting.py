"""`Casting`: a model of 16 bits takes and returns fp32, and keeps norms and losses in fp32."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from sherd.engine.modules.casting import Casting, kept_modules
from sherd.engine.modules.casting.calls import call_of
from tests.engine.modules.casting.models import (
    BF16,
    FP16,
    FP32,
    Block,
    Transformer,
    cast_model,
    conv,
    lowered,
    mlp,
    seen,
    softmax_loss,
)

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_mlp_is_that_of_plain_16_bits_between_fp32(dtype):
    model, x = cast_model(mlp(), dtype=dtype), torch.randn(4, 6, requires_grad=True)
    plain = mlp().to(dtype)
    y = model(x)
    assert y.dtype is FP32 and torch.equal(y, plain(x.to(dtype)).float())
    softmax_loss(y).backward()
    assert x.grad.dtype is FP32
    assert {p.grad.dtype for p in model.parameters()} == {dtype}
    softmax_loss(plain(x.detach().to(dtype)).float()).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    part = model[2](torch.randn(2, 8, dtype=torch.float64))
    assert part.dtype is FP32


def test_norms_compute_in_fp32_inside_a_model_of_16_bits():
    model = cast_model(conv())
    dtypes = seen(model)
    y = model(torch.randn(4, 3, 6, 6))
    assert dtypes["0"] == dtypes["4"] == (BF16, BF16) and dtypes["2"] == (BF16, BF16)
    assert dtypes["1"] == (FP32, FP32)
    assert model[1].running_mean.dtype is FP32 and model[1].weight.dtype is FP32
    y.sum().backward()
    assert {name: p.grad.dtype for name, p in model.named_parameters()} == {
        name: FP32 if name.startswith("1.") else BF16 for name, _ in model.named_parameters()
    }


@pytest.mark.parametrize("entered", [FP32, BF16])
def test_a_kept_module_that_is_entered_from_outside_returns_fp32(entered):
    model = cast_model(conv())
    x = torch.randn(2, 4, 3, 3).to(entered)
    expected = copy.deepcopy(model[1])
    y = model[1](x)
    assert y.dtype is FP32 and torch.equal(y, expected(x.float())), "and nothing is rounded on the way out"


def test_transformer_with_tied_embeddings_and_a_loss_of_its_own():
    model = cast_model(Transformer())
    ids = torch.randint(11, (2, 5))
    dtypes = seen(model)
    output = model(ids, targets=ids)
    assert output["loss"].dtype is output["logits"].dtype is FP32
    assert dtypes["embed"][1] is BF16 and dtypes["blocks.0"] == (BF16, BF16), "the buffer had promoted it to fp32"
    assert dtypes["blocks.0.norm"] == (FP32, FP32) and dtypes["head"] == (BF16, BF16)
    assert dtypes["criterion"] == (FP32, FP32)
    assert output["loss"].to(BF16) != output["loss"], "it is not rounded to 16 bits"
    output["loss"].backward()
    assert model.head.weight is model.embed.weight
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype is parameter.dtype is (FP32 if "norm" in name or "second" in name else BF16)
    assert model(ids)["loss"] is None


def test_generate_calls_the_model_from_outside_each_time():
    model = cast_model(Transformer()).eval()
    with torch.no_grad():
        assert model.generate(torch.randint(11, (2, 5))).shape == (2, 8)
    assert model.dtypes == (FP32, FP32)


def test_torchs_own_transformer_in_eval():
    """Torch's fused path takes no modules with hooks, so norms of fp32 do not get into it."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = cast_model(nn.TransformerEncoder(layer, 2)).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        found = model(x, src_key_padding_mask=torch.zeros(2, 5, dtype=torch.bool))
    assert found.dtype is FP32
    torch.testing.assert_close(found, model(x), atol=0.1, rtol=0.1)


def test_attention_still_gets_one_tensor_where_it_was_given_one():
    given = []

    class Attention(nn.MultiheadAttention):
        def forward(self, *args):
            given.extend(args)
            return super().forward(*args)

    model = cast_model(Attention(8, 2))
    x = torch.randn(3, 2, 8)
    values, weights = model(x, x, x)
    assert values.dtype is weights.dtype is FP32
    assert given[0] is given[1] is given[2] and given[0].dtype is BF16


def test_lstm_with_tensors_states_and_packed_sequences():
    model, x = cast_model(nn.LSTM(4, 6)), torch.randn(5, 3, 4)
    state = torch.zeros(1, 3, 6), torch.zeros(1, 3, 6)
    output, (hidden, cell) = model(x, state)
    assert output.dtype is hidden.dtype is cell.dtype is FP32
    packed, _ = model(pack_padded_sequence(x, torch.tensor([5, 3, 2])))
    assert packed.data.dtype is FP32 and type(packed).__name__ == "PackedSequence"
    packed.data.sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {BF16}


def test_modules_without_parameters_take_what_they_are_given():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.softmax = nn.Linear(2, 2), nn.Softmax(-1)

        def forward(self, x):
            return self.softmax(self.layer(x).float())

    model = cast_model(Model())
    dtypes = seen(model)
    model(torch.randn(3, 2))
    assert dtypes["softmax"] == (FP32, FP32)
    assert model.softmax(torch.randn(2)).dtype is FP32 and not model.softmax._forward_hooks


def test_a_kept_embedding_returns_what_its_surroundings_compute_in():
    inside = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    model = cast_model(nn.Sequential(inside, nn.Embedding(5, 4)), keep=["0"])
    dtypes = seen(model)
    inside(torch.arange(3))
    assert dtypes["0.0"][1] is dtypes["0.1"][0] is FP32
    outer = cast_model(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4)), keep=["0"])
    dtypes = seen(outer)
    heard = []
    outer[1].register_forward_pre_hook(lambda module, args: heard.append(args[0].dtype), prepend=True)
    outer(torch.arange(3))
    assert dtypes["0"][1] is FP32 and heard == [BF16]
    assert outer.float()(torch.arange(3)).dtype is FP32 and heard == [BF16, FP32]


@pytest.mark.filterwarnings("error")  # torch warns of errors in hooks that it calls because of an error
def test_a_failed_call_does_not_count():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.error = None

        def forward(self, x):
            if self.error is not None:
                raise self.error
            return self.layer(x)

    inner = Failing()
    model, x = cast_model(nn.Sequential(nn.Linear(2, 2), inner)), torch.randn(3, 2)
    for error in (ValueError("no"), KeyboardInterrupt(), SystemExit(1)):
        inner.error = error
        with pytest.raises(type(error)):
            model(x)
        inner.error = None
        assert model(x).dtype is FP32 and inner(x).dtype is FP32 and model[0](x).dtype is FP32

    def refuse(*_):
        raise ValueError("a hook refuses")

    refusing = inner.register_forward_pre_hook(refuse, prepend=True)  # so the pre-hook of `inner` is not reached
    with pytest.raises(ValueError, match="a hook refuses"):
        model(x)
    refusing.remove()
    caught = []

    def tolerant(module, args):
        try:
            module.layer(torch.randn(3, 5))
        except RuntimeError as failure:
            caught.append(failure)

    inner.register_forward_pre_hook(tolerant)
    inner.register_forward_hook(lambda module, args, output: caught.append(output.dtype), prepend=True)
    assert model(x).dtype is FP32 and len(caught) == 2 and caught[1] is BF16, "a call that was caught inside"


def test_calls_of_other_threads_are_not_around_those_of_this_one():
    found = {}

    class Waiting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            if threading.current_thread() is threading.main_thread():
                other = threading.Thread(target=lambda: found.update(other=model(x).dtype))
                other.start()
                other.join()
            return self.layer(x)

    model = cast_model(Waiting())
    assert model(torch.randn(3, 2)).dtype is FP32 and found == {"other": FP32}


def test_copies_and_pickles_are_cast_by_themselves():
    model, casting = lowered(Transformer())
    ids = torch.randint(11, (2, 5))
    expected = model(ids)["logits"]
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    part = copy.deepcopy(model.blocks[0])
    casting.remove()
    assert all(call_of(module) is None for module in model.modules())
    assert not model.norm._forward_pre_hooks
    for each in copies:
        assert torch.equal(each(ids)["logits"], expected) and each(ids)["logits"].dtype is FP32
        assert each.embed.weight.dtype is BF16
        Casting([each], BF16, kept_modules([each], None)).install()
        assert call_of(each)._replaced is None, "in place of what came with the copy"
        assert len(each.norm._forward_pre_hooks) == 1
    assert part(torch.randn(2, 5, 8)).dtype is FP32


def test_a_model_that_is_dropped_is_freed_at_once():
    model = cast_model(mlp())
    gone = weakref.ref(model)
    forward = model.forward
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(ReferenceError, match="keep the model"):
        forward(torch.randn(4, 6))


def test_forwards_that_are_replaced():
    """By an instance's own before, and by a wrapper after: both are called, and removing leaves what there was."""
    model, x, heard = mlp(), torch.randn(4, 6), []

    def own(x):
        heard.append(x.dtype)
        return nn.Linear.forward(model[0], x)

    model[0].forward = own
    _, casting = lowered(model)
    assert list(inspect.signature(model.forward).parameters) == ["input"]
    inner = model[2].forward
    model[2].forward = lambda x: inner(x)
    assert model(x).dtype is FP32 and model[2](torch.randn(2, 8)).dtype is FP32
    casting.remove()
    assert model[0].forward is own and "forward" not in model.__dict__
    assert model.bfloat16()(x.to(BF16)).dtype is BF16 and heard == [BF16] * 2


def test_converted_copies_compute_in_what_they_were_converted_to():
    model, x = cast_model(conv()), torch.randn(4, 3, 6, 6)
    plain = conv()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(copy.deepcopy(model).float()(x), plain(x))
    wide = copy.deepcopy(model).double()
    assert torch.equal(wide(x.double()), copy.deepcopy(plain).double()(x.double()))
    assert copy.deepcopy(model).half().eval()(x).dtype is FP32
    ids = torch.randint(11, (2, 5))
    assert cast_model(Transformer()).double()(ids, targets=ids)["loss"].dtype is torch.float64
    values = {name: value.detach().float().requires_grad_() for name, value in model.named_parameters()}
    result = torch.func.functional_call(model, values, x)
    result.sum().backward()
    torch.testing.assert_close(result, plain(x))
    assert values["0.weight"].grad.dtype is FP32
    assert model(x).dtype is FP32


def test_weights_that_are_computed():
    """By torch's parametrizations: `weight` is of 16 bits from inside and from outside."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    other = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    model = cast_model(nn.Sequential(layer, other))
    y = model(torch.randn(3, 6))
    assert y.dtype is FP32 and model[0].weight.dtype is model[1].weight.dtype is BF16
    y.sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {BF16}


def test_several_models_and_removing():
    generator, judge = mlp(), nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    kept = kept_modules([generator, judge], None)
    for parameter in (*generator.parameters(), *judge.parameters()):
        parameter.data = parameter.data if parameter in kept.parameters else parameter.data.to(BF16)
    casting = Casting([generator, judge], BF16, kept)
    casting.install()
    assert judge(generator(torch.randn(2, 6))).dtype is FP32
    casting.remove()
    with pytest.raises(RuntimeError, match="dtype"):
        generator(torch.randn(2, 6))


def test_block_on_its_own():
    block = cast_model(Block())
    x = torch.randn(2, 5, 8, requires_grad=True)
    block(x=x).square().mean().backward()
    assert x.grad.dtype is FP32 and x.grad.abs().max() > 0
