//! A machine without a driver: told so, not stopped.

use moe4_cuda::Cuda;
use moe4_cuda::driver::{Device, Unavailable};

#[test]
fn without_a_driver_the_backend_says_so() {
    // SAFETY: opening the driver's library runs its initializers and nothing of ours.
    if unsafe { libloading::Library::new("libcuda.so.1").or_else(|_| libloading::Library::new("libcuda.so")) }
        .is_ok()
    {
        println!("there is a driver: nothing to see here");
        return;
    }
    assert_eq!(Device::count(), Err(Unavailable::NoDriver));
    let refused = Cuda::new().expect_err("there is no driver");
    assert_eq!(refused, Unavailable::NoDriver);
    assert!(refused.to_string().contains("install the driver"), "{refused}");
}
