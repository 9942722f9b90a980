"""Which 16-bit products a CPU has instructions for, by flags of CPUs that are not this one."""

from __future__ import annotations

import json

import pytest
import torch

import sherd
from sherd import machine
from sherd.cli import main
from sherd.machine import native_half

pytestmark = pytest.mark.fake

BF16, FP16 = torch.bfloat16, torch.float16
AVX2 = {"architecture": "x86_64", "avx2": True, "f16c": True, "avx512_bf16": False}
SKYLAKE = {**AVX2, "avx512_f": True, "avx512_vnni": True}
ZEN4 = {**SKYLAKE, "avx512_bf16": True}
SAPPHIRE = {**ZEN4, "avx512_fp16": True, "amx_tile": True, "amx_bf16": True}
GRANITE = {**SAPPHIRE, "amx_fp16": True}
ARM, OLD_ARM = ({"architecture": "aarch64", "neon": True, "bf16": new, "fp16_arith": new} for new in (True, False))


@pytest.fixture(autouse=True)
def one_dnn(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)


@pytest.mark.parametrize(
    ("cpu", "limit", "bf16", "fp16"),
    [
        (AVX2, "", False, False),
        (SKYLAKE, "", False, False),
        (ZEN4, "", True, False),
        (SAPPHIRE, "", True, True),
        (GRANITE, "", True, True),
        (ARM, "", True, True),
        (OLD_ARM, "", False, False),
        (ZEN4, "AVX2", False, False),
        (ZEN4, "avx512_core", False, False),
        (ZEN4, "AVX512_CORE_AMX_FP16", True, False),
        (SAPPHIRE, "AVX512_CORE_BF16", True, False),
        (SAPPHIRE, "AVX512_CORE_FP16", True, True),
        (GRANITE, "AVX512_CORE_AMX", True, True),
        (GRANITE, "ALL", True, True),
        (ARM, "AVX2", True, True),  # a variable for others
    ],
)
def test_flags(cpu, limit, bf16, fp16):
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        assert (native_half(BF16, cpu, {name: limit}), native_half(FP16, cpu, {name: limit})) == (bf16, fp16)


def test_the_newer_name_of_the_variable_counts():
    both = {"DNNL_MAX_CPU_ISA": "ALL", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    assert not native_half(BF16, ZEN4, both)


def test_a_build_without_its_kernels(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not native_half(BF16, GRANITE, {})
    assert native_half(BF16, ARM, {})


def test_other_dtypes_are_refused():
    with pytest.raises(sherd.ConfigError, match=r"write torch\.bfloat16 or"):
        native_half(torch.float32)


def test_this_machine_is_asked(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    for cpu, expected in ((ZEN4, True), (AVX2, False)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda cpu=cpu: cpu)
        assert native_half(BF16) is expected


@pytest.mark.parametrize(
    ("bf16", "fp16", "words"),
    [
        (True, True, "native kernels for bf16 and fp16"),
        (True, False, "native kernels for bf16; fp16 is emulated"),
        (False, True, "native kernels for fp16; bf16 is emulated"),
        (False, False, "no native kernels for bf16 and fp16: they are emulated"),
    ],
)
def test_doctor_and_describe_say_it(monkeypatch, capfd, bf16, fp16, words):
    cpu = {**ARM, "bf16": bf16, "fp16_arith": fp16}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    assert machine.half_kernels().startswith(words)
    assert f"cpu        {words}" in sherd.describe(sherd.distribute(torch.nn.Linear(2, 2)))
    with pytest.raises(SystemExit):
        main(["doctor", "--json"])
    facts = json.loads(capfd.readouterr().out)
    assert (facts["native_bf16"], facts["native_fp16"]) == (bf16, fp16)
    with pytest.raises(SystemExit):
        main(["doctor"])
    text = " ".join(capfd.readouterr().out.split())
    assert text.count("emulated on") == 2 - bf16 - fp16
