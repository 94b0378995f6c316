"""Layers of torch.nn in their configurations, as cases of tests."""

from __future__ import annotations

import torch
from factored import Case, tokens
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils import _pytree as pytree

OUTER, CONV, EMBEDDING = {"weight": "Outer"}, {"weight": "Conv"}, {"weight": "Embedding"}


def total(outputs):
    """A loss of everything that a layer returns."""
    return sum(torch.sin(x).sum() for x in pytree.tree_leaves(outputs) if x is not None)


def layer(make, *shapes, kinds=OUTER, call=None, add_axis=True):
    """A case of a layer called on a batch of one sample, or on the sample as it is."""

    def loss(module, *xs):
        xs = [x[None] for x in xs] if add_axis else xs
        return total(module(*xs) if call is None else call(module, *xs))

    return Case(loss, make, shapes, kinds)


def outer(*names):
    return dict.fromkeys(names, "Outer")


LINEAR = {
    "Linear": layer(lambda: nn.Linear(9, 7), (9,)),
    "Linear, no bias": layer(lambda: nn.Linear(9, 7, bias=False), (9,)),
    "Linear on steps": layer(lambda: nn.Linear(9, 7), (2, 9)),
    "Linear on images": layer(lambda: nn.Linear(9, 7), (1, 2, 9)),
    "Linear, unbatched": layer(lambda: nn.Linear(9, 7), (9,), add_axis=False),
    "Linear in a residual": layer(
        lambda: nn.Linear(9, 9), (2, 9), call=lambda module, x: x + module(torch.relu(module(x)))
    ),
    "Linear, weight_norm": layer(lambda: parametrizations.weight_norm(nn.Linear(9, 7)), (9,), kinds={}),
    "Bilinear": layer(lambda: nn.Bilinear(7, 9, 4), (7,), (9,), kinds={}),
    "Bilinear, no bias": layer(lambda: nn.Bilinear(7, 9, 4, bias=False), (7,), (9,), kinds={}),
    "Bilinear on steps": layer(lambda: nn.Bilinear(7, 9, 4), (2, 7), (2, 9), kinds={}),
    "MLP with norms": layer(
        lambda: nn.Sequential(nn.Linear(9, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 7), nn.PReLU()),
        (2, 9),
        kinds=outer("0.weight", "3.weight"),
    ),
}

CONVOLUTIONS = {
    "Conv1d": layer(lambda: nn.Conv1d(4, 8, 3), (4, 4), kinds=CONV),
    "Conv1d, no bias": layer(lambda: nn.Conv1d(4, 8, 3, bias=False), (4, 4), kinds=CONV),
    "Conv1d, stride": layer(lambda: nn.Conv1d(4, 8, 3, stride=2), (4, 6), kinds=CONV),
    "Conv1d, last pixels unseen": layer(lambda: nn.Conv1d(4, 8, 2, stride=3), (4, 7), kinds=CONV),
    "Conv1d, padding": layer(lambda: nn.Conv1d(4, 8, 3, padding=2), (4, 4), kinds=CONV),
    "Conv1d, padding same": layer(lambda: nn.Conv1d(4, 8, 3, padding="same"), (4, 4), kinds=CONV),
    "Conv1d, padding same, even": layer(lambda: nn.Conv1d(4, 8, 4, padding="same"), (4, 4), kinds={}),
    "Conv1d, padding valid": layer(lambda: nn.Conv1d(4, 8, 3, padding="valid"), (4, 4), kinds=CONV),
    "Conv1d, reflect": layer(lambda: nn.Conv1d(4, 8, 3, padding=1, padding_mode="reflect"), (4, 4), kinds=CONV),
    "Conv1d, replicate": layer(lambda: nn.Conv1d(4, 8, 3, padding=1, padding_mode="replicate"), (4, 4), kinds=CONV),
    "Conv1d, circular": layer(lambda: nn.Conv1d(4, 8, 3, padding=1, padding_mode="circular"), (4, 4), kinds=CONV),
    "Conv1d, dilation": layer(lambda: nn.Conv1d(4, 8, 3, dilation=2), (4, 6), kinds=CONV),
    "Conv1d, stride and dilation": layer(
        lambda: nn.Conv1d(4, 8, 3, stride=2, padding=1, dilation=2), (4, 6), kinds=CONV
    ),
    "Conv1d, groups": layer(lambda: nn.Conv1d(4, 8, 3, groups=2), (4, 3), kinds=CONV),
    "Conv1d, depthwise": layer(lambda: nn.Conv1d(4, 8, 5, groups=4), (4, 5), kinds=CONV),
    "Conv1d, 1×1": layer(lambda: nn.Conv1d(9, 8, 1), (9, 3), kinds=CONV),
    "Conv1d, unbatched": layer(lambda: nn.Conv1d(4, 8, 3), (4, 4), kinds=CONV, add_axis=False),
    "Conv2d": layer(lambda: nn.Conv2d(4, 8, 3), (4, 4, 4), kinds=CONV),
    "Conv2d, oblong": layer(lambda: nn.Conv2d(4, 8, (3, 2), padding=(1, 0)), (4, 3, 4), kinds=CONV),
    "Conv2d, stride": layer(lambda: nn.Conv2d(4, 8, 3, stride=2, padding=1), (4, 6, 6), kinds=CONV),
    "Conv2d, strides": layer(lambda: nn.Conv2d(4, 8, 3, stride=(1, 2)), (4, 4, 6), kinds=CONV),
    "Conv2d, padding": layer(lambda: nn.Conv2d(4, 8, 3, padding=1), (4, 4, 4), kinds=CONV),
    "Conv2d, padding same": layer(lambda: nn.Conv2d(4, 8, 3, padding="same"), (4, 4, 4), kinds=CONV),
    "Conv2d, padding same, dilation": layer(
        lambda: nn.Conv2d(4, 8, (2, 3), padding="same", dilation=(1, 2)), (4, 3, 3), kinds={}
    ),
    "Conv2d, reflect": layer(lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"), (4, 3, 3), kinds=CONV),
    "Conv2d, replicate": layer(lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="replicate"), (4, 3, 3), kinds=CONV),
    "Conv2d, circular": layer(lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular"), (4, 3, 3), kinds=CONV),
    "Conv2d, dilation": layer(lambda: nn.Conv2d(4, 8, 3, dilation=2), (4, 5, 5), kinds=CONV),
    "Conv2d, groups": layer(lambda: nn.Conv2d(4, 8, 3, groups=2), (4, 4, 4), kinds=CONV),
    "Conv2d, depthwise": layer(lambda: nn.Conv2d(4, 4, 3, groups=4), (4, 3, 3), kinds=CONV),
    "Conv2d, depthwise ×2": layer(lambda: nn.Conv2d(4, 8, 3, groups=4), (4, 3, 3), kinds=CONV),
    "Conv2d, 1×1": layer(lambda: nn.Conv2d(9, 8, 1), (9, 2, 2), kinds=CONV),
    "Conv2d, unbatched": layer(lambda: nn.Conv2d(4, 8, 3), (4, 4, 4), kinds=CONV, add_axis=False),
    "Conv2d, several images": layer(lambda: nn.Conv2d(4, 8, 3), (2, 4, 4, 4), kinds=CONV, add_axis=False),
    "Conv2d, several images, groups": layer(
        lambda: nn.Conv2d(4, 8, 3, stride=2, groups=2), (2, 4, 3, 3), kinds=CONV, add_axis=False
    ),
    "Conv2d, large images": layer(lambda: nn.Conv2d(2, 3, 3), (2, 9, 9), kinds={}),
    "Conv2d, weight_norm": layer(lambda: parametrizations.weight_norm(nn.Conv2d(4, 8, 3)), (4, 4, 4), kinds={}),
    "Conv2d, twice": layer(
        lambda: nn.Conv2d(6, 6, 3, padding=1), (6, 3, 3), kinds=CONV, call=lambda m, x: m(torch.tanh(m(x)))
    ),
    "Conv2d, two image sizes": layer(
        lambda: nn.Conv2d(6, 6, 3), (6, 4, 3), call=lambda m, x: (m(x), m(x[:, :, :3].tanh()))
    ),
    "Conv2d, shrinking": layer(lambda: nn.Conv2d(9, 9, (3, 1)), (9, 5, 1), call=lambda m, x: m(torch.tanh(m(x)))),
    "Conv3d": layer(lambda: nn.Conv3d(2, 4, 3), (2, 3, 3, 3), kinds=CONV),
    "Conv3d, stride": layer(lambda: nn.Conv3d(2, 4, 3, stride=2, padding=1), (2, 4, 3, 3), kinds=CONV),
    "Conv3d, padding": layer(lambda: nn.Conv3d(2, 4, 3, padding=(0, 1, 0)), (2, 3, 3, 3), kinds=CONV),
    "Conv3d, padding same": layer(lambda: nn.Conv3d(2, 4, 3, padding="same"), (2, 3, 3, 3), kinds=CONV),
    "Conv3d, replicate": layer(
        lambda: nn.Conv3d(2, 8, 3, padding=(1, 0, 0), padding_mode="replicate"), (2, 3, 3, 3), kinds=CONV
    ),
    "Conv3d, circular": layer(
        lambda: nn.Conv3d(2, 8, 3, padding=(1, 0, 0), padding_mode="circular"), (2, 3, 3, 3), kinds=CONV
    ),
    "Conv3d, dilation": layer(lambda: nn.Conv3d(2, 8, 2, dilation=2), (2, 3, 3, 3), kinds=CONV),
    "Conv3d, groups": layer(lambda: nn.Conv3d(2, 4, 3, groups=2), (2, 3, 3, 3), kinds=CONV),
    "ConvTranspose1d": layer(lambda: nn.ConvTranspose1d(4, 8, 3), (4, 2), kinds=CONV),
    "ConvTranspose1d, stride": layer(lambda: nn.ConvTranspose1d(4, 8, 3, stride=2), (4, 2), kinds=CONV),
    "ConvTranspose1d, padding": layer(lambda: nn.ConvTranspose1d(4, 8, 3, padding=1), (4, 3), kinds=CONV),
    "ConvTranspose1d, output_padding": layer(
        lambda: nn.ConvTranspose1d(4, 8, 3, stride=3, output_padding=2), (4, 2), kinds=CONV
    ),
    "ConvTranspose1d, output padded by a stride": layer(
        lambda: nn.ConvTranspose1d(4, 8, 3, dilation=3, output_padding=2), (4, 2), kinds={}
    ),
    "ConvTranspose1d, groups": layer(lambda: nn.ConvTranspose1d(4, 8, 3, groups=2), (4, 2), kinds=CONV),
    "ConvTranspose1d, dilation": layer(lambda: nn.ConvTranspose1d(4, 8, 3, dilation=2), (4, 2), kinds=CONV),
    "ConvTranspose1d, unbatched": layer(lambda: nn.ConvTranspose1d(4, 8, 3), (4, 2), kinds=CONV, add_axis=False),
    "ConvTranspose2d": layer(lambda: nn.ConvTranspose2d(8, 6, 3), (8, 2, 2), kinds=CONV),
    "ConvTranspose2d, stride": layer(lambda: nn.ConvTranspose2d(8, 6, 3, stride=2), (8, 2, 2), kinds=CONV),
    "ConvTranspose2d, output_padding": layer(
        lambda: nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, output_padding=1), (8, 2, 2), kinds=CONV
    ),
    "ConvTranspose2d, groups": layer(lambda: nn.ConvTranspose2d(8, 6, 3, groups=2), (8, 2, 2), kinds=CONV),
    "ConvTranspose2d, dilation": layer(lambda: nn.ConvTranspose2d(8, 6, 3, dilation=(2, 1)), (8, 2, 2), kinds=CONV),
    "ConvTranspose2d, several images": layer(
        lambda: nn.ConvTranspose2d(8, 6, 3), (2, 8, 2, 2), kinds=CONV, add_axis=False
    ),
    "ConvTranspose3d": layer(lambda: nn.ConvTranspose3d(4, 3, 3), (4, 2, 2, 2), kinds=CONV),
    "ConvTranspose3d, stride": layer(
        lambda: nn.ConvTranspose3d(4, 3, 3, stride=(1, 2, 1), padding=1), (4, 2, 2, 2), kinds=CONV
    ),
    "CNN": layer(
        lambda: nn.Sequential(
            nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 7)
        ),
        (4, 6, 6),
        kinds={"0.weight": "Conv", "5.weight": "Outer"},
    ),
    "autoencoder": layer(
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.SiLU(), nn.Upsample(scale_factor=2), nn.ConvTranspose2d(8, 4, 3)),
        (4, 3, 3),
        kinds={"0.weight": "Conv", "3.weight": "Conv"},
    ),
}

EMBEDDINGS = {
    "Embedding": layer(lambda: nn.Embedding(60, 16), tokens(60, 3), kinds=EMBEDDING),
    "Embedding, repeated tokens": layer(lambda: nn.Embedding(60, 16), tokens(2, 3), kinds=EMBEDDING),
    "Embedding, padding_idx": layer(lambda: nn.Embedding(60, 16, padding_idx=0), tokens(3, 4), kinds=EMBEDDING),
    "Embedding, padding_idx=-1": layer(
        lambda: nn.Embedding(60, 16, padding_idx=-1), tokens(3, 4), kinds=EMBEDDING, call=lambda m, t: m(59 - t)
    ),
    "Embedding, scale_grad_by_freq": layer(
        lambda: nn.Embedding(60, 16, scale_grad_by_freq=True), tokens(3, 4), kinds={}
    ),
    "Embedding, padding_idx, scale_grad_by_freq": layer(
        lambda: nn.Embedding(60, 16, padding_idx=1, scale_grad_by_freq=True), tokens(3, 4), kinds={}
    ),
    "Embedding on a matrix": layer(lambda: nn.Embedding(60, 16), tokens(60, 2, 3), kinds=EMBEDDING),
    "Embedding, unbatched": layer(lambda: nn.Embedding(60, 16), tokens(60), kinds=EMBEDDING, add_axis=False),
    "Embedding, small": layer(lambda: nn.Embedding(8, 4), tokens(8, 3), kinds=EMBEDDING),
    "Embedding, many tokens": layer(lambda: nn.Embedding(8, 4), tokens(8, 12), kinds={}),
    "EmbeddingBag": layer(lambda: nn.EmbeddingBag(60, 16), tokens(60, 3), kinds=EMBEDDING),
    "EmbeddingBag, sum": layer(lambda: nn.EmbeddingBag(60, 16, mode="sum"), tokens(3, 4), kinds=EMBEDDING),
    "EmbeddingBag, max": layer(lambda: nn.EmbeddingBag(60, 16, mode="max"), tokens(60, 3), kinds=EMBEDDING),
    "EmbeddingBag, padding_idx": layer(lambda: nn.EmbeddingBag(60, 16, padding_idx=0), tokens(3, 4), kinds=EMBEDDING),
    "EmbeddingBag, weights": layer(
        lambda: nn.EmbeddingBag(60, 16, mode="sum"),
        tokens(60, 3),
        (3,),
        kinds=EMBEDDING,
        call=lambda m, t, w: m(t, per_sample_weights=w),
    ),
    "EmbeddingBag, offsets": layer(
        lambda: nn.EmbeddingBag(60, 16),
        tokens(60, 4),
        kinds=EMBEDDING,
        call=lambda m, t: m(t[0], torch.tensor([0, 3])),
    ),
}


def scattered(module):
    """A normalization layer with parameters and running statistics unlike the initial ones, in eval mode."""
    for x in [*module.parameters(), *module.buffers()]:
        if x.is_floating_point():
            nn.init.uniform_(x, 0.5, 1.5)
    return module.eval()


NORMS = {
    "LayerNorm": layer(lambda: scattered(nn.LayerNorm(8)), (2, 8), kinds={}),
    "LayerNorm, no bias": layer(lambda: scattered(nn.LayerNorm(8, bias=False)), (8,), kinds={}),
    "LayerNorm over images": layer(lambda: scattered(nn.LayerNorm((4, 3, 3))), (4, 3, 3), kinds={}),
    "GroupNorm": layer(lambda: scattered(nn.GroupNorm(2, 4)), (4, 3, 3), kinds={}),
    "GroupNorm, one group": layer(lambda: scattered(nn.GroupNorm(1, 4)), (4, 5), kinds={}),
    "RMSNorm": layer(lambda: scattered(nn.RMSNorm(8)), (2, 8), kinds={}),
    "InstanceNorm1d": layer(lambda: scattered(nn.InstanceNorm1d(4, affine=True)), (4, 5), kinds={}),
    "InstanceNorm2d": layer(lambda: scattered(nn.InstanceNorm2d(4, affine=True)), (4, 3, 3), kinds={}),
    "InstanceNorm3d": layer(lambda: scattered(nn.InstanceNorm3d(4, affine=True)), (4, 2, 2, 2), kinds={}),
    "InstanceNorm2d, running statistics": layer(
        lambda: scattered(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)), (4, 3, 3), kinds={}
    ),
    "BatchNorm1d": layer(lambda: scattered(nn.BatchNorm1d(4)), (4,), kinds={}),
    "BatchNorm2d": layer(lambda: scattered(nn.BatchNorm2d(4)), (4, 3, 3), kinds={}),
    "BatchNorm3d": layer(lambda: scattered(nn.BatchNorm3d(4)), (4, 2, 2, 2), kinds={}),
    "PReLU": layer(nn.PReLU, (4, 5), kinds={}),
    "PReLU of channels": layer(lambda: nn.PReLU(4), (4, 5), kinds={}),
}

IN_OUT = outer("in_proj_weight", "out_proj.weight")


def attend(**options):
    return lambda module, x, *rest: module(x, x, x, *rest, **options)


def attention(call=None, shapes=((2, 8),), kinds=IN_OUT, **options):
    options = {"batch_first": True, **options}
    return layer(lambda: nn.MultiheadAttention(8, 2, **options), *shapes, kinds=kinds, call=call or attend())


def transformer(make, *names, shapes=((2, 8),), call=None, **options):
    options = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True, **options}
    return layer(lambda: make(8, 2, **options), *shapes, kinds=outer(*names), call=call)


SEPARATE = outer("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight")
ENCODER = ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")
DECODER = (*ENCODER, "multihead_attn.in_proj_weight", "multihead_attn.out_proj.weight")
CAUSAL = torch.ones(2, 2).triu(1).bool()

ATTENTION = {
    "MultiheadAttention": attention(),
    "MultiheadAttention, no weights": attention(attend(need_weights=False)),
    "MultiheadAttention, no bias": attention(attend(need_weights=False), bias=False),
    "MultiheadAttention, add_bias_kv": attention(add_bias_kv=True),
    "MultiheadAttention, add_zero_attn": attention(attend(need_weights=False), add_zero_attn=True),
    "MultiheadAttention, kdim and vdim": attention(
        lambda m, x, y, z: m(x, y, z), ((2, 8), (2, 9), (2, 7)), SEPARATE, kdim=9, vdim=7
    ),
    "MultiheadAttention, kdim and vdim, no bias": attention(
        lambda m, x, y, z: m(x, y, z, need_weights=False),
        ((2, 8), (2, 9), (2, 7)),
        SEPARATE,
        kdim=9,
        vdim=7,
        bias=False,
    ),
    "MultiheadAttention, cross": attention(lambda m, x, y: m(x, y, y), ((2, 8), (3, 8))),
    "MultiheadAttention, steps first": attention(
        lambda m, x: m(*[x.transpose(0, 1)] * 3, need_weights=False), batch_first=False
    ),
    "MultiheadAttention, unbatched": layer(
        lambda: nn.MultiheadAttention(16, 2), (2, 16), kinds=IN_OUT, call=attend(), add_axis=False
    ),
    "MultiheadAttention, causal mask": attention(attend(attn_mask=CAUSAL)),
    "MultiheadAttention, is_causal": attention(attend(attn_mask=CAUSAL, is_causal=True, need_weights=False)),
    "MultiheadAttention, float mask": attention(
        lambda m, x: m(x, x, x, attn_mask=torch.tensor([[0.0, -1.0], [2.0, 0.0]]).to(x), need_weights=False)
    ),
    "MultiheadAttention, key_padding_mask": attention(
        lambda m, x, pad: m(x, x, x, key_padding_mask=(pad > 0) & torch.tensor([False, True])),
        ((2, 8), tokens(2, 2)),
    ),
    "MultiheadAttention, key_padding_mask, no weights": attention(
        lambda m, x, pad: m(
            x, x, x, key_padding_mask=(pad > 0) & torch.tensor([False, True]), attn_mask=CAUSAL, need_weights=False
        ),
        ((2, 8), tokens(2, 2)),
    ),
    "MultiheadAttention, weights of heads": attention(attend(average_attn_weights=False)),
    "TransformerEncoderLayer": transformer(nn.TransformerEncoderLayer, *ENCODER),
    "TransformerEncoderLayer, norm_first": transformer(nn.TransformerEncoderLayer, *ENCODER, norm_first=True),
    "TransformerEncoderLayer, gelu": transformer(nn.TransformerEncoderLayer, *ENCODER, activation="gelu"),
    "TransformerEncoderLayer, no bias": transformer(nn.TransformerEncoderLayer, *ENCODER, bias=False),
    "TransformerEncoderLayer, mask": transformer(
        nn.TransformerEncoderLayer, *ENCODER, call=lambda m, x: m(x, src_mask=CAUSAL, is_causal=True)
    ),
    "TransformerDecoderLayer": transformer(nn.TransformerDecoderLayer, *DECODER, shapes=((2, 8), (3, 8))),
    "TransformerDecoderLayer, norm_first": transformer(
        nn.TransformerDecoderLayer, *DECODER, shapes=((2, 8), (3, 8)), norm_first=True, activation="gelu"
    ),
    "TransformerDecoderLayer, masks": transformer(
        nn.TransformerDecoderLayer,
        *DECODER,
        shapes=((2, 8), (2, 8)),
        call=lambda m, x, memory: m(x, memory, tgt_mask=CAUSAL, memory_mask=CAUSAL),
    ),
    "TransformerEncoder": layer(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2, enable_nested_tensor=False
        ),
        (2, 8),
        kinds=outer(*(f"layers.{i}.{name}" for i in range(2) for name in ENCODER)),
    ),
    "Transformer": layer(
        lambda: nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True),
        (2, 8),
        (2, 8),
        kinds=outer(
            *(f"encoder.layers.0.{name}" for name in ENCODER), *(f"decoder.layers.0.{name}" for name in DECODER)
        ),
    ),
}


def recurrent(make, *sizes, names=("weight_ih_l0", "weight_hh_l0"), shapes=((2, 9),), call=None, **options):
    options = {"batch_first": True, **options}
    return layer(lambda: make(*sizes, **options), *shapes, kinds=outer(*names), call=call)


def both(*names):
    return (*names, *(f"{name}_reverse" for name in names))


def with_state(module, x, *state):
    """Call on an initial state of one layer and one sample."""
    state = [h[None] for h in state]
    return module(x, state[0] if len(state) == 1 else tuple(state))


CELL = ("weight_ih", "weight_hh")
FIRST = ("weight_ih_l0", "weight_hh_l0")
SECOND = ("weight_ih_l1", "weight_hh_l1")

RECURRENT = {
    "GRUCell": layer(lambda: nn.GRUCell(9, 6), (9,), (6,), kinds=outer(*CELL)),
    "GRUCell, no bias": layer(lambda: nn.GRUCell(9, 6, bias=False), (9,), (6,), kinds=outer(*CELL)),
    "GRUCell, no state": layer(lambda: nn.GRUCell(9, 6), (9,), kinds=outer(*CELL)),
    "GRUCell, unbatched": layer(lambda: nn.GRUCell(9, 6), (9,), (6,), kinds=outer(*CELL), add_axis=False),
    "GRUCell over steps": layer(
        lambda: nn.GRUCell(9, 6),
        (2, 9),
        (6,),
        kinds=outer(*CELL),
        call=lambda m, x, h: m(x[:, 1], m(x[:, 0], h)),
    ),
    "LSTMCell": layer(
        lambda: nn.LSTMCell(9, 6), (9,), (6,), (6,), kinds=outer(*CELL), call=lambda m, x, h, c: m(x, (h, c))
    ),
    "LSTMCell, no bias": layer(
        lambda: nn.LSTMCell(9, 6, bias=False),
        (9,),
        (6,),
        (6,),
        kinds=outer(*CELL),
        call=lambda m, x, h, c: m(x, (h, c)),
    ),
    "RNNCell": layer(lambda: nn.RNNCell(9, 6), (9,), (6,), kinds=outer(*CELL)),
    "RNNCell, relu": layer(lambda: nn.RNNCell(9, 6, nonlinearity="relu"), (9,), (6,), kinds=outer(*CELL)),
    "GRU": recurrent(nn.GRU, 9, 6),
    "GRU, steps first": recurrent(nn.GRU, 9, 6, batch_first=False, call=lambda m, x: m(x.transpose(0, 1))),
    "GRU, unbatched": layer(lambda: nn.GRU(9, 6), (2, 9), kinds=outer(*FIRST), add_axis=False),
    "GRU, initial state": recurrent(nn.GRU, 9, 6, shapes=((2, 9), (6,)), call=with_state),
    "GRU, layers": recurrent(nn.GRU, 9, 6, names=FIRST + SECOND, num_layers=2),
    "GRU, bidirectional": recurrent(nn.GRU, 9, 6, names=both(*FIRST), bidirectional=True),
    "GRU, no bias": recurrent(nn.GRU, 9, 6, bias=False),
    "GRU, many steps": recurrent(nn.GRU, 9, 6, names=(), shapes=((12, 9),)),
    "LSTM": recurrent(nn.LSTM, 9, 6),
    "LSTM, steps first": recurrent(nn.LSTM, 9, 6, batch_first=False, call=lambda m, x: m(x.transpose(0, 1))),
    "LSTM, initial state": recurrent(nn.LSTM, 9, 6, shapes=((2, 9), (6,), (6,)), call=with_state),
    "LSTM, layers, bidirectional": recurrent(
        nn.LSTM, 9, 6, names=both(*FIRST, *SECOND), num_layers=2, bidirectional=True
    ),
    "LSTM, proj_size": recurrent(nn.LSTM, 9, 8, names=(*FIRST, "weight_hr_l0"), proj_size=4),
    "LSTM, no bias": recurrent(nn.LSTM, 9, 6, bias=False),
    "RNN": recurrent(nn.RNN, 9, 6),
    "RNN, relu": recurrent(nn.RNN, 9, 6, nonlinearity="relu"),
    "RNN, layers, bidirectional, no bias": recurrent(
        nn.RNN, 9, 6, names=both(*FIRST, *SECOND), num_layers=2, bidirectional=True, bias=False
    ),
}

CASES = {**LINEAR, **CONVOLUTIONS, **EMBEDDINGS, **NORMS, **ATTENTION, **RECURRENT}
