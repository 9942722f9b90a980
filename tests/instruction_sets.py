"""`python -m tests.instruction_sets`: the bitwise tests once more, as if on weaker CPUs.

Each library has a variable of its own that lowers the instruction set which it uses. What took effect is printed, and
found out by looking: MKL's variable may do nothing on an AMD machine. Further arguments go to pytest; with names of
files, those are tested.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile

SETS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "sse": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "compatible": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
}
FILES = (
    "tests/engine/parameters/test_strides_and_bits.py",
    "tests/engine/parameters/test_memory_order.py",
    "tests/contracts/test_parity.py",
    "tests/docs/test_what_works.py",
    "tests/contracts/test_random_loops.py",
    "tests/contracts/test_random_graphs.py",
    "tests/engine/gradients/test_accumulation.py",
    "tests/engine/optimizer/test_optimizers.py",
    "tests/engine/optimizer/test_elementwise.py",
)

_PROBE = """
import torch
generator = torch.Generator().manual_seed(0)
a, b = torch.randn(37, 53, generator=generator), torch.randn(53, 29, generator=generator)
torch.nn.functional.conv2d(torch.randn(2, 8, 9, 9), torch.randn(4, 8, 3, 3))
print("aten", torch.backends.cpu.get_cpu_capability())
print("mkl", (a @ b).view(torch.int32).sum().item(), (a.double() @ b.double()).view(torch.int64).sum().item())
"""


def took_effect(variables: dict[str, str]) -> dict[str, str]:
    """What each library says of itself under these variables; MKL says nothing, but shows the bits of its products."""
    environment = {**os.environ, **variables, "ONEDNN_VERBOSE": "1"}
    command = [sys.executable, "-c", _PROBE]
    text = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    patterns = {"ATen": r"^aten (.*)$", "oneDNN": r"cpu,isa:(.*)$", "MKL": r"^mkl (.*)$"}
    matches = {name: re.search(pattern, text, re.MULTILINE) for name, pattern in patterns.items()}
    return {name: match[1] if match else "not found" for name, match in matches.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _, arguments = parser.parse_known_args()
    plain = took_effect({})
    files = [] if any(argument.startswith("tests") for argument in arguments) else list(FILES)
    failed = []
    for name, variables in SETS.items():
        found = took_effect(variables)
        print(f"\n== {name}: {' '.join(f'{key}={value}' for key, value in variables.items())}")
        for library, value in found.items():
            shown = "the bits of a product" if library == "MKL" else value
            effect = "as without" if value == plain[library] else f"changed: {shown}"
            print(f"   {library:8}{effect}", flush=True)
        command = [sys.executable, "-m", "pytest", *arguments, *files]
        with tempfile.TemporaryDirectory() as cache:  # torch's compiler would take kernels of other instruction sets
            environment = {**os.environ, **variables, "TORCHINDUCTOR_CACHE_DIR": cache}
            if subprocess.run(command, env=environment, check=False).returncode:
                failed.append(name)
    print(f"\nfailed under: {', '.join(failed)}" if failed else f"\nall passed under {', '.join(SETS)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
