//! Launches `kernels/group_quantize.cu`.

use super::{OutArgument, RandomArgument, THREADS, aligned, mask_choice, narrow};
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

/// Blocks of 16 columns of a patch; `COLUMN_BLOCKS` of the kernel.
const PATCH_BLOCKS: u32 = 8;
/// `Shared` of the kernel: two patches of 128 rows, scalings for both directions, and tiles.
const SHARED_BYTES: u32 = 2 * (128 * 16 + 8) * 16 + 4 * (128 + 2) * 4 + 4 * 32;
/// Thread blocks that a multiprocessor holds at a time, by shared memory and registers.
const RESIDENT: u32 = 3;

/// What is compiled for one copy.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Copy {
    pub(crate) made: bool,
    pub(crate) stochastic: bool,
    pub(crate) swizzled: bool,
    pub(crate) unpacked: bool,
}

impl Copy {
    fn of(cast: Option<&Cast<'_, DeviceMemory>>) -> Self {
        cast.map_or(Self::default(), |cast| Self {
            made: true,
            stochastic: cast.rounding != Rounding::Nearest,
            swizzled: cast.layout == ScaleLayout::Swizzled128x4,
            unpacked: cast.unpacked.is_some(),
        })
    }
}

pub(crate) fn variant(row: Copy, col: Copy, rht: Option<SignMask>) -> Variant {
    let defines = [
        ("ROWWISE", row.made),
        ("ROW_STOCHASTIC", row.stochastic),
        ("ROW_SWIZZLED", row.swizzled),
        ("ROW_UNPACKED", row.unpacked),
        ("COLUMNWISE", col.made),
        ("COL_STOCHASTIC", col.stochastic),
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
    fn new(cuda: &Cuda, cast: &Option<Cast<'_, DeviceMemory>>) -> Result<Self, Error> {
        let Some(cast) = cast else { return Ok(Self::zeroed()) };
        let kernel = "group_quantize";
        if cast.layout == ScaleLayout::Swizzled128x4 {
            // The kernel writes scales, and nothing of their padding.
            cuda.clear(&cast.scales)?;
        }
        let random = match cast.rounding {
            Rounding::Stochastic(random) => random,
            Rounding::Nearest => RandomStream { seed: 0, stream: 0 },
        };
        let unpacked = match &cast.unpacked {
            Some(values) => aligned(kernel, "unpacked", values.address(), 16)?,
            None => 0,
        };
        let codes = aligned(kernel, "codes", cast.codes.address(), 8)?;
        Ok(Self {
            amax: aligned(kernel, "amax", cast.amax.address(), 4)?,
            out: OutArgument { codes, scales: cast.scales.address(), unpacked },
            random: RandomArgument::new(random),
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
    let (row, col) = (Copy::of(rowwise.as_ref()), Copy::of(columnwise.as_ref()));
    let kernel = cuda.kernel(&variant(row, col, rht))?;
    let (row, col) = (CopyArgument::new(cuda, &rowwise)?, CopyArgument::new(cuda, &columnwise)?);
    let x = aligned("group_quantize", "x", x.address(), 16)?;
    let (cols, k) = (narrow("columns", cols)?, groups.extent().padded_rows as u64);
    let (groups_argument, mask) = (groups.argument(), rht.map_or(0, |mask| u32::from(mask.0)));
    let patches = cols.div_ceil(BLOCK as u32 * PATCH_BLOCKS);
    let count = 2u32;
    let arguments = Arguments::new()
        .with(&x)
        .with(&cols)
        .with(&k)
        .with(&count)
        .with(&groups_argument)
        .with(&mask)
        .with(&row)
        .with(&col);
    let mut blocks = groups.grid(patches);
    let lots = (groups.extent().most_tiles() as u32).div_ceil(count);
    blocks[1] = lots.min(65535);
    blocks[2] = lots.div_ceil(65535);
    let grid = Grid { shared: SHARED_BYTES, ..Grid::new(blocks, THREADS) };
    // SAFETY: `check` compared lengths with shapes. The kernel reads rows of experts, and writes all rows and positions.
    cuda.on(unsafe { kernel.launch(cuda.stream(), grid, arguments) })
}
