#!/usr/bin/env python3
"""Checkpoints and the rest of the world: what the trainer writes, others read, and the other way round.

The format is checked with Python's standard library alone; with the packages safetensors and numpy (and torch, for bfloat16)
where they are installed; and with transformers' GPT2LMHeadModel, which must compute the trainer's own validation loss."""
import os
import shutil
import struct
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from check import check, end, skip, test  # noqa: E402
from safetensors_file import read_file, write_file  # noqa: E402
from trainer_runs import TINY, read_log, train, write_corpus  # noqa: E402

TMP = tempfile.mkdtemp(prefix="flashgpt-safetensors-")
PREFIX = "transformer."


def need(name):
    """The module of that name, or a skip."""
    try:
        return __import__(name, fromlist=["_"])
    except ImportError as error:
        return skip(f"needs the Python package {name.split('.')[0]}: {error}")


def trained(corpus):
    """The checkpoint of a short run."""
    folder = os.path.join(TMP, "run")
    status, _, err = train(*TINY, "--data", corpus, "--steps", 3, "--out", folder, "--eval-every", 3,
                           "--eval-tokens", 1 << 20, "--lr", "1e-2", "--print-every", 0)
    check(status == 0, err)
    return os.path.join(folder, "step_00000003")


def reload_of(corpus, source, name):
    """What the trainer makes of `source`: the tensors of a checkpoint that starts from it, or None; and its complaint."""
    folder = os.path.join(TMP, name)
    status, _, err = train("--data", corpus, "--seq", 16, "--init", source, "--steps", 0, "--eval-every", 0, "--out", folder)
    if status:
        return None, err
    return read_file(os.path.join(folder, "step_00000000", "model.safetensors"))[0], ""


def foreign(name, checkpoint):
    """A new directory with the checkpoint's config.json, and the path of the model file to write there."""
    folder = os.path.join(TMP, name)
    os.mkdir(folder)
    shutil.copy(os.path.join(checkpoint, "config.json"), folder)
    return folder, os.path.join(folder, "model.safetensors")


def same(got, expected):
    """Both are the same tensors, to the bit."""
    check(got[0] is not None, "refused:", got[1])
    check(sorted(got[0] or {}) == sorted(expected), "other names:", sorted(got[0] or {}))
    for name in expected:
        check(got[0] and got[0].get(name) == expected[name], f"{name} differs")


def with_standard_library(corpus, checkpoint):
    with test("the files follow the format: aligned data, no gap, metadata, shapes of GPT-2"):
        model, metadata = read_file(os.path.join(checkpoint, "model.safetensors"))
        moments, _ = read_file(os.path.join(checkpoint, "optimizer.safetensors"))
        check(metadata == {"format": "pt"}, metadata)
        attention = model[PREFIX + "h.1.attn.c_attn.weight"][:2]
        check(attention == ("F32", [16, 48]), attention)
        check(model[PREFIX + "wte.weight"][1] == [257, 16], model[PREFIX + "wte.weight"][1])
        check(sorted(moments) == sorted(kind + name for kind in ("m.", "v.") for name in model), "optimizer's names")
    with test("a file written here, without the prefix and in another order, is read to the bit"):
        folder, path = foreign("plain", checkpoint)
        write_file(path, {name[len(PREFIX):]: model[name] for name in sorted(model, reverse=True)})
        same(reload_of(corpus, folder, "plain_out"), model)
    with test("a file that lacks a tensor is refused, and no run is left"):
        folder, path = foreign("lacking", checkpoint)
        write_file(path, {name: model[name] for name in model if not name.endswith("ln_f.bias")})
        got, err = reload_of(corpus, folder, "lacking_out")
        check(got is None and "ln_f.bias" in err and path in err and len(err.strip().split("\n")) == 1, "got:", err)
        check(not os.path.exists(os.path.join(TMP, "lacking_out", "step_00000000")), "a checkpoint was written")
    return model


def with_safetensors(corpus, checkpoint, model):
    with test("Python's safetensors reads both files"):
        numpy, theirs = need("numpy"), need("safetensors.numpy")
        moments, _ = read_file(os.path.join(checkpoint, "optimizer.safetensors"))
        for name, expected in (("model.safetensors", model), ("optimizer.safetensors", moments)):
            got = theirs.load_file(os.path.join(checkpoint, name))
            check(sorted(got) == sorted(expected), f"{name}: other names")
            for key, value in got.items():
                check(value.dtype == numpy.float32, f"{key} has dtype {value.dtype}")
                check((list(value.shape), value.tobytes()) == expected[key][1:], f"{key} differs")
        with need("safetensors").safe_open(os.path.join(checkpoint, "model.safetensors"), "numpy") as file:
            check(file.metadata() == {"format": "pt"}, file.metadata())
    with test("a file that Python's safetensors wrote is read to the bit; float16 as the fp32 of equal value"):
        numpy, theirs = need("numpy"), need("safetensors.numpy")
        arrays = {name: numpy.frombuffer(data, numpy.float32).reshape(shape) for name, (_, shape, data) in model.items()}
        folder, path = foreign("theirs", checkpoint)
        theirs.save_file({name[len(PREFIX):]: array for name, array in arrays.items()}, path)
        same(reload_of(corpus, folder, "theirs_out"), model)
        folder, path = foreign("half", checkpoint)
        halves = {name: (array * 2.0 ** -12).astype(numpy.float16) for name, array in arrays.items()}  # many are subnormal
        check(any(0 < abs(value) < 6e-5 for value in halves[PREFIX + "wpe.weight"].flat), "no value is subnormal")
        theirs.save_file(halves, path)
        same(reload_of(corpus, folder, "half_out"),
             {name: ("F32", model[name][1], array.astype(numpy.float32).tobytes()) for name, array in halves.items()})
    with test("a bfloat16 file that Python's safetensors wrote is read as the fp32 of equal value"):
        torch, theirs = need("torch"), need("safetensors.torch")
        folder, path = foreign("brain", checkpoint)
        brain = {name: torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(shape).bfloat16()
                 for name, (_, shape, data) in model.items()}
        theirs.save_file(brain, path)
        same(reload_of(corpus, folder, "brain_out"),
             {name: ("F32", model[name][1], value.float().numpy().tobytes()) for name, value in brain.items()})


def with_transformers(corpus, checkpoint):
    with test("transformers opens a checkpoint strictly, and computes the trainer's validation loss"):
        torch, transformers = need("torch"), need("transformers")
        model, report = transformers.GPT2LMHeadModel.from_pretrained(checkpoint, output_loading_info=True)
        check(not any(report.values()), report)
        config = model.config
        shape = (config.n_layer, config.n_head, config.n_embd, config.n_positions, config.vocab_size)
        check(shape == (2, 2, 16, 16, 257), shape)
        check(config.bos_token_id == 256 and config.eos_token_id == 256, config.bos_token_id, config.eos_token_id)
        with open(os.path.join(corpus, "val_0.bin"), "rb") as file:
            tokens = torch.tensor(struct.unpack("<600H", file.read()[1024:]), dtype=torch.long)
        count = (len(tokens) - 1) // 16
        windows = torch.stack([tokens[16 * i:16 * i + 17] for i in range(count)])
        with torch.no_grad():
            logits = model.eval()(windows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.double().reshape(-1, 257), windows[:, 1:].reshape(-1)).item()
        log = read_log(os.path.dirname(checkpoint))
        ours = [line["val_loss"] for line in log if line["step"] == 3 and "val_loss" in line]
        check(len(ours) == 1 and abs(ours[0] - loss) < 2e-6, f"the trainer's loss is {ours}, transformers' {loss}")
    with test("the trainer reads a directory that transformers saved, to the bit"):
        transformers = need("transformers")
        folder = os.path.join(TMP, "saved")
        transformers.GPT2LMHeadModel.from_pretrained(checkpoint).save_pretrained(folder, safe_serialization=True)
        same(reload_of(corpus, folder, "saved_out"), read_file(os.path.join(checkpoint, "model.safetensors"))[0])


def main():
    corpus = write_corpus(os.path.join(TMP, "corpus"))
    with test("a short run leaves a checkpoint"):
        checkpoint = trained(corpus)
        check(os.path.isdir(checkpoint), f"{checkpoint} is not there")
    model = with_standard_library(corpus, checkpoint)
    with_safetensors(corpus, checkpoint, model)
    with_transformers(corpus, checkpoint)
    shutil.rmtree(TMP)
    end()


if __name__ == "__main__":
    main()
