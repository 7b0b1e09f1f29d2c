//! Launches `kernels/group_quantize.cu`.

use super::{OutArgument, RandomArgument, aligned, mask_choice, narrow};
use crate::backend::Cuda;
use crate::driver::{Arguments, Grid};
use crate::memory::DeviceMemory;
use crate::variant::Variant;
use bytemuck::{Pod, Zeroable};
use moe4::kernels::Error;
use moe4::kernels::contract::{Cast, ColumnwiseCast, GroupQuantize};
use moe4::numerics::BLOCK;
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::rounding::{RandomStream, Rounding};
use moe4::tensor::ScaleLayout;

/// Threads of a block; `THREADS` of `kernels/shared_tile.cuh`.
const THREADS: u32 = 128;
/// Blocks of 16 columns of a thread block, with a columnwise copy and without; `LINE_BLOCKS` of the kernel.
const LINE_BLOCKS: [usize; 2] = [4, 8];

/// What is compiled for one copy.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Copy {
    pub(crate) made: bool,
    pub(crate) stochastic: bool,
    pub(crate) packed: bool,
    pub(crate) swizzled: bool,
    pub(crate) unpacked: bool,
}

impl Copy {
    fn of(cast: Option<&Cast<'_, DeviceMemory>>) -> Self {
        cast.map_or(Self::default(), |cast| Self {
            made: true,
            stochastic: cast.rounding != Rounding::Nearest,
            packed: cast.packed.is_some(),
            swizzled: cast.packed.as_ref().is_some_and(|out| out.layout == ScaleLayout::Swizzled128x4),
            unpacked: cast.unpacked.is_some(),
        })
    }
}

pub(crate) fn variant(row: Copy, col: Copy, rht: Option<SignMask>) -> Variant {
    let defines = [
        ("ROWWISE", row.made),
        ("ROW_STOCHASTIC", row.stochastic),
        ("ROW_PACKED", row.packed),
        ("ROW_SWIZZLED", row.swizzled),
        ("ROW_UNPACKED", row.unpacked),
        ("COLUMNWISE", col.made),
        ("COL_STOCHASTIC", col.stochastic),
        ("COL_PACKED", col.packed),
        ("COL_SWIZZLED", col.swizzled),
        ("COL_UNPACKED", col.unpacked),
        ("RHT", rht.is_some()),
    ];
    let mask = [("SIGN_MASK", rht.map_or(0, mask_choice))];
    let defines = defines.map(|(name, on)| (name, u32::from(on))).into_iter().chain(mask).collect();
    Variant { kernel: "group_quantize", defines }
}

/// `Copy` of the kernel.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct CopyArgument {
    amax: u64,
    out: OutArgument,
    random: RandomArgument,
}

impl CopyArgument {
    fn new(cast: &Option<Cast<'_, DeviceMemory>>, shift: u64) -> Result<Self, Error> {
        let Some(cast) = cast else { return Ok(Self::zeroed()) };
        let kernel = "group_quantize";
        let random = match cast.rounding {
            Rounding::Stochastic(random) => random,
            Rounding::Nearest => RandomStream { seed: 0, stream: 0 },
        };
        let unpacked = match &cast.unpacked {
            Some(values) => aligned(kernel, "unpacked", values.address(), 16)?,
            None => 0,
        };
        let (codes, scales) = match &cast.packed {
            Some(out) => (aligned(kernel, "codes", out.codes.address(), 8)?, out.scales.address()),
            None => (0, 0),
        };
        Ok(Self {
            amax: aligned(kernel, "amax", cast.amax.address(), 4)?,
            out: OutArgument { codes, scales, unpacked },
            random: RandomArgument::new(random, shift),
        })
    }
}

pub(crate) fn group_quantize(cuda: &Cuda, pass: GroupQuantize<'_, DeviceMemory>) -> Result<(), Error> {
    pass.check()?;
    let GroupQuantize { x, cols, groups, rowwise, columnwise } = pass;
    let (rht, columnwise) = match columnwise {
        Some(ColumnwiseCast { rht, cast }) => (rht, Some(cast)),
        None => (None, None),
    };
    if rowwise.is_none() && columnwise.is_none() {
        return Ok(());
    }
    let x = aligned("group_quantize", "x", x.address(), 16)?;
    let shift = cuda.stream_shift();
    let (row, col) = (CopyArgument::new(&rowwise, shift)?, CopyArgument::new(&columnwise, shift)?);
    let line = LINE_BLOCKS[usize::from(columnwise.is_none())];
    let lines = cols.div_ceil(BLOCK * line) as u32;
    let (cols, k) = (narrow("columns", cols)?, groups.extent().padded_rows as u64);
    let kernel = cuda.kernel(&variant(Copy::of(rowwise.as_ref()), Copy::of(columnwise.as_ref()), rht))?;
    for out in [&rowwise, &columnwise].into_iter().flatten().filter_map(|cast| cast.packed.as_ref()) {
        if out.layout == ScaleLayout::Swizzled128x4 {
            // The kernel writes scales, and nothing of their padding.
            cuda.clear(&out.scales)?;
        }
    }
    let (groups_argument, mask) = (groups.argument(), rht.map_or(0, |mask| u32::from(mask.0)));
    let arguments =
        Arguments::of("[T, cols, E]", [groups.extent().rows, cols as usize, groups.extent().experts])
            .with(&x)
            .with(&cols)
            .with(&k)
            .with(&groups_argument)
            .with(&mask)
            .with(&row)
            .with(&col);
    let grid = Grid::new(groups.grid(lines), THREADS);
    // SAFETY: `check` compared lengths with shapes. The kernel reads rows of experts, and writes all rows and positions.
    cuda.on(unsafe { kernel.launch(cuda.stream(), grid, arguments) })
}
