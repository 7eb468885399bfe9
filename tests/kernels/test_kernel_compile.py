"""The kernels compile for real devices on a machine without one: Triton's compiler needs no GPU, only a target."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Runs in a process of its own: the interpreter must be off, and the launcher is told to stop after compiling.
HARNESS = """
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
    # what every device from sm_80 on offers to one block
    assert kernel.metadata.shared <= 99 * 1024, (self.__name__, kernel.metadata.shared)
    compiled.add(self.__name__)

JITFunction.run = compile_only
from mediaspec.kernels import backend
backend._obstacle = lambda device: None
from dataclasses import replace
"""

VERIFICATION = (
    HARNESS
    + """
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
)

ATTENTION = (
    HARNESS
    + """
from mediaspec.kernels.lse_merge.cases import cases as merge_cases, run as run_merge
from mediaspec.kernels.sparse_attention.cases import make_case as make_sparse, run as run_sparse
from mediaspec.kernels.tree_attention.cases import make_case, run as run_tree

size, half = int(sys.argv[2]), torch.bfloat16
sinks = torch.zeros(16)
tree = make_case(9, [300, 40], 8, 2, size, tree=True, dtype=half)
run_tree(replace(tree, window=50, softcap=30.0, sinks=sinks, hidden=torch.zeros(2, 400, dtype=torch.bool)), "triton")
run_tree(make_case(1, [300, 40], 3, 2, size, dtype=half), "triton")
run_tree(make_case(1, [300, 40], 8, 2, size), "triton")
run_sparse(replace(make_sparse(1, [300, 40], 20, 8, 2, size, dtype=half), window=100, sinks=sinks), "triton")
run_merge(merge_cases(size=size)[2], "triton")
print(" ".join(sorted(compiled)))
"""
)


def names_of_compiled(script: str, *arguments: int) -> set[str]:
    """Compiles what the script calls, with the interpreter off."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return set(done.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "vocab"), [(90, 1024), (80, 16384)])
def test_kernels_compile(capability, vocab):
    pytest.importorskip("triton")
    names = {"_uniform_kernel", "_exponential_kernel", "_sample_kernel", "_accept_kernel", "_emit_kernel"}
    assert names | {"_walk_kernel", "_follow_kernel"} == names_of_compiled(VERIFICATION, capability, vocab)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "size"), [(90, 128), (80, 64), (80, 256)])
def test_attention_kernels_compile(capability, size):
    pytest.importorskip("triton")
    names = names_of_compiled(ATTENTION, capability, size)
    assert names == {"_split_kernel", "_list_kernel", "_merge_kernel"}
