//! Memory and streams that belong to others: another backend here, another framework in general.

use crate::cases::{Case, settings};
use crate::support::{another, called, cuda, must};
use half::bf16;
use moe4::kernels::contract::{GroupAmax, Permute};
use moe4::kernels::cpu::Cpu;
use moe4::kernels::{Backend, Error};
use moe4::tensor::Groups;
use moe4_conformance::compare::{bf16_bits, f32_bits};
use moe4_conformance::drive::{self, permute};
use moe4_conformance::{Outcome, data};
use moe4_cuda::driver::{Allocation, Allocator, Event, Stream};
use moe4_cuda::{Cuda, CudaOptions, DeviceBuffer, DeviceView, DeviceViewMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

const ROWS: usize = 5000;
const COLS: usize = 512;

fn splits() -> Groups {
    Groups::new(&[1700, 0, 3000], ROWS).expect("fits")
}

/// The same memory, as another framework would name it.
fn raw<T>(buffer: &DeviceBuffer<T>) -> DeviceView<'_, T> {
    let view = buffer.view();
    // SAFETY: the buffer is borrowed as long as the view, and its owner's work on it is done, or waited for by an
    // event.
    unsafe { DeviceView::from_raw(view.address(), view.len()) }
}

/// Amaxes by `cuda` of a tensor that is not its own.
fn amaxes(cuda: &Cuda, x: DeviceView<'_, bf16>) -> Result<Vec<f32>, Error> {
    let groups = cuda.groups(&splits())?;
    let mut amax = cuda.upload(&[f32::NAN; 3])?;
    cuda.group_amax(GroupAmax { x, cols: COLS, groups: &groups, amax: amax.view_mut() })?;
    cuda.download(amax.view())
}

#[test]
#[ignore = "needs a GPU"]
fn tensors_of_another_backend() {
    let (owner, user) = (another(), another());
    let host = data::normal(ROWS * COLS, 1.0, 1200);
    let backwards: Vec<u32> = (0..ROWS as u32).rev().collect();
    let compared = || -> Outcome {
        let expected = drive::amax(&Cpu::new(), &host, COLS, &splits())?;
        let x = owner.upload(&host)?;
        owner.synchronize()?;
        f32_bits("amax", &[3], &expected, &amaxes(&user, raw(&x))?)?;

        // Ordered by an event, and no host waits.
        let expected = permute(&Cpu::new(), &host, COLS, &backwards)?;
        let of_moved = drive::amax(&Cpu::new(), &expected, COLS, &splits())?;
        let places = owner.upload(&backwards)?;
        let mut moved = owner.upload(&vec![bf16::NAN; ROWS * COLS])?;
        let (view, out) = (x.view(), moved.view_mut());
        owner.permute(Permute { x: view, cols: COLS, source: places.view(), out })?;
        called(user.stream().wait(&called(Event::record(owner.stream()))?))?;
        f32_bits("amax of moved rows", &[3], &of_moved, &amaxes(&user, raw(&moved))?)?;

        // Written by the user, read by the owner.
        let mut out = owner.upload(&vec![bf16::NAN; ROWS * COLS])?;
        owner.synchronize()?;
        let whole = out.view_mut();
        // SAFETY: nobody else uses the buffer until the owner's stream waits for the event.
        let borrowed = unsafe { DeviceViewMut::from_raw(whole.address(), whole.len()) };
        user.permute(Permute { x: raw(&x), cols: COLS, source: raw(&places), out: borrowed })?;
        called(owner.stream().wait(&called(Event::record(user.stream()))?))?;
        bf16_bits("moved by the user", &[ROWS, COLS], &expected, &owner.download(out.view())?)
    };
    must(compared());
}

#[test]
#[ignore = "needs a GPU"]
fn memory_outlives_its_backend() {
    let host = data::normal(ROWS * COLS, 1.0, 1210);
    let compared = || -> Outcome {
        let x = {
            let owner = another();
            let x = owner.upload(&host)?;
            owner.synchronize()?;
            x
        };
        bf16_bits("x", &[ROWS, COLS], &host, &cuda().download(raw(&x))?)
    };
    must(compared());
}

#[test]
#[ignore = "needs a GPU"]
fn streams_of_others() {
    let host = data::normal(ROWS * COLS, 1.0, 1220);
    let (x, groups) = (&host[..50 * 48], Groups::new(&[30, 0, 17], 50).expect("fits"));
    let works = |cuda: &Cuda| Case::new(x, 48, &groups, settings(12)[0]).as_on_the_cpu(cuda);
    let compared = || -> Outcome {
        let expected = drive::amax(&Cpu::new(), &host, COLS, &splits())?;
        // Two backends on one stream see each other's work in order.
        let first = another();
        let options = CudaOptions::default();
        let on = |stream| Cuda::on_stream(stream, &options).unwrap_or_else(|e| panic!("{e}"));
        let second = on(first.stream().clone());
        let of_first = first.upload(&host)?;
        f32_bits("amax", &[3], &expected, &amaxes(&second, of_first.view())?)?;
        drop(first);
        works(&second)?;

        // SAFETY: the legacy default stream is that of the device's primary context, and always there.
        let legacy = on(unsafe { Stream::borrow(second.stream().device().clone(), 0) });
        works(&legacy)?;
        let of_legacy = legacy.upload(&host)?;
        f32_bits("amax on the legacy stream", &[3], &expected, &amaxes(&legacy, of_legacy.view())?)?;
        // It cannot be recorded, which is told and does no harm.
        let refused = legacy.capture(|| Ok(()));
        assert!(matches!(refused, Err(Error::Device(_))), "{refused:?}");
        works(&legacy)
    };
    must(compared());
}

#[test]
#[ignore = "needs a GPU"]
fn streams_of_one_gpu_share_kernels_and_faults() {
    let host = data::normal(ROWS * COLS, 1.0, 1230);
    let compared = || -> Outcome {
        let first = another();
        let second = first.with_stream(called(Stream::new(first.stream().device().clone()))?);
        let expected = drive::amax(&Cpu::new(), &host, COLS, &splits())?;
        let x = second.upload(&host)?;
        f32_bits("amax", &[3], &expected, &amaxes(&second, x.view())?)?;

        // A fault on one stream is seen from the other, without waiting once the device has come so far.
        first.check_faults()?;
        let wrong = second.send(&[1, -1])?;
        let groups = second.groups_from(wrong.view(), 5)?;
        called(second.stream().synchronize())?;
        let told = first.check_faults().expect_err("the fault").to_string();
        assert!(told.starts_with("splits[1]: expected 0 to"), "{told}");
        first.check_faults()?;
        second.synchronize()?;
        drop(groups);
        Ok(())
    };
    must(compared());
}

/// Memory of another backend, as another framework would give it.
#[derive(Debug)]
struct Lender {
    owner: Cuda,
    lent: Arc<AtomicUsize>,
    empty: Mutex<bool>,
}

/// Counts itself away.
struct Lent(#[allow(dead_code, reason = "freed with the rest")] DeviceBuffer<u8>, Arc<AtomicUsize>);

impl Drop for Lent {
    fn drop(&mut self) {
        self.1.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Allocator for Lender {
    fn allocate(&self, bytes: usize, element: usize, stream: &Stream) -> Result<Allocation, String> {
        assert!(bytes.is_multiple_of(element), "{bytes} bytes of elements of {element}");
        assert_eq!(stream.handle(), self.owner.stream().handle());
        if *self.empty.lock().expect("no test panics with it") {
            return Err("nothing left".into());
        }
        let buffer = self.owner.empty::<u8>(bytes).map_err(|e| e.to_string())?;
        self.lent.fetch_add(1, Ordering::Relaxed);
        let address = buffer.view().address();
        Ok(Allocation { address, owner: Box::new(Lent(buffer, self.lent.clone())) })
    }
}

#[test]
#[ignore = "needs a GPU"]
fn memory_of_an_allocator() {
    let owner = another();
    let stream = owner.stream().clone();
    let lent = Arc::new(AtomicUsize::new(0));
    let lender = Arc::new(Lender { owner, lent: lent.clone(), empty: Mutex::new(false) });
    let options = CudaOptions { allocator: Some(lender.clone()), ..CudaOptions::default() };
    let user = Cuda::on_stream(stream, &options).unwrap_or_else(|e| panic!("{e}"));
    let lent = || lent.load(Ordering::Relaxed);
    let compared = || -> Outcome {
        let groups = Groups::new(&[30, 0, 17], 50).expect("fits");
        let host = data::normal(50 * 48, 1.0, 1240);
        Case::new(&host, 48, &groups, settings(12)[0]).as_on_the_cpu(&user)?;
        assert_eq!(lent(), 0, "all went back");

        let x = user.upload(&host)?;
        let address = x.view().address();
        let given = x.into_owner().expect("it is of the allocator");
        assert!(given.is::<Lent>() && lent() == 1, "handed over");
        // SAFETY: `given` keeps the memory, which nobody writes.
        let view: DeviceView<'_, bf16> = unsafe { DeviceView::from_raw(address, host.len()) };
        bf16_bits("handed over", &[50, 48], &host, &user.download(view)?)?;
        drop(given);
        assert_eq!(lent(), 0);
        assert!(user.empty::<f32>(0)?.into_owner().is_none());

        *lender.empty.lock().expect("no test panics with it") = true;
        let refused = user.empty::<f32>(8).expect_err("nothing left").to_string();
        assert!(refused.contains("32 bytes") && refused.contains("nothing left"), "{refused}");
        Ok(())
    };
    must(compared());
}
