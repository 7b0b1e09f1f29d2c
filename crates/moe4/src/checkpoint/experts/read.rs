//! Experts' weights and biases from their files.

use half::bf16;

use super::{ExpertFormat, ExpertLayer, Naming, Projection, StoredNvfp4, bad};
use crate::checkpoint::{CheckpointError, ModelFiles};
use crate::numerics::scale::{self, RANGE};
use crate::numerics::{BLOCK, e2m1, e4m3};

impl ExpertLayer {
    /// A weight in BF16: as stored, or the values that its codes stand for, rounded once.
    ///
    /// # Errors
    ///
    /// Those of reading; [`CheckpointError::BadExperts`] for scales that are NaN, negative, not finite, or zero under codes that
    /// are not.
    pub fn read_bf16(
        &self,
        files: &mut ModelFiles,
        expert: usize,
        projection: Projection,
    ) -> Result<Vec<bf16>, CheckpointError> {
        if let Naming::Fused { transposed } = self.naming {
            return self.read_fused(files, expert, projection, transposed);
        }
        let [n, k] = self.shape(projection);
        match self.read_nvfp4(files, expert, projection)? {
            None => files.read_bf16(&self.weight_name(expert, projection), &[n, k]),
            Some(StoredNvfp4 { codes, scales, amax }) => {
                let value = |at: usize| {
                    let (even, odd) = e2m1::unpack(codes[at / 2]);
                    let code = if at.is_multiple_of(2) { even } else { odd };
                    bf16::from_f32(scale::dequantize(code, scales[at / BLOCK], amax))
                };
                Ok((0..n * k).map(value).collect())
            }
        }
    }

    /// A weight in NVFP4, or `None` if it is stored in BF16.
    ///
    /// # Errors
    ///
    /// Those of [`ExpertLayer::read_bf16`].
    pub fn read_nvfp4(
        &self,
        files: &mut ModelFiles,
        expert: usize,
        projection: Projection,
    ) -> Result<Option<StoredNvfp4>, CheckpointError> {
        let ([n, k], part) = (self.shape(projection), |part| self.part_name(expert, projection, part));
        let (codes, global) = match self.format {
            ExpertFormat::Bf16 => return Ok(None),
            ExpertFormat::ModelOpt => ("weight", "weight_scale_2"),
            ExpertFormat::CompressedTensors => ("weight_packed", "weight_global_scale"),
        };
        let scales_name = part("weight_scale");
        let codes = files.read_shaped::<u8>(&part(codes), &[n, k / 2])?;
        let scales = files.read_shaped::<u8>(&scales_name, &[n, k / BLOCK])?;
        if let Some(at) = scales.iter().position(|byte| !is_scale(*byte)) {
            let (place, scale) = ([at / (k / BLOCK), at % (k / BLOCK)], e4m3::decode(scales[at]));
            let problem = format!("scale {place:?} is {scale}; expected 0 or more, the file is damaged");
            return Err(bad(files, &scales_name, problem));
        }
        let name = part(global);
        let shape = files.info(&name)?.shape.clone();
        let stored = files.read_shaped::<f32>(&name, &shape)?[0];
        // ModelOpt stores the 0 of a weight of zeros; other codes would be lost.
        let zeros = || codes.iter().all(|pair| pair & 0x77 == 0);
        let amax = amax_of(self.format, stored).filter(|amax| *amax > 0.0 || zeros()).ok_or_else(|| {
            bad(
                files,
                &name,
                format!("expected a finite, positive number, got {stored}; the file is damaged"),
            )
        })?;
        Ok(Some(StoredNvfp4 { codes, scales, amax }))
    }

    /// Biases of both projections, `[E, N1]` and `[E, H]`; rows of the first in the order of [`ExpertLayer::elementwise`].
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn read_biases(&self, files: &mut ModelFiles) -> Result<Option<[Vec<bf16>; 2]>, CheckpointError> {
        if !self.bias {
            return Ok(None);
        }
        let [b1, b2] = self.bias_names();
        let n1 = if self.gated { 2 * self.ffn } else { self.ffn };
        Ok(Some([
            files.read_bf16(&b1, &[self.experts, n1])?,
            files.read_bf16(&b2, &[self.experts, self.hidden])?,
        ]))
    }

    /// Whether gate and up rows alternate in the file. Files do not say; those with transposed fused tensors and
    /// biases (GPT-OSS) do it.
    pub fn elementwise(&self) -> bool {
        self.gated && self.bias && self.naming == Naming::Fused { transposed: true }
    }

    fn read_fused(
        &self,
        files: &mut ModelFiles,
        expert: usize,
        projection: Projection,
        transposed: bool,
    ) -> Result<Vec<bf16>, CheckpointError> {
        let [n, k] = self.shape(projection);
        let stacked = if self.gated && projection != Projection::Down { 2 * n } else { n };
        let shape = if transposed { [self.experts, k, stacked] } else { [self.experts, stacked, k] };
        let name = self.weight_name(expert, projection);
        let all = files.read_bf16_part(&name, &shape, expert)?;
        let row = |i: usize| match (stacked == n, self.elementwise(), projection) {
            (true, ..) => i,
            (_, true, Projection::Gate) => 2 * i,
            (_, true, _) => 2 * i + 1,
            (_, false, Projection::Gate) => i,
            (_, false, _) => n + i,
        };
        let value = |at: usize| match (row(at / k), at % k) {
            (row, col) if transposed => all[col * stacked + row],
            (row, col) => all[row * k + col],
        };
        Ok((0..n * k).map(value).collect())
    }
}

/// Whether a byte is a block scale: E4M3 that is neither NaN nor negative. -0 is the number zero.
fn is_scale(byte: u8) -> bool {
    byte & 0x7F != e4m3::NAN && e4m3::decode(byte) >= 0.0
}

/// The amax of a stored global scale, `None` if it has none.
///
/// Amaxes of BF16 tensors are BF16 numbers. If the stored scale is that of one, this one is taken, so that going from
/// one format to the other and back changes nothing.
fn amax_of(format: ExpertFormat, stored: f32) -> Option<f32> {
    if !stored.is_finite() || stored < 0.0 || (format == ExpertFormat::CompressedTensors && stored == 0.0) {
        return None;
    }
    let near = match format {
        ExpertFormat::CompressedTensors => RANGE / stored,
        _ => stored * RANGE,
    };
    let exact = bf16::from_f32(near).to_f32();
    let amax = if global_scale(format, exact) == stored { exact } else { near };
    amax.is_finite().then_some(amax)
}

/// What a format stores for an amax. An amax of 0 stands for a scale of 1, as all values are 0.
pub(in crate::checkpoint) fn global_scale(format: ExpertFormat, amax: f32) -> f32 {
    match format {
        ExpertFormat::CompressedTensors if amax == 0.0 => 1.0,
        ExpertFormat::CompressedTensors => RANGE / amax,
        _ => amax / RANGE,
    }
}
