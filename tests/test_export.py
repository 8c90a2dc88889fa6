#!/usr/bin/env python3
"""Models in and out by the command line: llm.c's files, Hugging Face's directories, tokenizers beside them.

llm.c's files are written here by the words of data/llmc.h; directories of Hugging Face come from tests/fixtures, and where
transformers is installed, from it."""
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data"))
import vocabulary  # noqa: E402
from check import check, end, skip, test  # noqa: E402
from prepare import pack_tokenizer  # noqa: E402
from safetensors_file import read_file  # noqa: E402
from trainer_runs import ROOT, TINY, read_log, train, write_corpus, write_shard  # noqa: E402

TMP = tempfile.mkdtemp(prefix="flashgpt-export-")
FIXTURES = os.path.join(ROOT, "tests", "fixtures", "huggingface")
GPT2 = os.path.join(ROOT, "..", "shared", "data", "gpt2")
LOSS_BOUND = 1e-4  # of 20 steps from a checkpoint, beside PyTorch's

# llm.c's tensors in the order of its file: name, shape by layers L and channels C; weights outputs by inputs.
BLOCKS = (("ln_1.weight", "C"), ("ln_1.bias", "C"), ("attn.c_attn.weight", "3C C"), ("attn.c_attn.bias", "3C"),
          ("attn.c_proj.weight", "C C"), ("attn.c_proj.bias", "C"), ("ln_2.weight", "C"), ("ln_2.bias", "C"),
          ("mlp.c_fc.weight", "4C C"), ("mlp.c_fc.bias", "4C"), ("mlp.c_proj.weight", "C 4C"), ("mlp.c_proj.bias", "C"))


def path(*names):
    return os.path.join(TMP, *names)


def export(*arguments):
    return train("export", *arguments)


def refused(status, words, *arguments):
    """`train_gpt ARGUMENTS` ends with this status and one sentence that holds all of the words."""
    got, out, err = train(*arguments)
    check(got == status, f"status {got}, expected {status}:", arguments, out, err)
    check(err.count("\n") == 1 and err.startswith("train_gpt: "), "expected one sentence, got:", err)
    for word in words:
        check(word in err, f"'{word}' is missing in:", err)


# --- llm.c ------------------------------------------------------------------------------------------------------------

def transpose(values, rows, columns):
    return [values[row * columns + column] for column in range(columns) for row in range(rows)]


def write_llmc(file_path, layers=2, heads=2, channels=16, context=16, vocab=97, padded=128, seed=1):
    """A random model as llm.c's file, version 3, and the same tensors in Hugging Face's names and layout, as bytes."""
    rng = random.Random(seed)
    tensors, out = {}, []

    def draw(name, rows, columns):
        values = [struct.unpack("<f", struct.pack("<f", rng.gauss(0, 0.1)))[0] for _ in range(rows * columns)]
        out.extend(values)
        linear = ".c_" in name and name.endswith("weight")
        stored = transpose(values, rows, columns) if linear else values
        shape = [columns, rows] if linear else [rows, columns] if rows > 1 else [columns]
        tensors["transformer." + name] = ("F32", shape, struct.pack(f"<{len(stored)}f", *stored))

    draw("wte.weight", vocab, channels)
    out.extend([0.0] * ((padded - vocab) * channels))
    draw("wpe.weight", context, channels)
    for name, shape in BLOCKS:
        sides = [(int(side[:-1] or 1)) * channels for side in shape.split()]
        for layer in range(layers):
            draw(f"h.{layer}.{name}", sides[0] if len(sides) == 2 else 1, sides[-1])
    draw("ln_f.weight", 1, channels)
    draw("ln_f.bias", 1, channels)
    header = [20240326, 3, context, vocab, layers, heads, channels, padded] + [0] * 248
    with open(file_path, "wb") as file:
        file.write(struct.pack("<256i", *header) + struct.pack(f"<{len(out)}f", *out))
    return tensors


def read(name):
    with open(name, "rb") as file:
        return file.read()


def test_llmc():
    model = path("model.bin")
    tensors = write_llmc(model)
    with test("llm.c: a file that was written here becomes a checkpoint with its tensors, and goes back to the byte"):
        run = path("from_llmc")
        status, out, err = train("--init", model, "--steps", 0, "--out", run)
        check(status == 0, err)
        checkpoint = os.path.join(run, "step_00000000")
        got, _ = read_file(os.path.join(checkpoint, "model.safetensors"))
        check(got == tensors, [name for name in tensors if got.get(name) != tensors[name]][:3])
        for source in (run, checkpoint, os.path.join(checkpoint, "model.safetensors"), model):
            shutil.rmtree(path("back.bin"), ignore_errors=True)
            status, out, err = export("--to", "llmc", source, path("back.bin"))
            check(status == 0 and path("back.bin") in out, source, err)
            check(os.path.exists(path("back.bin")) and read(path("back.bin")) == read(model), source, "went back otherwise")
            if os.path.exists(path("back.bin")):
                os.unlink(path("back.bin"))
    with test("llm.c: bf16 is read as the fp32 of equal value, and stays what it is"):
        for name in ("five.bin", "again.bin"):
            source = model if name == "five.bin" else path("five_hf")
            check(export("--to", "llmc-bf16", source, path(name))[0] == 0, name)
            if name == "five.bin":
                check(export("--to", "hf", path(name), path("five_hf"))[0] == 0, "no directory from", name)
        check(read(path("five.bin")) == read(path("again.bin")), "it went round otherwise")
        words = struct.unpack("<8i", read(path("five.bin"))[:32])
        check(words == (20240326, 5, 16, 97, 2, 2, 16, 128), words)
        got, _ = read_file(path("five_hf", "model.safetensors"))
        for name, (_, shape, data) in tensors.items():
            ours = struct.unpack(f"<{len(data) // 4}f", got[name][2])
            wanted = struct.unpack(f"<{len(data) // 4}f", data)
            check(all(abs(a - b) <= abs(b) * 2 ** -8 for a, b in zip(ours, wanted)), name, "is off by more than half a bit")
            check(not any(word & 0xFFFF for word in struct.unpack(f"<{len(data) // 4}I", got[name][2])), name, "is no bf16")
    with test("llm.c: a model of 50257 tokens ends texts with 50256, others do not say"):
        with open(path("five_hf", "config.json"), encoding="utf-8") as file:
            check(json.load(file)["eos_token_id"] is None, "an end of text was made up")
        write_llmc(path("wide.bin"), layers=1, heads=1, channels=2, context=2, vocab=50257, padded=50304)
        check(export("--to", "bf16", path("wide.bin"), path("wide"))[0] == 0, "no directory")
        with open(path("wide", "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        check(config["eos_token_id"] == 50256 and config["torch_dtype"] == "bfloat16", config)
        dtype, shape, _ = read_file(path("wide", "model.safetensors"))[0]["transformer.wte.weight"]
        check((dtype, shape) == ("BF16", [50257, 2]), dtype, shape)


def test_refusals():
    with test("export: wrong options, each one sentence"):
        for words, arguments in (("--to is missing: llmc, llmc-bf16", []), ("--to: got 'onnx'", ["--to", "onnx", "a", "b"]),
                                 ("got 1 paths, expected two", ["--to", "hf", "a"]), ("got 3", ["--to", "hf", *"abc"]),
                                 ("--to needs a value", ["--to"]), ("option '--form'", ["--form", "hf", "a", "b"]),
                                 ("a path is empty", ["--to", "hf", "", "b"]), ("a path is empty", ["--to", "hf", "a", ""])):
            refused(2, [words], "export", *arguments)
        status, out, err = export("--help")
        check(status == 0 and all(word in out for word in ("llmc", "hf", "bf16")) and not err, out, err)
    with test("export: what cannot be read or written, each one sentence, nothing left"):
        out = path("never")
        damaged = path("damaged.bin")
        with open(damaged, "wb") as file:
            file.write(read(path("model.bin"))[:-5])
        llama = path("llama")
        os.makedirs(llama)
        with open(os.path.join(llama, "config.json"), "w", encoding="utf-8") as file:
            sizes = {key: 8 for key in ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size")}
            json.dump({"model_type": "llama", **sizes}, file)
        for words, source, place in ((["none", "No such file"], path("none"), out),
                                     (["damaged.bin", "bytes, expected"], damaged, out),
                                     (["\"model_type\" is \"llama\""], llama, out),
                                     (["exists already"], path("model.bin"), path("five_hf")),
                                     (["No such file"], path("model.bin"), path("no", "where"))):
            refused(1, words, "export", "--to", "hf", source, place)
        check(not os.path.exists(out) and not [name for name in os.listdir(TMP) if ".tmp." in name], os.listdir(TMP))


# --- Hugging Face -----------------------------------------------------------------------------------------------------

def test_fixtures():
    for name in ("plain", "sharded", "half"):
        with test(f"Hugging Face: {name} becomes a checkpoint with the values of its files"):
            run = path("hf_" + name)
            status, _, err = train("--init", os.path.join(FIXTURES, name), "--steps", 0, "--out", run)
            check(status == 0, err)
            got, _ = read_file(os.path.join(run, "step_00000000", "model.safetensors"))
            with open(os.path.join(run, "step_00000000", "config.json"), encoding="utf-8") as file:
                config = json.load(file)
            check(config["eos_token_id"] == config["vocab_size"] - 1, config["eos_token_id"], "ends texts")
            names = [entry for entry in os.listdir(os.path.join(FIXTURES, name)) if entry.startswith("model")
                     and entry.endswith(".safetensors")]
            if name == "plain":  # its masks are of a dtype that the reader of the tests does not know
                check(len(got) == 28 and "transformer.h.1.mlp.c_fc.bias" in got, len(got))
                continue
            source = {}
            for entry in names:
                source.update(read_file(os.path.join(FIXTURES, name, entry))[0])
            source.pop("lm_head.weight", None)
            check(sorted(source) == sorted(got), "other names")
            for key, (dtype, shape, data) in source.items():
                if dtype == "BF16":
                    wide = b"".join(b"\0\0" + data[i:i + 2] for i in range(0, len(data), 2))
                else:
                    wide = struct.pack(f"<{len(data) // 2}f", *struct.unpack(f"<{len(data) // 2}e", data))
                check(got.get(key) == ("F32", shape, wide), key, "has other values")


def small_tokenizer():
    """Bytes, two merges and end of text."""
    table = [bytes([byte]) for byte in range(256)] + [b"ab", b"abc", b"<|endoftext|>"]
    return vocabulary.Tokenizer("small", table, 258, merges=[(*b"ab", 256), (256, ord("c"), 257)])


def write_vocabulary(folder, tokenizer, literal=True):
    """vocab.json and merges.txt, by the words of vocabulary.py."""
    letters = {byte: letter for letter, byte in vocabulary.unicode_to_byte().items()}
    names = ["".join(letters[byte] for byte in text) for text in tokenizer.table]
    with open(os.path.join(folder, "vocab.json"), "w", encoding="utf-8") as file:
        json.dump({name: token for token, name in enumerate(names)}, file, ensure_ascii=not literal)
    with open(os.path.join(folder, "merges.txt"), "w", encoding="utf-8") as file:
        file.write("#version: 0.2\n" + "".join(f"{names[left]} {names[right]}\n" for left, right, _ in tokenizer.merges))


def test_tokenizers():
    tokenizer = small_tokenizer()
    model = path("with_vocabulary")
    corpus = path("corpus")
    write_corpus(corpus)
    with open(os.path.join(corpus, "tokenizer.bin"), "wb") as file:
        file.write(pack_tokenizer(tokenizer))
    with test("a checkpoint keeps its tokenizer in all its files, and they say the same"):
        status, _, err = train(*TINY, "--data", corpus, "--steps", 1, "--eval-every", 0, "--out", path("kept"))
        check(status == 0, err)
        checkpoint = path("kept", "step_00000001")
        check({"tokenizer.bin", "vocab.json", "merges.txt", "tokenizer_config.json"} <= {*os.listdir(checkpoint)},
              os.listdir(checkpoint))
        check(read(os.path.join(checkpoint, "tokenizer.bin")) == pack_tokenizer(tokenizer), "tokenizer.bin differs")
        _, ids, merges = vocabulary.read_merges(checkpoint)
        alphabet = vocabulary.unicode_to_byte()
        table = vocabulary.dense_table("x", ids, lambda token: vocabulary.token_bytes(token, alphabet))
        check(table == tokenizer.table and vocabulary.number_merges(ids, merges) == tokenizer.merges, merges)
        shutil.copytree(checkpoint, model)
        os.unlink(os.path.join(model, "tokenizer.bin"))
    with test("a prompt needs no data and no tokenizer.bin where vocab.json and merges.txt lie beside the model"):
        for literal in (True, False):
            write_vocabulary(model, tokenizer, literal)
            run = path(f"prompted{literal}")
            status, _, err = train("--init", model, "--train", os.path.join(corpus, "train_*.bin"), "--steps", 1,
                                   "--eval-every", 0, "--batch", 2, "--warmup", 0, "--sample-every", 1, "--sample-tokens", 3,
                                   "--prompt", "abc \u00e9", "--out", run)
            check(status == 0, err)
            samples = [line["sample"] for line in read_log(run) if "sample" in line] if status == 0 else []
            check(len(samples) == 1 and samples[0].startswith("abc \u00e9"), samples)
            check(read(os.path.join(run, "step_00000001", "tokenizer.bin")) == pack_tokenizer(tokenizer),
                  "the tokenizer did not come along")
    with test("a tokenizer that is not the model's is refused, with both counts or the first token that differs"):
        other = path("other_corpus")
        write_corpus(other)  # of bytes alone
        options = ["--seq", 16, "--batch", 2, "--warmup", 0, "--steps", 1, "--eval-every", 0]
        refused(2, ["257 tokens", "259", "differ in token 256"], *options, "--data", other, "--init", model)
        bare = path("bare")
        shutil.copytree(model, bare)
        for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
            os.unlink(os.path.join(bare, name))
        status, _, err = train(*options, "--data", other, "--init", bare)
        check(status == 0, "a vocabulary padded by two tokens is refused:", err)
        write_llmc(path("far.bin"), vocab=400, padded=512)
        refused(2, ["257 tokens", "400", "--vocab 400"], *options, "--data", other, "--init", path("far.bin"))
        status, _, err = train(*options, "--data", other, "--init", path("far.bin"), "--vocab", 400)
        check(status == 0, "--vocab does not help:", err)
        refused(2, ["--vocab 97", "257"], *options, "--data", other, "--init", path("model.bin"))
        refused(2, ["--sample-every", "tokenizer"], *options, "--train", os.path.join(other, "train_*.bin"), "--init", bare,
                "--sample-every", 1)
    with test("a faulty tokenizer beside a model is named"):
        with open(os.path.join(model, "merges.txt"), "a", encoding="utf-8") as file:
            file.write("zz qq\n")
        refused(1, ["merges.txt", "merge 3", "zz"], *options, "--data", corpus, "--init", model)
        refused(1, ["merges.txt", "merge 3"], "export", "--to", "llmc", model, path("never"))


def test_fine_tuning():
    with test("20 steps from a directory of Hugging Face follow PyTorch's AdamW"):
        try:
            import torch  # noqa: F401
        except ImportError as error:
            skip(f"needs PyTorch: {error}")
        corpus = path("tuning")
        os.makedirs(corpus)
        rng = random.Random(4)
        for name in ("train_0.bin", "val_0.bin"):
            tokens = [rng.randrange(33) if rng.random() < 0.3 else i % 33 for i in range(900)]
            write_shard(os.path.join(corpus, name), tokens)
        # A directory that dev/reference.py reads as well: fp32, one file.
        source = path("tuned_from")
        check(export("--to", "hf", os.path.join(FIXTURES, "half"), source)[0] == 0, "no directory")
        options = ["--train", os.path.join(corpus, "train_*.bin"), "--seq", 9, "--batch", 8, "--steps", 20, "--warmup", 4,
                   "--lr", "1e-2", "--eval-every", 0, "--save-every", 0]
        status, _, err = train(*options, "--init", os.path.join(FIXTURES, "half"), "--out", path("tuned"))
        check(status == 0, err)
        twin = [sys.executable, os.path.join(ROOT, "dev", "reference.py"), "--init", source, "--device", "cpu", "--out",
                path("tuned_torch")]
        done = subprocess.run(twin + [*map(str, options)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        check(done.returncode == 0, done.stdout)
        ours, theirs = ([line["loss"] for line in read_log(path(name)) if "loss" in line]
                        for name in ("tuned", "tuned_torch"))
        worst = max(abs(a - b) for a, b in zip(ours, theirs))
        print(f"     largest difference {worst:.1e}")
        check(len(ours) == len(theirs) == 20 and worst <= LOSS_BOUND, worst, ours[-1], theirs[-1])
        check(ours[0] - ours[-1] > 0.3, "nothing was learned:", ours[0], ours[-1])


def test_transformers():
    for layers, heads, dim, context, vocab in ((1, 1, 8, 5, 30), (2, 4, 32, 24, 259), (3, 2, 20, 16, 301)):
        with test(f"transformers: {layers} layers, {dim} wide, from it and back, and again after training"):
            try:
                import torch
                import transformers
            except ImportError as error:
                skip(f"needs transformers: {error}")
            torch.manual_seed(layers)
            config = transformers.GPT2Config(n_layer=layers, n_head=heads, n_embd=dim, n_positions=context, vocab_size=vocab,
                                             attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, bos_token_id=1, eos_token_id=1)
            first = transformers.GPT2LMHeadModel(config).eval()
            name = f"transformers{layers}"
            first.save_pretrained(path(name), safe_serialization=True, max_shard_size="30KB" if layers == 3 else "1GB")
            os.makedirs(path(name, "data"))
            tokens = [random.Random(5).randrange(vocab) if i % 3 else i % 7 for i in range(40 * context + 1)]
            write_shard(path(name, "data", "train_0.bin"), tokens)
            write_shard(path(name, "data", "val_0.bin"), tokens)
            status, _, err = train("--init", path(name), "--data", path(name, "data"), "--seq", context, "--batch", 4,
                                   "--steps", 20, "--warmup", 0, "--lr", "1e-2", "--eval-every", 20,
                                   "--eval-tokens", 10 ** 6, "--out", path(name, "run"))
            check(status == 0, err)
            losses = {line["step"]: line["val_loss"] for line in read_log(path(name, "run")) if "val_loss" in line}
            last, report = transformers.GPT2LMHeadModel.from_pretrained(path(name, "run", "step_00000020"),
                                                                        output_loading_info=True)
            check(not any(report.values()), report)
            windows = torch.tensor(tokens[:40 * context + 1])
            inputs, targets = windows[:-1].reshape(40, context), windows[1:].reshape(40, context)
            for step, model in ((0, first), (20, last.eval())):
                with torch.no_grad():
                    logits = model(inputs).logits.double()
                loss = torch.nn.functional.cross_entropy(logits.reshape(-1, vocab), targets.reshape(-1)).item()
                check(abs(losses[step] - loss) < 2e-6 * loss, f"step {step}: loss {losses[step]}, transformers' {loss}")
            check(losses[20] < losses[0] - 0.1, "nothing was learned:", losses)
            for form, dtype in (("hf", torch.float32), ("bf16", torch.bfloat16)):
                check(export("--to", form, path(name, "run"), path(name, form))[0] == 0, form)
                model = transformers.AutoModelForCausalLM.from_pretrained(path(name, form), torch_dtype="auto")
                check(model.dtype == dtype, form, model.dtype)
                for (key, got), wanted in zip(model.state_dict().items(), last.state_dict().values()):
                    check(torch.equal(got, wanted.to(dtype)), form, key, "differs")
    with test("transformers: the fixtures of tests/test_model.c are what it computes now"):
        try:
            import transformers  # noqa: F401
        except ImportError as error:
            skip(f"needs transformers: {error}")
        done = subprocess.run([sys.executable, os.path.join(ROOT, "tests", "fixtures", "make_huggingface.py"), "--check"],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        check(done.returncode == 0, done.stdout)
    with test("transformers: the tokenizer beside a checkpoint is GPT2Tokenizer's, slow and fast, and gives GPT-2's tokens"):
        try:
            import transformers
        except ImportError as error:
            skip(f"needs transformers: {error}")
        if not os.path.isdir(GPT2):
            skip("no ../shared/data/gpt2 with vocab.bpe and encoder.json")
        name, ids, pairs = vocabulary.read_merges(GPT2)
        alphabet = vocabulary.unicode_to_byte()
        table = vocabulary.dense_table(name, ids, lambda token: vocabulary.token_bytes(token, alphabet))
        corpus = path("gpt2")
        write_corpus(corpus)
        with open(os.path.join(corpus, "tokenizer.bin"), "wb") as file:
            file.write(pack_tokenizer(vocabulary.Tokenizer(name, table, 50256, merges=vocabulary.number_merges(ids, pairs))))
        status, _, err = train(*TINY, "--data", corpus, "--steps", 0, "--eval-every", 0, "--out", path("gpt2_run"))
        check(status == 0, err)
        folder = path("gpt2_run", "step_00000000")
        with open(os.path.join(folder, "vocab.json"), encoding="utf-8") as file:
            check(json.load(file) == ids, "vocab.json is another table")
        check(read(os.path.join(folder, "merges.txt")) == read(os.path.join(GPT2, "vocab.bpe")), "merges.txt differs")
        for class_ in (transformers.GPT2Tokenizer, transformers.AutoTokenizer):
            opened = class_.from_pretrained(folder)
            got = opened("Hello world's end<|endoftext|>").input_ids
            check(got == [15496, 995, 338, 886, 50256] and opened.eos_token_id == 50256 and opened.model_max_length == 16,
                  type(opened), got, opened.eos_token_id, opened.model_max_length)


def main():
    try:
        test_llmc()
        test_refusals()
        test_fixtures()
        test_tokenizers()
        test_fine_tuning()
        test_transformers()
    finally:
        shutil.rmtree(TMP, ignore_errors=True)
    end()


if __name__ == "__main__":
    main()
