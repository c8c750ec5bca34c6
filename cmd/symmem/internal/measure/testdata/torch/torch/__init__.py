"""As much of PyTorch as pytorch.py uses, without GPUs: tensors are lists of numbers, and the ranks share a folder."""

import json
import os
import time
import types

__version__ = "0.0+pretended"
float32, bfloat16, int32 = "float32", "bfloat16", "int32"
folder = os.environ["PRETENDED_TORCH"]
spoil = os.environ.get("PRETENDED_TORCH_SPOILS", "")
print("a library says something")  # which is no answer


class Tensor:
    def __init__(self, values, dtype=None):
        self.values = list(values)
        self.dtype = dtype

    def numel(self):
        return len(self.values)

    def element_size(self):
        return {"bfloat16": 2, None: 8}.get(self.dtype, 4)

    def to(self, dtype):
        return Tensor(self.values, dtype)

    def zero_(self):
        self.values = [0] * len(self.values)

    def copy_(self, other):
        self.values = list(other.values)

    def __mod__(self, n):
        return Tensor((v % n for v in self.values), self.dtype)

    def __mul__(self, n):
        return Tensor((v * n for v in self.values), self.dtype)

    def __radd__(self, n):
        return Tensor((v + n for v in self.values), self.dtype)

    def __iadd__(self, other):
        self.values = [a + b for a, b in zip(self.values, other.values)]
        return self


def empty(n, dtype=None, device=None):
    return Tensor([-1] * n, dtype)


def arange(n, dtype=None, device=None):
    return Tensor(range(n), dtype)


def equal(a, b):
    return a.values == b.values


def device(kind, index):
    return index


class Store:
    def __init__(self, prefix=""):
        self.prefix, self.port = prefix, 7

    def set(self, key, value):
        path = os.path.join(folder, (self.prefix + key).replace("/", "_"))
        with open(path + ".new", "w") as f:
            f.write(value)
        os.rename(path + ".new", path)

    def get(self, key):
        path = os.path.join(folder, (self.prefix + key).replace("/", "_"))
        for _ in range(3000):
            if os.path.exists(path):
                with open(path, "rb") as f:
                    return f.read()
            time.sleep(0.01)
        raise TimeoutError(key)


class Calls:
    """The calls of all ranks, each of which makes them in the same order."""

    def __init__(self):
        self.n = 0

    def sum(self, t):
        from . import distributed

        self.n += 1
        store = Store("call")
        store.set(f"{self.n}/{distributed.rank}", json.dumps(t.values))
        all = [json.loads(store.get(f"{self.n}/{r}")) for r in range(distributed.ranks)]
        return [sum(v) for v in zip(*all)]


calls = Calls()


def one_shot_all_reduce_out(t, op, group, out):
    if spoil == "one":
        raise RuntimeError("one_shot is not for this")
    out.values = calls.sum(t)
    return out


def two_shot_all_reduce_(t, op, group):
    if spoil in ("one", "wrong"):
        t.values = [0] * len(t.values)
        if spoil == "wrong":
            return t
        raise RuntimeError("two_shot is not for this")
    t.values = calls.sum(t)
    return t


class Graph:
    def replay(self):
        time.sleep(1e-6)


class Recording:
    def __init__(self, graph):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


ops = types.SimpleNamespace(symm_mem=types.SimpleNamespace(one_shot_all_reduce_out=one_shot_all_reduce_out, two_shot_all_reduce_=two_shot_all_reduce_))
cuda = types.SimpleNamespace(
    set_device=lambda d: None, get_device_properties=lambda d: types.SimpleNamespace(), synchronize=lambda: None, CUDAGraph=Graph, graph=Recording
)
