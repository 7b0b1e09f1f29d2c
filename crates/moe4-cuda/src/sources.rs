//! The CUDA sources, embedded: a binary carries its kernels and reads none from disk.
//!
//! Every file of `kernels/` is in one of the two tables. NVRTC gets all headers with every kernel, under the names
//! below, and no other include path, so that what it reads is what the tables hold.
#![forbid(unsafe_code)]

/// Kernels: base name and text of `kernels/<name>.cu`.
pub const SOURCES: &[(&str, &str)] = &[
    ("copy_pages", include_str!("../kernels/copy_pages.cu")),
    ("dequantize", include_str!("../kernels/dequantize.cu")),
    ("group_amax", include_str!("../kernels/group_amax.cu")),
    ("group_hadamard_amax", include_str!("../kernels/group_hadamard_amax.cu")),
    ("group_offsets", include_str!("../kernels/group_offsets.cu")),
    ("group_quantize", include_str!("../kernels/group_quantize.cu")),
    ("permute", include_str!("../kernels/permute.cu")),
    ("quantize_weights", include_str!("../kernels/quantize_weights.cu")),
    ("unpermute", include_str!("../kernels/unpermute.cu")),
    ("weights_amax", include_str!("../kernels/weights_amax.cu")),
];

/// Shared headers: name as an `#include` says it, and text of `kernels/<name>`.
pub const HEADERS: &[(&str, &str)] = &[
    ("encode.cuh", include_str!("../kernels/encode.cuh")),
    ("fault.cuh", include_str!("../kernels/fault.cuh")),
    ("groups.cuh", include_str!("../kernels/groups.cuh")),
    ("numerics.cuh", include_str!("../kernels/numerics.cuh")),
    ("output.cuh", include_str!("../kernels/output.cuh")),
    ("reduce.cuh", include_str!("../kernels/reduce.cuh")),
    ("shared_tile.cuh", include_str!("../kernels/shared_tile.cuh")),
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
