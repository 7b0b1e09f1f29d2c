//! NVRTC's C functions behind safe ones: the only file of the compile floor with `unsafe` code.
//!
//! The functions are looked up by hand in one library that is opened by name or by path. cudarc's bindings are not
//! used here, for three reasons: they look for bare names only, so that an older `libnvrtc.so` on the loader's path
//! would stand in for the one a caller asked for; they panic where a library or a function is missing; and they read
//! result codes into a Rust enum, whose values differ from one NVRTC to the next.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

use libloading::Library;

/// `nvrtcResult`; an integer, since later versions have codes of their own.
pub(super) type Code = c_int;
const SUCCESS: Code = 0;

/// `nvrtcProgram`: an opaque pointer.
type Handle = *mut c_void;
type GetSize = unsafe extern "C" fn(Handle, *mut usize) -> Code;
type GetBytes = unsafe extern "C" fn(Handle, *mut c_char) -> Code;
type CreateProgram = unsafe extern "C" fn(
    *mut Handle,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> Code;

/// NVRTC's functions. The library stays loaded until the process ends.
pub(super) struct Nvrtc {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Code,
    num_supported_archs: unsafe extern "C" fn(*mut c_int) -> Code,
    supported_archs: unsafe extern "C" fn(*mut c_int) -> Code,
    error_string: unsafe extern "C" fn(Code) -> *const c_char,
    create_program: CreateProgram,
    compile_program: unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> Code,
    destroy_program: unsafe extern "C" fn(*mut Handle) -> Code,
    cubin_size: GetSize,
    cubin: GetBytes,
    log_size: GetSize,
    log: GetBytes,
}

/// What a program is made of.
pub(super) struct Input<'a> {
    /// Name of the source file in messages and in line information.
    pub name: &'a CStr,
    pub source: &'a CStr,
    /// Name, as an `#include` says it, and text.
    pub headers: &'a [(CString, CString)],
    pub options: &'a [CString],
}

/// A call that failed: which one, its code, and what the log had to say.
pub(super) struct Failure {
    pub call: &'static str,
    pub code: Code,
    pub log: String,
}

/// Loads a library for the whole process, so that NVRTC finds it by name later; the error is the loader's.
pub(super) fn preload(path: &Path) -> Result<(), libloading::Error> {
    // SAFETY: loading runs the library's own initialization. Its name says that it is NVIDIA's companion of NVRTC,
    // which has no preconditions; whoever can put another file there can already run code as this user.
    std::mem::forget(unsafe { Library::new(path) }?);
    Ok(())
}

impl Nvrtc {
    /// Opens the library at `path`, or one that the loader finds if `path` is a bare name.
    pub(super) fn open(path: &Path) -> Result<Self, libloading::Error> {
        // SAFETY: as in `preload`.
        let library = unsafe { Library::new(path) }?;
        // SAFETY: each type is the declaration of that name in nvrtc.h, unchanged since CUDA 11.2. The pointers stay
        // valid because the library is never unloaded.
        let functions = unsafe {
            Self {
                version: *library.get("nvrtcVersion")?,
                num_supported_archs: *library.get("nvrtcGetNumSupportedArchs")?,
                supported_archs: *library.get("nvrtcGetSupportedArchs")?,
                error_string: *library.get("nvrtcGetErrorString")?,
                create_program: *library.get("nvrtcCreateProgram")?,
                compile_program: *library.get("nvrtcCompileProgram")?,
                destroy_program: *library.get("nvrtcDestroyProgram")?,
                cubin_size: *library.get("nvrtcGetCUBINSize")?,
                cubin: *library.get("nvrtcGetCUBIN")?,
                log_size: *library.get("nvrtcGetProgramLogSize")?,
                log: *library.get("nvrtcGetProgramLog")?,
            }
        };
        std::mem::forget(library);
        Ok(functions)
    }

    /// Major and minor version.
    pub(super) fn version(&self) -> Result<(i32, i32), Code> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are valid for a write.
        check(unsafe { (self.version)(&mut major, &mut minor) })?;
        Ok((major, minor))
    }

    /// The architectures that it compiles for, as 90 for sm_90.
    pub(super) fn supported_archs(&self) -> Result<Vec<i32>, Code> {
        let mut count = 0;
        // SAFETY: the pointer is valid for a write.
        check(unsafe { (self.num_supported_archs)(&mut count) })?;
        let mut archs = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: the buffer holds as many elements as the call before said this one writes.
        check(unsafe { (self.supported_archs)(archs.as_mut_ptr()) })?;
        Ok(archs)
    }

    /// NVRTC's name of a code, as `NVRTC_ERROR_COMPILATION`.
    pub(super) fn error_string(&self, code: Code) -> String {
        // SAFETY: any integer may be given: unknown ones have a text too.
        let text = unsafe { (self.error_string)(code) };
        if text.is_null() {
            return "unknown error".into();
        }
        // SAFETY: a string that is not null is one of the library's constants, which end in NUL and stay.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// Compiles to a cubin; with it the log, which may be empty.
    pub(super) fn compile(&self, input: &Input<'_>) -> Result<(Vec<u8>, String), Failure> {
        let without_log = |call| move |code| Failure { call, code, log: String::new() };
        let program = Program::create(self, input).map_err(without_log("nvrtcCreateProgram"))?;
        let compiled = program.compile(input.options);
        // The log matters most when the compilation failed; one that cannot be read must not hide that.
        let log = program.bytes(self.log_size, self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
        match compiled
            .map_err(|code| ("nvrtcCompileProgram", code))
            .and_then(|()| program.bytes(self.cubin_size, self.cubin).map_err(|code| ("nvrtcGetCUBIN", code)))
        {
            Ok(cubin) => Ok((cubin, log)),
            Err((call, code)) => Err(Failure { call, code, log }),
        }
    }
}

/// A program that lives: destroyed when it goes out of scope, on whichever path.
struct Program<'a> {
    nvrtc: &'a Nvrtc,
    handle: Handle,
}

impl<'a> Program<'a> {
    fn create(nvrtc: &'a Nvrtc, input: &Input<'_>) -> Result<Self, Code> {
        let texts: Vec<*const c_char> = input.headers.iter().map(|(_, text)| text.as_ptr()).collect();
        let names: Vec<*const c_char> = input.headers.iter().map(|(name, _)| name.as_ptr()).collect();
        let count = c_int::try_from(texts.len()).unwrap_or(c_int::MAX);
        let mut handle = ptr::null_mut();
        // SAFETY: source and name are strings that end in NUL; both arrays hold `count` such strings; all are borrowed
        // for the call, which copies them.
        check(unsafe {
            let (source, name) = (input.source.as_ptr(), input.name.as_ptr());
            (nvrtc.create_program)(&mut handle, source, name, count, texts.as_ptr(), names.as_ptr())
        })?;
        Ok(Self { nvrtc, handle })
    }

    fn compile(&self, options: &[CString]) -> Result<(), Code> {
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let count = c_int::try_from(options.len()).unwrap_or(c_int::MAX);
        // SAFETY: the program is alive and no other thread has it; the array holds `count` strings that end in NUL.
        check(unsafe { (self.nvrtc.compile_program)(self.handle, count, options.as_ptr()) })
    }

    /// A result of the program, by a function that says its size and one that writes it.
    fn bytes(&self, size: GetSize, get: GetBytes) -> Result<Vec<u8>, Code> {
        let mut length = 0;
        // SAFETY: the program is alive and the pointer is valid for a write.
        check(unsafe { size(self.handle, &mut length) })?;
        let mut bytes = vec![0_u8; length];
        // SAFETY: the buffer has the size that the call before said this one writes.
        check(unsafe { get(self.handle, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle came from nvrtcCreateProgram and is destroyed only here. Its code is of no use any more.
        unsafe { (self.nvrtc.destroy_program)(&mut self.handle) };
    }
}

fn check(code: Code) -> Result<(), Code> {
    if code == SUCCESS { Ok(()) } else { Err(code) }
}
