#!/usr/bin/env python3
"""Puts NVIDIA's headers into a folder, for the tests that compare the bindings with them. `.ci/run headers` runs it.

The headers come out of Python packages, pinned by version and hash; of a package nothing else is kept, and what is in the folder
already is not fetched again. It needs Python 3.9 with pip. The small packages are 74 MB together: CUDA's headers, NVSHMEM's, and
what NVIDIA's package nccl4py has of NCCL's. The others, cuBLAS among them, are 2.6 GB. NIXL's Python packages lack the header of its C interface, which
is in its crate: for that --all needs cargo.

  get.py FOLDER        the small ones
  get.py --all FOLDER  the large ones too: NCCL's own, other versions, cuBLAS's and NIXL's
"""

import argparse
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

# The folder that the headers go to, the package, the hash of its wheel for x86-64, where in it the headers are, and what is kept.
SMALL = [
    ("cuda-12.4.127", "nvidia-cuda-runtime-cu12==12.4.127",
     "64403288fa2136ee8e467cdc9c9427e0434110899d07c779f25b5c068934faa5", "nvidia/cuda_runtime/include/", "cuda.h"),
    ("cuda-12.9.79", "nvidia-cuda-runtime-cu12==12.9.79",
     "25bba2dfb01d48a9b59ca474a1ac43c6ebf7011f1b0b8cc44f54eb6ac48a96c3", "nvidia/cuda_runtime/include/", "cuda.h"),
    ("cuda-13.5.37", "nvidia-cuda-runtime==13.5.37",
     "df2b79a8852f10d1fef8c848489c49eebb5754051bf870202a862831412b179d", "nvidia/cu13/include/", "cuda.h"),
    ("nccl-2.30.7", "nccl4py==0.4.1",
     "89a4cad32b6a81df416e4c635e95330306f0225ca93bed2a59d99c66a30ef90b", "nccl/bindings/", "cynccl.pxd"),
    ("nccl-2.32.3", "nccl4py==0.6.0",
     "7b75f4943edc39522bec1d3c7c59804fa2fd87a879e5744660d723440cb62755", "nccl/bindings/", "cynccl.pxd"),
    ("nvshmem-3.4.5", "nvidia-nvshmem-cu13==3.4.5",
     "290f0a2ee94c9f3687a02502f3b9299a9f9fe826e6d0287ee18482e78d495b80", "nvidia/nvshmem/include/", ""),
]
LARGE = [
    ("nccl-2.28.3", "nvidia-nccl-cu13==2.28.3",
     "9f093dd7b97ddc90ef654676173a0c301d2434c431f17aa324e9c00039afb4c7", "nvidia/nccl/include/", ""),
    ("nccl-2.28.7", "nvidia-nccl-cu13==2.28.7",
     "f9988ff615aa2e21dffc606a8e5861fe41f4140b4540856a780009c4b1c3626f", "nvidia/nccl/include/", ""),
    ("nccl-2.28.9", "nvidia-nccl-cu13==2.28.9",
     "e4553a30f34195f3fa1da02a6da3d6337d28f2003943aa0a3d247bbc25fefc42", "nvidia/nccl/include/", ""),
    ("nccl-2.29.2", "nvidia-nccl-cu13==2.29.2",
     "86b997b315df0fb2874fd6062f2930d317bfa6434823351f287936d5ed616fc9", "nvidia/nccl/include/", ""),
    ("nccl-2.29.7", "nvidia-nccl-cu13==2.29.7",
     "edd81538446786ec3b73972543e53bb43bcaf0bfc8ef76cb679fcc390ffe136d", "nvidia/nccl/include/", ""),
    ("nccl-2.30.7", "nvidia-nccl-cu13==2.30.7",
     "cefa7fdb9710efd0f39c5f1be1d61ff6fc9a996c451265bd7fbdcf9455ed4b50", "nvidia/nccl/include/", ""),
    ("nccl-2.32.3", "nvidia-nccl-cu13==2.32.3",
     "1459723080ac889d73a26edfa3e04383a7928ab31ac8f0ec43b3ea9548b04ff3", "nvidia/nccl/include/", ""),
    ("nvshmem-3.8.0", "nvidia-nvshmem-cu13==3.8.0",
     "81a4d1f666543e6d34df6d2ff940c7da1435e34e186aab6f3c2b48861b64ef38", "nvidia/nvshmem/include/", ""),
    ("cublas-12.4.5", "nvidia-cublas-cu12==12.4.5.8",
     "2fc8da60df463fdefa81e323eef2e36489e1c94335b5358bcb38360adf75ac9b", "nvidia/cublas/include/", "cublas_api.h"),
    ("cublas-13.2.0", "nvidia-cublas==13.2.0.9",
     "9c46d723b9a34bd69a453594be9b3ca6fd68db6e1da99095e15106d4134be0c3", "nvidia/cu13/include/", "cublas_api.h"),
]

# The same of crates: the folder, the version of nixl-sys, the hash.
CRATES = [
    ("nixl-1.0.0", "1.0.0", "e4f28c4892e39d6f5d8bcd551e7001c03a04b16e5669a9a7d67b23f9720ecaae"),
    ("nixl-1.5.1", "1.5.1", "91946d10f2f32f9b08a690a0033e408962e35a72ea8a68dd11fcdbebda130301"),
]

# The wheels for one system on any: the headers are the same.
PLATFORMS = ["manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_24_x86_64", "manylinux_2_18_x86_64", "manylinux_2_17_x86_64",
             "manylinux2014_x86_64"]


def get(root, folder, package, digest, inside, only):
    """Puts the headers of one package into the folder, once."""
    complete = root / folder / f"{package}.complete"
    if complete.exists():
        return
    print(f"{folder}: the headers of {package}", flush=True)
    with tempfile.TemporaryDirectory(dir=root) as tmp:
        tmp = pathlib.Path(tmp)
        requirements = tmp / "requirements.txt"
        requirements.write_text(f"{package} --hash=sha256:{digest}\n")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
        pip += ["--implementation=cp", "--python-version=3.11", "--abi=cp311", "--abi=none"] + [f"--platform={p}" for p in PLATFORMS]
        subprocess.run(pip + ["--require-hashes", "--dest", tmp, "-r", requirements], check=True)
        [wheel] = tmp.glob("*.whl")
        kept = 0
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                below = name.removeprefix(inside)
                if below == name or (below != only if only else not below.endswith((".h", ".cuh"))):
                    continue
                path = root / folder / below
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(name) as source, open(path, "wb") as to:
                    shutil.copyfileobj(source, to)
                kept += 1
        if not kept:
            sys.exit(f"{package} has no headers in {inside}")
    complete.touch()


def get_crate(root, folder, version, digest):
    """Puts the header of NIXL's C interface into the folder, once."""
    complete = root / folder / f"nixl-sys=={version}.complete"
    if complete.exists():
        return
    print(f"{folder}: the header of crate nixl-sys {version}", flush=True)
    with tempfile.TemporaryDirectory(dir=root) as tmp:
        tmp = pathlib.Path(tmp)
        (tmp / "src").mkdir()
        (tmp / "src" / "lib.rs").touch()
        (tmp / "Cargo.toml").write_text(
            f'[package]\nname = "headers"\nversion = "0.0.0"\nedition = "2021"\n[dependencies]\nnixl-sys = "={version}"\n')
        subprocess.run(["cargo", "fetch", "--quiet"], cwd=tmp, env=os.environ | {"CARGO_HOME": str(tmp.resolve() / "home")}, check=True)
        [crate] = tmp.glob(f"home/registry/cache/*/nixl-sys-{version}.crate")
        found = hashlib.sha256(crate.read_bytes()).hexdigest()
        if found != digest:
            sys.exit(f"{crate.name} has the hash {found}, and {digest} is expected")
        (root / folder).mkdir(exist_ok=True)
        with tarfile.open(crate) as archive:
            header = archive.extractfile(f"nixl-sys-{version}/wrapper.h")
            (root / folder / "wrapper.h").write_bytes(header.read())
    complete.touch()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="the large packages too")
    parser.add_argument("folder", type=pathlib.Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for one in SMALL + (LARGE if args.all else []):
        get(args.folder, *one)
    for one in CRATES if args.all else []:
        get_crate(args.folder, *one)


if __name__ == "__main__":
    main()
