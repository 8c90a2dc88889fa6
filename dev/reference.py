#!/usr/bin/env python3
"""The PyTorch twin of train_gpt: the same run, computed by other code.

It takes the trainer's options, reads the same shards in the same order, starts from the same checkpoint or the same seed,
steps with torch.optim.AdamW, and writes the same log.jsonl, so that dev/compare.py can lay one curve over the other:

    ./train_gpt --data data/text --layers 4 --heads 4 --dim 128 --seq 64 --out runs/c
    python3 dev/reference.py --config runs/c/config.json --out runs/torch    # the same options, and the same start
    python3 dev/compare.py runs/c runs/torch --png difference.png

One file, top to bottom: options, shards, order of windows, checkpoints, the model, the optimizer, the run. It needs PyTorch
(1.13 or later) and numpy. Nothing here is tuned beyond what a PyTorch user would write; --attention sdpa, --compile and
--dtype bf16 make it the baseline to measure speed against.
"""
import argparse
import glob
import inspect
import json
import math
import os
import re
import sys
import time

MISSING = None
try:
    import numpy
    import torch
    import torch.nn.functional as F
    from torch.nn import Module
except ImportError as fault:  # need_torch() says so, behind --help and what is wrong with the options
    MISSING, Module = fault, object


class Fault(Exception):
    """What is wrong with the input, in one sentence."""


# --- options --------------------------------------------------------------------------------------------------------

# Shapes of the published models: layers, heads, dim. Source: Radford et al. 2019, table 2.
MODELS = {"gpt2": (12, 12, 768), "gpt2-medium": (24, 16, 1024), "gpt2-large": (36, 20, 1280), "gpt2-xl": (48, 25, 1600)}

# Those of `train_gpt --help` that make sense here, with its defaults. Name, default, help; the type is that of the default.
OPTIONS = [
    ("data", "", "directory with train_*.bin, val_*.bin, tokenizer.bin"),
    ("train", "", "glob of training shards, instead of DIR/train_*.bin"),
    ("val", "", "glob of validation shards, instead of DIR/val_*.bin"),
    ("model", "", "gpt2, gpt2-medium, gpt2-large, gpt2-xl, or dN: N layers, N heads, 64*N wide"),
    ("layers", 0, "number of blocks; 0: as the model says"),
    ("heads", 0, "attention heads a block; 0: as the model says"),
    ("dim", 0, "channels, divisible by heads; 0: as the model says"),
    ("context", 0, "positions the model can see; 0: 1024 for a named model, else --seq"),
    ("vocab", 0, "tokens in the vocabulary; 0: as tokenizer.bin says, else 50257"),
    ("init", "random", "random, a checkpoint directory, a run (its newest checkpoint), or a .safetensors file"),
    ("out", "", "directory for log.jsonl, config.json and checkpoints; without it nothing is written"),
    ("batch", 4, "sequences in a micro-step"),
    ("seq", 1024, "tokens in a sequence, at most the context"),
    ("batch-tokens", 0, "tokens in an update, a multiple of batch*seq: gradients accumulate; 0: batch*seq"),
    ("steps", 1000, "updates in the whole run"),
    ("lr", 6e-4, "peak learning rate"),
    ("warmup", 100, "updates over which the learning rate rises linearly"),
    ("schedule", "cosine", "cosine, linear, constant or wsd: course of the learning rate after warmup"),
    ("lr-final", -1.0, "learning rate at the last update; -1: a tenth of --lr"),
    ("weight-decay", 0.1, "decoupled weight decay, on matrices only"),
    ("beta1", 0.9, "AdamW's decay of the first moment"),
    ("beta2", 0.95, "AdamW's decay of the second moment"),
    ("eps", 1e-8, "AdamW's epsilon"),
    ("clip", 1.0, "largest global norm of the gradient; 0: no clipping"),
    ("eval-every", 100, "validation loss every N updates, and at both ends; 0: never"),
    ("eval-tokens", 65536, "tokens of an evaluation"),
    ("print-every", 10, "print a line every N updates (log.jsonl gets every one); 0: never"),
    ("device", "auto", "auto, cpu, cuda or cuda:N"),
    ("dtype", "fp32", "fp32, or bf16 for autocast"),
    ("attention", "materialised", "materialised (also for a kernel of train_gpt), or sdpa: scaled_dot_product_attention "
     "(PyTorch 2)"),
    ("seed", 1337, "of initial weights and of the order of the data"),
]
# Options of train_gpt that change nothing of what is compared: taken, so that one command line serves both, and not used.
UNUSED = ("save-every", "keep", "sample-every", "sample-tokens", "prompt", "temperature", "top-k", "top-p", "recompute",
          "hellaswag", "hellaswag-every", "stop")
UNUSED_FLAGS = ("no-graph", "deterministic")
CHOICES = {"schedule": ("cosine", "linear", "constant", "wsd"), "dtype": ("fp32", "bf16")}
# What a run was called and where it ran is not taken over from its config.json.
NOT_FROM_CONFIG = ("out", "device", "attention")


def build_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     argument_default=argparse.SUPPRESS)
    for name, default, text in OPTIONS:
        shown = "" if default == "" else f" [{default}]"
        parser.add_argument("--" + name, type=type(default), metavar="X", help=text + shown)
    for name in UNUSED:
        parser.add_argument("--" + name, metavar="X", help="as in train_gpt; not used here")
    for name in UNUSED_FLAGS:
        parser.add_argument("--" + name, action="store_true", help="as in train_gpt; not used here")
    parser.add_argument("--resume", action="store_true", help="refused: a checkpoint can only be started from, with --init")
    parser.add_argument("--config", metavar="FILE", help="config.json of a run of train_gpt: its options are the defaults")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model (PyTorch 2)")
    parser.add_argument("--tf32", action="store_true", help="allow TF32 products in fp32 mode")
    parser.add_argument("--save", action="store_true", help="write the first and the last checkpoint")
    return parser


def key_of(name):
    return name.replace("-", "_")


def read_json(path):
    """The object in a JSON file."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except OSError as fault:
        raise Fault(f"{path}: {fault.strerror}") from None
    except ValueError as fault:
        raise Fault(f"{path}: not JSON: {fault}") from None
    if not isinstance(value, dict):
        raise Fault(f"{path}: holds {type(value).__name__}, expected an object")
    return value


def config_options(path):
    """The options of a run of train_gpt that this program has too."""
    config, options = read_json(path), {}
    for name, default, _ in OPTIONS:
        value = config.get(key_of(name))
        if value is None or name in NOT_FROM_CONFIG:
            continue
        kind = type(default)
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            raise Fault(f"{path}: {key_of(name)} is {json.dumps(value)}, expected {kind.__name__}")
        options[key_of(name)] = kind(value)
    return options


def parse_options(arguments):
    """The options, and which of them the command line gave."""
    given = vars(build_parser().parse_args(arguments))
    for name in UNUSED + UNUSED_FLAGS:
        given.pop(key_of(name), None)
    if given.pop("resume", False):
        raise Fault("--resume: runs of this program cannot be resumed; start one from a checkpoint with --init DIR")
    values = {key_of(name): default for name, default, _ in OPTIONS}
    values.update(compile=False, tf32=False, save=False)
    if "config" in given:
        values.update(config_options(given.pop("config")))
    values.update(given)
    check_options(values)
    if values["attention"] not in ("materialised", "sdpa"):
        print(f"--attention {values['attention']} is one of train_gpt's kernels; here attention is materialised")
        values["attention"] = "materialised"
    return argparse.Namespace(**values), given


def check_options(values):
    for name, default, _ in OPTIONS:
        value = values[key_of(name)]
        if name in CHOICES and value not in CHOICES[name]:
            raise Fault(f"--{name}: got '{value}', expected one of {', '.join(CHOICES[name])}")
        if type(default) is str:
            continue
        least = {"batch": 1, "seq": 1, "eval-tokens": 1, "lr-final": -1}.get(name, 0)
        if not least <= value < (1 if name in ("beta1", "beta2") else math.inf):
            raise Fault(f"--{name}: got {value}, expected " + ("0 to below 1" if "beta" in name else f"at least {least}"))
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", values["device"]):
        raise Fault(f"--device: got '{values['device']}', expected auto, cpu, cuda or cuda:N")
    if values["save"] and not values["out"]:
        raise Fault("--save needs --out DIR")


def need_torch():
    """Ends the program where PyTorch or numpy is not installed."""
    if MISSING:
        sys.exit(f"dev/{os.path.basename(sys.argv[0])} needs PyTorch and numpy: {MISSING}")


def check_torch(options):
    """Whether this PyTorch has what the options ask for."""
    need_torch()
    name = options.device
    if name.startswith("cuda") and int(name[5:] or 0) >= torch.cuda.device_count():
        raise Fault(f"--device {name}: PyTorch {torch.__version__} sees {torch.cuda.device_count()} GPUs here")
    if options.attention == "sdpa" and not hasattr(F, "scaled_dot_product_attention"):
        raise Fault(f"--attention sdpa needs PyTorch 2, this is {torch.__version__}")
    if options.compile and not hasattr(torch, "compile"):
        raise Fault(f"--compile needs PyTorch 2, this is {torch.__version__}")


def tokenizer_vocab(path):
    """Number of tokens in tokenizer.bin (data/tokenizer.h)."""
    with open(path, "rb") as file:
        header = file.read(16)
    magic, version, vocab = (int.from_bytes(header[at:at + 4], "little") for at in (0, 4, 8))
    if len(header) < 16 or magic != 20240328 or version != 2:
        raise Fault(f"{path}: starts with {[magic, version]}, expected magic 20240328 and version 2")
    return vocab


def resolve_options(options, given):
    """Fills in what follows from other options, as the trainer does."""
    if options.data:
        folder = glob.escape(options.data)
        options.train = options.train or os.path.join(folder, "train_*.bin")
        options.val = options.val or os.path.join(folder, "val_*.bin")
        tokenizer = os.path.join(options.data, "tokenizer.bin")
        if os.path.exists(tokenizer):
            found = tokenizer_vocab(tokenizer)
            options.vocab = options.vocab or found
            if options.vocab < found:
                raise Fault(f"--vocab {options.vocab} is smaller than the tokenizer's vocabulary of {found}")
    if options.init != "random":
        resolve_from_checkpoint(options, given)
    resolve_from_model(options)
    options.vocab = options.vocab or 50257
    options.context = options.context or (1024 if options.model else options.seq)
    if "seq" not in given:
        options.seq = min(options.seq, options.context)
    if options.seq > options.context:
        raise Fault(f"--seq {options.seq} is longer than the context of the model, {options.context}")
    if options.dim % options.heads:
        raise Fault(f"dim {options.dim} is not divisible by heads {options.heads}")
    micro = options.batch * options.seq
    options.batch_tokens = options.batch_tokens or micro
    if options.batch_tokens % micro:
        raise Fault(f"--batch-tokens {options.batch_tokens} is not a multiple of --batch {options.batch} times --seq "
                    f"{options.seq}")
    if options.lr_final < 0:
        options.lr_final = options.lr / 10
    if options.warmup > options.steps:
        if "warmup" in given and options.steps:
            raise Fault(f"--warmup {options.warmup} is longer than the run of --steps {options.steps}")
        options.warmup = options.steps // 10


def newest_checkpoint(path):
    """Of a run's directory its newest checkpoint, else the path itself."""
    names = os.listdir(path) if os.path.isdir(path) else []
    steps = [name for name in names if re.fullmatch(r"step_\d{8,}", name) and
             os.path.exists(os.path.join(path, name, "model.safetensors"))]
    return os.path.join(path, max(steps, key=lambda name: int(name[5:]))) if steps else path


def resolve_from_checkpoint(options, given):
    """The shape that the config.json of a checkpoint directory says, or the one beside a .safetensors file."""
    options.init = newest_checkpoint(options.init)
    folder = options.init if os.path.isdir(options.init) else os.path.dirname(options.init)
    path = os.path.join(folder, "config.json")
    config = read_json(path)
    for key, name in (("n_layer", "layers"), ("n_head", "heads"), ("n_embd", "dim"), ("n_positions", "context"),
                      ("vocab_size", "vocab")):
        size = config.get(key)
        if not isinstance(size, int) or size < 1:
            raise Fault(f"{path}: {key} is {json.dumps(size)}, expected a size")
        if given.get(name, size) not in (0, size):
            raise Fault(f"--{name} {given[name]} disagrees with {path}, whose model has {size}")
        setattr(options, name, size)


def resolve_from_model(options):
    name = options.model or "gpt2"
    if name in MODELS:
        sizes = MODELS[name]
    elif name[0] == "d" and name[1:].isdigit() and int(name[1:]):
        sizes = int(name[1:]), int(name[1:]), 64 * int(name[1:])
    else:
        raise Fault(f"--model: got '{name}', expected {', '.join(MODELS)} or dN")
    for part, size in zip(("layers", "heads", "dim"), sizes):
        setattr(options, part, getattr(options, part) or size)


# --- shards (data/shards.h) -----------------------------------------------------------------------------------------

HEADER_BYTES = 1024
CHECK_MOST = 500_000_000  # sets of more tokens are not read through at the start; every window is checked anyway
FORMS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic: version, type of a token


def open_shard(path):
    """The tokens of a shard, memory-mapped."""
    size = os.path.getsize(path)
    if size == 0:
        raise Fault(f"{path}: is empty")
    head = numpy.fromfile(path, dtype="<i4", count=3) if size >= 12 else numpy.zeros(3, dtype="<i4")
    if int(head[0]) not in FORMS:
        if size % 2:
            raise Fault(f"{path}: has no known header and {size} bytes, an odd number for uint16 tokens")
        return numpy.memmap(path, dtype="<u2", mode="r")
    version, dtype = FORMS[int(head[0])]
    if head[1] != version:
        raise Fault(f"{path}: version {head[1]} with magic {head[0]}, expected {version}")
    if size <= HEADER_BYTES:
        raise Fault(f"{path}: has {size} bytes, expected a header of {HEADER_BYTES} and tokens")
    width = numpy.dtype(dtype).itemsize
    count = (size - HEADER_BYTES) // width
    if (size - HEADER_BYTES) % width or int(head[2]) & 0xFFFFFFFF != count & 0xFFFFFFFF:
        raise Fault(f"{path}: header counts {head[2]} tokens, the file's {size} bytes hold {count}")
    return numpy.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES)


class Shards:
    """Every window of T+1 tokens that the files of a glob hold, by number."""

    def __init__(self, pattern, T, vocab):
        self.T, self.vocab = T, vocab
        self.paths = sorted(glob.glob(pattern), key=os.fsencode)
        if not self.paths:
            raise Fault(f"no file matches {pattern}")
        self.shards = [open_shard(path) for path in self.paths]
        self.windows = [(len(shard) - 1) // T for shard in self.shards]
        self.slack = [(len(shard) - 1) % T for shard in self.shards]
        self.total = sum(self.windows)
        if not self.total:
            raise Fault(f"{pattern}: no shard holds the {T + 1} tokens of one window")
        if sum(map(len, self.shards)) <= CHECK_MOST:
            for i, shard in enumerate(self.shards):
                self.check_tokens(i, 0, len(shard))

    def window(self, index, shifts):
        """Window `index`, its shard's windows moved by shifts[shard] tokens."""
        shard = 0
        while index >= self.windows[shard]:
            index -= self.windows[shard]
            shard += 1
        first = index * self.T + shifts[shard]
        self.check_tokens(shard, first, self.T + 1)
        return self.shards[shard][first:first + self.T + 1].astype(numpy.int64)

    def check_tokens(self, shard, first, count):
        tokens = self.shards[shard][first:first + count]
        if tokens.max() >= self.vocab:
            place = int((tokens >= self.vocab).argmax())
            raise Fault(f"{self.paths[shard]}: token {tokens[place]} at position {first + place}, "
                        f"expected below the vocabulary of {self.vocab}")

    def evaluation_windows(self, tokens):
        """Numbers of the windows that an evaluation of about `tokens` tokens reads: spread evenly over the set."""
        n = min(self.total, max(1, -(-tokens // self.T)))
        return [i * self.total // n for i in range(n)]


# --- the order of windows (data/loader.h) ---------------------------------------------------------------------------

MASK64 = (1 << 64) - 1


def mix(x):
    """splitmix64's output function: a bijection of 64-bit words (data/random.h)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK64
    return x ^ (x >> 31)


def mix_array(x):
    """mix() of an array of uint64, whose products and sums wrap by themselves."""
    x = x + numpy.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return x ^ (x >> numpy.uint64(31))


def epoch_keys(seed, epoch):
    return [mix((mix(seed & MASK64) + 4 * epoch + r) & MASK64) for r in range(4)]


def order(seed, epoch, i, n):
    """Window at place i of an epoch of n windows: four Feistel rounds, walked until the result is below n."""
    half = 1
    while 4 ** half < n:
        half += 1
    mask = (1 << half) - 1
    keys = epoch_keys(seed, epoch)
    while True:
        left, right = i >> half, i & mask
        for key in keys:
            left, right = right, left ^ (mix((right + key) & MASK64) & mask)
        i = left << half | right
        if i < n:
            return i


def shard_shifts(seed, epoch, slack):
    """By how many tokens an epoch moves each shard's windows: 0 in epoch 0."""
    if epoch == 0:
        return [0] * len(slack)
    key = epoch_keys(seed, epoch)[0]
    return [mix(key ^ (s + 1)) % (slack[s] + 1) for s in range(len(slack))]


class Loader:
    """Batches of B windows from position 0 on; an epoch visits each window once."""

    def __init__(self, shards, B, seed):
        self.shards, self.B, self.seed, self.position = shards, B, seed, 0

    def next(self):
        """Inputs (B, T) and targets (B, T), one token further on."""
        rows = []
        for _ in range(self.B):
            epoch, place = divmod(self.position, self.shards.total)
            index = order(self.seed, epoch, place, self.shards.total)
            rows.append(self.shards.window(index, shard_shifts(self.seed, epoch, self.shards.slack)))
            self.position += 1
        return split(rows)


def split(rows):
    tokens = torch.from_numpy(numpy.stack(rows))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


# --- checkpoints in Hugging Face's layout (data/safetensors.h, data/checkpoint.h) -----------------------------------

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
          "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}  # as torch calls them


def read_safetensors(path):
    """Tensors of a .safetensors file by name."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as fault:
        raise Fault(f"{path}: {fault.strerror}") from None
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise Fault(f"{path}: header of {length} bytes in a file of {len(data)}")
    try:
        header = json.loads(data[8:8 + length])
    except ValueError as fault:
        raise Fault(f"{path}: header is not JSON: {fault}") from None
    body = memoryview(bytearray(data))[8 + length:]
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if entry["dtype"] not in DTYPES:
            raise Fault(f"{path}: {name} is of type {entry['dtype']}, expected one of {', '.join(DTYPES)}")
        dtype = getattr(torch, DTYPES[entry["dtype"]])
        want = math.prod(entry["shape"]) * torch.empty(0, dtype=dtype).element_size()
        if not 0 <= begin <= end <= len(body) or end - begin != want:
            raise Fault(f"{path}: {name} has bytes {begin} to {end} of {len(body)}, expected {want} bytes")
        tensor = torch.frombuffer(body[begin:end], dtype=dtype) if want else torch.empty(0, dtype=dtype)
        tensors[name] = tensor.reshape(entry["shape"]).clone()
    return tensors


def write_safetensors(path, tensors):
    """Writes tensors by name, in the given order, as the `safetensors` package would."""
    names = {getattr(torch, dtype): name for name, dtype in DTYPES.items()}
    header, offset, pieces = {"__metadata__": {"format": "pt"}}, 0, []
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)
        pieces.append(flat.numpy().tobytes())
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [offset, offset + len(pieces[-1])]}
        offset += len(pieces[-1])
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts at a multiple of 8, as the format's own writer does
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(pieces)


def is_conv1d(name):
    """GPT-2's files hold the weights of its linear layers as (in, out); nn.Linear and this model hold (out, in)."""
    return name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))


def load_parameters(model, path):
    """Fills the model from a folder with model.safetensors or from such a file, names with or without "transformer."."""
    if os.path.isdir(path):
        path = os.path.join(path, "model.safetensors")
    tensors = {}
    for name, tensor in read_safetensors(path).items():
        # Older files also hold the tied head and the causal mask.
        if name == "lm_head.weight" or name.endswith((".attn.bias", ".attn.masked_bias")):
            continue
        tensors[name if name.startswith("transformer.") else "transformer." + name] = tensor
    parameters = dict(model.named_parameters())
    for name in sorted(set(parameters) ^ set(tensors)):
        raise Fault(f"{path}: {name} is " + ("missing" if name in parameters else "not part of this model"))
    with torch.no_grad():
        for name, parameter in parameters.items():
            tensor = tensors[name].t() if is_conv1d(name) else tensors[name]
            if tensor.shape != parameter.shape:
                raise Fault(f"{path}: {name} is {tuple(tensors[name].shape)}, expected "
                            f"{tuple(parameter.t().shape if is_conv1d(name) else parameter.shape)}")
            parameter.copy_(tensor)


def save_checkpoint(model, options, step):
    """Writes OUT/step_NNNNNNNN with config.json and model.safetensors; returns its path."""
    path = os.path.join(options.out, f"step_{step:08d}")
    os.makedirs(path, exist_ok=True)
    write_safetensors(os.path.join(path, "model.safetensors"), {
        name: parameter.detach().float().t() if is_conv1d(name) else parameter.detach().float()
        for name, parameter in model.named_parameters()})
    end = {257: 256, 50257: 50256}.get(options.vocab)  # end of text in the bytes and in GPT-2's tokenizer
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new",
              "n_layer": options.layers, "n_head": options.heads, "n_embd": options.dim, "n_positions": options.context,
              "n_ctx": options.context, "vocab_size": options.vocab, "n_inner": None, "layer_norm_epsilon": 1e-5,
              "initializer_range": 0.02, "tie_word_embeddings": True, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
              "resid_pdrop": 0.0, "bos_token_id": end, "eos_token_id": end, "torch_dtype": "float32"}
    with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)
        file.write("\n")
    return path


# --- the model: GPT-2 as published, modules named as in Hugging Face's files ----------------------------------------

class Attention(Module):
    def __init__(self, dim, heads, sdpa):
        super().__init__()
        self.heads, self.sdpa = heads, sdpa
        self.c_attn = torch.nn.Linear(dim, 3 * dim)
        self.c_proj = torch.nn.Linear(dim, dim)

    def forward(self, x):  # (B, T, C)
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2)  # (B, NH, T, HS)
                   for part in self.c_attn(x).split(C, dim=2))
        if self.sdpa:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            s = q @ k.transpose(2, 3) / math.sqrt(C // self.heads)  # (B, NH, T, T)
            future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
            o = s.masked_fill(future, -math.inf).softmax(dim=3) @ v
        return self.c_proj(o.transpose(1, 2).reshape(B, T, C))


class Mlp(Module):
    def __init__(self, dim):
        super().__init__()
        self.c_fc = torch.nn.Linear(dim, 4 * dim)
        self.c_proj = torch.nn.Linear(4 * dim, dim)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(Module):
    def __init__(self, dim, heads, sdpa):
        super().__init__()
        self.ln_1 = torch.nn.LayerNorm(dim, eps=1e-5)
        self.attn = Attention(dim, heads, sdpa)
        self.ln_2 = torch.nn.LayerNorm(dim, eps=1e-5)
        self.mlp = Mlp(dim)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(Module):
    def __init__(self, layers, heads, dim, context, vocab, sdpa=False):
        super().__init__()
        self.transformer = torch.nn.ModuleDict({
            "wte": torch.nn.Embedding(vocab, dim),
            "wpe": torch.nn.Embedding(context, dim),
            "h": torch.nn.ModuleList(Block(dim, heads, sdpa) for _ in range(layers)),
            "ln_f": torch.nn.LayerNorm(dim, eps=1e-5)})

    def forward(self, tokens):
        """Logits (B, T, V) of tokens (B, T); the head is the token embedding."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.transformer.wte(tokens) + self.transformer.wpe(positions)
        for block in self.transformer.h:
            x = block(x)
        return F.linear(self.transformer.ln_f(x), self.transformer.wte.weight)


def token_losses(logits, targets):
    """Cross entropy (B, T) in fp32 or better, 0 where the target is -1: one that does not count."""
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none").view(targets.shape)


def parameters_by_kind(model):
    """Names in the trainer's order (layers/gpt.h): kind by kind, matrices before vectors, and layer by layer in a kind."""
    block = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    kinds = ["wte.weight", "wpe.weight"] + [f"h.{{}}.{part}.weight" for part in block]
    kinds += ["h.{}.ln_1.weight", "h.{}.ln_1.bias", "h.{}.attn.c_attn.bias", "h.{}.attn.c_proj.bias", "h.{}.ln_2.weight",
              "h.{}.ln_2.bias", "h.{}.mlp.c_fc.bias", "h.{}.mlp.c_proj.bias", "ln_f.weight", "ln_f.bias"]
    layers = range(len(model.transformer.h))
    return ["transformer." + kind.format(layer) for kind in kinds for layer in (layers if "{}" in kind else (0,))]


def init_random(model, seed):
    """GPT-2's initialisation, normal(0, 0.02) and 0.02/sqrt(2 L) for the projections into the residual stream, from the
    trainer's own random numbers: a seed means the same start in both. A row of a matrix has a generator of its own, seeded
    from seed, tensor and row; pairs of its numbers become pairs of normal ones (Box and Muller 1958)."""
    parameters = dict(model.named_parameters())
    for i, name in enumerate(parameters_by_kind(model)):
        parameter = parameters[name]
        if parameter.dim() < 2:
            parameter.data.fill_(1.0 if "ln_" in name and name.endswith("weight") else 0.0)
            continue
        rows, columns = parameter.shape
        deviation = 0.02 / math.sqrt(2 * len(model.transformer.h)) if name.endswith("c_proj.weight") else 0.02
        tensor_seed, draws = mix(mix(seed & MASK64) + i & MASK64), columns + columns % 2
        steps = numpy.arange(draws, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
        for row in range(rows):
            uniform = (mix_array(steps + numpy.uint64(mix(tensor_seed + row & MASK64))) >> numpy.uint64(11)) * 2.0 ** -53
            radius, angle = deviation * numpy.sqrt(-2 * numpy.log(1 - uniform[::2])), 2 * math.pi * uniform[1::2]
            normal = numpy.stack((radius * numpy.cos(angle), radius * numpy.sin(angle)), axis=1).reshape(-1)[:columns]
            parameter.data[row] = torch.from_numpy(normal.astype(numpy.float32))


# --- optimizer ------------------------------------------------------------------------------------------------------

def make_optimizer(model, options):
    """AdamW; matrices decay, vectors do not."""
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.dim() == 2], "weight_decay": options.weight_decay},
              {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
    can_fuse = parameters[0].is_cuda and "fused" in inspect.signature(torch.optim.AdamW).parameters
    fused = {"fused": True} if can_fuse else {}
    return torch.optim.AdamW(groups, lr=options.lr, betas=(options.beta1, options.beta2), eps=options.eps, **fused)


def learning_rate(options, step):
    """Of update `step`, counted from 1."""
    lr, final = options.lr, options.lr_final
    if step <= options.warmup:
        rate = lr * step / options.warmup
    else:
        p = (step - options.warmup) / (options.steps - options.warmup)
        stable = 0.8 * options.steps  # wsd: where the decay begins
        if options.schedule == "cosine":
            rate = final + 0.5 * (1 + math.cos(math.pi * p)) * (lr - final)
        elif options.schedule == "linear":
            rate = lr + (final - lr) * p
        elif options.schedule == "wsd" and step > stable:
            rate = lr + (final - lr) * (step - stable) / (options.steps - stable)
        else:
            rate = lr
    return rate


def clip_gradients(parameters, limit):
    """Scales the gradients to a global norm of at most `limit` (0: no limit); returns the norm before that."""
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in parameters]
    norm = float(torch.linalg.vector_norm(torch.stack(norms)))
    if limit and norm > limit:
        for p in parameters:
            p.grad.mul_(limit / norm)
    return norm


# --- the run --------------------------------------------------------------------------------------------------------

class Run:
    """One training run: its data, model, optimizer and log."""

    def __init__(self, options):
        self.options = options
        self.device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto"
                                   else options.device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.tf32
        self.model = Gpt(options.layers, options.heads, options.dim, options.context, options.vocab,
                         sdpa=options.attention == "sdpa")
        if options.init == "random":
            init_random(self.model, options.seed)
        else:
            load_parameters(self.model, options.init)
        self.model.to(self.device)
        self.forward = torch.compile(self.model) if options.compile else self.model
        self.train = self.val = None
        if options.train or options.steps:  # without steps only the initial checkpoint is wanted
            self.open_data()
        self.optimizer = make_optimizer(self.model, options)
        self.seconds = 0.0

    def open_data(self):
        options = self.options
        if not options.train:
            raise Fault("nothing to train on: give --data DIR or --train GLOB")
        self.train = Shards(options.train, options.seq, options.vocab)
        self.loader = Loader(self.train, options.batch, options.seed)
        if options.eval_every:
            if not options.val:
                raise Fault("no validation data: give --val GLOB, or turn evaluation off with --eval-every 0")
            self.val = Shards(options.val, options.seq, options.vocab)

    def losses(self, inputs, targets):
        """Loss of every token (B, T), on the device."""
        inputs, targets = inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.options.dtype == "bf16"):
            logits = self.forward(inputs)
        return token_losses(logits, targets)

    def evaluate(self):
        """Mean loss over the same windows of the validation set every time."""
        windows, shifts = self.val.evaluation_windows(self.options.eval_tokens), [0] * len(self.val.shards)
        total = 0.0
        with torch.no_grad():
            for first in range(0, len(windows), self.options.batch):
                rows = [self.val.window(i, shifts) for i in windows[first:first + self.options.batch]]
                total += float(self.losses(*split(rows)).sum(dtype=torch.float64))
        return total / (len(windows) * self.options.seq)

    def update(self, step):
        """One update over batch_tokens tokens; returns its log record."""
        options, start = self.options, time.perf_counter()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.optimizer.zero_grad(set_to_none=True)
        for _ in range(options.batch_tokens // (options.batch * options.seq)):
            losses = self.losses(*self.loader.next())
            (losses.sum() / options.batch_tokens).backward()
            total += losses.detach().sum(dtype=torch.float64)
        rate = learning_rate(options, step)
        for group in self.optimizer.param_groups:
            group["lr"] = float(numpy.float32(rate))  # as the trainer's AdamW takes it
        norm = clip_gradients(list(self.model.parameters()), options.clip)
        loss = float(total) / options.batch_tokens
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise Fault(f"step {step}: loss {loss}, gradient norm {norm}: the run has diverged")
        self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - start
        self.seconds += seconds
        return {"step": step, "loss": loss, "lr": rate, "grad_norm": norm, "ms": 1000 * seconds,
                "tokens_per_second": options.batch_tokens / seconds, "mfu": None}


def absolute_paths(options):
    """The options with paths that mean the same in every directory, as train_gpt keeps them."""
    values = dict(vars(options))
    for name, here in (("data", os.getcwd()), ("train", glob.escape(os.getcwd())), ("val", glob.escape(os.getcwd()))):
        values[name] = os.path.join(here, values[name]) if values[name] else ""
    return values


def open_out(options):
    """Creates the run's folder, writes config.json, opens log.jsonl; refuses one that holds a run. None without --out."""
    if not options.out:
        return None
    path = os.path.join(options.out, "log.jsonl")
    if os.path.exists(path):
        raise Fault(f"--out {options.out} already holds a run ({path}); choose another folder")
    try:
        os.makedirs(options.out, exist_ok=True)
        log = open(path, "w", encoding="utf-8", buffering=1)
        with open(os.path.join(options.out, "config.json"), "w", encoding="utf-8") as file:
            json.dump(absolute_paths(options), file, indent=2)
            file.write("\n")
    except OSError as fault:
        raise Fault(f"--out {options.out}: {fault.strerror}") from None
    return log


def write_record(log, record):
    if log:
        log.write(json.dumps(record) + "\n")


def evaluate_and_log(run, log, step):
    loss = run.evaluate()
    write_record(log, {"step": step, "val_loss": loss})
    print(f"step {step:6d}/{run.options.steps}  validation loss {loss:.4f}", flush=True)


def train(options):
    run, log = Run(options), open_out(options)
    count = sum(p.numel() for p in run.model.parameters())
    print(f"PyTorch {torch.__version__} on {run.device}, {options.dtype}, attention {options.attention}; "
          f"{count} parameters, {run.train.total if run.train else 0} windows of {options.seq} tokens", flush=True)
    if options.save or (options.out and not options.steps):
        print("wrote " + save_checkpoint(run.model, options, 0))
    if run.val:
        evaluate_and_log(run, log, 0)
    for step in range(1, options.steps + 1):
        record = run.update(step)
        write_record(log, record)
        if options.print_every and (step % options.print_every == 0 or step == options.steps):
            print("step {step:6d}/{steps}  loss {loss:.4f}  norm {grad_norm:.3f}  lr {lr:.2e}  {ms:.1f} ms  "
                  "{tokens_per_second:.0f} tokens/s".format(steps=options.steps, **record), flush=True)
        if run.val and (step % options.eval_every == 0 or step == options.steps):
            evaluate_and_log(run, log, step)
    if options.save and options.steps:
        print("wrote " + save_checkpoint(run.model, options, options.steps))
    if log:
        log.close()


def main(arguments):
    try:
        options, given = parse_options(arguments)
        resolve_options(options, given)
        check_torch(options)
        train(options)
    except Fault as fault:
        print(f"reference.py: {fault}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
