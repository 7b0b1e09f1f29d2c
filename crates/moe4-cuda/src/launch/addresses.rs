//! Launches `kernels/addresses.cu`.

use super::plain;
use crate::backend::Cuda;
use crate::driver::{Arguments, DeviceBytes, Grid};
use bytemuck::{Pod, Zeroable};
use moe4::kernels::Error;

/// Addresses of one launch; `MOST` of the kernel.
const MOST: usize = 256;

/// `Addresses` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct AddressesArgument([u64; MOST]);

// SAFETY: an array of numbers, without padding.
unsafe impl Zeroable for AddressesArgument {}
// SAFETY: as above.
unsafe impl Pod for AddressesArgument {}

/// The addresses, or other numbers of 64 bits, in device memory. They travel as arguments of launches, so that a graph holds them.
pub(crate) fn addresses(cuda: &Cuda, places: &[u64]) -> Result<DeviceBytes, Error> {
    let table = cuda.bytes::<u64>(places.len())?;
    let kernel = cuda.kernel(&plain("addresses"))?;
    for (i, places) in places.chunks(MOST).enumerate() {
        let mut given = AddressesArgument::zeroed();
        given.0[..places.len()].copy_from_slice(places);
        let (count, to) = (places.len() as u32, table.address() + (i * MOST * size_of::<u64>()) as u64);
        let arguments =
            Arguments::of("[addresses, 1, 1]", [places.len(), 1, 1]).with(&given).with(&count).with(&to);
        // SAFETY: the table has an entry for each address.
        cuda.on(unsafe { kernel.launch(cuda.stream(), Grid::new([1; 3], MOST as u32), arguments) })?;
    }
    Ok(table)
}
