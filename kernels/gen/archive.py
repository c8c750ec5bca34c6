#!/usr/bin/env python3
"""The one file that holds all PTX, kernels/ptx/images/kernels.z. kernels/ptx/images reads it in Go.

  archive.py FILE             prints every PTX text in FILE; good for git: CONTRIBUTING.md says how
  archive.py FILE NAME...     prints those texts only

The texts are much alike, but not to a compressor that looks for equal strings: each function numbers its registers and labels anew. So
a line is taken apart: into a template, which is the line without those numbers, and the numbers. Each is coded as how many others
of its kind were named since it was named last. What is equal then is equal in bytes too, and deflate finds it: 7 MB become 150 KB.

FILE is a zlib stream (RFC 1950), whose checksum guards it all. Inside, numbers are unsigned LEB128 and strings have their length in front:

  templates  one string: a line each, the most used first. A byte 1 to 7 in one stands for a register or label, 8 for the function's name
  modules    their count; of each the name, the CRC-32 of its text, how many parts it has, and their numbers
  parts      their count; of each the function's name ("" if it is no kernel), the number of its labels, and its lines, coded, as a string

A line is its template's number, below 192 in a byte and else in two (192 + high, low), and then its registers and labels: a byte
each, NEW for one that was not named before and is one more than the last such of its kind (they begin with 1), JUMP for
one that was not named before and anything else (the difference follows: 2n for n, 2n+1 for -n-1), or FIRST plus how many others of
the kind were named since, or FAR and then that number.
"""

import collections
import re
import sys
import zlib

KINDS = ["%p", "%rs", "%r", "%rd", "%f", "%fd", "$L__BB"]
LABEL = KINDS.index("$L__BB")
NAMED = re.compile(r"(%(?:p|rs|r|rd|f|fd))(\d+)\b|(\$L__BB)(\d+)_(\d+)\b")
OWN = chr(1 + len(KINDS))  # the function's name
SHORT = 192  # templates that take one byte
NEW, JUMP, FAR, FIRST = 0, 1, 2, 3


def number(n):
    out = bytearray()
    while n >= 128:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)
    return bytes(out)


def string(s):
    return number(len(s)) + s


def split(text):
    """The functions of a PTX text, in order, with what is before them as the first."""
    return re.split(r"(?m)^(?=\.visible|\.entry|\.func)", text)


class Part:
    """One function, as lines of (template, [(kind, number)])."""

    def __init__(self, text):
        entry = re.match(r"\.visible \.entry (\w+)\(", text)
        self.own = entry.group(1) if entry else ""
        if self.own:
            text = text.replace(self.own, OWN)
        self.label = None
        self.lines = []
        for line in text.splitlines():
            named = []

            def take(m):
                if m.group(1):
                    kind, n = KINDS.index(m.group(1)), int(m.group(2))
                else:
                    kind, n = LABEL, int(m.group(5))
                    if self.label not in (None, int(m.group(4))):
                        raise ValueError(f"labels of two functions in one: {line}")
                    self.label = int(m.group(4))
                named.append((kind, n))
                return chr(1 + kind)

            self.lines.append((NAMED.sub(take, line), named))
        self.label = self.label or 0

    def code(self, templates):
        recent, last = [[] for _ in KINDS], [0] * len(KINDS)
        out = bytearray()
        for template, named in self.lines:
            i = templates[template]
            out += bytes([i]) if i < SHORT else bytes([SHORT + (i - SHORT >> 8), i - SHORT & 255])
            for kind, n in named:
                known = recent[kind]
                if n in known:
                    since = known.index(n)
                    del known[since]
                    out += bytes([FIRST + since]) if FIRST + since < 256 else bytes([FAR]) + number(since)
                else:
                    by = n - last[kind] - 1
                    last[kind] = n
                    out += bytes([NEW]) if by == 0 else bytes([JUMP]) + number(2 * by if by >= 0 else -2 * by - 1)
                known.insert(0, n)
        return bytes(out)


def order(part):
    """Parts that are alike stand side by side, since deflate looks back 32 KiB: by form, world size, dtype."""
    words = part.own.split("_")
    return (words[2:4], words[5:], words[4:5])


def encode(texts):
    """The archive of texts by name, before it is deflated."""
    parts, modules = [], []
    for name in sorted(texts):
        own = [Part(t) for t in split(texts[name])]
        modules.append((name, own))
        parts += own
    parts.sort(key=order)  # stable: what has the same key stays in the order of modules
    count = collections.Counter(template for part in parts for template, _ in part.lines)
    used = sorted(count, key=lambda t: (-count[t], t))
    templates = {t: i for i, t in enumerate(used)}
    if len(used) > SHORT + (256 - SHORT) * 256:
        raise ValueError(f"{len(used)} templates are too many for two bytes")
    place = {id(part): i for i, part in enumerate(parts)}
    out = bytearray(string("".join(t + "\n" for t in used).encode()))
    out += number(len(modules))
    for name, own in modules:
        out += string(name.encode()) + zlib.crc32(texts[name].encode()).to_bytes(4, "little")
        out += number(len(own)) + b"".join(number(place[id(part)]) for part in own)
    out += number(len(parts))
    for part in parts:
        out += string(part.own.encode()) + number(part.label) + string(part.code(templates))
    return bytes(out)


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def byte(self):
        self.at += 1
        return self.data[self.at - 1]

    def number(self):
        n = shift = 0
        while True:
            b = self.byte()
            n |= (b & 127) << shift
            shift += 7
            if b < 128:
                return n

    def string(self):
        n = self.number()
        self.at += n
        return self.data[self.at - n : self.at]


def decode(data):
    """The texts by name of what encode gave."""
    r = Reader(data)
    templates = r.string().decode().split("\n")[:-1]
    modules = {}
    for _ in range(r.number()):
        name = r.string().decode()
        crc = int.from_bytes(bytes(r.byte() for _ in range(4)), "little")
        modules[name] = crc, [r.number() for _ in range(r.number())]
    parts = []
    for _ in range(r.number()):
        own, label, code = r.string().decode(), r.number(), Reader(r.string())
        recent, last = [[] for _ in KINDS], [0] * len(KINDS)
        lines = []
        while code.at < len(code.data):
            i = code.byte()
            if i >= SHORT:
                i = SHORT + (i - SHORT << 8) + code.byte()
            line = []
            for c in templates[i]:
                if c == OWN:
                    line.append(own)
                elif ord(c) > len(KINDS):
                    line.append(c)
                else:
                    kind = ord(c) - 1
                    known, b = recent[kind], code.byte()
                    if b in (NEW, JUMP):
                        by = code.number() if b == JUMP else 0
                        n = last[kind] = last[kind] + 1 + (-(by + 1) // 2 if by & 1 else by // 2)
                    else:
                        n = known.pop(code.number() if b == FAR else b - FIRST)
                    known.insert(0, n)
                    line.append(f"{KINDS[kind]}{label}_{n}" if kind == LABEL else f"{KINDS[kind]}{n}")
            lines.append("".join(line) + "\n")
        parts.append("".join(lines))
    texts = {name: "".join(parts[i] for i in own) for name, (_, own) in modules.items()}
    for name, (crc, _) in modules.items():
        if zlib.crc32(texts[name].encode()) != crc:
            raise ValueError(f"{name} is damaged")
    return texts


def deflate(data):
    return zlib.compress(data, 9)


def main():
    path, *names = sys.argv[1:] or sys.exit(__doc__)
    with open(path, "rb") as f:
        texts = decode(zlib.decompress(f.read()))
    if unknown := set(names) - set(texts):
        sys.exit(f"no {' '.join(sorted(unknown))} in {path}; there are {' '.join(texts)}")
    for name in names or texts:
        print(texts[name], end="")


if __name__ == "__main__":
    main()
