"""Two models and two optimizers, and one optimizer over several models."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import softplus

from tests.helpers.training import adamw, double, loss_of, network, sgd, train, weights
from tests.what_works.cases import case, refused, together


def _critic():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def _gan(run, discriminator_first, detach=True, toggle=False):
    """Both optimizers clear only what is theirs; each backward leaves gradients in the other's model."""
    generator, discriminator = double(), _critic()
    generator, of_generator = run.distribute(generator, adamw(generator))
    discriminator, of_discriminator = run.distribute(discriminator, sgd(discriminator))
    losses = []

    def tell_apart(x, real):
        fake = generator(x).detach() if detach else generator(x)
        of_discriminator.zero_grad()
        loss = softplus(-discriminator(real)).mean() + softplus(discriminator(fake)).mean()
        loss.backward()
        of_discriminator.step()
        return loss

    def deceive(x, real):
        discriminator.requires_grad_(not toggle)
        of_generator.zero_grad()
        loss = softplus(-discriminator(generator(x))).mean()
        loss.backward()
        of_generator.step()
        discriminator.requires_grad_(True)
        return loss

    for x, real in run.batches(4):
        for half in (tell_apart, deceive) if discriminator_first else (deceive, tell_apart):
            losses.append(run.mean(half(x, real)))
    return together(generator=weights(generator), discriminator=weights(discriminator), all={"l": torch.stack(losses)})


@case("Several models", "A GAN: two models, two optimizers", "`distribute` is called for each; either may step first")
def gan(run):
    return together(discriminator_first=_gan(run, True), generator_first=_gan(run, False))


@case(
    "Several models",
    "A GAN without `detach()`",
    "what the discriminator's backward leaves in the generator is dropped by the generator's `zero_grad()`",
)
def gan_without_detach(run):
    return together(first=_gan(run, True, detach=False), second=_gan(run, False, detach=False))


@case(
    "Several models",
    "A GAN that freezes the discriminator while the generator learns",
    "`requires_grad_(False)` and back in every step, on every rank",
)
def gan_toggling(run):
    return together(first=_gan(run, True, toggle=True), second=_gan(run, False, toggle=True))


@case("Several models", "A GAN without `detach()` that toggles `requires_grad_`", "both at once")
def gan_toggling_without_detach(run):
    return _gan(run, True, detach=False, toggle=True)


@case("Several models", "One backward through two models", "each with its own optimizer, which both step")
def two_optimizers_one_backward(run):
    encoder, decoder = double(), _critic()
    encoder, of_encoder = run.distribute(encoder, sgd(encoder))
    decoder, of_decoder = run.distribute(decoder, adamw(decoder))
    for x, y in run.batches():
        (decoder(encoder(x)) - y[:, :1]).square().mean().backward()
        for optimizer in (of_encoder, of_decoder):
            optimizer.step()
            optimizer.zero_grad()
    return together(encoder=weights(encoder), decoder=weights(decoder))


@case(
    "Several models",
    "One optimizer over two models",
    "`encoder, decoder, optimizer = sherd.distribute(encoder, decoder, optimizer)`",
)
def one_optimizer(run):
    encoder, decoder = double(), _critic()
    optimizer = sgd(nn.ModuleList([encoder, decoder]))
    encoder, decoder, optimizer = run.distribute(encoder, decoder, optimizer)
    for x, y in run.batches():
        (decoder(encoder(x)) - y[:, :1]).square().mean().backward()
        torch.nn.utils.clip_grad_norm_([*encoder.parameters(), *decoder.parameters()], 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return together(encoder=weights(encoder), decoder=weights(decoder))


@case(
    "Several models",
    "Two optimizers over one model",
    "`model, sgd, adamw = sherd.distribute(model, sgd, adamw)`; each steps its own parameters",
)
def two_optimizers_one_model(run):
    model = double()
    last, first = sgd(model[2]), adamw(model[0])
    model, last, first = run.distribute(model, last, first, clip_norm=0.5)
    for x, y in run.batches(6):
        loss_of(model, (x, y)).backward()
        if run.plain:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in (last, first):
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


@case(
    "Several models",
    "Two optimizers over one model, one of which steps every second time",
    "what it did not step from is added up for it",
)
def one_every_second_time(run):
    model = double()
    model, last, first = run.distribute(model, sgd(model[2]), adamw(model[0]))
    for step, data in enumerate(run.batches(6)):
        loss_of(model, data).backward()
        last.step()
        last.zero_grad()
        if step % 2:
            first.step()
            first.zero_grad()
    return weights(model)


@case(
    "Several models",
    "A GAN in one call",
    "`sherd.distribute(generator, discriminator, of_generator, of_discriminator)`",
)
def gan_in_one_call(run):
    generator, discriminator = double(), _critic()
    both = generator, discriminator, adamw(generator), sgd(discriminator)
    generator, discriminator, of_generator, of_discriminator = run.distribute(*both)
    for x, real in run.batches(4):
        of_discriminator.zero_grad()
        fake = discriminator(generator(x).detach())
        (softplus(-discriminator(real)).mean() + softplus(fake).mean()).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        softplus(-discriminator(generator(x))).mean().backward()
        of_generator.step()
    return together(generator=weights(generator), discriminator=weights(discriminator))


@case("Several models", "One optimizer over three models, used in turn", "a model that was not used is left alone")
def three_models(run):
    models = [network(seed, torch.float64) for seed in range(3)]
    optimizer = sgd(nn.ModuleList(models))
    *models, optimizer = run.distribute(*models, optimizer)
    for step, data in enumerate(run.batches(6)):
        loss_of(models[step % 3], data).backward()
        optimizer.step()
        optimizer.zero_grad()
    return together(**{f"model {index}": weights(model) for index, model in enumerate(models)})


@case("Several models", "Two models that share a layer, with one optimizer", "it is trained once, and stays tied")
def shared_layer(run):
    first, second = double(), network(1, torch.float64)
    second[0] = first[0]
    optimizer = sgd(nn.ModuleList([first, second]))
    first, second, optimizer = run.distribute(first, second, optimizer)
    for data in run.batches():
        (loss_of(first, data) + loss_of(second, data)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert first[0].weight is second[0].weight
    return together(first=weights(first), second=weights(second))


@case("Several models", "Two optimizers over two parts of one model", "each part is distributed with its optimizer")
def parts_of_a_model(run):
    model = double()
    parts = [(part, sgd(part)) for part in (model[0], model[2])]
    for part, optimizer in parts:
        run.distribute(part, optimizer)
    for step, data in enumerate(run.batches(4)):
        loss_of(model, data).backward()
        for _, optimizer in parts[step % 2 :]:
            optimizer.step()
        for _, optimizer in parts:
            optimizer.zero_grad()
    return weights(model)


@case("Several models", "A frozen teacher", "a model without an optimizer, distributed or not")
def teacher(run):
    found = {}
    for distributed in (False, True):
        student, master = double(), network(1, torch.float64).requires_grad_(False)
        student, optimizer = run.distribute(student, sgd(student))
        if distributed:
            master = run.distribute(master)
        with torch.no_grad():
            batches = [(x, master(x)) for x, _ in run.batches()]
        train(student, optimizer, batches)
        found[f"distributed {distributed}"] = weights(student)
    return together(**found)


@case("Several models", "A model trained after another", "each is distributed in its turn")
def one_after_another(run):
    found = {}
    for seed in range(3):
        model = network(seed, torch.float64)
        model, optimizer = run.distribute(model, sgd(model))
        train(model, optimizer, run.batches(start=seed))
        found[f"model {seed}"] = weights(model)
    return together(**found)


@refused(
    "Several models",
    "The same model distributed twice",
    "call `sherd.distribute` once per model, with its optimizer",
    match=r"already distributed; call sherd\.distribute once per model",
)
def twice(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    run.distribute(model, optimizer)


@refused(
    "Several models",
    "An optimizer with parameters of a model that was not passed",
    "pass every model that the optimizer trains: `sherd.distribute(encoder, decoder, optimizer)`",
    match=r"group 0 has a parameter of .* at position 4 .* sherd\.distribute\(encoder, decoder, optimizer\)",
)
def model_not_passed(run):
    encoder, decoder = double(), _critic()
    run.distribute(encoder, sgd(nn.ModuleList([encoder, decoder])))
