"""Quantizers: arrays of any kind in, torch tensors out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import moe4

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def decode(q: moe4.QuantizedTensor) -> Tensor:
    """By the definition: ``code * scale * amax / 2688``."""
    codes = torch.stack([q.codes & 15, q.codes >> 4], -1).flatten(-2).long()
    scales = q.scales.float().repeat_interleave(16, -1)
    return E2M1.to(codes.device)[codes] * (scales * q.amax.view(-1, *[1] * (codes.dim() - 1)) * (1 / 2688))


@pytest.mark.usefixtures("device")
def test_codes_and_scales_mean_what_the_format_says() -> None:
    x = torch.randn(48, 64).bfloat16()
    q = moe4.quantize(x)
    assert q.codes.dtype == torch.uint8 and q.codes.shape == (48, 32)
    assert q.scales.dtype == torch.float8_e4m3fn and q.scales.shape == (48, 4)
    assert q.amax.tolist() == [x.abs().max().item()]
    assert torch.allclose(decode(q)[0] if decode(q).dim() == 3 else decode(q), q.dequantize(), rtol=1e-6)
    # Half a step of E2M1 is at most 1/6 of a block's maximum, and a block scale is off by at most 1/16.
    block = x.float().view(48, 4, 16)
    worst = (block - q.dequantize().view(48, 4, 16)).abs().amax(-1) / block.abs().amax(-1)
    assert worst.max() < 1 / 6 * 17 / 16 and worst.max() > 0.02


@pytest.mark.usefixtures("device")
def test_every_direction_and_each_expert_alone() -> None:
    x, splits = torch.randn(40, 64).bfloat16(), [10, 0, 21, 7]
    row, column = moe4.group_quantize(x, splits, columnwise=True, rht=None)
    assert row is not None and column is not None
    assert column.codes.shape == (64, (16 + 32 + 16) // 2) and column.amax.shape == (4,)
    assert row.dequantize()[38:].abs().max() == 0 and row.amax[1] == 0
    at = 0
    for e, (n, start) in enumerate(zip(splits, (0, 10, 10, 31))):
        alone, turned = moe4.group_quantize(x[start : start + n], columnwise=True, rht=None)
        assert alone is not None and turned is not None
        assert torch.equal(alone.codes, row.codes[start : start + n]) and alone.amax[0] == row.amax[e]
        end = at + (n + 15) // 16 * 16
        assert torch.equal(turned.codes, column.codes[:, at // 2 : end // 2])
        assert torch.equal(turned.dequantize()[:, :n], column.dequantize()[:, at : at + n])
        at = end


@pytest.mark.usefixtures("device")
def test_amaxes_agree_with_the_quantizer() -> None:
    x, splits = torch.randn(64, 32).bfloat16(), torch.tensor([30, 34], dtype=torch.int32, device="cpu")
    amax, rht = moe4.hadamard_amax(x, splits)
    row, column = moe4.group_quantize(x, splits, columnwise=True)
    assert row is not None and column is not None
    assert torch.equal(amax, row.amax) and torch.equal(rht, column.amax)
    assert amax.tolist() == [x[:30].abs().max().item(), x[30:].abs().max().item()]
    again = moe4.group_quantize(x, splits, columnwise=True, amax=amax, amax_rht=rht)
    assert torch.equal(again[1].codes, column.codes)
    larger = moe4.group_quantize(x, splits, amax=amax * 1.7)[0]
    assert not torch.equal(larger.codes, row.codes) and torch.equal(larger.amax, amax * 1.7)


@pytest.mark.usefixtures("device")
def test_stochastic_rounding_is_unbiased_and_seeded() -> None:
    x = torch.full((16, 64), 1.1).bfloat16()
    x[:, 0] = 6.0
    draws = [moe4.quantize(x, rounding="stochastic", seed=s).dequantize() for s in range(200)]
    mean = torch.stack(draws).mean(0)[:, 1:16]
    # 200 x 240 draws between 1 and 1.5: the mean's deviation is below 0.25 / sqrt(48000).
    assert abs(float(mean.mean()) - float(x[0, 1])) < 5 * 0.25 / 48000**0.5 + 0.5 / 256
    one = moe4.quantize(x, rounding="stochastic", seed=1).codes
    assert torch.equal(one, moe4.quantize(x, rounding="stochastic", seed=1).codes)
    assert not torch.equal(one, moe4.quantize(x, rounding="stochastic", seed=2).codes)
    torch.manual_seed(5)
    drawn = moe4.quantize(x, rounding="stochastic").codes
    torch.manual_seed(5)
    assert torch.equal(drawn, moe4.quantize(x, rounding="stochastic").codes)


@pytest.mark.usefixtures("device")
def test_weights_in_square_tiles() -> None:
    w = torch.randn(3, 32, 48).bfloat16()
    q = moe4.quantize(w, tile="16x16")
    assert q.codes.shape == (3, 32, 24) and q.scales.shape == (3, 32, 3) and q.amax.shape == (3,)
    assert torch.equal(q.scales.view(torch.uint8)[:, :16], q.scales.view(torch.uint8)[:, :1].expand(3, 16, 3))
    assert (q.dequantize() - w).norm() < 0.2 * w.norm()
    turned = moe4.quantize(w.transpose(1, 2).contiguous(), tile="16x16")
    assert torch.equal(turned.dequantize(), q.dequantize().transpose(1, 2))
    flat = moe4.quantize(w[1], tile="16x16")
    assert torch.equal(flat.codes, q.codes[1]) and flat.dequantize().shape == (32, 48)


@pytest.mark.usefixtures("device")
def test_swizzled_scales() -> None:
    x = torch.randn(130, 96).bfloat16()
    plain, swizzled = moe4.quantize(x), moe4.quantize(x, layout="swizzled")
    assert swizzled.scales.shape == (256, 8) and torch.equal(plain.codes, swizzled.codes)
    flat = swizzled.scales.view(torch.uint8).flatten()
    for r, c in ((0, 0), (31, 5), (32, 1), (129, 3)):
        at = ((r // 128) * 2 + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
        assert flat[at] == plain.scales.view(torch.uint8)[r, c]
    assert torch.equal(plain.dequantize(), swizzled.dequantize())


class Exporter:
    """Nothing but the protocol."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


def test_arrays_of_any_kind() -> None:
    x = torch.randn(32, 32).bfloat16()
    expected = moe4.quantize(x).codes
    assert torch.equal(moe4.quantize(Exporter(x)).codes, expected)
    bits = x.view(torch.int16).numpy()

    class Bf16Array:
        """Stands in for an array of ml_dtypes' bfloat16."""

        dtype = type("dtype", (), {"name": "bfloat16"})()
        __array_interface__ = bits.__array_interface__

        def view(self, dtype: str) -> Any:
            return bits.view(dtype)

    assert torch.equal(moe4.quantize(Bf16Array()).codes, expected)
    assert torch.equal(moe4.quantize(x.T.contiguous().T).codes, expected)
    with pytest.raises(TypeError, match="x: expected dtype torch.bfloat16, got torch.float32"):
        moe4.quantize(torch.zeros(16, 16).numpy())
    with pytest.raises(TypeError, match="x: expected a torch tensor, a NumPy array or an object with __dlpack__, got list"):
        moe4.quantize([[1.0]])


def of_shape(q: moe4.QuantizedTensor, rows: int, cols: int) -> Any:
    shape = torch.Size((rows, cols))
    return moe4.dequantize(moe4.QuantizedTensor(q.codes, q.scales, q.amax, shape))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: moe4.quantize(x[:, :20]), "expected a positive multiple of 16, got 20"),
        (lambda x: moe4.quantize(x[0]), r"x: expected 2 dimensions, got shape \[32\]"),
        (lambda x: moe4.quantize(x, axis="diagonal"), "axis: expected rowwise or columnwise, got 'diagonal'"),
        (lambda x: moe4.quantize(x, rht=1), "rht: expected None unless axis='columnwise'"),
        (lambda x: moe4.quantize(x, seed=1), "seed: expected None with rounding='nearest'"),
        (lambda x: moe4.quantize(x, tile="16x16", rounding="stochastic"), "16x16 goes with"),
        (lambda x: moe4.quantize(x[:20], tile="16x16"), "rows of a quantized weight: expected a positive multiple of 16"),
        (lambda x: moe4.group_quantize(x, rowwise=False), "expected rowwise, columnwise or both, got neither"),
        (lambda x: moe4.group_quantize(x, [16, 16], amax=torch.ones(3)), r"amax: expected shape \[2\], got \[3\]"),
        (lambda x: moe4.group_quantize(x, [16, 17]), "expected a sum of at most 32"),
        (lambda x: moe4.group_quantize(x, columnwise=True, rht=1 << 17), "rht: expected a 16-bit sign mask"),
        (lambda x: moe4.hadamard_amax(x, sign_mask=-1), "sign_mask: expected a 16-bit sign mask"),
        (lambda x: of_shape(moe4.quantize(x), 10**6, 10**6), r"codes of shape \[1000000, 500000\]: expected"),
        (lambda x: of_shape(moe4.quantize(x), 2**40, 2**40), "codes of shape"),
    ],
)
def test_misuse_is_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.randn(32, 32).bfloat16())


@pytest.mark.usefixtures("device")
def test_empty_and_not_finite() -> None:
    empty = moe4.quantize(torch.empty(0, 32).bfloat16())
    assert empty.codes.shape == (0, 16) and empty.dequantize().shape == (0, 32) and empty.amax.tolist() == [0.0]
    x = torch.ones(16, 32).bfloat16()
    x[3, 5] = float("nan")
    q = moe4.quantize(x)
    assert q.scales.view(torch.uint8)[3].tolist()[0] == 0x7F and q.dequantize()[3, :16].isnan().all()
    assert q.dequantize()[3, 16:].isfinite().all() and q.dequantize()[4].isfinite().all() and q.amax[0] == 1


def test_repr() -> None:
    q = moe4.group_quantize(torch.randn(32, 32).bfloat16(), [32, 0], rowwise=False, columnwise=True)[1]
    assert repr(q) == (
        "QuantizedTensor(shape=[32, 32], axis='columnwise', tile='1x16', rht=0xD7E8, experts=2, bytes=584)"
    )
    assert "cpu kernels" in moe4.doctor() and torch.__version__ in moe4.doctor()
