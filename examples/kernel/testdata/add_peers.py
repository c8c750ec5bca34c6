# A Triton kernel that reads the copies of all ranks by their addresses, and waits for nobody.
#
#   TRITON_DISABLE_LINE_INFO=1 python add_peers.py > add_peers.ptx
#
# It needs Triton 3 (this was 3.9.0) and no GPU. PTX 8.4 for sm_80 is what drivers from 550 on load, for every GPU since.
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget


# y = scale * the sum of all ranks' x, in rank order. table has the addresses of the x, by rank.
@triton.jit
def add_peers(y, table, n, world, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for rank in range(world):
        x = tl.load(table + rank).to(tl.pointer_type(tl.float32))
        total += tl.load(x + i, i < n)
    tl.store(y + i, total * scale, i < n)


signature = {"y": "*fp32", "table": "*i64", "n": "i32", "world": "i32", "scale": "fp32", "BLOCK": "constexpr"}
source = triton.compiler.ASTSource(add_peers, signature, {"BLOCK": 1024})
kernel = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": 4, "ptx_version": 84})
print(kernel.asm["ptx"], end="")
# Blocks of num_warps * 32 threads, and this dynamic shared memory, are what the launch must have.
assert kernel.metadata.shared == 0 and kernel.metadata.global_scratch_size == 0
