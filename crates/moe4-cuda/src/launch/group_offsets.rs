//! Launches `kernels/group_offsets.cu`.

use super::{aligned, plain};
use crate::backend::Cuda;
use crate::driver::{Arguments, Grid};
use crate::groups::{DeviceGroups, GroupsExtent};
use crate::memory::DeviceView;
use moe4::kernels::{Error, Misuse};

const THREADS: u32 = 1024;

pub(crate) fn group_offsets(
    cuda: &Cuda,
    splits: DeviceView<'_, i64>,
    groups: &mut DeviceGroups,
) -> Result<(), Error> {
    let extent = groups.extent();
    if splits.len() != extent.experts {
        return Err(Misuse::Length {
            kernel: "compute_groups",
            tensor: "splits",
            shape: format!("[{}]", extent.experts),
            expected: extent.experts,
            got: splits.len(),
        }
        .into());
    }
    if extent.padded_rows < GroupsExtent::for_any_splits(extent.experts, extent.rows).padded_rows {
        return Err(Misuse::Conflict {
            what: "compute_groups",
            conflict:
                "expected groups with token positions for any splits, got those of splits that the host knew"
                    .into(),
            fix: "make the groups by Cuda::empty_groups",
        }
        .into());
    }
    let splits = aligned("compute_groups", "splits", splits.address(), 8)?;
    let kernel = cuda.kernel(&plain("group_offsets"))?;
    groups.forget_live_rows();
    let [offsets, padded, first_tiles, tiles] = groups.parts();
    let (experts, most_tiles) = (extent.experts as u32, extent.most_tiles() as u32);
    let faults = cuda.faults_address();
    let (rows, padded_rows) = (extent.rows as u64, extent.padded_rows as u64);
    let arguments = Arguments::of("[T, Tp, E]", [extent.rows, extent.padded_rows, extent.experts])
        .with(&splits)
        .with(&experts)
        .with(&rows)
        .with(&padded_rows)
        .with(&offsets)
        .with(&padded)
        .with(&first_tiles)
        .with(&tiles)
        .with(&most_tiles)
        .with(&faults);
    // SAFETY: splits have an entry for each expert, and the parts of the groups' buffer are as large as the kernel takes
    // them to be.
    cuda.on(unsafe { kernel.launch(cuda.stream(), Grid::new([1; 3], THREADS), arguments) })
}
