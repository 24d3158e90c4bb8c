"""A kernel that holds so many multiprocessors (SMs) of a CUDA device for so long, and copies meanwhile, as the channels of NCCL do.

One device has nobody to talk to. What a collective takes of it is stood in for: a block of 640 threads for each channel, with so much
shared memory that no other fits beside it, that copies at an even pace.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

SHARED_BYTES, THREADS, CHUNK_BYTES, WORD_BYTES = 80 * 2**10, 640, 2**19, 16
SOURCE = r"""
extern "C" __global__ void __launch_bounds__(THREADS)
paced(const uint4* src, uint4* dst, int src_n, int dst_n, double duration_ns, int chunk)
{
  extern __shared__ char held[];
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  long long per = ((long long)dst_n + gridDim.x - 1) / gridDim.x;
  long long first = per * blockIdx.x, last = first + per;
  if (last > dst_n) last = dst_n;
  for (long long at = first; at < last; at += chunk) {
    long long end = at + chunk; if (end > last) end = last;
    for (long long i = at + threadIdx.x; i < end; i += blockDim.x) dst[i] = src[i % src_n];
    __syncthreads();
    double until = duration_ns * (double)(end - first) / (double)(last - first);
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while ((double)(now - start) < until);
    __syncthreads();
  }
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while ((double)(now - start) < duration_ns);
  if (duration_ns < 0) held[threadIdx.x] = 1;
}
"""


@cache
def _kernel() -> Any:
    kernel = torch.cuda._compile_kernel(SOURCE.replace("THREADS", str(THREADS)), "paced")  # type: ignore[attr-defined]
    kernel.set_shared_memory_config(SHARED_BYTES)
    return kernel


def paced(target: torch.Tensor, source: torch.Tensor, time_s: float, channels: int, stream: torch.cuda.Stream) -> None:
    """Fill ``target`` with ``source``, over and over, in no less than ``time_s``, on so many SMs."""
    words, own = (max(1, tensor.numel() * tensor.element_size() // WORD_BYTES) for tensor in (target, source))
    _kernel()(
        grid=(channels, 1, 1),
        block=(THREADS, 1, 1),
        args=[source, target, own, words, time_s * 1e9, CHUNK_BYTES // WORD_BYTES],
        shared_mem=SHARED_BYTES,
        stream=stream,
    )
