#!/usr/bin/env python3
"""train_gpt generate: the tokens that PyTorch and transformers choose, with a cache and without, within the context and
beyond it; text that is UTF-8 at every moment; where it ends; prompts of every kind; one sentence for what cannot be."""
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "dev"))
from check import check, end, skip, test  # noqa: E402
from trainer_runs import ROOT, TINY, TRAIN, hear_signals, read_log, train, write_corpus, write_tokenizer  # noqa: E402

FIXTURES = os.path.join(ROOT, "tests", "fixtures", "huggingface")
SHAPES = {"plain": (12, 61), "sharded": (20, 150), "half": (9, 33)}  # context, vocabulary
GPT2 = os.path.join(ROOT, "..", "shared", "data", "gpt2")
TMP = tempfile.mkdtemp(prefix="flashgpt-generate-")


def path(*parts):
    return os.path.join(TMP, *parts)


def generate(*options, stdin=b"", env=None):
    """Runs the command; returns (exit status, stdout as bytes, stderr)."""
    done = subprocess.run([TRAIN, "generate", *map(str, options)], cwd=ROOT, input=stdin, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, env=dict(os.environ, **(env or {})))
    return done.returncode, done.stdout, done.stderr.decode()


def tokens_of(*options):
    """The tokens of each text that the command writes, without the prompt."""
    status, out, err = generate(*options, "--show", "tokens", "--no-prompt")
    check(status == 0, f"ended with {status}:", err)
    return [[int(word) for word in line.split()] for line in out.decode().splitlines()]


def listed(tokens):
    return ",".join(map(str, tokens))


def torch_model(folder):
    """dev/reference.py's GPT with the weights of a directory of ours."""
    try:
        import torch
        import reference
        reference.need_torch()
    except (ImportError, SystemExit) as error:
        skip(f"needs PyTorch and numpy: {error}")
    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
    model = reference.Gpt(config["n_layer"], config["n_head"], config["n_embd"], config["n_positions"], config["vocab_size"])
    reference.load_parameters(model, folder)
    return torch, model.double().eval()


def greedy_of(torch, model, prompt, count, context):
    """What temperature 0 writes, by the rule of trainer/sample.h: a full context forgets its older half."""
    seen, written = list(prompt), []
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([seen]))[0, -1]
        written.append(int(logits.argmax()))
        seen = (seen[len(seen) - context // 2:] if context > 1 else []) if len(seen) == context else seen
        seen.append(written[-1])
    return written


def test_greedy():
    for name, (context, vocab) in SHAPES.items():
        with test(f"{name}: the likeliest tokens are PyTorch's, within the context and far beyond it"):
            folder = path("torch_" + name)
            status, _, err = train("export", "--to", "hf", os.path.join(FIXTURES, name), folder)
            check(status == 0, err)
            torch, model = torch_model(folder)
            for length in (1, 3, context - 1, context):
                prompt = [(7 * i + length) % vocab for i in range(length)]
                wanted = greedy_of(torch, model, prompt, 5 * context, context)
                got = tokens_of("--init", folder, "--prompt-tokens", listed(prompt), "--tokens", 5 * context,
                                "--temperature", 0, "--no-stop")
                check(got == [wanted], f"from {length} tokens {got}, PyTorch {wanted}")


def test_transformers():
    for layers, heads, dim, context, vocab in ((1, 1, 8, 5, 30), (2, 4, 32, 24, 259), (3, 2, 20, 16, 301)):
        with test(f"transformers: {layers} layers, {dim} wide: greedy is its generate()"):
            try:
                import torch
                import transformers
            except ImportError as error:
                skip(f"needs transformers: {error}")
            torch.manual_seed(layers + 5)
            config = transformers.GPT2Config(n_layer=layers, n_head=heads, n_embd=dim, n_positions=context, vocab_size=vocab,
                                             initializer_range=0.3, bos_token_id=1, eos_token_id=1)
            model = transformers.GPT2LMHeadModel(config).eval()
            folder = path(f"transformers{layers}")
            model.save_pretrained(folder, safe_serialization=True)
            rng = random.Random(layers)
            for length in (1, 2, context // 2, context - 1):
                prompt = [rng.randrange(2, vocab) for _ in range(length)]
                for ends in (True, False):
                    wanted = model.generate(torch.tensor([prompt]), max_length=context, do_sample=False, pad_token_id=0,
                                            eos_token_id=1 if ends else None)[0].tolist()[length:]
                    got = tokens_of("--init", folder, "--prompt-tokens", listed(prompt), "--tokens", context - length,
                                    "--temperature", 0, *([] if ends else ["--no-stop"]))
                    check(got == [wanted], f"from {prompt}: {got}, transformers {wanted}")


def test_cache():
    for name, (context, _) in SHAPES.items():
        with test(f"{name}: with the cache the same tokens as without, drawn or the likeliest, beyond the context too"):
            seen = set()
            for options in (["--temperature", 0], ["--temperature", 1], ["--temperature", 2, "--top-k", 7, "--seed", 3],
                            ["--temperature", 1.5, "--top-p", 0.6, "--samples", 3],
                            ["--temperature", 3, "--samples", 11, "--seed", 9]):
                common = ["--init", os.path.join(FIXTURES, name), "--prompt-tokens", "5 2,9", "--tokens", 3 * context,
                          *options]
                with_cache, without = tokens_of(*common), tokens_of(*common, "--no-cache")
                check(with_cache == without, f"{options}: {with_cache}, without the cache {without}")
                seen.update(map(tuple, with_cache))
            check(len(seen) >= 14, "of 17 texts many are the same:", len(seen))


def test_draws():
    common = ["--init", os.path.join(FIXTURES, "sharded"), "--prompt-tokens", "1", "--tokens", 15, "--temperature", 1.2]
    with test("the same seed, the same text; another seed, another"):
        first, again, other = tokens_of(*common), tokens_of(*common), tokens_of(*common, "--seed", 4)
        check(first == again != other, first, again, other)
    with test("a text is the same whatever number of others is written beside it"):
        many = tokens_of(*common, "--samples", 8)
        check(many[0] == first[0] and tokens_of(*common, "--samples", 3) == many[:3], many)
    with test("top-k 1 and a tiny top-p are the likeliest tokens"):
        likeliest = tokens_of(*common[:-2], "--temperature", 0)
        check(tokens_of(*common, "--top-k", 1) == likeliest == tokens_of(*common, "--top-p", "1e-6"), likeliest)


def with_end(name, token):
    """A copy of a fixture whose end-of-text token is `token`."""
    folder = path(f"{name}_{token}")
    shutil.copytree(os.path.join(FIXTURES, name), folder)
    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
    config["eos_token_id"] = config["bos_token_id"] = token
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)
    return folder


def test_end():
    with test("a text ends with the end-of-text token, each of several by itself; --no-stop writes on"):
        common = ["--prompt-tokens", "3,4", "--tokens", 40, "--temperature", 1.5, "--samples", 6]
        whole = tokens_of("--init", os.path.join(FIXTURES, "plain"), *common, "--no-stop")
        ender = whole[0][9]
        folder = with_end("plain", ender)
        wanted = [text[:text.index(ender) + 1] if ender in text else text for text in whole]
        check(len(set(map(len, wanted))) > 2, "all texts end at the same place:", wanted)
        check(tokens_of("--init", folder, *common) == wanted, "wanted", wanted)
        check(tokens_of("--init", folder, *common, "--no-stop") == whole, "--no-stop stops")
    with test("an empty prompt is the end-of-text token"):
        options = ["--init", folder, "--tokens", 9]
        check(tokens_of(*options) == tokens_of(*options, "--prompt-tokens", ender), "they differ")


def byte_model():
    """A checkpoint that knows bytes and wrote nothing yet, its tokenizer beside it."""
    if not os.path.isdir(path("bytes")):
        corpus = write_corpus(path("corpus"))
        status, _, err = train(*TINY, "--data", corpus, "--steps", 0, "--eval-every", 0, "--out", path("bytes"))
        check(status == 0, err)
    return path("bytes", "step_00000000")


def wide_model():
    """A model with GPT-2's vocabulary, trained on none of it, and a tokenizer of bytes that is not its own."""
    if not os.path.isdir(path("wide")):
        shards = os.path.join(write_corpus(path("wide_data")), "train_*.bin")
        status, _, err = train(*TINY, "--train", shards, "--vocab", 50257, "--steps", 0, "--eval-every", 0, "--out",
                               path("wide"))
        check(status == 0, err)
        write_tokenizer(path("tokenizer.bin"))
    return path("wide")


def shown(tokens):
    """What stdout should have of a text, given its tokens of bytes."""
    text = bytes(token for token in tokens if token < 256).decode("utf-8", "replace")
    return text if text.endswith("\n") else text + "\n"


def test_text():
    model = byte_model()
    prompts = [[226, 130, 172, 240, 159], [65], [0xC3], [0xED, 0xA0, 0x80], [0xF4, 0x90, 0xE2, 0x82],
               [0xE0, 0x80, 0xF0, 0x9F, 0x98]]
    with test("text is what the tokens' bytes are in UTF-8, incomplete characters and what is none as Python reads them"):
        for number, prompt in enumerate(prompts):
            options = ["--init", model, "--prompt-tokens", listed(prompt), "--tokens", 60, "--temperature", 1, "--seed",
                       number]
            drawn = tokens_of(*options)[0]
            status, out, err = generate(*options)
            check(status == 0 and out.decode() == shown(prompt + drawn), number, out, shown(prompt + drawn), err)
            status, out, _ = generate(*options, "--no-prompt")
            check(out.decode() == shown(drawn), number, out)
    with test("several texts come one after another, each whole"):
        options = ["--init", model, "--prompt", "ab", "--tokens", 30, "--samples", 4, "--temperature", 1]
        texts = tokens_of(*options)
        _, out, _ = generate(*options)
        wanted = "".join(f"--- sample {n + 1}\n" + shown([97, 98] + text) for n, text in enumerate(texts))
        check(out.decode() == wanted, out, wanted)
    with test("a prompt from standard input is the same, byte for byte, as one in the arguments or in numbers"):
        for text in ("x", "two\nlines\n", "tr\u00e4ge \u20ac "):
            options = ["--init", model, "--tokens", 20, "--temperature", 1]
            _, given, _ = generate(*options, "--prompt", text)
            status, read, err = generate(*options, "--prompt", "-", stdin=text.encode())
            _, numbers, _ = generate(*options, "--prompt-tokens", listed(text.encode()))
            check(status == 0 and given == read == numbers and given.decode().startswith(text), given, read, numbers, err)
    with test("the speed goes to stderr"):
        _, _, err = generate("--init", model, "--prompt", "a", "--tokens", 12, "--no-stop")
        check(re.fullmatch(r"12 tokens in [\d.]+ s, [\d.]+ tokens/s after \d+ ms for the prompt's 1\n", err), err)


def test_stream():
    with test("text comes while it is written, whole characters at a time, and Ctrl-C ends it with what there is"):
        process = subprocess.Popen([TRAIN, "generate", "--init", byte_model(), "--tokens", "100000000", "--no-stop",
                                    "--temperature", "1"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   preexec_fn=hear_signals)
        chunks = []
        while sum(map(len, chunks)) < 3000:
            chunks.append(os.read(process.stdout.fileno(), 1 << 16))
            if not check(chunks[-1], "stdout ended"):
                break
        check(process.poll() is None, "all came at the end")
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate()
        check(process.returncode == 130 and err == b"", process.returncode, err)
        text = b"".join(chunks) + rest
        check(text.decode().endswith("\n"), text[-20:])
    with test("a reader of stdout that goes away ends it quietly"):
        done = subprocess.run(f"'{TRAIN}' generate --init '{byte_model()}' --tokens 100000000 --no-stop --temperature 1 | "
                              "head -c 100 > /dev/null; echo ${PIPESTATUS[0]}", shell=True, executable="/bin/bash", cwd=ROOT,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
        check(done.stdout == b"130\n" and done.stderr == b"", done.stdout, done.stderr)
    with test("a full disk is an error"):
        if not os.path.exists("/dev/full"):
            skip("no /dev/full")
        with open("/dev/full", "wb") as full:
            done = subprocess.run([TRAIN, "generate", "--init", byte_model(), "--tokens", "100"], cwd=ROOT, stdout=full,
                                  stderr=subprocess.PIPE)
        check(done.returncode == 1 and b"standard output cannot be written: No space" in done.stderr, done.stderr)


def test_sources():
    with test("a run's directory means its newest checkpoint"):
        newest, named = (tokens_of("--init", source, "--tokens", 9) for source in (path("bytes"), byte_model()))
        check(newest == named, newest, named)
    with test("a file of llm.c writes the same text, with a tokenizer from elsewhere"):
        options = ["--prompt", "ab", "--tokens", 25, "--temperature", 1]
        status, _, err = train("export", "--to", "llmc", byte_model(), path("bytes.bin"))
        check(status == 0, err)
        write_tokenizer(path("tokenizer.bin"))
        wanted = generate("--init", byte_model(), *options)
        for tokenizer in (path("tokenizer.bin"), byte_model()):
            got = generate("--init", path("bytes.bin"), "--tokenizer", tokenizer, *options)
            check(got[0] == 0 and got[1] == wanted[1], got, wanted)
    with test("GPT-2's tokenizer beside a model: a prompt in words"):
        if not os.path.isdir(GPT2):
            skip("no ../shared/data/gpt2 with vocab.bpe and encoder.json")
        corpus = write_corpus(path("words"))
        status, _, err = train(*TINY, "--data", corpus, "--vocab", 50257, "--steps", 0, "--eval-every", 0, "--out",
                               path("gpt2"))
        check(status == 0, err)
        options = ["--init", path("gpt2"), "--tokenizer", GPT2, "--tokens", 5, "--no-stop"]
        words = generate(*options, "--prompt", "Hello world's end", "--show", "tokens")
        numbers = generate(*options, "--prompt-tokens", "15496 995 338 886", "--show", "tokens")
        check(words[0] == 0 and words[1] == numbers[1] and words[1].startswith(b"15496 995 338 886 "), words, numbers)


def test_training():
    with test("the trainer's samples are what generate writes, also beyond its window"):
        corpus, out = write_corpus(path("sampled")), path("sampled_run")
        status, _, err = train(*TINY, "--data", corpus, "--steps", 4, "--lr", "1e-2", "--eval-every", 0, "--sample-every", 2,
                               "--sample-tokens", 40, "--prompt", "!", "--temperature", 0, "--save-every", 2, "--keep", 0,
                               "--out", out)
        check(status == 0, err)
        samples = {line["step"]: line["sample"] for line in read_log(out) if "sample" in line} if status == 0 else {}
        check(sorted(samples) == [2, 4], samples)
        for step, sample in samples.items():
            _, text, _ = generate("--init", os.path.join(out, f"step_{step:08}"), "--prompt", "!", "--tokens", 40,
                                  "--temperature", 0, "--no-stop")
            check(text.decode() == (sample if sample.endswith("\n") else sample + "\n"), step, text, sample)


def refused(status, words, *options, stdin=b""):
    got, out, err = generate(*options, stdin=stdin)
    check(got == status, f"status {got}, expected {status}:", out, err)
    lines = err.strip().split("\n")
    check(len(lines) == 1 and lines[0].startswith("train_gpt: ") and out == b"", "expected one sentence, got:", out, err)
    for word in words:
        check(word in err, f"'{word}' is missing in:", err)


def test_refusals():
    model, plain = byte_model(), os.path.join(FIXTURES, "plain")
    broken = path("broken")
    shutil.copytree(model, broken)
    with open(os.path.join(broken, "model.safetensors"), "r+b") as file:
        file.truncate(200)
    numbers = ["--init", plain, "--show", "tokens"]
    cases = [
        ("no model", 2, ["generate: --init is missing"], ["--prompt", "a"]),
        ("an unknown option, with the nearest", 2, ["generate: unknown option '--tokes'", "--tokens", "generate --help"],
         ["--init", model, "--tokes", 3]),
        ("a word that belongs to no option", 2, ["generate: 'word' belongs to no option"], ["--init", model, "word"]),
        ("a count that is a word", 2, ["generate: --tokens: got 'many'"], ["--init", model, "--tokens", "many"]),
        ("no tokens", 2, ["--tokens", "got 0", "from 1"], ["--init", model, "--tokens", 0]),
        ("a top-p of 0", 2, ["--top-p", "got 0"], ["--init", model, "--top-p", 0]),
        ("a negative temperature", 2, ["--temperature", "got -1"], ["--init", model, "--temperature", -1]),
        ("a model that is not there", 1, ["/none"], ["--init", path("none")]),
        ("a model that is cut short", 1, ["model.safetensors"], ["--init", broken]),
        ("a prompt longer than the context", 2, ["17 tokens", "holds 16"], ["--init", model, "--prompt", "a" * 17]),
        ("numbers longer than the context", 2, ["13 tokens", "holds 12"], [*numbers, "--prompt-tokens", "1 " * 13]),
        ("a token beyond the vocabulary", 2, ["number 2", "'61'", "from 0 to 60"], [*numbers, "--prompt-tokens", "60,61"]),
        ("a negative token", 2, ["number 1", "'-1'"], [*numbers, "--prompt-tokens=-1"]),
        ("a token that is a word", 2, ["number 3", "'x'"], [*numbers, "--prompt-tokens", "1,2,x"]),
        ("a token with a tail", 2, ["number 1", "'1x'"], [*numbers, "--prompt-tokens", "1x"]),
        ("an empty list", 2, ["list is empty"], [*numbers, "--prompt-tokens", " , "]),
        ("two prompts", 2, ["exclude each other"], ["--init", model, "--prompt", "a", "--prompt-tokens", "1"]),
        ("text without a tokenizer", 2, ["no tokenizer", "--show tokens"], ["--init", plain, "--prompt-tokens", "1"]),
        ("a prompt in words without a tokenizer", 2, ["no", "--prompt-tokens"], [*numbers, "--prompt", "a"]),
        ("a tokenizer that is not there", 1, ["none.bin"], ["--init", model, "--tokenizer", path("none.bin")]),
        ("a directory without a tokenizer", 1, ["holds no tokenizer"], ["--init", model, "--tokenizer", plain]),
        ("a tokenizer of more tokens than the model's", 1, ["257 tokens", "61"],
         ["--init", plain, "--tokenizer", model, "--prompt", "a"]),
        ("a tokenizer of far fewer tokens than the model's", 1,
         ["--tokenizer", "257 tokens", "50257", "do not belong together"],
         ["--init", wide_model(), "--tokenizer", path("tokenizer.bin"), "--prompt", "a"]),
        ("an unknown device", 2, ["--device", "'tpu'"], ["--init", model, "--device", "tpu"]),
        ("an unknown attention kernel", 2, ["'fast'"], ["--init", model, "--device", "cpu", "--attention", "fast"]),
        ("bf16 on the CPU", 2, ["--dtype bf16", "GPU"], ["--init", model, "--device", "cpu", "--dtype", "bf16"]),
    ]
    for name, status, words, options in cases:
        with test("refuses " + name):
            refused(status, words, *options)
    with test("refuses more samples than memory holds, and says what one needs"):
        # A context so long that its cache is large while the model is small.
        status, _, err = train("--layers", 1, "--heads", 1, "--dim", 8, "--vocab", 300, "--context", 1 << 20, "--seq", 16,
                               "--steps", 0, "--train", os.path.join(write_corpus(path("long")), "train_*.bin"),
                               "--eval-every", 0, "--out", path("long_run"))
        check(status == 0, err)
        refused(1, ["--samples 65536 over 1048576 tokens need", "one sample"], "--init", path("long_run"), "--samples",
                65536, "--tokens", 1 << 21, "--prompt-tokens", "1", "--show", "tokens", "--device", "cpu")
    with test("generate --help names every option with its default"):
        status, out, _ = generate("--help")
        text = out.decode()
        for words in ("--init PATH", "--prompt TEXT|-", "--tokens N", "[256]", "--temperature X", "[0.8]", "--no-cache"):
            check(status == 0 and words in text, words)


def main():
    try:
        test_greedy()
        test_transformers()
        test_cache()
        test_draws()
        test_end()
        test_text()
        test_stream()
        test_sources()
        test_training()
        test_refusals()
    finally:
        shutil.rmtree(TMP, ignore_errors=True)
    end()


if __name__ == "__main__":
    main()
