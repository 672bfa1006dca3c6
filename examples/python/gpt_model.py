"""GPT-2 in plain PyTorch, the model of gpt.py. Names, shapes and initial distribution of the parameters are those of
GPT2LMHeadModel in transformers, so its files can be loaded and the other way round."""

import math

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# Blocks of the context, width, layers and heads.
SIZES = {
    "demo": {"block": 128, "width": 128, "layers": 4, "heads": 4},
    "gpt2": {"block": 1024, "width": 768, "layers": 12, "heads": 12},
    "gpt2-medium": {"block": 1024, "width": 1024, "layers": 24, "heads": 16},
}


class Conv1D(nn.Module):
    """A linear layer whose weight is [in, out], as in GPT-2's files."""

    def __init__(self, size_in, size_out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_in, size_out))
        self.bias = nn.Parameter(torch.zeros(size_out))

    def forward(self, x):
        return functional.linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.c_attn, self.c_proj = Conv1D(width, 3 * width), Conv1D(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.c_attn(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(width, 4 * width), Conv1D(4 * width, width)

    def forward(self, x):
        return self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """Causal self-attention, then a feed-forward network, both pre-norm with a residual connection."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.dropout = dropout
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width, heads, dropout)
        self.ln_2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x):
        x = x + functional.dropout(self.attn(self.ln_1(x)), self.dropout, self.training)
        return x + functional.dropout(self.mlp(self.ln_2(x)), self.dropout, self.training)


class Transformer(nn.Module):
    def __init__(self, vocabulary, block, width, layers, heads, dropout, recompute):
        super().__init__()
        self.dropout, self.recompute = dropout, recompute
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        self.h = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        x = functional.dropout(x, self.dropout, self.training)
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute and self.training else block(x)
        return self.ln_f(x)


class Gpt(nn.Module):
    """Maps tokens, int64 [batch, length], to the logits of the next one, float32 [batch, length, vocabulary].

    recompute: keep the input of each block only, and run the block again in backward().
    """

    def __init__(self, vocabulary, block, width, layers, heads, dropout=0.0, recompute=False):
        super().__init__()
        self.block = block
        self.transformer = Transformer(vocabulary, block, width, layers, heads, dropout, recompute)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() > 1:
                    residual = name.endswith("c_proj.weight")  # two sums in each block
                    parameter.normal_(0, 0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, tokens):
        # The output layer shares its weights with the embedding.
        return self.transformer(tokens) @ self.transformer.wte.weight.t()

    def loss(self, tokens, following):
        """The mean loss over all tokens of the batch."""
        return functional.cross_entropy(self(tokens).flatten(0, 1).float(), following.flatten())
