//! The CUDA sources, embedded: a binary carries its kernels and reads none from disk.
//!
//! Every file of `kernels/` is in one of the two tables. NVRTC gets all headers with every kernel, under the names
//! below, and no other include path, so that what it reads is what the tables hold.
#![forbid(unsafe_code)]

/// Kernels: base name and text of `kernels/<name>.cu`.
pub const SOURCES: &[(&str, &str)] = &[
    ("addresses", include_str!("../kernels/addresses.cu")),
    ("column_sums", include_str!("../kernels/column_sums.cu")),
    ("copy_pages", include_str!("../kernels/copy_pages.cu")),
    ("dequantize", include_str!("../kernels/dequantize.cu")),
    ("group_amax", include_str!("../kernels/group_amax.cu")),
    ("group_hadamard_amax", include_str!("../kernels/group_hadamard_amax.cu")),
    ("group_offsets", include_str!("../kernels/group_offsets.cu")),
    ("group_quantize", include_str!("../kernels/group_quantize.cu")),
    ("grouped_bias_grad", include_str!("../kernels/grouped_bias_grad.cu")),
    ("grouped_gemm", include_str!("../kernels/grouped_gemm.cu")),
    ("grouped_gemm_act", include_str!("../kernels/grouped_gemm_act.cu")),
    ("grouped_gemm_dact", include_str!("../kernels/grouped_gemm_dact.cu")),
    ("grouped_wgrad", include_str!("../kernels/grouped_wgrad.cu")),
    ("hopper_gemm", include_str!("../kernels/hopper_gemm.cu")),
    ("hopper_gemm_act", include_str!("../kernels/hopper_gemm_act.cu")),
    ("hopper_gemm_dact", include_str!("../kernels/hopper_gemm_dact.cu")),
    ("hopper_wgrad", include_str!("../kernels/hopper_wgrad.cu")),
    ("packed_gemm", include_str!("../kernels/packed_gemm.cu")),
    ("packed_gemm_act", include_str!("../kernels/packed_gemm_act.cu")),
    ("packed_gemm_dact", include_str!("../kernels/packed_gemm_dact.cu")),
    ("permute", include_str!("../kernels/permute.cu")),
    ("quantize_cached_weights", include_str!("../kernels/quantize_cached_weights.cu")),
    ("quantize_weights", include_str!("../kernels/quantize_weights.cu")),
    ("sum_slices", include_str!("../kernels/sum_slices.cu")),
    ("sum_tiles", include_str!("../kernels/sum_tiles.cu")),
    ("unpack", include_str!("../kernels/unpack.cu")),
    ("unpermute", include_str!("../kernels/unpermute.cu")),
    ("weights_amax", include_str!("../kernels/weights_amax.cu")),
];

/// Shared headers: name as an `#include` says it, and text of `kernels/<name>`.
pub const HEADERS: &[(&str, &str)] = &[
    ("activation.cuh", include_str!("../kernels/activation.cuh")),
    ("encode.cuh", include_str!("../kernels/encode.cuh")),
    ("epilogue.cuh", include_str!("../kernels/epilogue.cuh")),
    ("epilogue_act.cuh", include_str!("../kernels/epilogue_act.cuh")),
    ("epilogue_dact.cuh", include_str!("../kernels/epilogue_dact.cuh")),
    ("fault.cuh", include_str!("../kernels/fault.cuh")),
    ("fragment.cuh", include_str!("../kernels/fragment.cuh")),
    ("fragment_amax.cuh", include_str!("../kernels/fragment_amax.cuh")),
    ("glu.cuh", include_str!("../kernels/glu.cuh")),
    ("groups.cuh", include_str!("../kernels/groups.cuh")),
    ("hopper_pipeline.cuh", include_str!("../kernels/hopper_pipeline.cuh")),
    ("hopper_rows.cuh", include_str!("../kernels/hopper_rows.cuh")),
    ("mma.cuh", include_str!("../kernels/mma.cuh")),
    ("mma_loop.cuh", include_str!("../kernels/mma_loop.cuh")),
    ("numerics.cuh", include_str!("../kernels/numerics.cuh")),
    ("output.cuh", include_str!("../kernels/output.cuh")),
    ("packed_decode.cuh", include_str!("../kernels/packed_decode.cuh")),
    ("packed_loop.cuh", include_str!("../kernels/packed_loop.cuh")),
    ("packed_stage.cuh", include_str!("../kernels/packed_stage.cuh")),
    ("quantize_weights.cuh", include_str!("../kernels/quantize_weights.cuh")),
    ("reduce.cuh", include_str!("../kernels/reduce.cuh")),
    ("shared_tile.cuh", include_str!("../kernels/shared_tile.cuh")),
    ("wgmma.cuh", include_str!("../kernels/wgmma.cuh")),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::{HEADERS, SOURCES};

    #[test]
    fn every_file_is_embedded_once() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let on_disk: BTreeSet<String> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.ends_with(".cu") || name.ends_with(".cuh"))
            .collect();
        let kernels = SOURCES.iter().map(|(name, _)| format!("{name}.cu"));
        let embedded: Vec<String> = kernels.chain(HEADERS.iter().map(|(name, _)| (*name).into())).collect();
        assert_eq!(embedded.iter().cloned().collect::<BTreeSet<_>>(), on_disk);
        assert_eq!(embedded.len(), on_disk.len(), "a file is embedded twice");
    }
}
