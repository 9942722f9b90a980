"""Models of Hugging Face transformers with random weights, as small as they get. Nothing is downloaded."""

from __future__ import annotations

import os
import tempfile

import torch

import sherd
from tests.helpers.training import weights
from tests.what_works.cases import ENDS, STEPS, case, refused

SECTION = "Hugging Face transformers"
TOKENS = 40
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 24}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def library():
    """Imported by the ranks that need it: it takes seconds."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def gpt2():
    hf = library()
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": TOKENS}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return _double(hf.GPT2LMHeadModel, hf.GPT2Config(**sizes, **dropout, **SPECIAL))


def llama():
    hf = library()
    return _double(hf.LlamaForCausalLM, hf.LlamaConfig(vocab_size=TOKENS, num_key_value_heads=2, **SIZES, **SPECIAL))


def t5():
    hf = library()
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": TOKENS}
    return _double(hf.T5ForConditionalGeneration, hf.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


def bert():
    hf = library()
    return _double(hf.BertForMaskedLM, hf.BertConfig(vocab_size=TOKENS, **SIZES, **NO_DROPOUT))


def vit():
    hf = library()
    images = {"image_size": 8, "patch_size": 4, "num_labels": 3}
    return _double(hf.ViTForImageClassification, hf.ViTConfig(**images, **SIZES, **NO_DROPOUT))


def mixtral():
    hf = library()
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    config = hf.MixtralConfig(vocab_size=TOKENS, experts_implementation="eager", **experts, **SIZES, **SPECIAL)
    return _double(hf.MixtralForCausalLM, config)  # eager: torch's grouped matrices know no float64


def _double(kind, config):
    torch.manual_seed(0)
    model = kind(config).double()
    for parameter in model.parameters():
        if not parameter.any():
            # A bias of keys has a gradient of pure noise; around zero, nothing but noise would be compared.
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def texts(run, step):
    """This rank's part of some random texts, which are their own labels.

    Their numbers are powers of two: some of these models take the loss in float32 whatever they are in, and halving
    a batch then changes no bit of its gradients.
    """
    ids = torch.randint(3, TOKENS, (4, 9), generator=torch.Generator().manual_seed(step))
    return {"input_ids": run.rows(ids), "labels": run.rows(ids)}


def masked(run, step):
    """Texts of which every second token is to be guessed."""
    data = texts(run, step)
    hidden = torch.arange(data["input_ids"].shape[1]) % 2 == 1
    return {
        "input_ids": data["input_ids"].masked_fill(hidden, 3),
        "labels": data["labels"].masked_fill(~hidden, -100),
    }


def pictures(run, step):
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"pixel_values": run.rows(images), "labels": run.rows(torch.arange(4) % 3)}


def trained(run, make, data=texts, prepare=None):
    """A model after some steps of the usual loop."""
    model = make()
    if prepare is not None:
        prepare(model)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer = run.distribute(model, optimizer)
    for step in range(STEPS):
        model(**data(run, step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def written(model):
    """What a model writes, greedily and by chance."""
    prompts = torch.randint(3, TOKENS, (2, 4), generator=torch.Generator().manual_seed(99))
    options = {"max_new_tokens": 6, "attention_mask": torch.ones_like(prompts)}
    greedy = model.generate(prompts, do_sample=False, **options)
    torch.manual_seed(5)
    return {"greedy": greedy, "sampled": model.generate(prompts, do_sample=True, **options)}


def writes_like_a_twin(model, make):
    """Assert that a plain model with the same weights writes the same; what it writes."""
    twin = make()
    twin.load_state_dict(model.state_dict())
    found, expected = written(model.eval()), written(twin.eval())
    assert all(torch.equal(found[how], expected[how]) for how in expected), (found, expected)
    return found


def trains_and_writes(run, make):
    untrained = run.distribute(make())
    before = writes_like_a_twin(untrained, make)
    model = trained(run, make)
    after = writes_like_a_twin(model, make)
    assert not torch.equal(before["sampled"], after["sampled"]), "training changed nothing"
    return {**weights(model), **after}


@case(
    SECTION,
    "GPT-2",
    "its head is its embedding, and stays it; `generate()` writes what a plain twin writes",
    often=ENDS,
)
def gpt2_trains_and_writes(run):
    return trains_and_writes(run, gpt2)


@case(SECTION, "Llama", "rotary buffers, grouped queries; `generate()` as above", often=ENDS)
def llama_trains_and_writes(run):
    return trains_and_writes(run, llama)


@case(SECTION, "T5", "encoder, decoder and head share one embedding; `generate()` as above", often=ENDS)
def t5_trains_and_writes(run):
    return trains_and_writes(run, t5)


@case(
    SECTION, "Mixtral", "experts that see different numbers of tokens on each rank; `generate()` as above", often=ENDS
)
def mixtral_trains_and_writes(run):
    return trains_and_writes(run, mixtral)


@case(SECTION, "BERT that fills in masked tokens", "the decoder's weight and bias are tied")
def bert_trains(run):
    model = trained(run, bert, masked)
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert model.cls.predictions.decoder.bias is model.cls.predictions.bias
    return weights(model)


@case(SECTION, "ViT that classifies images")
def vit_trains(run):
    return weights(trained(run, vit, pictures))


@case(SECTION, "`gradient_checkpointing_enable()`", "in both of torch's kinds")
def checkpointing(run):
    found = {}
    for reentrant in (False, True):

        def prepare(model, kind=reentrant):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": kind})

        model = trained(run, gpt2, prepare=prepare)
        assert model.is_gradient_checkpointing
        found.update({f"{name}, reentrant {reentrant}": weight for name, weight in weights(model).items()})
    return found


@case(
    SECTION,
    "Labels of -100: texts of different lengths",
    "every token counts the same wherever it is if you say how many there are: `sherd.weigh(model, tokens)`",
)
def weighed(run):
    model = gpt2()
    model, optimizer = run.distribute(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    lengths = torch.tensor([9, 2, 3, 3])  # 10 labels on rank 0, and 4 on rank 1: the first token is none
    for step in range(STEPS):
        data = texts(run, step)
        data["labels"] = data["labels"].masked_fill(torch.arange(9) >= run.rows(lengths)[:, None], -100)
        if not run.plain:
            sherd.weigh(model, float((data["labels"][:, 1:] != -100).sum()))
        logits = model(**data).logits[:, :-1]  # the model's own loss is in float32
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), data["labels"][:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case(SECTION, "`save_pretrained()` on rank 0, `from_pretrained()`", "tied weights are written once and tied again")
def pretrained(run):
    found = {}
    for make in (gpt2, t5):
        model = trained(run, make)
        with tempfile.TemporaryDirectory() as own:
            folder = own if run.plain else run.comm.broadcast_object(own)
            if run.rank == 0:
                model.save_pretrained(folder)
            run.barrier()
            loaded = type(model).from_pretrained(folder, dtype=torch.float64)
            run.barrier()
        assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
        assert all(torch.equal(weights(model)[name], weight) for name, weight in weights(loaded).items())
        found.update({f"{make.__name__}.{name}": weight for name, weight in weights(loaded).items()})
    return found


@refused(
    SECTION,
    "`resize_token_embeddings()` after `distribute`",
    "it puts new parameters in the place of those that the ranks train: resize first, then build the optimizer, then "
    "distribute",
    match=r"rank \d: parameter 'transformer\.wte\.weight' .*before sherd\.distribute",
)
def resized(run):
    model = gpt2()
    model, optimizer = run.distribute(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    model.resize_token_embeddings(TOKENS + 8)
    model(**texts(run, 0)).loss.backward()
    optimizer.step()
