"""All-reduces of PyTorch's symmetric memory, measured for "symmem bench --peer pytorch".

Each rank of bench starts one such process, which works on the rank's GPU. Every line of its standard input is a request, and every line that it answers is on its standard
output, both in JSON. First comes what the job is, then the port where the processes meet, which the one of rank 0 has told, and then one request for each size. An answer with
"error" says why something is not measured, and one with "wrong" which result is not right.
"""

import datetime
import json
import os
import queue
import sys
import threading
import time

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print is no answer
requests = queue.Queue()


def answer(**fields):
    answers.write(json.dumps(fields) + "\n")
    answers.flush()


def read():
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)  # the rank has ended, and with it whatever this process may be waiting for


def text(error):
    return f"{type(error).__name__}: {error}".splitlines()[0]


class Wrong(Exception):
    pass


class Peer:
    """What is measured on one rank. All ranks do the same, in the same order."""

    def __init__(self, job):
        import torch
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symm_mem

        self.torch, self.symm_mem, self.job = torch, symm_mem, job
        self.rank, self.ranks, self.step = job["rank"], job["ranks"], 0
        self.dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[job["dtype"]]
        self.device = torch.device("cuda", job["device"])
        torch.cuda.set_device(self.device)
        uuid = str(getattr(torch.cuda.get_device_properties(self.device), "uuid", "")).lower().removeprefix("gpu-")
        if uuid and job["uuid"].lower().startswith("gpu-") and uuid != job["uuid"].lower().removeprefix("gpu-"):
            raise RuntimeError(f"GPU {job['device']} is {uuid} here, and {job['uuid']} in bench")
        timeout = datetime.timedelta(seconds=job["timeout"])

        def store(port):
            return dist.TCPStore("127.0.0.1", port, self.ranks, self.rank == 0, timeout=timeout, wait_for_workers=False)

        if self.rank == 0:
            self.store = store(0)
        answer(version=torch.__version__, port=self.store.port if self.rank == 0 else 0)
        port = requests.get()["port"]
        if self.rank != 0:
            self.store = store(port)
        # The group has no communicator of NCCL, which is made by its first collective: there is none.
        dist.init_process_group("nccl", store=dist.PrefixStore("group", self.store), rank=self.rank, world_size=self.ranks, timeout=timeout)
        self.group = dist.group.WORLD.group_name
        self.tensors(4096)

    def together(self, do):
        """Calls do, and returns what it has and None, or if it fails on any rank None and the first failure, on all ranks."""
        result, mine = None, ["", ""]
        try:
            result = do()
        except Wrong as e:
            mine = ["wrong", str(e)]
        except Exception as e:
            mine = ["error", text(e)]
        self.step += 1
        try:
            self.store.set(f"{self.step}/{self.rank}", json.dumps(mine))
            all = [json.loads(self.store.get(f"{self.step}/{rank}")) for rank in range(self.ranks)]
        except Exception as e:  # the processes are no longer at the same step, and never will be again
            answer(error=f"rank {self.rank}: the processes cannot exchange what they have: {text(e)}")
            os._exit(1)
        for rank, (kind, why) in enumerate(all):
            if kind:
                why = f"rank {rank}: {why}"
                return None, Wrong(why) if kind == "wrong" else RuntimeError(why)
        return result, None

    def agreed(self, do):
        """The same, with the failure raised."""
        result, failure = self.together(do)
        if failure:
            raise failure
        return result

    def tensors(self, bytes):
        """A symmetric tensor, its handle and a tensor for results."""
        n = bytes // self.torch.empty(0, dtype=self.dtype).element_size()
        t, out = self.agreed(lambda: (
            self.symm_mem.empty(n, dtype=self.dtype, device=self.device), self.torch.empty(n, dtype=self.dtype, device=self.device)))
        return t, self.agreed(lambda: self.symm_mem.rendezvous(t, self.group)), out

    def forms(self, t, out):
        """The all-reduces, by name: what enqueues one, and where its result is. What allocates its result would pay for that each time."""
        ops, group = self.torch.ops.symm_mem, self.group
        one = lambda: ops.one_shot_all_reduce_out(t, "sum", group, out)
        if not hasattr(ops, "one_shot_all_reduce_out"):
            one = lambda: ops.one_shot_all_reduce(t, "sum", group)
        return {"one_shot_all_reduce": one, "two_shot_all_reduce_": lambda: ops.two_shot_all_reduce_(t, "sum", group)}

    def check(self, name, enqueue, t, out):
        """Compares one result, of small integers that differ from rank to rank and from place to place, and leaves zeros."""
        torch = self.torch
        i = torch.arange(t.numel(), dtype=torch.int32, device=self.device) % 61
        value = lambda rank: (1 + i * (rank + 1) % 3).to(self.dtype)
        want = value(0)
        for rank in range(1, self.ranks):
            want += value(rank)
        out.zero_()
        t.copy_(value(self.rank))
        torch.cuda.synchronize()
        got = enqueue()
        torch.cuda.synchronize()
        right = bool(torch.equal(got, want))
        t.zero_()
        torch.cuda.synchronize()
        if not right:
            raise Wrong(f"{name} gave another sum of {t.numel()} elements")

    def capture(self, each, enqueue):
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            for _ in range(each):
                enqueue()
        return graph

    def times(self, size, handle, enqueue):
        """The times per iteration in microseconds, by repetition, after one that does not count."""
        n, each, work = size["iterations"], 1, enqueue
        if self.job["graph"]:
            each = size["each"]
            work = self.agreed(lambda: self.capture(each, enqueue)).replay

        def repeat():
            handle.barrier(channel=0)
            self.torch.cuda.synchronize()
            began = time.perf_counter_ns()
            for _ in range(n // each):
                work()
            self.torch.cuda.synchronize()
            return (time.perf_counter_ns() - began) / 1e3 / (n // each * each)

        return self.agreed(lambda: [repeat() for _ in range(size["repetitions"] + 1)][1:])

    def measure(self, size):
        t, handle, out = self.tensors(size["bytes"])
        times, failures = {}, []
        for name, enqueue in self.forms(t, out).items():
            _, failure = self.together(lambda: self.check(name, enqueue, t, out))
            if isinstance(failure, Wrong):
                raise failure
            if failure:  # it is not for this dtype, size or number of ranks
                failures.append(f"{name}: {failure}")
                continue
            times[name] = self.times(size, handle, enqueue)
        if not times:
            raise RuntimeError("; ".join(failures))
        return times


def main():
    threading.Thread(target=read, daemon=True).start()
    try:
        peer = Peer(requests.get())
    except Exception as e:
        answer(error=text(e))
        return
    answer()
    while True:
        size = requests.get()
        try:
            answer(times=peer.measure(size))
        except Wrong as e:
            answer(wrong=str(e))
        except Exception as e:
            answer(error=text(e))


main()
