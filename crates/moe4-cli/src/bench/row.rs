//! One measured row, as the table shows it and a record keeps it.

use moe4::kernels::Entry;
use serde::Serialize;

use super::clock::Ceilings;
use super::sequence::PassTime;
use super::shapes::ShapeId;

/// A case on a shape.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) shape: ShapeId,
    /// The backend and its hardware path.
    pub(super) backend: String,
    pub(super) median_ms: f64,
    pub(super) min_ms: f64,
    pub(super) max_ms: f64,
    pub(super) runs: usize,
    /// What the measured ceilings allow; none for products where the matrix rate is not known.
    pub(super) floor_ms: Option<f64>,
    /// Read and written.
    pub(super) bytes: u64,
    /// Multiplications and additions of matrix products.
    pub(super) flops: u64,
    /// Bytes of `h` that wait for the backward, of rows that compare just that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) saved_h_bytes: Option<usize>,
    /// The passes of a run of several, if their times were taken.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) passes: Vec<PassTime>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) peers: Vec<PeerTime>,
}

/// A peer's time for the same work.
#[derive(Clone, Debug, Serialize)]
pub(super) struct PeerTime {
    pub(super) peer: String,
    pub(super) peer_ms: f64,
    /// moe4's time over the peer's: below 1, moe4 is faster.
    pub(super) ratio: f64,
}

/// The least time that these passes take one after the other: each moves its bytes and computes its products, at
/// best both at the same time.
pub(super) fn floor_ms(entries: &[Entry], ceilings: Ceilings) -> Option<f64> {
    let of_pass = |entry: &Entry| {
        let copy = entry.work.bytes() as f64 / ceilings.copy_gb_s / 1e6;
        match entry.work.flops {
            0 => Some(copy),
            flops => ceilings.matrix_tflop_s.map(|rate| copy.max(flops as f64 / rate / 1e9)),
        }
    };
    entries.iter().map(of_pass).sum()
}

/// Times to a tenth of a microsecond, ratios to a thousandth: digits beyond are noise.
pub(super) fn round(rows: &mut [Row]) {
    let to = |value: &mut f64, unit: f64| *value = (*value * unit).round() / unit;
    for row in rows {
        for ms in [&mut row.median_ms, &mut row.min_ms, &mut row.max_ms].into_iter().chain(&mut row.floor_ms)
        {
            to(ms, 1e4);
        }
        for pass in &mut row.passes {
            [&mut pass.ms].into_iter().chain(&mut pass.floor_ms).for_each(|ms| to(ms, 1e4));
        }
        for peer in &mut row.peers {
            to(&mut peer.peer_ms, 1e4);
            to(&mut peer.ratio, 1e3);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use moe4::kernels::PassName;
    use moe4::kernels::work::Work;

    use super::*;

    fn entry(read: u64, written: u64, flops: u64) -> Entry {
        Entry { name: PassName::Permute, work: Work { read, written, flops }, time: Duration::ZERO }
    }

    #[test]
    fn the_floor_adds_passes_and_takes_the_slower_of_bytes_and_products() {
        let ceilings = Ceilings { copy_gb_s: 1.0, matrix_tflop_s: Some(1e-3) };
        // 3 ms of bytes; then 1 ms of bytes beside 5 ms of products.
        let passes = [entry(1_000_000, 2_000_000, 0), entry(500_000, 500_000, 5_000_000)];
        assert_eq!(floor_ms(&passes, ceilings), Some(8.0));
        let unknown = Ceilings { matrix_tflop_s: None, ..ceilings };
        assert_eq!(floor_ms(&passes, unknown), None);
        assert_eq!(floor_ms(&passes[..1], unknown), Some(3.0));
    }
}
