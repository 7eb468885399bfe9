"""The kernels compile for real devices on a machine without one: Triton's compiler needs no GPU, only a target."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Runs in a process of its own: the interpreter must be off, and the launcher is told to stop after compiling.
SCRIPT = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Target:
    def get_current_target(self):
        return GPUTarget("cuda", int(sys.argv[1]), 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device=None):
        return 0

driver.set_active(Target())
launch, compiled = JITFunction.run, set()

def compile_only(self, *arguments, grid, warmup, **more):
    kernel = launch(self, *arguments, grid=grid, warmup=True, **more)
    assert len(kernel.asm["cubin"]) > 0
    compiled.add(self.__name__)

JITFunction.run = compile_only
from mediaspec.kernels import backend
backend._obstacle = lambda device: None
from dataclasses import replace
from mediaspec.kernels import philox
from mediaspec.kernels.verify_chain.cases import cases as chain_cases, run as run_chain
from mediaspec.kernels.verify_tree.cases import cases as tree_cases, run as run_tree

vocab = int(sys.argv[2])
positions = torch.tensor([[0, 7]])
philox.uniform(positions[0, :1], positions, 1, impl="triton")
philox.exponential(positions[0, :1], positions, vocab, 1, impl="triton")
for case in chain_cases(vocab, 1, 2):
    if case.name in ("omega-band", "guided", "top-p", "match-all"):
        run_chain(replace(case, target_logits=case.target_logits.bfloat16()), "triton")
for case in tree_cases(vocab, 1):
    if case.name in ("omega-band", "point", "guided", "match"):
        run_tree(case, "triton")
print(" ".join(sorted(compiled)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "vocab"), [(90, 1024), (80, 16384)])
def test_kernels_compile(capability, vocab):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(capability), str(vocab)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names = {"_uniform_kernel", "_exponential_kernel", "_sample_kernel", "_accept_kernel", "_emit_kernel"}
    assert names | {"_walk_kernel", "_follow_kernel"} == set(done.stdout.split())
