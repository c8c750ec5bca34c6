#!/usr/bin/env python3
"""Compiles kernels/cuda to PTX, and puts it into kernels/ptx/images. `go generate ./kernels/...` runs it.

It needs Python 3.9 with pip, linux, and no GPU, no CUDA toolkit and no C++ compiler: NVRTC and ptxas come as wheels, pinned by
version and hash, into .cache/ of the repository. The output depends on nothing but the sources and those pins.

  gen.py              writes the archive, if that is not what it would write, and prints which functions have changed and how
  gen.py signals      compiles signals only; likewise the others, one or several. The rest of the archive stays
  gen.py --check      also assembles each file for every architecture that it is meant for, and
                      examples/kernel, which has symmem.cuh only
  gen.py --diff       writes nothing, and fails if the archive is not what it would write
  gen.py --compile FILE.cu [FILE.cu...]
                      compiles sources of somebody else, which include symmem.cuh, to FILE.ptx beside them. The archive stays

`archive.py kernels/ptx/images/kernels.z signals.ptx` prints a file of the archive.
"""

import argparse
import concurrent.futures
import ctypes
import difflib
import itertools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zlib

import archive

KERNELS = pathlib.Path(__file__).resolve().parent.parent
SOURCES = KERNELS / "cuda"
OUTPUT = KERNELS / "ptx" / "images" / "kernels.z"
EXAMPLE = KERNELS.parent / "examples" / "kernel" / "rmsnorm.cu"

# NVRTC 12.4 writes PTX ISA 8.4, which the drivers of the 550 series and later load. ptxas is newer because it must know
# sm_100; it only checks.
REQUIREMENTS = """
nvidia-cuda-nvrtc-cu12==12.4.127 \\
    --hash=sha256:a178759ebb095827bd30ef56598ec182b85547f1508941a3d560eb7ea1fbf338 \\
    --hash=sha256:0eedf14185e04b76aa05b1fea04133e59f465b6f960c0cbf4e37c3cb6b0ea198
nvidia-cuda-nvcc-cu12==12.9.86 \\
    --hash=sha256:5d6a0d32fdc7ea39917c20065614ae93add6f577d840233237ff08e9a38f58f0 \\
    --hash=sha256:44e1eca4d08926193a558d2434b1bf83d57b4d5743e0c431c0c83d51da1df62b
"""
CACHE = KERNELS.parent / ".cache" / "cuda-nvrtc-12.4.127-nvcc-12.9.86"

DTYPES = ["f16", "bf16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"]
SUMS = ["f16", "bf16", "f32"]  # have kernels for each world size
WORLDS = range(2, 9)

OPTIONS = [
    "--std=c++17",
    "--device-as-default-execution-space",  # for lambdas
    "--fmad=false",  # the host does not fuse either
    "--ftz=false",
    "--prec-div=true",
]


def modules():
    """Every file of the archive: its name without .ptx, source, lowest architecture and macros."""
    # Those with _sm90 are the same again with programmatic dependent launch, which sm_80 has not.
    out = [("signals", "signals.cu", 80, []), ("signals_sm90", "signals.cu", 90, []), ("pull", "pull.cu", 80, []), ("pull_sm90", "pull.cu", 90, []), ("multimem", "multimem.cu", 90, []),
           ("lines", "lines.cu", 80, []), ("lines_sm90", "lines.cu", 90, []), ("alltoallv", "alltoallv.cu", 80, []), ("told", "told.cu", 80, [])]

    def allreduce(name, arch, dtype, world, push):
        macros = dict(DTYPE=dtype, TYPE=dtype.upper(), WORLD=world, PUSH=push)
        out.append((name, "allreduce.cu", arch, [f"-DSYMMEM_{k}={v}" for k, v in macros.items()]))

    def many(name, arch, dtype, *more):
        out.append((name, "many.cu", arch, [f"-DSYMMEM_DTYPE={dtype}", f"-DSYMMEM_TYPE={dtype.upper()}", *more]))

    out.append(("many_copy", "many.cu", 80, ["-DSYMMEM_COPY"]))
    out.append(("many_moves", "many.cu", 80, ["-DSYMMEM_MOVES"]))
    out.append(("many_moves_sm90", "many.cu", 90, ["-DSYMMEM_MOVES", "-DSYMMEM_ONESHOT_ONLY"]))
    for dtype in DTYPES:
        allreduce(f"any_{dtype}", 80, dtype, 0, 0)
        macros = [f"-DSYMMEM_{k}={v}" for k, v in dict(DTYPE=dtype, TYPE=dtype.upper(), FLOAT=int(dtype in SUMS)).items()]
        out.append((f"scatter_{dtype}", "scatter.cu", 80, macros))
        if dtype in SUMS:
            out.append((f"scatter_{dtype}_sm90", "scatter.cu", 90, macros))
        many(f"many_{dtype}", 80, dtype)
        if dtype in SUMS:
            many(f"many_{dtype}_sm90", 90, dtype, "-DSYMMEM_ONESHOT_ONLY")
    for world in WORLDS:
        out.append((f"lines_w{world}", "lines_whole.cu", 80, [f"-DSYMMEM_WORLD={world}"]))
        out.append((f"lines_w{world}_sm90", "lines_whole.cu", 90, [f"-DSYMMEM_WORLD={world}"]))
    for dtype in SUMS:
        for world in WORLDS:
            allreduce(f"pull_{dtype}_w{world}", 80, dtype, world, 0)
            allreduce(f"push_{dtype}_w{world}", 80, dtype, world, 1)
            allreduce(f"push_{dtype}_w{world}_sm90", 90, dtype, world, 1)
            macros = [f"-DSYMMEM_{k}={v}" for k, v in dict(DTYPE=dtype, TYPE=dtype.upper(), WORLD=world).items()]
            out.append((f"scatter_{dtype}_w{world}", "scatter_whole.cu", 80, macros))
            out.append((f"scatter_{dtype}_w{world}_sm90", "scatter_whole.cu", 90, macros))
        macros = [f"-DSYMMEM_DTYPE={dtype}", f"-DSYMMEM_TYPE={dtype.upper()}"]
        out.append((f"rms_norm_{dtype}", "rms_norm.cu", 80, macros + ["-DSYMMEM_SPECIAL=0"]))
        out.append((f"rms_norm_{dtype}_sm90", "rms_norm.cu", 90, macros + ["-DSYMMEM_SPECIAL=1"] + (["-DSYMMEM_TWO_BLOCKS"] if dtype == "bf16" else [])))
        out.append((f"quantized_{dtype}", "quantized.cu", 80, macros))
    return out


def install():
    """Puts the compiler into the cache, once."""
    if (CACHE / "complete").exists():
        return
    CACHE.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE.parent) as tmp:
        requirements = pathlib.Path(tmp) / "requirements.txt"
        requirements.write_text(REQUIREMENTS)
        target = pathlib.Path(tmp) / "site"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile"]
        subprocess.run(pip + ["--require-hashes", "--only-binary=:all:", "--target", target, "-r", requirements], check=True)
        (target / "complete").touch()
        try:
            target.rename(CACHE)
        except OSError:
            if not (CACHE / "complete").exists():  # another run was not quicker
                raise


class Compiler:
    """NVRTC, as a function from source to PTX."""

    def __init__(self):
        folder = CACHE / "nvidia" / "cuda_nvrtc" / "lib"
        # The library loads its built-in headers by name; a copy that is loaded already is found without a search path.
        for builtins in folder.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self.lib = ctypes.CDLL(str(folder / "libnvrtc.so.12"))
        self.lib.nvrtcGetErrorString.restype = ctypes.c_char_p

    def must(self, result):
        if result != 0:
            raise RuntimeError("NVRTC: " + self.lib.nvrtcGetErrorString(result).decode())

    def text(self, program, what):
        size = ctypes.c_size_t()
        self.must(getattr(self.lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self.must(getattr(self.lib, f"nvrtcGet{what}")(program, buffer))
        return buffer.value.decode()

    def compile(self, source, arch, options, headers="*.cuh", more=b""):
        headers = sorted(SOURCES.glob(headers))
        names = (ctypes.c_char_p * len(headers))(*[h.name.encode() for h in headers])
        bodies = (ctypes.c_char_p * len(headers))(*[h.read_bytes() for h in headers])
        options = [f"--gpu-architecture=compute_{arch}"] + options
        values = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
        program = ctypes.c_void_p()
        path = SOURCES / source  # which an absolute path replaces
        body = path.read_bytes() + more
        self.must(self.lib.nvrtcCreateProgram(ctypes.byref(program), body, path.name.encode(), len(headers), bodies, names))
        try:
            result = self.lib.nvrtcCompileProgram(program, len(options), values)
            log = self.text(program, "ProgramLog").strip()
            if result != 0 or log:  # a warning is an error
                raise RuntimeError(f"{source} {' '.join(options)}:\n{log}")
            return self.text(program, "PTX")
        finally:
            self.lib.nvrtcDestroyProgram(ctypes.byref(program))


def tidy(ptx, source):
    """PTX without what only people need: comments, blank lines and indentation are half of it."""
    tools = re.search(r"^// Cuda compilation tools, (.*)$", ptx, re.M).group(1)
    # Functions that are not visible outside have a hash of the whole source in their names, and would all change with any line of it.
    ptx = re.sub(r"_ZN\d+_INTERNAL_[0-9a-f]{8}_\d+_\w+?_cu_[0-9a-f]{8}", "_ZN", ptx)
    lines = [f"// Code generated by kernels/gen from {source} with NVRTC {tools}; DO NOT EDIT."]
    for line in ptx.splitlines():
        line = re.sub(r"\s+", " ", line.split("//")[0]).strip()
        if line:
            lines.append(line)
    return "\n".join(lines) + "\n"


def build(module):
    name, source, arch, macros = module
    return f"{name}.ptx", tidy(Compiler().compile(source, arch, OPTIONS + macros), f"kernels/cuda/{source}")


def foreign(source, arch=80, more=b""):
    """A kernel that is not this module's, as PTX: compiled with the public header and no other."""
    return Compiler().compile(source, arch, ["--std=c++17"], "symmem.cuh", more)


def example(arch):
    """Such a kernel, and all of that header, used or not."""
    all_of_it = b"""template struct symmem::Ranks<>; template struct symmem::Ranks<8>;
extern "C" __global__ void early(const __grid_constant__ symmem::Comm c, const float *x, float y, int n) {
  symmem::Ranks<> ranks(c, symmem::kKindUser);
  symmem::u32 epoch;
  if (ranks.begin(epoch, x, y, n)) ranks.close(epoch);
}"""
    return f"{EXAMPLE.name}.{arch}", foreign(EXAMPLE, arch, all_of_it)


def assemble(job):
    """Assembles one file for one architecture, and says what is wrong with it."""
    path, arch = job
    ptxas = CACHE / "nvidia" / "cuda_nvcc" / "bin" / "ptxas"
    run = subprocess.run([ptxas, f"-arch=sm_{arch}", path, "-o", os.devnull], capture_output=True, text=True)
    return f"{path.name} for sm_{arch}:\n{run.stdout}{run.stderr}" if run.returncode or run.stderr.strip() else ""


def functions(text):
    """The functions of a PTX text, by name. What is before them is one too."""
    out = {}
    for part in archive.split(text):
        name = re.search(r"^\.(?:visible \.entry|func(?: \(.*?\))?) (\w+)", part)
        name = name.group(1) if name else "what comes before the functions"
        out[name + ("" if "\n{" in part else " (declared)")] = part.splitlines()
    return out


def read():
    """The archive as it is, before and after decoding; nothing if there is none, or it cannot be read."""
    try:
        kept = zlib.decompress(OUTPUT.read_bytes())
        return kept, archive.decode(kept)
    except FileNotFoundError:
        return b"", {}
    except (zlib.error, ValueError, IndexError) as e:
        print(f"{OUTPUT.name} cannot be read and is made anew: {e}")
        return b"", {}


DIFF_LINES = 40  # of one function


def difference(old, new):
    """How two functions differ, as lines of a unified diff, and how many of these are changes. The numbers of registers and labels are not
    compared: one more at the top of a function gives other numbers to all below it."""

    def plain(lines):
        return [archive.NAMED.sub(lambda m: m.group(1) or m.group(3), line) for line in lines]

    out, changes = [], 0
    for group in difflib.SequenceMatcher(None, plain(old), plain(new)).get_grouped_opcodes(2):
        out.append(f"@@ -{group[0][1] + 1},{group[-1][2] - group[0][1]} +{group[0][3] + 1},{group[-1][4] - group[0][3]} @@")
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                out += [" " + line for line in new[j1:j2]]
            else:
                out += ["-" + line for line in old[i1:i2]] + ["+" + line for line in new[j1:j2]]
                changes += i2 - i1 + j2 - j1
    return out, changes


def compare(before, after):
    """Says what is different between two sets of files, function by function."""
    for name in sorted(before.keys() | after.keys()):
        old, new = functions(before.get(name, "")), functions(after.get(name, ""))
        for function in itertools.chain(new, (f for f in old if f not in new)):
            if old.get(function) == new.get(function):
                continue
            lines, changes = difference(old.get(function, []), new.get(function, []))
            what = "is new" if function not in old else "has gone" if function not in new else "has changed"
            print(f"{name}: {function} {what}: {changes} lines" + ("" if changes else ", but for the numbers of registers and labels"))
            print("".join(f"    {line}\n" for line in lines[:DIFF_LINES]), end="")
            if len(lines) > DIFF_LINES:
                print(f"    ... and {len(lines) - DIFF_LINES} lines more")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="assemble what was made for sm_80, sm_90 and sm_100")
    parser.add_argument("--diff", action="store_true", help="write nothing; fail if the archive is not up to date")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a file to make, without .ptx; none are all")
    parser.add_argument("--compile", action="store_true", help="the names are sources of somebody else")
    args = parser.parse_args()
    if args.compile:
        if not args.names:
            parser.error("--compile needs the names of sources")
        install()
        for source in map(pathlib.Path, args.names):
            source.with_suffix(".ptx").write_text(tidy(foreign(source.resolve()), source.name))
        return
    todo = [m for m in modules() if not args.names or m[0] in args.names]
    if unknown := set(args.names) - {m[0] for m in todo}:
        parser.error(f"no such file: {' '.join(sorted(unknown))}; there are {' '.join(m[0] for m in modules())}")
    install()

    kept, before = read()
    with concurrent.futures.ProcessPoolExecutor() as pool:
        made = dict(pool.map(build, todo))
        names = [f"{m[0]}.ptx" for m in modules()]
        after = {name: made.get(name, before.get(name)) for name in names}
        if lacking := [name for name in names if after[name] is None]:
            sys.exit(f"the archive lacks {lacking[0]} and {len(lacking) - 1} others: make all, without names")
        # Compared before deflating, which another version of zlib does in other bytes.
        coded = archive.encode(after)
        if archive.decode(coded) != after:
            sys.exit("the archive is not what was put into it")
        print(f"{len(made)} files made, {sum(map(len, after.values()))} bytes in all")
        if coded != kept:
            compare(before, after)
            if args.diff:
                sys.exit(f"{OUTPUT.name} is not up to date, run go generate ./kernels/...")
            OUTPUT.write_bytes(archive.deflate(coded))
            print(f"{OUTPUT.name}: {OUTPUT.stat().st_size} bytes")
        if args.check:
            with tempfile.TemporaryDirectory() as tmp:
                examples = dict(pool.map(example, (80, 90)))
                for name, text in (made | examples).items():
                    (pathlib.Path(tmp) / name).write_text(text)
                jobs = [(pathlib.Path(tmp) / f"{m[0]}.ptx", arch) for m in todo for arch in (80, 90, 100) if arch >= m[2]]
                jobs += [(pathlib.Path(tmp) / name, arch) for name in examples for arch in (80, 90, 100) if arch >= int(name.split(".")[-1])]
                wrong = [w for w in pool.map(assemble, jobs) if w]
            print(f"{len(jobs)} assembled, {len(wrong)} with complaints")
            if wrong:
                sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
