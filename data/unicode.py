#!/usr/bin/env python3
"""Writes data/unicode_classes.c: which characters are letters, numbers and blanks, as GPT-2's rule for cutting text asks.

    python3 data/unicode.py            writes the file anew; needs Unicode's tables of VERSION
    python3 data/unicode.py --check    compares the file with the tables that this Python has; exits 1 where they differ

The tables are those of the module unicodedata, or of the package unicodedata2 where that one has VERSION. It is the version
that tiktoken 0.14 uses (tests/test_tokenizer.py compares every character), so that tokens are the same for all of them, the
unassigned ones included. A check with an older version compares what was assigned then, one with a newer version what was
a letter, number or blank already.

Blanks are the characters with the property White_Space. Python has no table of it, but str.isspace() is true for them and
for four separators (U+001C to U+001F) that do not have it.
"""
import os
import sys
import unicodedata

VERSION = "16.0.0"
PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "unicode_classes.c")
CODES = 0x110000
CLASSES = {"L": 1, "N": 2}  # as the enum in unicode.h
SPACE = 3


def tables():
    """The module with VERSION, or else the one that Python has."""
    try:
        import unicodedata2
    except ImportError:
        return unicodedata
    return unicodedata2 if unicodedata2.unidata_version == VERSION else unicodedata


def class_of(code, module):
    character = chr(code)
    if character.isspace() and not 0x1C <= code <= 0x1F:
        return SPACE
    return CLASSES.get(module.category(character)[0], 0)


def render(module):
    """The C file: every code point at which another class begins."""
    starts, last = [], None
    for code in range(CODES):
        found = class_of(code, module)
        if found != last:
            starts.append(f"0x{code << 2 | found:06x}")
            last = found
    rows = [", ".join(starts[i:i + 12]) for i in range(0, len(starts), 12)]
    return (f"/* unicode_classes.c - written by data/unicode.py from Unicode {module.unidata_version}. Each entry is a code "
            "point at which\n * a class begins, times 4, plus the class; the class goes on until the next entry. */\n"
            '#include "data/unicode.h"\n\n'
            "const uint32_t unicode_classes[] = {\n    " + ",\n    ".join(rows) + ",\n};\n\n"
            "const size_t unicode_classes_count = sizeof unicode_classes / sizeof unicode_classes[0];\n")


def read_classes(path):
    """Class of every code point, by the words of the file."""
    with open(path, encoding="ascii") as file:
        body = file.read().split("{")[1].split("}")[0]
    starts = [int(word, 16) for word in body.replace(",", " ").split()]
    classes = []
    for start, following in zip(starts, starts[1:] + [CODES << 2]):
        classes += [start & 3] * ((following >> 2) - (start >> 2))
    return classes


def check(module, path=PATH):
    """The first assigned code point at which file and tables differ, as a sentence; None where they agree."""
    classes = read_classes(path)
    if len(classes) != CODES:
        return f"{path}: {len(classes)} code points, expected {CODES}"
    version, ours = ([int(part) for part in words.split(".")] for words in (module.unidata_version, VERSION))
    for code in range(CODES):
        known = version == ours or (module.category(chr(code)) != "Cn" if version < ours else classes[code])
        if known and classes[code] != class_of(code, module):
            return (f"{path}: U+{code:04X} has class {classes[code]}, Unicode {module.unidata_version} says "
                    f"{class_of(code, module)}")
    return None


def main():
    module = tables()
    if sys.argv[1:] == ["--check"]:
        fault = check(module)
        print(fault or f"{PATH}: agrees with Unicode {module.unidata_version}", file=sys.stderr if fault else sys.stdout)
        return 1 if fault else 0
    if sys.argv[1:]:
        print(f"unicode.py: got {' '.join(sys.argv[1:])}, expected nothing or --check", file=sys.stderr)
        return 2
    if module.unidata_version != VERSION:
        print(f"unicode.py: this Python has the tables of Unicode {module.unidata_version}, expected {VERSION}: "
              f"pip install unicodedata2=={VERSION}", file=sys.stderr)
        return 1
    with open(PATH, "w", encoding="ascii") as file:
        file.write(render(module))
    return 0


if __name__ == "__main__":
    sys.exit(main())
