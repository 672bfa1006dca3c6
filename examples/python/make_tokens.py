"""Writes a text as tokens of pieces of words, for 03_gpt --tokens and gpt.py --tokens.

python make_tokens.py TEXT tokens.safetensors --vocabulary 8000      # trains a byte-pair encoding on the text
python make_tokens.py TEXT tokens.safetensors --tokenizer gpt2.json  # uses the tokenizer.json of a model
"""

import argparse
import itertools
import pathlib

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("text", type=pathlib.Path)
parser.add_argument("output")
parser.add_argument("--vocabulary", type=int, default=8000, help="number of different tokens")
parser.add_argument("--tokenizer", help="the tokenizer.json of a model with a byte-level encoding, such as GPT-2")
args = parser.parse_args()

if args.tokenizer:
    tokenizer = Tokenizer.from_file(args.tokenizer)
else:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train([str(args.text)], trainers.BpeTrainer(vocab_size=args.vocabulary, initial_alphabet=alphabet))
ids = tokenizer.encode(args.text.read_bytes().decode()).ids
# A byte-level encoding writes each byte as one character: itself if it is visible, else one from U+0100 on.
visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
others = [byte for byte in range(256) if byte not in visible]
byte_of = {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}
tokens = [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size())]
pieces = [bytes(byte_of[c] for c in t) if set(t) <= byte_of.keys() else t.encode() for t in tokens]
ends = list(itertools.accumulate(len(piece) for piece in pieces))
data = {"tokens": (ids, torch.int32), "bytes": (list(b"".join(pieces)), torch.uint8), "ends": (ends, torch.int64)}
save_file({name: torch.tensor(values, dtype=dtype) for name, (values, dtype) in data.items()}, args.output)
print(f"{len(ids)} tokens of {len(pieces)} different ones in {args.output}")
