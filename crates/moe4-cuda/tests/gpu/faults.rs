//! What is wrong with splits, indices, addresses and captures: told by its place, and harmless to what comes after.

use crate::cases::{Case, settings};
use crate::support::{another, cuda, must, refused};
use half::bf16;
use moe4::kernels::contract::*;
use moe4::kernels::{Backend, Error, Extent};
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::rounding::Rounding;
use moe4::tensor::{Groups, ScaleLayout};
use moe4_conformance::compare::{all_zero, bf16_bits, f32_bits};
use moe4_conformance::{InCase, Outcome, data, drive};
use moe4_cuda::{Cuda, DeviceMemory, DeviceView, DeviceViewMut};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The backend still gives the right bytes.
fn works(cuda: &Cuda) -> Outcome {
    let groups = Groups::new(&[30, 0, 17], 50).expect("fits");
    let x = data::normal(50 * 48, 1.0, 900);
    Case::new(&x, 48, &groups, settings(9)[0]).as_on_the_cpu(cuda)
}

#[test]
#[ignore = "needs a GPU"]
fn splits_that_do_not_fit() {
    let cuda = cuda();
    let (rows, cols) = (150, 48);
    let wrong: [(&[i64], &str); 6] = [
        (&[5, -1, 3], "splits[1]"),
        (&[100, 0, 100], "sum of splits: expected at most the rows of the tensor, got 200"),
        (&[0, 0, 151], "splits[2]"),
        (&[i64::MAX, 1, i64::MAX], "splits[0]"),
        (&[1, i64::MIN, 0], "splits[1]"),
        // Two kinds at once: the first of them is told.
        (&[150, 150, -7], "splits[2]"),
    ];
    for (splits, place) in wrong {
        let compared = || -> Outcome {
            let mut groups = cuda.empty_groups(3, rows)?;
            let k = groups.padded_rows();
            let x = cuda.upload(&data::normal(rows * cols, 1.0, 910))?;
            let splits = cuda.upload_plain(splits)?;
            let mut amax = cuda.upload(&[f32::NAN; 3])?;
            let mut amax_rht = cuda.upload(&[f32::NAN; 3])?;
            let mut codes =
                [cuda.upload(&vec![0xAAu8; rows * cols / 2])?, cuda.upload(&vec![0xAAu8; k * cols / 2])?];
            let mut scales =
                [cuda.upload(&vec![0xAAu8; rows * cols / 16])?, cuda.upload(&vec![0xAAu8; k * cols / 16])?];
            cuda.compute_groups(splits.view(), &mut groups)?;
            cuda.group_hadamard_amax(GroupHadamardAmax {
                x: x.view(),
                cols,
                groups: &groups,
                sign_mask: SignMask::DEFAULT,
                amax: amax.view_mut(),
                amax_rht: amax_rht.view_mut(),
            })?;
            let ([row_codes, col_codes], [row_scales, col_scales]) = (&mut codes, &mut scales);
            let cast = |amax, codes, scales| Cast::<DeviceMemory> {
                amax,
                rounding: Rounding::Nearest,
                packed: Some(PackedOut { codes, scales, layout: ScaleLayout::Plain }),
                unpacked: None,
            };
            cuda.group_quantize(GroupQuantize {
                x: x.view(),
                cols,
                groups: &groups,
                rowwise: Some(cast(amax.view(), row_codes.view_mut(), row_scales.view_mut())),
                columnwise: Some(ColumnwiseCast {
                    rht: Some(SignMask::DEFAULT),
                    cast: cast(amax_rht.view(), col_codes.view_mut(), col_scales.view_mut()),
                }),
            })?;
            refused(cuda.synchronize(), place)?;
            cuda.synchronize()?;
            all_zero("amax", 0, &cuda.download(amax.view())?)?;
            all_zero("amax after RHT", 0, &cuda.download(amax_rht.view())?)?;
            for (name, codes, scales) in
                [("rowwise", &codes[0], &scales[0]), ("columnwise", &codes[1], &scales[1])]
            {
                all_zero(&format!("{name} codes"), 0, &cuda.download(codes.view())?)?;
                all_zero(&format!("{name} scales"), 0, &cuda.download(scales.view())?)?;
            }
            Ok(())
        };
        must(compared().in_case(format!("splits {splits:?} of {rows} rows")));
    }
    must(works(cuda));
}

#[test]
#[ignore = "needs a GPU"]
fn indices_beyond_a_tensor() {
    let cuda = cuda();
    let compared = |cols: usize| -> Outcome {
        let host = data::normal(4 * cols, 1.0, 920);
        let row = |r: usize| &host[r * cols..(r + 1) * cols];
        let zero = vec![bf16::ZERO; cols];
        let x = cuda.upload(&host)?;
        let source = cuda.upload(&[3, NO_ROW, 9, 0, 4, NO_ROW - 1])?;
        let mut out = cuda.upload(&vec![bf16::NAN; 6 * cols])?;
        let (view, indices) = (x.view(), source.view());
        cuda.permute(Permute { x: view, cols, source: indices, out: out.view_mut() })?;
        refused(cuda.synchronize(), "permute: source[2]")?;
        cuda.synchronize()?;
        let expected = [row(3), &zero, &zero, row(0), &zero, &zero].concat();
        bf16_bits("permuted", &[6, cols], &expected, &cuda.download(out.view())?)?;

        // Three tokens of two choices.
        let mut out = cuda.upload(&vec![bf16::NAN; 3 * cols])?;
        let slot = cuda.upload(&[1, NO_ROW, 2, 4, 7, NO_ROW - 1])?;
        let slot = slot.view();
        cuda.unpermute(Unpermute { y: view, cols, slot, top_k: 2, weights: None, out: out.view_mut() })?;
        // A download tells as well.
        refused(cuda.download(out.view()), "unpermute: slot[3]")?;
        let expected = [row(1), row(2), &zero].concat();
        bf16_bits("unpermuted", &[3, cols], &expected, &cuda.download(out.view())?)
    };
    // By words of 16 bytes, and element by element.
    [16, 17].into_iter().for_each(|cols| must(compared(cols).in_case(format!("{cols} columns"))));
    must(works(cuda));
}

/// One thing wrong with a capture.
type Mistake = fn(&Cuda) -> Result<(), Error>;

#[test]
#[ignore = "needs a GPU"]
fn captures_that_fail_leave_the_stream_usable() {
    let cuda = cuda();
    let conflict = "expected a stream that runs, got one that records a graph";
    let refusals: [(&str, Mistake); 6] = [
        ("upload", |cuda| cuda.upload(&[1.0f32]).map(drop)),
        ("upload_plain", |cuda| cuda.upload_plain(&[1i64]).map(drop)),
        ("groups", |cuda| cuda.groups(&Groups::single(5)).map(drop)),
        ("empty_groups", |cuda| cuda.empty_groups(2, 5).map(drop)),
        ("download", |cuda| {
            // SAFETY: nothing is read, since the download is refused.
            cuda.download(unsafe { DeviceView::<'_, f32>::from_raw(256, 1) }).map(drop)
        }),
        ("its own error", |_| Err(Groups::new(&[], 1).expect_err("no experts").into())),
    ];
    for (what, mistake) in refusals {
        let told = if what == "its own error" { "expected one entry for each expert" } else { conflict };
        must(refused(cuda.capture(|| mistake(cuda)), told).in_case(what));
        must(works(cuda).in_case(what));
    }
    let compared = || -> Outcome {
        let mut buffer = cuda.upload(&[1.0f32, 2.0])?;
        refused(cuda.capture(|| cuda.write(&mut buffer, &[3.0, 4.0])), conflict)?;
        f32_bits("after a refused write", &[2], &[1.0, 2.0], &cuda.download(buffer.view())?)
    };
    must(compared());
    // The driver itself refuses to wait, which spoils the recording.
    let waited = cuda.capture(|| cuda.synchronize());
    assert!(matches!(waited, Err(Error::Device(_))), "{waited:?}");
    must(works(cuda));
    // Also if the wait's error is swallowed: half a recording is no graph.
    let swallowed = cuda.capture(|| {
        let _ = cuda.synchronize();
        Ok(())
    });
    assert!(matches!(swallowed, Err(Error::Device(_))), "{swallowed:?}");
    must(works(cuda));
    let panicked = catch_unwind(AssertUnwindSafe(|| cuda.capture(|| panic!("inside a capture"))));
    assert!(panicked.is_err());
    must(works(cuda));
}

#[test]
#[ignore = "needs a GPU"]
fn an_empty_capture_is_a_graph() {
    let mut graph = cuda().capture(|| Ok(())).unwrap_or_else(|e| panic!("{e}"));
    // SAFETY: nothing was recorded.
    unsafe { graph.launch() }.unwrap_or_else(|e| panic!("{e}"));
    must(works(cuda()));
}

#[test]
#[ignore = "needs a GPU"]
fn misaligned_addresses_are_refused() {
    let cuda = cuda();
    let (rows, cols) = (50, 48);
    let groups = Groups::new(&[30, 0, 17], rows).expect("fits");
    let compared = || -> Outcome {
        let mut host = vec![bf16::MAX];
        host.extend(data::normal(rows * cols, 1.0, 930));
        let whole = cuda.upload(&host)?;
        let on_device = cuda.groups(&groups)?;
        let k = on_device.padded_rows();
        // One element behind the beginning.
        let x = whole.view().slice(1..1 + rows * cols);
        let floats = cuda.upload(&[1.0f32; 8])?;
        let bytes = cuda.upload(&vec![0u8; k * cols * 4 + 64])?;
        let start = bytes.view().address();
        // SAFETY: the views lie in `bytes`, and nothing that is refused touches them.
        let read = |shift: u64, len| unsafe { DeviceView::<'_, u8>::from_raw(start + shift, len) };
        // SAFETY: as above.
        let write = |shift: u64, len| unsafe { DeviceViewMut::<'_, u8>::from_raw(start + shift, len) };
        // SAFETY: as above.
        let write_f32 = |shift: u64, len| unsafe { DeviceViewMut::<'_, f32>::from_raw(start + shift, len) };
        // SAFETY: as above.
        let write_bf16 = |shift: u64, len| unsafe { DeviceViewMut::<'_, bf16>::from_raw(start + shift, len) };
        // SAFETY: the view lies in `floats`.
        let amax_off = unsafe { DeviceView::<'_, f32>::from_raw(floats.view().address() + 2, 3) };
        let amax = floats.view().slice(0..3);
        let aligned_x = whole.view().slice(0..rows * cols);

        let quantize = |x, amax, codes: u64, unpacked: u64| {
            let cast = Cast::<DeviceMemory> {
                amax,
                rounding: Rounding::Nearest,
                packed: Some(PackedOut {
                    codes: write(codes, rows * cols / 2),
                    scales: write(0, rows * cols / 16),
                    layout: ScaleLayout::Plain,
                }),
                unpacked: Some(write_bf16(unpacked, rows * cols)),
            };
            cuda.group_quantize(GroupQuantize {
                x,
                cols,
                groups: &on_device,
                rowwise: Some(cast),
                columnwise: None,
            })
        };
        refused(quantize(x, amax, 0, 0), "x: expected an address that is a multiple of 16")?;
        refused(quantize(aligned_x, amax_off, 0, 0), "amax: expected an address that is a multiple of 4")?;
        refused(quantize(aligned_x, amax, 4, 0), "codes: expected an address that is a multiple of 8")?;
        refused(quantize(aligned_x, amax, 0, 8), "unpacked: expected an address that is a multiple of 16")?;

        let back = |codes: u64, out: u64| {
            cuda.dequantize(Dequantize {
                codes: read(codes, rows * cols / 2),
                scales: read(0, rows * cols / 16),
                amax,
                cols,
                groups: &on_device,
                direction: Direction::Rowwise,
                layout: ScaleLayout::Plain,
                out: write_f32(out, rows * cols),
            })
        };
        refused(back(2, 0), "codes: expected an address that is a multiple of 8")?;
        refused(back(0, 4), "out: expected an address that is a multiple of 16")?;

        let shape = WeightShape { n: 48, k: 48 };
        let weights = |w, amax: u64| {
            cuda.quantize_weights(QuantizeWeights {
                w: vec![w],
                shape,
                codes: write(0, 48 * 24),
                scales: write(0, 48 * 3),
                unpacked: None,
                amax: write_f32(amax, 1),
            })
        };
        let w = whole.view().slice(0..48 * 48);
        refused(weights(whole.view().slice(1..1 + 48 * 48), 0), "w: expected an address")?;
        refused(weights(w, 2), "amax: expected an address that is a multiple of 4")?;

        let amax_into = |shift| {
            cuda.group_amax(GroupAmax { x: aligned_x, cols, groups: &on_device, amax: write_f32(shift, 3) })
        };
        refused(amax_into(2), "amax: expected an address that is a multiple of 4")?;
        let amaxes_into = |first, second| {
            cuda.group_hadamard_amax(GroupHadamardAmax {
                x: aligned_x,
                cols,
                groups: &on_device,
                sign_mask: SignMask::DEFAULT,
                amax: write_f32(first, 3),
                amax_rht: write_f32(second, 3),
            })
        };
        refused(amaxes_into(1, 16), "amax: expected an address that is a multiple of 4")?;
        refused(amaxes_into(0, 18), "amax after RHT: expected an address that is a multiple of 4")?;

        // SAFETY: refused, so nothing is read.
        let source = unsafe { DeviceView::<'_, u32>::from_raw(start + 2, 3) };
        let gathered = cuda.permute(Permute { x: aligned_x, cols, source, out: write_bf16(0, 3 * cols) });
        refused(gathered, "source: expected an address that is a multiple of 4")?;
        // SAFETY: refused, so nothing is read.
        let splits = unsafe { DeviceView::<'_, i64>::from_raw(start + 4, 3) };
        let mut any = cuda.empty_groups(3, rows)?;
        refused(
            cuda.compute_groups(splits, &mut any),
            "splits: expected an address that is a multiple of 8",
        )?;
        // SAFETY: refused, so nothing is read.
        let odd = unsafe { DeviceView::<'_, bf16>::from_raw(whole.view().address() + 1, rows * cols) };
        let of_odd = cuda.group_amax(GroupAmax { x: odd, cols, groups: &on_device, amax: write_f32(0, 3) });
        refused(of_odd, "x: expected an address that is a multiple of 2")
    };
    must(compared());
    must(works(cuda));
}

/// Amaxes and permutation take a tensor at any element, by narrower words.
#[test]
#[ignore = "needs a GPU"]
fn tensors_at_any_element() {
    let cuda = cuda();
    let (rows, cols) = (310, 144);
    let groups = Groups::new(&[1, 0, 100, 37, 150], rows).expect("fits");
    let source: Vec<u32> = (0..rows as u32).rev().collect();
    for shift in [1, 2, 3, 4, 7, 8] {
        let compared = || -> Outcome {
            let host = data::normal(rows * cols, 1.0, 940 + shift as u64);
            // What lies around the tensor is larger than all of it.
            let mut whole = vec![bf16::MAX; shift];
            whole.extend(&host);
            whole.extend([bf16::MAX; 8]);
            let (whole, on_device) = (cuda.upload(&whole)?, cuda.groups(&groups)?);
            let x = whole.view().slice(shift..shift + rows * cols);
            let nan = [f32::NAN; 5];
            let (mut amax, mut before, mut after) =
                (cuda.upload(&nan)?, cuda.upload(&nan)?, cuda.upload(&nan)?);
            cuda.group_amax(GroupAmax { x, cols, groups: &on_device, amax: amax.view_mut() })?;
            cuda.group_hadamard_amax(GroupHadamardAmax {
                x,
                cols,
                groups: &on_device,
                sign_mask: SignMask::DEFAULT,
                amax: before.view_mut(),
                amax_rht: after.view_mut(),
            })?;
            let cpu = moe4::kernels::cpu::Cpu::new();
            let expected = drive::hadamard_amax(&cpu, &host, cols, &groups, SignMask::DEFAULT)?;
            f32_bits("amax", &[5], &expected.0, &cuda.download(amax.view())?)?;
            f32_bits("amax before RHT", &[5], &expected.0, &cuda.download(before.view())?)?;
            f32_bits("amax after RHT", &[5], &expected.1, &cuda.download(after.view())?)?;
            let (places, mut out) = (cuda.upload(&source)?, cuda.upload(&vec![bf16::NAN; rows * cols])?);
            let (source_view, out_view) = (places.view(), out.view_mut());
            cuda.permute(Permute { x, cols, source: source_view, out: out_view })?;
            let expected = drive::permute(&cpu, &host, cols, &source)?;
            bf16_bits("permuted", &[rows, cols], &expected, &cuda.download(out.view())?)?;
            let (y, slot, out_view) = (x, places.view(), out.view_mut());
            cuda.unpermute(Unpermute { y, cols, slot, top_k: 1, weights: None, out: out_view })?;
            bf16_bits("unpermuted", &[rows, cols], &expected, &cuda.download(out.view())?)
        };
        must(compared().in_case(format!("{shift} elements behind the beginning of a buffer")));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn small_and_empty_shapes() {
    let cuda = cuda();
    let shapes: [(&[usize], usize); 8] = [
        (&[0], 0),
        (&[0, 0, 0], 0),
        (&[0], 5),
        (&[1], 1),
        (&[16], 16),
        (&[17], 40),
        (&[0, 1, 0], 2),
        (&[129], 129),
    ];
    for (splits, rows) in shapes {
        let groups = Groups::new(splits, rows).expect("fits");
        for cols in [16, 48] {
            let mut x = data::normal(rows * cols, 1.0, 950 + rows as u64);
            x[groups.live_rows() * cols..].fill(bf16::NAN);
            for setting in settings(95) {
                let case = Case::new(&x, cols, &groups, setting);
                must(
                    case.as_on_the_cpu(cuda)
                        .in_case(format!("splits {splits:?} of {rows} rows of {cols}, {setting:?}")),
                );
            }
        }
    }
    must(refused(cuda.empty_groups(0, 10), "expected one entry for each expert"));
    let compared = || -> Outcome {
        let mut groups = cuda.empty_groups(3, 10)?;
        let splits = cuda.upload_plain(&[1i64, 2])?;
        refused(
            cuda.compute_groups(splits.view(), &mut groups),
            "splits of shape [3]: expected 3 elements, got 2",
        )?;
        let mut buffer = cuda.upload(&[1.0f32, 2.0])?;
        refused(cuda.write(&mut buffer, &[1.0]), "of shape [2]: expected 2 elements, got 1")?;
        cuda.write(&mut buffer, &[5.0, 6.0])?;
        f32_bits("written", &[2], &[5.0, 6.0], &cuda.download(buffer.view())?)?;
        let mut none = cuda.empty::<u8>(0)?;
        cuda.write(&mut none, &[])?;
        Ok(cuda.download(none.view()).map(drop)?)
    };
    must(compared());
}

/// A fault belongs to the backend whose pass found it.
#[test]
#[ignore = "needs a GPU"]
fn faults_of_one_backend_are_not_those_of_another() {
    let (first, second) = (another(), another());
    let compared = || -> Outcome {
        let splits = first.upload_plain(&[-1i64])?;
        let mut groups = first.empty_groups(1, 5)?;
        first.compute_groups(splits.view(), &mut groups)?;
        second.synchronize()?;
        works(&second)?;
        refused(first.synchronize(), "splits[0]")?;
        works(&first)
    };
    must(compared());
}

/// Groups of splits that the host knew hold positions for those only.
#[test]
#[ignore = "needs a GPU"]
fn groups_for_some_splits_take_no_others() {
    let cuda = cuda();
    let mut groups = cuda.groups(&Groups::new(&[32, 0], 32).unwrap()).unwrap();
    let splits = cuda.upload_plain(&[31i64, 1]).unwrap();
    let refused = cuda.compute_groups(splits.view(), &mut groups).unwrap_err().to_string();
    assert!(refused.contains("empty_groups"), "{refused}");
}
