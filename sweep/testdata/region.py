"""Hold an offload region as a vLLM engine does, with vLLM's own code: region.py ENGINE_ID MIB [join]."""

import sys

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

engine_id, chunks = sys.argv[1], int(sys.argv[2])
region = SharedOffloadRegion(engine_id=engine_id, num_chunks=chunks, rank=None, kv_bytes_per_chunk=1 << 20, cpu_page_size=1 << 20)
print("mapped", region.mmap_path, region.total_size_bytes, flush=True)
sys.stdin.read()  # until this process is killed, or told to end
region.cleanup()
