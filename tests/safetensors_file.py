"""Safetensors files by the words of their format, with the standard library alone."""
import json
import math
import struct

from check import check


def read_file(path):
    """A safetensors file by its format's description: ({name: (dtype, shape, bytes)}, metadata)."""
    with open(path, "rb") as file:
        data = file.read()
    length, = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + length].decode("utf-8"))
    check((8 + length) % 8 == 0, f"data starts at byte {8 + length}")
    metadata, at, tensors = header.pop("__metadata__", {}), 0, {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, finish = entry["data_offsets"]
        check(begin == at, f"{name} starts at {begin}, {at} is expected")
        size = math.prod(entry["shape"]) * {"F32": 4, "F16": 2, "BF16": 2}[entry["dtype"]]
        check(finish - begin == size, f"{name} spans bytes {begin} to {finish}, its shape needs {size}")
        tensors[name] = (entry["dtype"], entry["shape"], data[8 + length + begin:8 + length + finish])
        at = finish
    check(8 + length + at == len(data), f"{len(data)} bytes, tensors end at {8 + length + at}")
    return tensors, metadata


def write_file(path, tensors):
    """The opposite: {name: (dtype, shape, bytes)}; header unpadded, keys not in the order of the data."""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(dict(reversed(list(header.items())))).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))
