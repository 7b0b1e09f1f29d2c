"""NVFP4 quantization of grouped rows by ordinary PyTorch operations, eager and compiled.

    amax    per expert, before and after the random Hadamard transform (RHT) along tokens
    row     blocks of 16 along a row:    codes [T, cols/2], scales [T, cols/16]
    column  blocks of 16 tokens, RHT:    codes [cols, Tp/2], scales [cols, Tp/16]
    S_enc = 2688 / amax,  s = E4M3(block_amax * S_enc / 6),  code = E2M1(x * S_enc / s)

The formats are those of docs/numerics.md. The transform is a product with a 16x16 matrix, as one writes it in PyTorch,
so a few codes differ from moe4's butterfly in the last bit of BF16. Random numbers are PyTorch's.
"""

import torch

import common
from common import Layout, check, measure, normal

SIGN_MASK = 0xD7E8
# Between neighbouring magnitudes; a tie goes to the even code. bucketize counts boundaries below a value, so where a
# tie goes up the boundary is the next smaller number.
TIES_DOWN = [0.25, 1.25, 2.5, 5.0]
TIES_UP = [0.75, 1.75, 3.5]
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def hadamard(device):
    """The transform of 16 tokens as a matrix: signs, Hadamard, a quarter."""
    h = torch.ones(1, 1)
    for _ in range(4):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    signs = torch.tensor([-1.0 if SIGN_MASK >> i & 1 else 1.0 for i in range(16)])
    return (h * signs * 0.25).bfloat16().to(device)


def transform(x, matrix):
    """[Tp, cols] to tiles [Tp/16, 16, cols] after the RHT, BF16."""
    return torch.matmul(matrix, x.view(-1, 16, x.shape[1]))


def by_expert(maxima, expert, experts):
    """The largest of the values of each expert, FP32."""
    zeros = torch.zeros(experts, dtype=torch.float32, device=maxima.device)
    return zeros.scatter_reduce_(0, expert, maxima.float(), "amax")


def group_amax(x, layout, experts):
    return by_expert(x.abs().amax(1), layout.expert_of_row, experts)


def group_hadamard_amax(x, layout, experts, matrix):
    tiles = transform(layout.pad(x), matrix)
    return group_amax(x, layout, experts), by_expert(tiles.abs().amax((1, 2)), layout.expert_of_tile, experts)


def nearest_compared(a):
    """E2M1 magnitude code of a >= 0 by comparisons, which a compiler fuses."""
    code = (a > TIES_DOWN[0]).to(torch.uint8)
    for tie in TIES_DOWN[1:]:
        code += a > tie
    for tie in TIES_UP:
        code += a >= tie
    return code


def nearest_searched(a):
    """The same in one pass without a compiler."""
    up = torch.nextafter(torch.tensor(TIES_UP), torch.zeros(3))
    bounds = torch.cat([torch.tensor(TIES_DOWN), up]).sort().values.to(a.device)
    return torch.bucketize(a, bounds, out_int32=True).to(torch.uint8)


def stochastic(a):
    """Up or down at random in proportion to the distances."""
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    t = a + torch.rand_like(a) * step
    code = (t >= MAGNITUDES[1]).to(torch.uint8)
    for magnitude in MAGNITUDES[2:]:
        code += t >= magnitude
    return code


def quantize_blocks(x, s_enc, rounding):
    """[..., n] in blocks of 16 along the last axis; `s_enc` has the shape of the blocks. Packed codes and scales."""
    blocks = x.float().unflatten(-1, (-1, 16))
    scales = (blocks.abs().amax(-1) * (s_enc / 6)).clamp(max=448).to(torch.float8_e4m3fn)
    factor = (s_enc / scales.float()).clamp(max=torch.finfo(torch.float32).max)
    v = blocks * factor.unsqueeze(-1)
    codes = rounding(v.abs()) | (torch.signbit(v).to(torch.uint8) << 3)
    codes = codes.flatten(-2).unflatten(-1, (-1, 2))
    return codes[..., 0] | (codes[..., 1] << 4), scales


def encode_scale(amax):
    return torch.where(amax > 0, 2688 / amax, 1.0)


def quantize_rowwise(x, amax, layout, rounding):
    return quantize_blocks(x, encode_scale(amax)[layout.expert_of_row].unsqueeze(1), rounding)


def quantize_columnwise(x, amax_rht, layout, matrix, rounding):
    tiles = transform(layout.pad(x), matrix)
    s_enc = encode_scale(amax_rht)[layout.expert_of_tile].unsqueeze(0)
    return quantize_blocks(tiles.view(-1, x.shape[1]).t().contiguous(), s_enc, rounding)


def quantize_weights(w, rounding):
    """[E, n, k] in tiles of 16x16, each expert with its own amax."""
    experts, n, k = w.shape
    tiles = w.float().view(experts, n // 16, 16, k // 16, 16)
    tile_amax = tiles.abs().amax((2, 4))
    s_enc = encode_scale(tile_amax.amax((1, 2)))[:, None, None]
    scales = (tile_amax * (s_enc / 6)).clamp(max=448).to(torch.float8_e4m3fn)
    v = tiles * (s_enc / scales.float()).clamp(max=torch.finfo(torch.float32).max)[:, :, None, :, None]
    codes = rounding(v.abs()) | (torch.signbit(v).to(torch.uint8) << 3)
    codes = codes.view(experts, n, k // 2, 2)
    return codes[..., 0] | (codes[..., 1] << 4), scales.repeat_interleave(16, 1)


def permute(x, source):
    return x[source]


def unpermute(y, slot, weights):
    tokens, top_k = weights.shape
    return (y[slot].view(tokens, top_k, -1).float() * weights.unsqueeze(-1)).sum(1).bfloat16()


def dequantize(codes, scales, s_enc):
    """FP32 values of packed blocks."""
    pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    magnitudes = torch.tensor(MAGNITUDES + [-m for m in MAGNITUDES], device=codes.device)
    return (magnitudes[pairs].unflatten(-1, (-1, 16)) * (scales.float() / s_enc).unsqueeze(-1)).flatten(-2)


def work_of(name, shape, device, searched):
    """The operation of one row of `moe4 bench` and its inputs, or None."""
    kind, _, tensor = name.partition(" ")
    layout, matrix = Layout(shape, device), hadamard(device)
    nearest = nearest_searched if searched else nearest_compared
    if kind == "quantize_weights":
        n = shape.fc1_rows if tensor == "w1" else shape.hidden
        return lambda w: quantize_weights(w, nearest), (normal(shape.experts, n, shape.cols(tensor), device=device),)
    if kind in ("permute", "unpermute"):
        order = torch.randperm(shape.rows, device=device)
        tokens = shape.rows // shape.top_k
        if kind == "permute":
            return permute, (normal(tokens, shape.hidden, device=device), order // shape.top_k)
        weights = torch.rand(tokens, shape.top_k, device=device)
        return unpermute, (normal(shape.rows, shape.hidden, device=device), order, weights)
    if not kind.startswith("group_"):
        return None
    x = normal(shape.rows, shape.cols(tensor), device=device)
    if kind == "group_amax":
        return lambda x: group_amax(x, layout, shape.experts), (x,)
    if kind == "group_hadamard_amax":
        return lambda x: group_hadamard_amax(x, layout, shape.experts, matrix), (x,)
    amaxes = group_hadamard_amax(x, layout, shape.experts, matrix)

    def row(x, amax, _, rounding=nearest):
        return quantize_rowwise(x, amax, layout, rounding)

    def column(x, _, amax_rht, rounding=nearest):
        return quantize_columnwise(x, amax_rht, layout, matrix, rounding)

    def both(x, amax, amax_rht, rounding=nearest):
        return *row(x, amax, None, rounding), *column(x, None, amax_rht, rounding)

    def both_stochastic(x, amax, amax_rht):
        return both(x, amax, amax_rht, stochastic)

    kinds = {
        "group_quantize_rowwise": row,
        "group_quantize_columnwise": column,
        "group_quantize_both": both,
        "group_quantize_both_stochastic": both_stochastic,
    }
    return kinds[kind], (x, *amaxes)


ROWS = ["group_amax x", "group_hadamard_amax x", "group_hadamard_amax dc"]
ROWS += [f"group_quantize_{kind} {t}" for kind in ("rowwise", "columnwise", "both") for t in "xh"]
ROWS += ["group_quantize_both_stochastic x", "group_quantize_both_stochastic dc"]
ROWS += ["quantize_weights w1", "quantize_weights w2", "permute x", "unpermute x"]


def self_check(device):
    """A known answer and an error bound."""
    grid = torch.tensor(MAGNITUDES + [-m for m in MAGNITUDES], device=device)
    codes, scales = quantize_blocks(grid.view(1, 16), torch.full((1, 1), 448.0, device=device), nearest_searched)
    check(codes.flatten().tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], "codes of the E2M1 grid")
    check(scales.float().tolist() == [[448.0]], "scale of the E2M1 grid")
    ties = torch.tensor(sorted(TIES_DOWN + TIES_UP), device=device)
    for rounding in (nearest_compared, nearest_searched):
        check(rounding(ties).tolist() == [0, 2, 2, 4, 4, 6, 6], "ties go to even")

    shape, layout = common.SMALL, Layout(common.SMALL, device)
    matrix = hadamard(device)
    check(torch.equal(matrix.double() @ matrix.double().t(), torch.eye(16, device=device).double()), "RHT")
    x = normal(shape.rows, shape.hidden, device=device)
    amax, amax_rht = group_hadamard_amax(x, layout, shape.experts, matrix)
    parts = x.split(shape.splits)
    expected = [float(part.abs().max()) if len(part) else 0.0 for part in parts]
    check(amax.tolist() == expected, "amax of each expert")
    for rounding, steps in ((nearest_searched, 1.1), (stochastic, 2.2)):
        row = quantize_rowwise(x, amax, layout, rounding)
        column = quantize_columnwise(x, amax_rht, layout, matrix, rounding)
        s_row = encode_scale(amax)[layout.expert_of_row].unsqueeze(1)
        s_column = encode_scale(amax_rht)[layout.expert_of_tile].unsqueeze(0)
        rotated = transform(layout.pad(x), matrix).view(-1, shape.hidden).t()
        for what, packed, s_enc, original in (("row", row, s_row, x), ("column", column, s_column, rotated)):
            error = (dequantize(*packed, s_enc) - original.float()).abs().unflatten(-1, (-1, 16))
            # Half the widest gap (4 to 6) of a block whose scale is rounded to 4 bits; all of it at random.
            bound = original.float().abs().unflatten(-1, (-1, 16)).amax(-1, keepdim=True) / 6 * steps
            check(bool((error <= bound).all()), f"error of a {what}wise copy, {rounding.__name__}")


def check_compiled(device):
    """Eager beside compiled."""
    for name in ("group_quantize_both x", "quantize_weights w1"):
        torch.manual_seed(common.SEED)
        eager, given = work_of(name, common.SMALL, device, searched=True)
        torch.manual_seed(common.SEED)
        fused, again = work_of(name, common.SMALL, device, searched=False)
        for ours, theirs in zip(eager(*given), common.compiled(fused)(*again), strict=True):
            differ = (ours.view(torch.uint8) != theirs.view(torch.uint8)).double().mean()
            check(differ < 2e-3, f"{name}: eager and compiled differ in {differ:.1%} of the bytes")


def main():
    given = common.arguments()
    wanted = [name for name in ROWS if given.wants(name)]
    if not wanted:
        return
    self_check(given.device)
    not_compiled = common.why_not_compiled(given.device)
    not_compiled = not_compiled or common.why_wrong(lambda: check_compiled(given.device))
    for shape in given.shapes:
        for name in wanted:
            torch.manual_seed(common.SEED)
            for peer, fused in (("PyTorch eager", False), ("PyTorch compiled", True)):
                if fused and not_compiled:
                    common.tell(peer, [name], shape, {"error": not_compiled})
                    continue
                work, inputs = work_of(name, shape, given.device, searched=not fused)
                call = common.compiled(work) if fused else work
                measure(peer, [name], shape, lambda call=call, inputs=inputs: call(*inputs), given)


if __name__ == "__main__":
    with torch.no_grad():
        main()
