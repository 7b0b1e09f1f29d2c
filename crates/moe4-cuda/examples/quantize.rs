//! A tensor to NVFP4 on the GPU and back to the host: the first thing to read of this crate.
//!
//! `cargo run --release -p moe4-cuda --example quantize`

use half::bf16;
use moe4::kernels::Backend;
use moe4::kernels::contract::{Cast, GroupAmax, GroupQuantize, PackedOut};
use moe4::numerics::rounding::Rounding;
use moe4::tensor::{Groups, ScaleLayout};
use moe4_cuda::Cuda;

fn main() -> anyhow::Result<()> {
    let cuda = match Cuda::new() {
        Ok(cuda) => cuda,
        Err(reason) => {
            println!("nothing to do here: {reason}");
            return Ok(());
        }
    };
    println!("{}", cuda.capabilities().path);

    // [T, cols] in BF16, sorted by expert: the first 700 rows are the first expert's.
    let (rows, cols) = (1000, 4096);
    let host: Vec<bf16> = (0..rows * cols).map(|i| bf16::from_f32((i as f32).sin())).collect();
    let x = cuda.upload(&host)?;
    let groups = cuda.groups(&Groups::new(&[700, 300], rows)?)?;

    // Each expert's largest magnitude, then codes of 4 bits and a scale for each 16 of them. Nothing here waits.
    let mut amax = cuda.empty::<f32>(2)?;
    let mut codes = cuda.empty::<u8>(rows * cols / 2)?;
    let mut scales = cuda.empty::<u8>(rows * cols / 16)?;
    cuda.group_amax(GroupAmax { x: x.view(), cols, groups: &groups, amax: amax.view_mut() })?;
    let layout = ScaleLayout::Plain;
    let packed = Some(PackedOut { codes: codes.view_mut(), scales: scales.view_mut(), layout });
    let rowwise = Some(Cast { amax: amax.view(), rounding: Rounding::Nearest, packed, unpacked: None });
    cuda.group_quantize(GroupQuantize { x: x.view(), cols, groups: &groups, rowwise, columnwise: None })?;

    // Downloads wait for the passes before them.
    let (codes, scales, amax) =
        (cuda.download(codes.view())?, cuda.download(scales.view())?, cuda.download(amax.view())?);
    let (before, after) = (size_of_val(&host[..]), codes.len() + scales.len() + size_of_val(&amax[..]));
    println!("amaxes {amax:?}; first codes {:02x?}, first scales {:02x?}", &codes[..8], &scales[..4]);
    println!(
        "{before} bytes in BF16, {after} in NVFP4: {:.1} % saved",
        100.0 * (1.0 - after as f64 / before as f64)
    );
    Ok(())
}
