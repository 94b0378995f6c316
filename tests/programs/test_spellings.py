"""Every way to write down a product with a weight: its gradients are those of the loop, and are found factored."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from factored import B, Case, assert_found, assert_reductions, kinds, tokens
from torch import nn
from torch.nn import functional as F

from persample import Norm, stop_gradient

# torch.func.jvp itself is the first to call it
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

OUTER = {"w": "Outer"}
X, XS, V = (9,), (2, 9), (9, 7)  # a vector, a matrix of T=2 rows; a weight to multiply from the right
W = {"w": (7, 9)}  # 63 numbers, more than the T·(7 + 9) of its factors


def bent(y):
    """A loss whose gradient differs from sample to sample and from entry to entry."""
    return torch.sin(y).sum()


def product(fn, params=None, batch=(X,), kinds=OUTER):
    """A case of ``fn(w, x)`` bent to a loss, for the one parameter w."""
    return Case(lambda p, *xs: bent(fn(p["w"], *xs)), params or W, batch, kinds)


def loss(fn, params, batch=(X,), **kinds):
    """A case of ``fn(p, x)`` bent to a loss."""
    return Case(lambda p, *xs: bent(fn(p, *xs)), params, batch, kinds)


def tables(fn, *shape, kinds, rows=60, width=16):
    """A case of ``fn(w, tokens)`` for a table w, large enough to be left as zeros plus rows."""
    return Case(lambda p, t: bent(fn(p["w"], t)), {"w": (rows, width)}, (tokens(rows, *shape),), kinds)


MULTIPLIED = {
    "F.linear vector": product(lambda w, x: F.linear(x, w)),
    "F.linear matrix": product(lambda w, x: F.linear(x, w), batch=(XS,)),
    "F.linear 3-D": product(lambda w, x: F.linear(x, w), batch=((2, 1, 9),)),
    "F.linear 4-D": product(lambda w, x: F.linear(x, w), batch=((1, 2, 1, 9),)),
    "F.linear vector, bias": loss(lambda p, x: F.linear(x, p["w"], p["b"]), {**W, "b": (7,)}, w="Outer"),
    "F.linear matrix, bias": loss(lambda p, x: F.linear(x, p["w"], p["b"]), {**W, "b": (7,)}, (XS,), w="Outer"),
    "F.linear 3-D, bias": loss(lambda p, x: F.linear(x, p["w"], p["b"]), {**W, "b": (7,)}, ((2, 1, 9),), w="Outer"),
    "F.linear of 1-D weight": product(lambda w, x: F.linear(x, w), {"w": (9,)}, (XS,), {}),
    "x @ W": product(lambda w, x: x @ w, {"w": V}),
    "X @ W": product(lambda w, x: x @ w, {"w": V}, (XS,)),
    "X.T @ W": product(lambda w, x: x.T @ w, {"w": V}, ((9, 2),)),
    "W @ x": product(lambda w, x: w @ x),
    "W @ X": product(lambda w, x: w @ x, batch=((9, 2),)),
    "W @ X.T": product(lambda w, x: w @ x.T, batch=(XS,)),
    "W @ batch of matrices": product(lambda w, x: w @ x, batch=((2, 9, 1),)),
    "W in float64 @ x": product(lambda w, x: (w.double() @ x.double()).to(x)),
    "one row": product(lambda w, x: w @ x, {"w": (1, 9)}, kinds={}),
    "one column": product(lambda w, x: w @ x, {"w": (7, 1)}, ((1,),), kinds={}),
    "1 × 1": product(lambda w, x: w @ x, {"w": (1, 1)}, ((1, 2),), kinds={}),
    "x @ W.T": product(lambda w, x: x @ w.T),
    "X @ W.mT": product(lambda w, x: x @ w.mT, batch=(XS,)),
    "(W @ X).T": product(lambda w, x: (w @ x.T).T, batch=(XS,)),
    "x[None] @ W": product(lambda w, x: (x[None] @ w)[0], {"w": V}),
    "W @ x[:, None]": product(lambda w, x: (w @ x[:, None])[:, 0]),
    "matmul, 3-D inputs": product(torch.matmul, {"w": V}, ((2, 7, 3),), {}),
    "matmul, inputs broadcast": product(lambda w, x: torch.matmul(x, w), {"w": V}, ((2, 1, 9),)),
    "matmul, weights broadcast": product(torch.matmul, {"w": (3, 7, 9)}),
    "matmul, stacked weights": product(lambda w, x: x @ w, {"w": (3, 9, 7)}, ((3, 2, 9),)),
    "mm": product(lambda w, x: torch.mm(x, w), {"w": V}, (XS,)),
    "mv": product(torch.mv),
    "bmm": product(lambda w, x: torch.bmm(x, w), {"w": (3, 9, 7)}, ((3, 2, 9),)),
    "addmm": loss(lambda p, x: torch.addmm(p["b"], x, p["w"]), {"w": V, "b": (7,)}, (XS,), w="Outer"),
    "addmm, scaled": loss(
        lambda p, x: torch.addmm(p["b"], x, p["w"], beta=2, alpha=3), {"w": V, "b": (7,)}, (XS,), w="Outer"
    ),
    "addmv": loss(lambda p, x: torch.addmv(p["b"], p["w"], x), {**W, "b": (7,)}, w="Outer"),
    "addr": loss(lambda p, x: torch.addr(p["w"], x[:7], x) @ x, W, w="Outer"),
    "baddbmm": loss(
        lambda p, x: torch.baddbmm(p["b"], x, p["w"]), {"w": (3, 9, 7), "b": (3, 1, 7)}, ((3, 2, 9),), w="Outer"
    ),
    "addbmm": loss(
        lambda p, x: torch.addbmm(p["b"], x, p["w"]), {"w": (3, 9, 7), "b": (2, 7)}, ((3, 2, 9),), w="Outer"
    ),
    "outer": product(torch.outer, {"w": (7,)}, kinds={}),
    "dot": product(torch.dot, {"w": (9,)}, kinds={}),
    "vector @ X": product(torch.matmul, {"w": (9,)}, ((9, 2),), {}),
    "inner": product(lambda w, x: torch.inner(x, w), batch=(XS,)),
    "tensordot": product(lambda w, x: torch.tensordot(x, w, dims=([1], [1])), batch=(XS,)),
    "tensordot over two axes": product(torch.tensordot, {"w": (8, 3, 3)}, ((3, 3),)),
    "multi_dot": loss(
        lambda p, x: torch.linalg.multi_dot([x, p["v"], p["w"]]), {"v": (9, 8), "w": (8, 7)}, v="Outer", w="Outer"
    ),
    "kron": product(lambda w, x: torch.kron(w, x[:2]), kinds={}),
    "einsum td,do->to": product(lambda w, x: torch.einsum("td,do->to", x, w), {"w": V}, (XS,)),
    "einsum td,hdk->htk": product(lambda w, x: torch.einsum("td,hdk->htk", x, w), {"w": (3, 9, 7)}, (XS,)),
    "einsum htd,hdk->htk": product(lambda w, x: torch.einsum("htd,hdk->htk", x, w), {"w": (3, 9, 7)}, ((3, 2, 9),)),
    "einsum htk,hkd->td": product(lambda w, x: torch.einsum("htk,hkd->td", x, w), {"w": (3, 9, 7)}, ((3, 2, 9),)),
    "einsum ij,j->i": product(lambda w, x: torch.einsum("ij,j->i", w, x)),
    "einsum j,ij->i": product(lambda w, x: torch.einsum("j,ij->i", x, w)),
    "einsum ...d,od->...o": product(lambda w, x: torch.einsum("...d,od->...o", x, w), batch=((2, 1, 9),)),
    "einsum i,ij,j->": product(lambda w, x, y: torch.einsum("i,ij,j->", x, w, y), batch=((7,), X)),
    "einsum i,oij,j->o": product(lambda w, x, y: torch.einsum("i,oij,j->o", x, w, y), {"w": (4, 7, 9)}, ((7,), X)),
    "einsum ij,ij->": product(lambda w, x: torch.einsum("ij,ij->", w, x), batch=((7, 9),)),
    "einsum of experts": loss(
        lambda p, x: torch.einsum("e,eoi,i->o", torch.softmax(p["gate"] @ x, 0), p["w"], x),
        {"w": (3, 7, 9), "gate": (3, 9)},
        w="Outer",
        gate="Outer",
    ),
    "bilinear form": product(lambda w, x, y: x @ w @ y, batch=((7,), X)),
    "W @ (W @ x)": product(lambda w, x: w @ torch.tanh(w @ x), {"w": (9, 9)}),
    "learned queries": loss(
        lambda p, x: torch.softmax(p["q"] @ x.T, -1) @ x @ p["v"], {"q": (8, 9), "v": V}, (XS,), q="Outer"
    ),
    "one-hot @ W": product(lambda w, t: (t[:, None] == torch.arange(9)).to(w) @ w, {"w": V}, (tokens(9, 2),)),
    "cat of x and 1": product(lambda w, x: w @ torch.cat([x, x.new_ones(1)]), {"w": (7, 10)}),
    "F.bilinear": product(lambda w, x, y: F.bilinear(x, y, w), {"w": (4, 7, 9)}, ((7,), X)),
    "F.bilinear, T=2, bias": loss(
        lambda p, x, y: F.bilinear(x, y, p["w"], p["b"]), {"w": (4, 7, 9), "b": (4,)}, ((2, 7), XS), w="Outer"
    ),
    "F.conv1d": product(lambda w, x: F.conv1d(x, w), {"w": (8, 4, 3)}, ((4, 4),), {"w": "Conv"}),
    "F.conv2d": product(lambda w, x: F.conv2d(x, w), {"w": (8, 4, 3, 3)}, ((4, 4, 4),), {"w": "Conv"}),
    "F.conv2d by unfold": product(
        lambda w, x: w.flatten(1) @ F.unfold(x[None], 3)[0], {"w": (8, 4, 3, 3)}, ((4, 4, 4),)
    ),
    "F.conv_transpose1d": product(lambda w, x: F.conv_transpose1d(x, w), {"w": (4, 8, 3)}, ((4, 2),), {"w": "Conv"}),
}


def two_layers(theta, x):
    w, b, v = theta.split([63, 7, 56])
    return v.view(8, 7) @ torch.tanh(w.view(7, 9) @ x + b)


CHANGED = {
    "transposed": product(lambda w, x: x @ w.t()),
    "transposed twice": product(lambda w, x: w.T.contiguous().T @ x),
    "sliced": product(lambda w, x: w[2:] @ x),
    "sliced columns": product(lambda w, x: w[:, 1:] @ x[1:]),
    "sliced with step": product(lambda w, x: w[::2] @ x),
    "even and odd columns": product(lambda w, x: w[:, ::2] @ x[::2] * (w[:, 1::2] @ x[1::2])),
    "narrow": product(lambda w, x: w.narrow(0, 1, 5) @ x),
    "selected": product(lambda w, x: w[1] @ x, {"w": (3, 7, 9)}),
    "selected, negative": product(lambda w, x: w[:, -1] @ x, {"w": (7, 3, 9)}),
    "selected twice": product(lambda w, x: w[0] @ torch.tanh(w[1] @ x), {"w": (2, 9, 9)}),
    "w[None]": product(lambda w, x: w[None] @ x),
    "w[..., 0]": product(lambda w, x: w[..., 0] @ x, {"w": (7, 9, 2)}),
    "unbind": product(lambda w, x: sum(torch.tanh(u @ x) for u in w.unbind()), {"w": (3, 7, 9)}),
    "unbind, one used": product(lambda w, x: w.unbind()[1] @ x, {"w": (3, 35, 9)}),
    "unbind, one used, small": product(lambda w, x: w.unbind()[1] @ x, {"w": (3, 7, 9)}),
    "loop over axis 0": product(lambda w, x: sum(torch.tanh(u @ x) for u in w), {"w": (3, 7, 9)}),
    "chunk": product(lambda w, x: torch.stack([torch.tanh(u @ x) for u in w.chunk(2)]), {"w": (8, 9)}),
    "chunk, one used": product(lambda w, x: w.chunk(2)[1] @ x, {"w": (100, 9)}),
    "split": product(lambda w, x: torch.cat([torch.tanh(u @ x) for u in w.split([2, 5])])),
    "split columns": product(lambda w, x: sum(torch.tanh(u @ x[: u.shape[1]]) for u in w.split([4, 5], 1))),
    "cat": loss(lambda p, x: torch.cat([p["v"], p["w"]]) @ x, {"v": (7, 9), "w": (8, 9)}, v="Outer", w="Outer"),
    "cat of columns": loss(
        lambda p, x: torch.cat([p["v"], p["w"]], 1) @ x, {"v": (7, 4), "w": (7, 5)}, v="Outer", w="Outer"
    ),
    "stack": loss(lambda p, x: torch.stack([p["v"], p["w"]]) @ x, {"v": (7, 9), "w": (7, 9)}, v="Outer", w="Outer"),
    "hstack": loss(lambda p, x: torch.hstack([p["v"], p["w"]]) @ x, {"v": (7, 4), "w": (7, 5)}, v="Outer", w="Outer"),
    "times a number": product(lambda w, x: (0.5 * w) @ x),
    "times a 0-d tensor": product(lambda w, x: (w * torch.tensor(3.0)) @ x),
    "times a number of the sample": product(lambda w, x: (w * x[0]) @ x),
    "divided": product(lambda w, x: (w / 3) @ x),
    "negated": product(lambda w, x: -w @ x),
    "product scaled": product(lambda w, x: (w @ x) * 9**-0.5),
    "rows scaled by the sample": product(lambda w, x: (w * x[:7, None]) @ x),
    "columns scaled by the sample": product(lambda w, x: (w * x) @ x),
    "rows scaled by constants": product(lambda w, x: (torch.arange(1.0, 8.0).to(w)[:, None] * w) @ x),
    "plus a constant": product(lambda w, x: (w + 1) @ x),
    "minus a constant": product(lambda w, x: (1 - w) @ x),
    "permuted": product(lambda w, x: w.permute(2, 0, 1) @ x, {"w": (7, 9, 2)}),
    "movedim": product(lambda w, x: w.movedim(0, -1) @ x, {"w": (9, 2, 7)}),
    "reshaped": product(lambda w, x: w.reshape(7, 9) @ x, {"w": (63,)}),
    "flattened": product(lambda w, x: w.flatten(1) @ x, {"w": (7, 3, 3)}),
    "unflattened": product(lambda w, x: w.unflatten(0, (3, 7)) @ x, {"w": (21, 9)}),
    "squeezed": product(lambda w, x: w.squeeze(1) @ x, {"w": (7, 1, 9)}),
    "clone": product(lambda w, x: w.clone() @ x),
    "contiguous": product(lambda w, x: w.T.contiguous() @ x, {"w": V}),
    "detached and attached": product(lambda w, x: w @ x + w.detach() @ x),
    "flipped": product(lambda w, x: w.flip(0) @ x, kinds={}),
    "rolled": product(lambda w, x: w.roll(1, 0) @ x, kinds={}),
    "expanded": product(lambda w, x: w.expand(7, 9) @ x, {"w": (1, 9)}, kinds={}),
    "repeated": product(lambda w, x: w.repeat(2, 1) @ x, kinds={}),
    "padded": product(lambda w, x: F.pad(w, (1, 2)) @ torch.cat([x, x[:3]]), kinds={}),
    "diagonal": product(lambda w, x: w.diagonal() @ x[:7], kinds={}),
    "as_strided": product(lambda w, x: w.as_strided((8, 7), (7, 1), 3) @ x[:7], kinds={}),
    "viewed across": product(lambda w, x: w.view(9, 7) @ x[:7]),
    "copied across": product(lambda w, x: w.T.reshape(7, 9) @ x, kinds={}),
    "masked": product(lambda w, x: (w * torch.ones_like(w).tril()) @ x, kinds={}),
    "tril": product(lambda w, x: w.tril() @ x, kinds={}),
    "normalized": product(lambda w, x: F.normalize(w, dim=1) @ x, kinds={}),
    "weight_norm": loss(lambda p, x: (p["g"] * p["w"] / p["w"].norm(dim=1, keepdim=True)) @ x, {**W, "g": (7, 1)}),
    "exp": product(lambda w, x: w.exp() @ x, kinds={}),
    "complex": product(
        lambda w, x: (w @ x.to(w)).abs(), {"w": lambda: torch.randn(7, 9, dtype=torch.complex128)}, kinds={}
    ),
    "flat vector of all": Case(
        lambda p, x: bent(torch.tanh(x @ p["w"][:63].view(9, 7)) @ p["w"][63:119].view(7, 8)), {"w": (119,)}
    ),
    "flat vector, split": product(two_layers, {"w": (126,)}, kinds={}),
    "layers in one tensor": product(
        lambda w, x: torch.tanh(w[2] @ torch.tanh(w[1] @ torch.tanh(w[0] @ x))), {"w": (3, 9, 9)}
    ),
    "layers in one tensor, reversed": product(lambda w, x: torch.tanh(w[-3] @ torch.tanh(w[-2] @ x)), {"w": (3, 9, 9)}),
    "layer of the sample": product(lambda w, x, k: w[k] @ x, {"w": (16, 7, 9)}, (X, tokens(2)), {"w": "Embedding"}),
    "rows by a list": product(lambda w, x: w[[0, 2, 2]] @ x, kinds={}),
    "conv kernel scaled": product(lambda w, x: F.conv2d(x, w * 0.5), {"w": (8, 4, 3, 3)}, ((4, 4, 4),), {"w": "Conv"}),
    "conv kernel negated": product(lambda w, x: F.conv1d(x, -w), {"w": (8, 4, 3)}, ((4, 4),), {"w": "Conv"}),
    "conv kernel reshaped": product(lambda w, x: F.conv1d(x, w.unsqueeze(-1)), {"w": (8, 9)}, ((9, 2),)),
    "conv kernel sliced": product(lambda w, x: F.conv1d(x, w[1:]), {"w": (8, 4, 3)}, ((4, 4),), {}),
    "conv kernel standardized": product(
        lambda w, x: F.conv1d(x, w - w.mean((1, 2), keepdim=True)), {"w": (8, 4, 3)}, ((4, 4),), {}
    ),
}

LOOKED_UP = {
    "F.embedding": tables(lambda w, t: F.embedding(t, w), 3, kinds={"w": "Embedding"}),
    "F.embedding of one token": tables(lambda w, t: F.embedding(t, w), kinds={"w": "Embedding"}),
    "F.embedding of a matrix": tables(lambda w, t: F.embedding(t, w), 2, 2, kinds={"w": "Embedding"}),
    "repeated tokens": tables(
        lambda w, t: F.embedding(t % 2, w) * torch.arange(1.0, 5.0).to(w)[:, None], 4, kinds={"w": "Embedding"}
    ),
    "padding_idx": tables(lambda w, t: F.embedding(t % 3, w, padding_idx=1), 4, kinds={"w": "Embedding"}),
    "padding_idx=-1": tables(lambda w, t: F.embedding(59 - t % 3, w, padding_idx=-1), 4, kinds={"w": "Embedding"}),
    "padding_idx=0": tables(lambda w, t: F.embedding(t % 3, w, padding_idx=0), 4, kinds={"w": "Embedding"}),
    "scale_grad_by_freq": tables(
        lambda w, t: F.embedding(t % 3, w, scale_grad_by_freq=True), 4, kinds={"w": "Embedding"}
    ),
    "padding_idx, scale_grad_by_freq": tables(
        lambda w, t: F.embedding(t % 3, w, padding_idx=2, scale_grad_by_freq=True), 5, kinds={"w": "Embedding"}
    ),
    "nn.Embedding": Case(
        lambda model, t: bent(model(t)), lambda: nn.Embedding(60, 16), (tokens(60, 3),), {"weight": "Embedding"}
    ),
    "W[tokens]": tables(lambda w, t: w[t], 3, kinds={"w": "Embedding"}),
    "W[one token]": tables(lambda w, t: w[t], kinds={"w": "Embedding"}),
    "W[matrix of tokens]": tables(lambda w, t: w[t], 2, 2, kinds={"w": "Embedding"}),
    "W[tokens], negative": tables(lambda w, t: w[t - 60], 3, kinds={"w": "Embedding"}),
    "W[tokens], 3-D table": product(lambda w, t: w[t], {"w": (60, 4, 4)}, (tokens(60, 3),), {"w": "Embedding"}),
    "W[:, tokens]": tables(lambda w, t: w[:, t % 16], 1, kinds={}),
    "W[tokens, tokens]": tables(lambda w, t: w[t, t % 16], 3, kinds={}),
    "index_select": tables(lambda w, t: w.index_select(0, t), 3, kinds={"w": "Embedding"}),
    "gather": tables(lambda w, t: w.gather(0, t[:, None].expand(3, 16)), 3, kinds={}),
    "take_along_dim": tables(lambda w, t: w.take_along_dim(t[:, None], 0), 3, kinds={}),
    "unbatched arange": loss(
        lambda p, x: (x + F.embedding(torch.arange(2), p["pos"])) @ p["w"],
        {"pos": (60, 9), "w": V},
        (XS,),
        pos="Embedding",
        w="Outer",
    ),
    "positions sliced": loss(lambda p, x: (x + p["pos"][:2]) @ p["w"], {"pos": (60, 9), "w": V}, (XS,), w="Outer"),
    "embedding scaled": tables(lambda w, t: F.embedding(t, w) * 4, 3, kinds={"w": "Embedding"}),
    "table scaled": tables(lambda w, t: F.embedding(t, w * 4), 3, kinds={"w": "Embedding"}),
    "table transposed": Case(lambda p, t: bent(F.embedding(t, p["w"].T)), {"w": (16, 60)}, (tokens(60, 3),), {}),
    "table sliced": tables(lambda w, t: F.embedding(t % 50, w[10:]), 3, kinds={}),
    "table of two": loss(
        lambda p, t: F.embedding(t, torch.cat([p["v"], p["w"]])), {"v": (30, 16), "w": (30, 16)}, (tokens(60, 3),)
    ),
    "some columns of the rows": tables(lambda w, t: w[t][:, ::2], 3, kinds={"w": "Embedding"}),
    "small table": tables(lambda w, t: F.embedding(t, w), 2, kinds={"w": "Embedding"}, rows=8, width=4),
    "F.embedding_bag": tables(lambda w, t: F.embedding_bag(t[None], w, mode="sum"), 3, kinds={"w": "Embedding"}),
    "F.embedding_bag, mean": tables(lambda w, t: F.embedding_bag(t[None], w, mode="mean"), 3, kinds={"w": "Embedding"}),
}


def recurrent(p, xs):
    h = xs.new_zeros(8)
    for x in xs:
        h = torch.tanh(p["w"] @ x + p["u"] @ h + p["b"])
    return h


def gated(p, xs):
    h = xs.new_zeros(6)
    for x in xs:
        reset, update, new = (p["w"] @ x + p["u"] @ h).chunk(3)
        h = torch.lerp(torch.tanh(new * torch.sigmoid(reset)), h, torch.sigmoid(update))
    return h


def attention(p, x):
    q, k, v = (x @ p["qkv"]).unflatten(-1, (3, 2, 4)).permute(1, 2, 0, 3)
    weights = torch.softmax((q @ k.mT / 2).masked_fill(torch.ones(2, 2).triu(1).bool(), -torch.inf), -1)
    return (weights @ v).transpose(0, 1).flatten(1) @ p["out"]


def fused_attention(**options):
    def fn(p, x):
        q, k, v = (x @ p["qkv"]).unflatten(-1, (3, 2, 4)).permute(1, 2, 0, 3)
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(0, 1).flatten(1) @ p["out"]

    return loss(fn, {"qkv": (8, 24), "out": (8, 8)}, ((2, 8),), qkv="Outer", out="Outer")


def penalty(p, x):
    slope = torch.func.grad(lambda x: bent(p["v"] @ torch.tanh(p["w"] @ x)))(x)
    return p["v"] @ torch.tanh(p["w"] @ x) + slope.norm()


def adapted(p, x):
    inner = torch.func.grad(lambda w: bent(w @ x))(p["w"])
    return (p["w"] - 0.1 * inner) @ torch.tanh(x)


def buffer_written(w, xs):
    out = xs.new_zeros(2, 7)
    for step, x in enumerate(xs):
        out[step] = w @ x
    return out


def input_overwritten(w, x):
    seen = x.clone()
    y = w @ (seen * 1)
    seen.zero_()
    return y + seen[:7]


LORA = {"base": (7, 9), "up": (7, 2), "down": (2, 9)}
LORA_KINDS = {"base": "Outer", "up": "Outer", "down": "Outer"}
FROZEN = torch.randn(7, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

REUSED = {
    "used twice": product(lambda w, x, y: w @ x * (w @ y), batch=(X, X)),
    "W and W.T": product(lambda w, x: torch.tanh(x @ w.T) @ w),
    "W and W.T, square": product(lambda w, x: torch.tanh(x @ w.T) @ w, {"w": (9, 9)}),
    "W @ W @ x": product(lambda w, x: (w @ w) @ x, {"w": (9, 9)}),
    "W and a slice of W": product(lambda w, x: (w @ x)[:3] * torch.tanh(w[:3] @ x)),
    "product and elementwise": product(lambda w, x: w @ x + w.sum(1), kinds={}),
    "weight decay": product(lambda w, x: torch.cat([w @ x, w.flatten()]), kinds={}),
    "times another parameter": loss(lambda p, x: (p["w"] * p["s"]) @ x, {**W, "s": (7, 1)}),
    "over time": loss(recurrent, {"w": (8, 9), "u": (8, 8), "b": (8,)}, (XS,), w="Outer", u="Outer"),
    "GRU by hand": loss(gated, {"w": (18, 9), "u": (18, 6)}, (XS,), w="Outer", u="Outer"),
    "attention": loss(attention, {"qkv": (8, 24), "out": (8, 8)}, ((2, 8),), qkv="Outer", out="Outer"),
    "tied, F.linear": tables(
        lambda w, t: F.linear(torch.tanh(F.embedding(t, w)), w), 3, kinds={"w": "Embedding+Outer"}
    ),
    "tied, head transposed": tables(
        lambda w, t: torch.tanh(F.embedding(t, w)) @ w.T, 3, kinds={"w": "Embedding+Outer"}
    ),
    "tied, W[tokens]": tables(lambda w, t: torch.tanh(w[t]) @ w.T, 3, kinds={"w": "Embedding+Outer"}),
    "tied, two lookups": tables(
        lambda w, t: F.embedding(t, w) * F.embedding(t.flip(0), w).exp(), 3, kinds={"w": "Embedding"}
    ),
    "tied, padding_idx": tables(
        lambda w, t: F.linear(torch.tanh(F.embedding(t % 3, w, padding_idx=2)), w), 3, kinds={"w": "Embedding+Outer"}
    ),
    "tied, head of some rows": tables(
        lambda w, t: torch.tanh(F.embedding(t, w)) @ w[:50].T, 3, kinds={"w": "Embedding+Outer"}
    ),
    "tied, table and products scaled": tables(
        lambda w, t: torch.tanh(F.embedding(t, w) * 4) @ (w / 2).T, 3, kinds={"w": "Embedding+Outer"}
    ),
    "tokens and positions": loss(
        lambda p, t: torch.tanh(F.embedding(t, p["w"]) + F.embedding(torch.arange(3), p["pos"])) @ p["w"].T,
        {"w": (60, 16), "pos": (60, 16)},
        (tokens(60, 3),),
        w="Embedding+Outer",
        pos="Embedding",
    ),
    "conv on equal sizes": product(
        lambda w, x: F.conv1d(x, w) + F.conv1d(x.flip(1), w).tanh(), {"w": (8, 9, 3)}, ((9, 4),), {"w": "Conv"}
    ),
    "conv on unequal sizes": product(
        lambda w, x: F.conv1d(x, w).sum() + F.conv1d(x[:, :3], w).tanh(), {"w": (8, 9, 3)}, ((9, 4),)
    ),
    "conv of two strides": product(
        lambda w, x: F.conv1d(x, w).sum() + F.conv1d(x, w, stride=2).tanh(), {"w": (8, 9, 3)}, ((9, 4),)
    ),
    "kernel as a matrix, too": product(
        lambda w, x: F.conv1d(x, w)[:, 0] + w.flatten(1) @ x.flatten()[:27].tanh(),
        {"w": (8, 9, 3)},
        ((9, 4),),
        {"w": "Conv+Outer"},
    ),
    "LoRA, W + B A": loss(lambda p, x: F.linear(x, p["base"] + p["up"] @ p["down"]), LORA, **LORA_KINDS),
    "LoRA, frozen + B A / 2": loss(
        lambda p, x: F.linear(x, FROZEN.to(x) + p["up"] @ p["down"] / 2),
        {"up": (7, 2), "down": (2, 9)},
        up="Outer",
        down="Outer",
    ),
    "LoRA, B(A(x))": loss(
        lambda p, x: F.linear(x, FROZEN.to(x)) + 2 * F.linear(F.linear(x, p["down"]), p["up"]),
        {"up": (7, 2), "down": (2, 9)},
        up="Outer",
        down="Outer",
    ),
    "constant @ W": product(lambda w, x: (FROZEN[:, :8].to(w) @ w) @ x, {"w": (8, 9)}),
    "W @ constant": product(lambda w, x: (w @ FROZEN.to(w)) @ x, {"w": (8, 7)}),
    "hypernetwork": loss(lambda p, x, z: (p["w"] @ z).view(7, 9) @ x, {"w": (63, 4)}, (X, (4,)), w="Outer"),
    "where of two products": loss(
        lambda p, x: torch.where(x[0] > 0, p["w"] @ x, p["v"] @ x), {**W, "v": (7, 9)}, w="Outer", v="Outer"
    ),
    "constant signal": Case(lambda p, x: (p["w"] @ x).sum(), W, (X,), OUTER),
    "constant input": loss(lambda p, x: (p["w"] @ torch.ones(9).to(x)) * x[:7], W, w="Outer"),
    "constant input, T=2": loss(lambda p, x: (p["w"] @ torch.ones(9, 2).to(x)) * x, W, ((7, 2),), w="Outer"),
    "constant product": loss(
        lambda p, x: torch.sum(p["v"] @ torch.ones(9).to(x)) + p["w"] @ x, {**W, "v": (7, 9)}, w="Outer", v="Outer"
    ),
    "sizes like B": product(lambda w, x: w @ x, {"w": (B, B)}, ((B,),)),
    "sizes like B, T=B": product(lambda w, x: x @ w, {"w": (B, B)}, ((B, B),), {}),
    "unbatched product of size B": loss(
        lambda p, x: (p["w"] @ p["v"]) @ x, {"w": (B, 9), "v": (9, B)}, ((B,),), w="Outer", v="Outer"
    ),
    "stop-gradients": product(lambda w, x: stop_gradient(w @ x) * torch.tanh(w @ x)),
    "stop-gradient of the weight": product(lambda w, x: stop_gradient(w) @ x + torch.tanh(w @ x)),
    "inner grad": loss(penalty, {**W, "v": (8, 7)}, w="Outer", v="Outer"),
    "inner grad by a weight": loss(adapted, W, w="Outer"),
    "inner jvp": product(lambda w, x: torch.func.jvp(lambda x: torch.tanh(w @ x), (x,), (x,))[1]),
    "inner jacrev": product(lambda w, x: torch.func.jacrev(lambda x: torch.tanh(w @ x))(x[:9]), kinds={}),
    "inner vmap": product(lambda w, x: torch.func.vmap(lambda row: w @ row)(x), batch=(XS,)),
    "inner vmap over weights": product(lambda w, x: torch.func.vmap(lambda u: u @ x)(w), {"w": (3, 7, 9)}),
    "in place on a product": product(lambda w, x: (w @ x).mul_(2).relu_()),
    "in place on a part": product(lambda w, x: torch.index_fill(w @ x, 0, torch.tensor([0]), 0).add_(1)),
    "written into a buffer": product(buffer_written, batch=(XS,)),
    "input overwritten": product(input_overwritten),
    "weight copied and overwritten": product(lambda w, x: w.clone().mul_(2).add_(1) @ x),
    "unused": loss(lambda p, x: p["w"] @ x, {**W, "v": (7, 9)}, w="Outer"),
    "unused, large": loss(lambda p, x: p["w"] @ x, {**W, "v": (55, 60)}, w="Outer"),
    "used times zero": loss(lambda p, x: p["w"] @ x + 0 * (p["v"] @ x), {**W, "v": (7, 9)}, w="Outer", v="Outer"),
    "masked softmax": product(lambda w, x: torch.softmax((w @ x).masked_fill(x[:7] < 0, -torch.inf), 0).nan_to_num()),
    "SDPA": fused_attention(),
    "SDPA, causal": fused_attention(is_causal=True),
    "SDPA, mask": fused_attention(attn_mask=torch.tensor([[True, False], [True, True]])),
    "SDPA, scale": fused_attention(scale=0.3),
}

CASES = {**MULTIPLIED, **CHANGED, **LOOKED_UP, **REUSED}
# Right, and written out: what is no layer, is computed of a parameter by more than a view, or has one input for all.
WRITTEN_OUT = {
    *("matmul, weights broadcast", "matmul, stacked weights", "bmm", "addmm, scaled", "addr", "baddbmm", "addbmm"),
    *("tensordot", "tensordot over two axes", "multi_dot", "einsum td,hdk->htk", "einsum htd,hdk->htk"),
    *("einsum htk,hkd->td", "einsum i,ij,j->", "einsum i,oij,j->o", "einsum ij,ij->", "F.bilinear"),
    *("F.bilinear, T=2, bias", "transposed twice", "sliced with step", "even and odd columns", "w[None]", "w[..., 0]"),
    *("cat", "cat of columns", "stack", "hstack"),
    *("times a number of the sample", "rows scaled by the sample", "columns scaled by the sample", "minus a constant"),
    *("rows scaled by constants", "permuted", "movedim", "reshaped", "unflattened", "clone"),
    *("contiguous", "layer of the sample", "conv kernel scaled", "conv kernel negated", "conv kernel reshaped"),
    *("scale_grad_by_freq", "padding_idx, scale_grad_by_freq", "W[tokens], 3-D table", "table scaled"),
    *("constant input", "constant input, T=2", "inner grad", "inner grad by a weight", "inner jvp"),
    *("inner vmap over weights", "weight copied and overwritten"),
}
CASES |= {name: replace(CASES[name], kinds={}) for name in WRITTEN_OUT}
CASES |= {
    "einsum of experts": replace(CASES["einsum of experts"], kinds={"gate": "Outer"}),
    "constant product": replace(CASES["constant product"], kinds={"w": "Outer"}),
    "one row": replace(CASES["one row"], kinds={"w": "Outer"}),
    "one column": replace(CASES["one column"], kinds={"w": "Outer"}),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


@every_case
def test_equals_the_loop(case):
    assert_reductions(case)


@every_case
def test_is_found(case):
    """Where nothing but the size decides: for plain sums, and for one's own contractions."""
    assert_found(case)


@every_case
def test_float32(case):
    assert_reductions(case, torch.float32, together=("Sum", "Norm", "ClippedMean", "Gram", "Project"), alone=())


# So many steps that the product is the smaller form: it is found just as well, and written out for norms.
LONG = {
    "F.linear": product(lambda w, x: F.linear(x, w), batch=((40, 9),)),
    "X @ W": product(lambda w, x: x @ w, {"w": V}, ((40, 9),)),
    "einsum": product(lambda w, x: torch.einsum("htd,hdk->htk", x, w), {"w": (3, 9, 7)}, ((3, 40, 9),), {}),
    "LoRA": loss(lambda p, x: F.linear(x, p["base"] + p["up"] @ p["down"]), LORA, ((40, 9),), **LORA_KINDS),
    "over time": loss(recurrent, {"w": (8, 9), "u": (8, 8), "b": (8,)}, ((10, 9),), w="Outer", u="Outer"),
    "cut in two": product(lambda w, x: torch.cat([torch.tanh(x @ u.T) for u in w.split([2, 5])], 1), batch=((40, 9),)),
    "F.conv2d": product(lambda w, x: F.conv2d(x, w), {"w": (3, 2, 3, 3)}, ((2, 12, 12),), {"w": "Conv"}),
    "F.embedding": tables(lambda w, t: F.embedding(t, w), 40, rows=20, width=41, kinds={"w": "Embedding"}),
    "tied": tables(
        lambda w, t: torch.tanh(F.embedding(t, w)) @ w.T, 40, rows=20, width=41, kinds={"w": "Embedding+Outer"}
    ),
}


@pytest.mark.parametrize("case", LONG.values(), ids=list(LONG))
def test_long_sums(case):
    assert_reductions(case)
    loss_fn, params, batch = case.build()
    assert kinds(loss_fn, params, batch) == case.kinds
    assert kinds(loss_fn, params, batch, Norm()) == {}
