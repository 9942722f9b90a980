"""The words of the README's tables, in its two languages."""
# ruff: noqa: RUF001 - Chinese has commas and brackets of its own

from __future__ import annotations

LIMIT = "unconnected"
NAMES = {
    "sherd-zero1": "sherd zero1",
    "sherd-zero2": "sherd zero2",
    "sherd-zero3": "sherd zero3",
    "sherd-zero2-bf16": 'sherd zero2, `wire_dtype="bf16"`',
    "sherd-zero3-bf16": 'sherd zero3, `wire_dtype="bf16"`',
    "sherd-ddp": "sherd ddp",
    "torch-ddp": "torch DDP",
    "torch-ddp-bf16": "torch DDP, bf16 hook",
    "torch-zero": "torch ZeroRedundancyOptimizer",
    "fsdp2": "torch FSDP2",
    "deepspeed-1": "DeepSpeed 1",
    "deepspeed-2": "DeepSpeed 2",
    "deepspeed-3": "DeepSpeed 3",
}
"""The contenders, in the order of a table."""

WORDS: dict[str, dict[str, str]] = {
    "en": {
        LIMIT: "processes without communication",
        "single": "one process, as many threads, the batch of all",
        "one-core": "one process on one core",
        "all-cores": "one process on all cores",
        "machine": "a machine with {cores} cores",
        "training": "A GPT of {size} parameters, fp32 AdamW, {ranks} ranks on {machine} (`make bench-training`):",
        "fused": "The same with fused AdamW, {ranks} ranks:",
        "memory": "The same memory at {size} parameters (`make bench-memory`):",
        "cluster": "{hosts} hosts of {ranks} ranks with a link of {megabits} Mbit/s between them, played by {machine} "
        "(`make bench-cluster`):",
        "backend": 'torch\'s own DDP and FSDP2 over gloo and over the [backend](docs/backend.md) `"sherd"`, {ranks} '
        "ranks on {machine} (`make bench-backend`):",
        "resnet": "ResNet-50, {size} x {size} pixels, {batch} images a step on all ranks together, fp32 AdamW, on "
        "{machine} (`make bench-resnet`):",
        "A": "step, 2 x 128 tokens per rank",
        "B": "step, 1 x 32 tokens per rank",
        "bytes": "host memory, bytes per parameter",
        "ranks": "{ranks} ranks",
        "step": "step",
        "sent": "sent by a host per step",
        "gloo": "step over gloo",
        "sherd": "over sherd",
        "times": "times as fast",
        "images": "images/s",
        "one": "speed-up to one core",
        "all": "to all cores",
        "peak": "host memory",
    },
    "zh": {
        LIMIT: "互不通信的进程",
        "single": "线程数相同的单进程，批次为所有 rank 之和",
        "one-core": "单核单进程",
        "all-cores": "使用全部核心的单进程",
        "machine": "一台 {cores} 核的机器",
        "training": "{size} 参数的 GPT，fp32 AdamW，{machine}上 {ranks} 个 rank（`make bench-training`）：",
        "fused": "同上，使用 fused AdamW，{ranks} 个 rank：",
        "memory": "{size} 参数时的同一项内存（`make bench-memory`）：",
        "cluster": "{hosts} 台主机、每台 {ranks} 个 rank，之间的链路为 {megabits} Mbit/s，由{machine}模拟"
        "（`make bench-cluster`）：",
        "backend": 'torch 自带的 DDP 和 FSDP2，使用 gloo 与使用[后端](docs/backend.md) `"sherd"`，{machine}上 '
        "{ranks} 个 rank（`make bench-backend`）：",
        "resnet": "ResNet-50，{size} x {size} 像素，所有 rank 合计每步 {batch} 张图，fp32 AdamW，{machine}"
        "（`make bench-resnet`）：",
        "A": "每步，每 rank 2 x 128 个 token",
        "B": "每步，每 rank 1 x 32 个 token",
        "bytes": "主机内存，每个参数的字节数",
        "ranks": "{ranks} 个 rank",
        "step": "每步",
        "sent": "每台主机每步发送",
        "gloo": "每步，使用 gloo",
        "sherd": "使用 sherd",
        "times": "倍数",
        "images": "图像/秒",
        "one": "相对单核的加速比",
        "all": "相对全部核心",
        "peak": "主机内存",
    },
}
