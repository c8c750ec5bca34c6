import os
import types

from .. import Store

rank = ranks = None
group = types.SimpleNamespace(WORLD=types.SimpleNamespace(group_name="0"))


def TCPStore(host, port, ranks, master, timeout, wait_for_workers):
    assert port == (0 if master else 7), port
    return Store()


def PrefixStore(prefix, store):
    return Store(prefix)


def init_process_group(backend, store, rank, world_size, timeout):
    # What says nothing of multicast is switched off, and what says something stays.
    assert os.environ["NCCL_NVLS_ENABLE"] == os.environ["PRETENDED_NVLS"], os.environ["NCCL_NVLS_ENABLE"]
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    globals().update(rank=rank, ranks=world_size)
