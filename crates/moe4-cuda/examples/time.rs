//! scratch timing
use moe4::kernels::contract::*;
use moe4::kernels::{Backend, Memory, Extent};
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::rounding::{RandomStream, Rounding};
use moe4::tensor::{Groups, ScaleLayout};
use moe4_cuda::{Cuda, DeviceMemory};
use half::bf16;

fn main() {
    let cuda = Cuda::new().unwrap_or_else(|e| panic!("{e}"));
    let shapes: [(&str, usize, usize, usize); 4] = [
        ("mixtral", 8, 16384, 4096),
        ("qwen3", 128, 65536, 2048),
        ("nemotron", 16, 49152, 2688),
        ("proxy8", 8, 65536, 4096),
    ];
    for (name, e, t, h) in shapes {
        let mut splits: Vec<usize> = (0..e).map(|i| t * (i % 7 + 2) / (5 * e) ).collect();
        let mut over = splits.iter().sum::<usize>();
        let mut i = 0;
        while over > t { let cut = splits[i % e].min(over - t).min(64); splits[i % e] -= cut; over -= cut; i += 1; }
        splits[e - 1] += t - over;
        let groups = Groups::new(&splits, t).unwrap();
        let g = cuda.groups(&groups).unwrap();
        let mut state = 1u64;
        let mut next = || { state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407); (state >> 40) as f32 / (1u64 << 24) as f32 };
        let base: Vec<bf16> = (0..1 << 20).map(|_| bf16::from_f32((next() + next() + next() + next() - 2.0) * 1.7)).collect();
        let host: Vec<bf16> = base.iter().cycle().take(t * h).copied().collect();
        let x = cuda.upload(&host).unwrap();
        let k = g.padded_rows();
        let mut amax = cuda.empty::<f32>(e).unwrap();
        let mut amax_rht = cuda.empty::<f32>(e).unwrap();
        let mut rc = cuda.empty::<u8>(t * h / 2).unwrap();
        let mut rs = cuda.empty::<u8>(t * h / 16).unwrap();
        let mut cc = cuda.empty::<u8>(k * h / 2).unwrap();
        let mut cs = cuda.empty::<u8>(k * h / 16).unwrap();
        type M = DeviceMemory;
        let median = |mut v: Vec<f32>| { v.sort_by(f32::total_cmp); v[v.len() / 2] };
        let copy = {
            let mut other = cuda.empty::<bf16>(t * h).unwrap();
            let _ = &mut other;
            let d = median(cuda.time(10, || { let c = cuda.duplicate(x.view())?; drop(c); Ok(()) }).unwrap());
            4.0 * (t * h) as f32 / d / 1e6
        };
        let report = |what: &str, ms: f32, bytes: f64| println!("{name:10} {what:28} {ms:8.4} ms {:8.1} GB/s  {:5.1} % of copy {copy:.0}", bytes / ms as f64 / 1e6, bytes / ms as f64 / 1e4 / copy as f64);
        let n = (t * h) as f64;
        for _ in 0..2 {
        let d = median(cuda.time(15, || cuda.group_amax(GroupAmax { x: x.view(), cols: h, groups: &g, amax: amax.view_mut() })).unwrap());
        report("group_amax", d, 2.0 * n);
        let d = median(cuda.time(15, || cuda.group_hadamard_amax(GroupHadamardAmax { x: x.view(), cols: h, groups: &g, sign_mask: SignMask::DEFAULT, amax: amax.view_mut(), amax_rht: amax_rht.view_mut() })).unwrap());
        report("group_hadamard_amax", d, 2.0 * n);
        }
        for st in [false, true] {
            for (r, c) in [(true, false), (false, true), (true, true)] {
                let round = |s| if st { Rounding::Stochastic(RandomStream { seed: 7, stream: s }) } else { Rounding::Nearest };
                let mut run = || cuda.group_quantize(GroupQuantize {
                    x: x.view(), cols: h, groups: &g,
                    rowwise: r.then(|| Cast::<M> { amax: amax.view(), rounding: round(1), layout: ScaleLayout::Plain, codes: rc.view_mut(), scales: rs.view_mut(), unpacked: None }),
                    columnwise: c.then(|| ColumnwiseCast { rht: Some(SignMask::DEFAULT), cast: Cast::<M> { amax: amax_rht.view(), rounding: round(2), layout: ScaleLayout::Plain, codes: cc.view_mut(), scales: cs.view_mut(), unpacked: None } }),
                });
                run().unwrap();
                let d = median(cuda.time(15, run).unwrap());
                let dirs = r as usize + c as usize;
                report(&format!("quantize row={r} col={c} sr={st}"), d, n * (2.0 + 0.5625 * dirs as f64));
            }
        }
        let _ = <M as Memory>::len(&x.view());
    }
}
