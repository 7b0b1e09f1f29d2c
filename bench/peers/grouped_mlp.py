"""The experts of a mixture-of-experts layer, forward and backward, in BF16 and in emulated NVFP4.

    c = x @ W1[e].T,  h = bf16(act(c) * prob),  y = h @ W2[e].T        rows of expert e, all gradients

BF16 is what one trains with today: a grouped matrix product where the device has one, else a product an expert, and
autograd. The emulation quantizes every operand to NVFP4 as moe4 does (weights in 16x16 tiles; x and h to nearest, dy
and dc at random; operands of dW after the random Hadamard transform), dequantizes to BF16, and multiplies in BF16:
what one writes to study 4-bit training without 4-bit hardware. Both are timed eager and compiled. BF16 is also timed
forward alone, without gradients.
"""

import torch

import common
from common import Layout, check, measure, normal, relative
from quantize import (
    by_expert,
    dequantize,
    encode_scale,
    group_amax,
    hadamard,
    nearest_compared,
    nearest_searched,
    quantize_blocks,
    quantize_weights,
    stochastic,
    transform,
)

grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


class Products:
    """Products of each expert's rows: grouped on a GPU, expert by expert elsewhere."""

    def __init__(self, splits, offsets, device):
        self.splits, self.offsets = splits, offsets
        self.grouped = device == "cuda" and grouped_mm is not None
        self.name = "grouped_mm" if self.grouped else "loop"

    def rows(self, a, w):
        """[T, k] times [E, n, k] transposed: [T, n]."""
        if self.grouped:
            return grouped_mm(a, w.transpose(1, 2), offs=self.offsets)
        return torch.cat([part @ weight.t() for part, weight in zip(a.split(self.splits), w, strict=True)])

    def contract(self, a, b):
        """[T, n] transposed times [T, k], expert by expert: [E, n, k]."""
        if self.grouped:
            return grouped_mm(a.t(), b, offs=self.offsets)
        parts = zip(a.split(self.splits), b.split(self.splits), strict=True)
        return torch.stack([left.t() @ right for left, right in parts])


def activate(c, activation):
    """FP32 value of the activation; gate rows come first."""
    if activation == "srelu":
        return torch.relu(c.float()).square()
    gate, up = c.float().chunk(2, 1)
    return torch.nn.functional.silu(gate) * up


def activation_backward(c, da, activation):
    """Gradient of `activate`, FP32."""
    if activation == "srelu":
        return 2 * torch.relu(c.float()) * da
    gate, up = c.float().chunk(2, 1)
    s = torch.sigmoid(gate)
    return torch.cat([da * up * s * (1 + gate * (1 - s)), da * gate * s], 1)


def bf16_forward(shape, products):
    """From x to y."""

    def forward(x, w1, w2, prob):
        h = (activate(products.rows(x, w1), shape.activation) * prob.unsqueeze(1)).to(x.dtype)
        return products.rows(h, w2)

    return forward


def bf16_step(shape, products):
    """Forward and backward by autograd."""
    forward = bf16_forward(shape, products)

    def step(x, w1, w2, prob, dy):
        leaves = [tensor.detach().requires_grad_() for tensor in (x, w1, w2, prob)]
        x, w1, w2, prob = leaves
        y = forward(x, w1, w2, prob)
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    return step


def compiled_bf16_step(shape, products):
    """The forward compiled, and with it its backward."""
    fused = common.compiled(bf16_forward(shape, products))

    def step(x, w1, w2, prob, dy):
        leaves = [tensor.detach().requires_grad_() for tensor in (x, w1, w2, prob)]
        y = fused(*leaves)
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    return step


def inference(forward):
    """The forward alone, on the inputs of a step."""

    def work(x, w1, w2, prob, _):
        with torch.no_grad():
            return (forward(x, w1, w2, prob),)

    return work


class Emulation:
    """Tensors as NVFP4 would hold them, in BF16."""

    def __init__(self, shape, layout, device, nearest):
        self.experts, self.layout, self.nearest = shape.experts, layout, nearest
        self.matrix = hadamard(device)

    def row(self, x, rounding):
        s_enc = encode_scale(group_amax(x, self.layout, self.experts))[self.layout.expert_of_row].unsqueeze(1)
        return dequantize(*quantize_blocks(x, s_enc, rounding), s_enc).bfloat16()

    def column(self, x, rounding):
        """[Tp, cols] after the transform, which cancels in the product of two such operands."""
        tiles = transform(self.layout.pad(x), self.matrix)
        expert = self.layout.expert_of_tile
        s_enc = encode_scale(by_expert(tiles.abs().amax((1, 2)), expert, self.experts))[expert].unsqueeze(0)
        columns = tiles.view(-1, x.shape[1]).t().contiguous()
        return dequantize(*quantize_blocks(columns, s_enc, rounding), s_enc).bfloat16().t().contiguous()

    def weight(self, w):
        s_enc = encode_scale(w.abs().amax((1, 2)).float())[:, None, None]
        return dequantize(*quantize_weights(w, self.nearest), s_enc).bfloat16()


def emulated_step(shape, layout, products, padded_products, device, nearest):
    """Forward and backward written out, weights quantized in the step."""
    nvfp4 = Emulation(shape, layout, device, nearest)

    def step(x, w1, w2, prob, dy):
        w1, w2 = nvfp4.weight(w1), nvfp4.weight(w2)
        c = products.rows(nvfp4.row(x, nearest), w1)
        act = activate(c, shape.activation)
        h = (act * prob.unsqueeze(1)).bfloat16()
        y = products.rows(nvfp4.row(h, nearest), w2)

        dh = products.rows(nvfp4.row(dy, stochastic), w2.transpose(1, 2)).float()
        dprob = (act * dh).sum(1)
        dc = activation_backward(c, dh * prob.unsqueeze(1), shape.activation).bfloat16()
        dx = products.rows(nvfp4.row(dc, stochastic), w1.transpose(1, 2))
        dw2 = padded_products.contract(nvfp4.column(dy, stochastic), nvfp4.column(h, nearest))
        dw1 = padded_products.contract(nvfp4.column(dc, stochastic), nvfp4.column(x, nearest))
        return y, dx, dw1, dw2, dprob

    return step


def inputs(shape, device):
    experts, hidden, ffn = shape.experts, shape.hidden, shape.ffn
    return (
        normal(shape.rows, hidden, device=device),
        normal(experts, shape.fc1_rows, hidden, device=device, scale=hidden**-0.5),
        normal(experts, hidden, ffn, device=device, scale=ffn**-0.5),
        torch.rand(shape.rows, device=device) * 0.5 + 0.25,
        normal(shape.rows, hidden, device=device),
    )


RESULTS = ["y", "dx", "dw1", "dw2", "dprob"]
ROWS = ["step_bf16", "step_nvfp4", "forward_bf16", "forward_nvfp4"]


def peers(shape, device):
    """Name, the rows it is compared with, and how to make its step."""
    layout = Layout(shape, device)
    products = Products(layout.splits, layout.offsets, device)
    padded = Products(layout.padded_splits, layout.padded_offsets, device)

    def emulated(nearest):
        return emulated_step(shape, layout, products, padded, device, nearest)

    eager, fused = (f"PyTorch BF16 {products.name}, {how}" for how in ("eager", "compiled"))
    step, forward = ROWS[:2], ROWS[2:]
    plain = bf16_forward(shape, products)
    return [
        (eager, step, lambda: bf16_step(shape, products)),
        (fused, step, lambda: compiled_bf16_step(shape, products)),
        ("PyTorch NVFP4 emulation, eager", step[1:], lambda: emulated(nearest_searched)),
        ("PyTorch NVFP4 emulation, compiled", step[1:], lambda: common.compiled(emulated(nearest_compared))),
        (eager, forward, lambda: inference(plain)),
        (fused, forward, lambda: inference(common.compiled(plain))),
    ]


def self_check(device, no_compiler):
    """BF16 against FP32 expert by expert; the emulation near it, but not on it. Of each peer None, or why it fails."""
    shape = common.SMALL
    torch.manual_seed(common.SEED)
    given = inputs(shape, device)
    loop = Products(shape.splits, None, "cpu")
    exact = bf16_step(shape, loop)(*(tensor.float() for tensor in given))

    def check_peer(peer, make):
        results = make()(*given)
        check(len(results) in (1, len(RESULTS)), f"{len(results)} results")
        for name, result, expected in zip(RESULTS, results, exact, strict=False):
            distance = relative(result, expected)
            low, high = (0.02, 0.35) if "NVFP4" in peer else (0.0, 0.02)
            check(low <= distance <= high, f"{name} is off by {distance:.3f}, expected {low} to {high}")

    def why_wrong(peer, make):
        if "compiled" in peer and no_compiler:
            return no_compiler
        return common.why_wrong(lambda: check_peer(peer, make))

    return [why_wrong(peer, make) for peer, _, make in peers(shape, device)]


def main():
    given = common.arguments()
    rows = [name for name in ROWS if given.wants(name)]
    if not rows:
        return
    wrong = self_check(given.device, common.why_not_compiled(given.device))
    for shape in given.shapes:
        if shape.activation not in ("swiglu", "srelu"):
            continue
        torch.manual_seed(common.SEED)
        tensors = inputs(shape, given.device)
        for (peer, compared, make), why in zip(peers(shape, given.device), wrong, strict=True):
            names = [name for name in compared if name in rows]
            if names and why:
                common.tell(peer, names, shape, {"error": why})
            elif names:
                step = make()
                measure(peer, names, shape, lambda step=step, tensors=tensors: step(*tensors), given)


if __name__ == "__main__":
    main()
