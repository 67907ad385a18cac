"""Compiles the kernels for GPUs, for an H200 that need not be here: python -m tests.compress.compiling

In a process of its own, because Triton's interpreter, which the other tests use, changes Triton's language.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from thinwire.compress import gpu

TARGET = GPUTarget("cuda", 90, 32)
WORDS = {"counts": "*i32", "places": "*i16", "spoilt": "*i32", "num_blocks": "i32"}
FIRST = {"stride": "i32", "numel": "i32", "threshold": "*fp32"}
SECOND = {"ends": "*i32", "message": "*i32", "index": "*i32", "capacity": "i32"}


def compile_kernel(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> None:
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    assert triton.compile(source, target=TARGET).asm["cubin"]


def main() -> None:
    for residual, gradient in (("*fp32", "*fp32"), ("*fp32", "*bf16"), ("*fp64", "*fp64")):
        types = {**WORDS, **FIRST, "residual": residual, "gradient": gradient}
        compile_kernel(gpu._accumulate, types, {"BLOCK": gpu._BLOCK})
        sys.stdout.write(f"the first, {residual} {gradient}\n")
    sizes = {"BLOCK": gpu._BLOCK, "TILE": gpu._TILE, "SLOTS": gpu._SLOTS}
    for rounded, value in ((False, "*fp32"), (True, "*i16")):
        types = {**WORDS, **SECOND, "residual": "*fp32", "value": value}
        compile_kernel(gpu._move, types, {**sizes, "ROUNDED": rounded})
        sys.stdout.write(f"the second, {value}\n")


if __name__ == "__main__":
    main()
