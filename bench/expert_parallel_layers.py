"""Layers whose experts are spread over processes, one that holds all of them, and their answers compared.

The one process sees all tokens, process after process, with the same weights and the same seeds. No sum crosses processes
but that of the router's gradient; everything else has to be the same bytes.
"""

import pathlib
import sys

import moe4
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "peers"))

import common
from grouped_mlp import Products, bf16_forward

BALANCE = 0.01
"""Factor of the load-balance loss in a training step."""


class OneProcess(moe4.MoELayer):
    """All experts. Routes the tokens of each of ``parts`` processes apart: a library's product may sum in another order
    for another number of rows, and probabilities would differ in their last bits."""

    def __init__(self, parts, *arguments, **options):
        super().__init__(*arguments, **options)
        self.parts = parts

    def _route(self, tokens):
        route = super()._route
        return tuple(torch.cat(part) for part in zip(*(route(own) for own in tokens.chunk(self.parts)), strict=True))


class TorchExperts(nn.Module):
    """PyTorch's BF16 in the place of ``GroupedMLP``, over its weights: grouped products on a GPU, a loop elsewhere."""

    def __init__(self, experts, shape):
        super().__init__()
        self.w1, self.w2, self.shape = experts.w1, experts.w2, shape

    def forward(self, rows, counts, weights, weight_version=None):
        device = rows.device.type
        splits = None if device == "cuda" else counts.tolist()
        products = Products(splits, counts.cumsum(0).to(torch.int32), device)
        if not products.grouped and splits is None:
            raise NotImplementedError("this PyTorch has no grouped product")
        return bf16_forward(self.shape, products)(rows, self.w1, self.w2, weights)


class SharedExpert(nn.Module):
    """A dense MLP of the size of one expert, BF16."""

    def __init__(self, shape, device):
        super().__init__()
        self.gated = shape.fc1_rows != shape.ffn
        self.up = nn.Linear(shape.hidden, shape.fc1_rows, bias=False, dtype=torch.bfloat16, device=device)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False, dtype=torch.bfloat16, device=device)

    def forward(self, x):
        c = self.up(x)
        if not self.gated:
            return self.down(torch.relu(c).square())
        gate, up = c.chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)


class Problem:
    """Weights and tokens of a shape, the same on every process, and which of them are this process's."""

    def __init__(self, shape, device):
        self.shape, self.device = shape, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.tokens = shape.rows // shape.top_k // self.world  # of each process
        torch.manual_seed(common.SEED)
        self.state = self.one().state_dict()
        size = self.tokens * self.world, shape.hidden
        self.all_x, self.all_dy = (common.normal(*size, device=device) for _ in range(2))
        self.own = slice(self.rank * self.tokens, (self.rank + 1) * self.tokens)
        self.x, self.dy = self.all_x[self.own], self.all_dy[self.own]
        each = shape.experts // self.world
        self.experts = slice(self.rank * each, (self.rank + 1) * each)

    def one(self):
        return OneProcess(self.world, *self._sizes(), device=self.device, activation=self.shape.activation)

    def spread(self, shared=None, **options):
        """The layer over all processes."""
        return self._part(self.shape.experts, group=dist.group.WORLD, shared=shared, **options)

    def alone(self):
        """This process's experts as if there were no others: the same numbers of experts, tokens and rows."""
        return self._part(self.shape.experts // self.world, group=None)

    def _sizes(self):
        return self.shape.experts, self.shape.hidden, self.shape.ffn, self.shape.top_k

    def _part(self, experts, group, shared=None, **options):
        options |= {"device": self.device, "activation": self.shape.activation}
        layer = moe4.MoELayer(experts, *self._sizes()[1:], process_group=group, shared=shared, **options)
        with torch.no_grad():
            layer.router.copy_(self.state["router"][self.experts if group is None else slice(None)])
            layer.experts.w1.copy_(self.state["experts.w1"][self.experts])
            layer.experts.w2.copy_(self.state["experts.w2"][self.experts])
        return layer


def step(layer, x, dy, apart=None, balance=0.0):
    """Forward and backward; ``apart`` is a shared expert that the layer does not know of. Returns y and dx."""
    torch.manual_seed(common.SEED)  # of stochastic rounding: the same on every process
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y, aux = layer(x)
    if apart is not None:
        apart.zero_grad()
        y = y + apart(x)
    outputs, grads = ([y, balance * aux], [dy, None]) if balance else ([y], [dy])
    torch.autograd.backward(outputs, grads)
    return y.detach(), x.grad


class Watch:
    """What the experts of a layer were given in a step: rows, how many of each, and the gradients of the outputs."""

    def __init__(self, layer):
        self.hooks = [layer.experts.register_forward_pre_hook(self._before)]
        self.hooks += [layer.experts.register_forward_hook(self._after)]

    def _before(self, _, arguments):
        self.rows, self.counts, self.weights = (tensor.detach() for tensor in arguments)

    def _after(self, _, arguments, out):
        out.register_hook(self._gradient)

    def _gradient(self, grad):
        self.dy = grad.detach()

    def close(self):
        for hook in self.hooks:
            hook.remove()


def operands(x, counts, rounding):
    """Each expert's quantized rows: codes, scales and amax, rowwise and columnwise."""
    seed = common.SEED if rounding == "stochastic" else None
    row, column = moe4.group_quantize(x, counts, columnwise=True, rounding=rounding, seed=seed)
    found, start, tile = [], 0, 0
    for e, n in enumerate(counts.tolist()):
        end, last = start + n, tile + (n + 15) // 16
        found.append({
            "rowwise codes": row.codes[start:end],
            "rowwise scales": row.scales.view(torch.uint8)[start:end],
            "rowwise amax": row.amax[e],
            "columnwise codes": column.codes[:, tile * 8 : last * 8],
            "columnwise scales": column.scales.view(torch.uint8)[:, tile:last],
            "columnwise amax": column.amax[e],
        })
        start, tile = end, last
    return found


def check_answers(problem):
    """What is wrong on this process, a line each; and what was compared, for the record."""
    wrong = []

    def same(what, ours, one):
        if not torch.equal(ours, one):
            off = common.relative(ours.float(), one.float()) if ours.shape == one.shape else "another shape"
            wrong.append(f"{what}: expected the bytes of one process, got a distance of {off}")
        elif what in ("y", "dx") and not ours.any():
            wrong.append(f"{what}: expected values, got zeros")

    layer, one = problem.spread(), problem.one()
    one.load_state_dict(problem.state)
    ours, all_of_them = Watch(layer), Watch(one)
    y, dx = step(layer, problem.x, problem.dy)
    all_y, all_dx = step(one, problem.all_x, problem.all_dy)
    for what, rounding in (("rows", "nearest"), ("dy", "nearest"), ("dy", "stochastic")):
        theirs = operands(getattr(all_of_them, what), all_of_them.counts, rounding)[problem.experts]
        for e, (a, b) in enumerate(zip(operands(getattr(ours, what), ours.counts, rounding), theirs, strict=True)):
            for part, value in a.items():
                same(f"{what}, {rounding}, {part} of expert {problem.experts.start + e}", value, b[part])
    for name in ("w1", "w2"):
        a, b = (moe4.quantize(getattr(held.experts, name).detach(), tile="16x16") for held in (layer, one))
        for part in ("codes", "scales", "amax"):
            left, right = (getattr(q, part) for q in (a, b))
            same(f"{part} of {name}", left.view(torch.uint8), right[problem.experts].view(torch.uint8))
    same("y", y, all_y[problem.own])
    same("dx", dx, all_dx[problem.own])
    for name in ("w1", "w2"):
        same(f"d{name}", getattr(layer.experts, name).grad, getattr(one.experts, name).grad[problem.experts])

    # A sum of T products in FP32, taken in two orders. Roundings of 2^-24 of partial sums that grow as sqrt(k) add up, as
    # random ones do, to sqrt(T / 6) * 2^-24 of the sum for each order; 8 times that is no accident.
    router = layer.router.grad.clone()
    dist.all_reduce(router)
    tokens = problem.tokens * problem.world
    distance, tolerance = common.relative(router, one.router.grad), 8 * tokens**0.5 * 2**-24
    if not distance <= tolerance:
        wrong.append(f"gradient of the router: expected a distance of at most {tolerance:.1e}, got {distance:.1e}")
    received = ours.counts.sum().item()
    ours.close()

    shared = SharedExpert(problem.shape, problem.device)
    inside = problem.spread(shared=shared)
    apart = step(layer, problem.x, problem.dy, apart=shared)
    apart += tuple(p.grad.clone() for p in shared.parameters())
    together = step(inside, problem.x, problem.dy) + tuple(p.grad for p in shared.parameters())
    for what, a, b in zip(("y", "dx", "dW up", "dW down"), together, apart, strict=True):
        same(f"{what} with a shared expert", a, b)
    return wrong, {"router_distance": distance, "router_tolerance": tolerance, "rows_received": received}


def check_torch(problem):
    """What is wrong with the BF16 of PyTorch: it is near that of moe4, as near as bench/peers asks for."""

    def check():
        ours, theirs = problem.spread(precision="bf16"), problem.spread()
        theirs.experts = TorchExperts(theirs.experts, problem.shape)
        results = []
        for layer in (theirs, ours):
            y, dx = step(layer, problem.x, problem.dy)
            results.append({"y": y, "dx": dx, "dw1": layer.experts.w1.grad, "dw2": layer.experts.w2.grad})
        for name, got in results[0].items():
            distance = common.relative(got, results[1][name])
            common.check(distance <= 0.02, f"{name} is {distance:.3f} from moe4's in BF16, expected at most 0.02")

    why = common.why_wrong(check)
    return [why] if why else []
