//! Cubins on disk, one file a key.
//!
//! ```text
//! <folder>/<key in hex>.cubin = magic (8 bytes) | key (32) | SHA-256 of the cubin (32) | cubin
//! ```
//!
//! A file that is not exactly that is compiled again and replaced. Files are written under a temporary name in the
//! same folder and renamed, so that another process sees a whole file or none; if two write the same key, both files
//! hold the same. The cache only saves time: whatever fails here is logged once and costs a compilation.
#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::{env, fs};

use sha2::{Digest, Sha256};

use super::Key;

/// Changes when the format does.
const MAGIC: &[u8; 8] = b"moe4cub1";
const HEADER: usize = 8 + 32 + 32;

/// A folder of cubins, or none.
#[derive(Debug)]
pub struct Cache {
    folder: Option<PathBuf>,
    /// Whether a write has failed: one warning is enough.
    warned: AtomicBool,
}

impl Cache {
    /// The cache in `folder`, which is made at the first write.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { folder: Some(folder.into()), warned: AtomicBool::new(false) }
    }

    /// The cache in the user's folder for such files: `$XDG_CACHE_HOME/moe4`, or `~/.cache/moe4`. Keeps nothing if
    /// neither variable is set.
    pub fn for_user() -> Self {
        match user_folder(env::var_os("XDG_CACHE_HOME"), env::var_os("HOME")) {
            Some(folder) => Self::at(folder),
            None => Self::disabled(),
        }
    }

    /// Keeps nothing.
    pub fn disabled() -> Self {
        Self { folder: None, warned: AtomicBool::new(false) }
    }

    /// Where the files are, if anything is kept.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The cubin of `key`: from disk, or from `compile` and then kept.
    ///
    /// # Errors
    ///
    /// Those of `compile` only.
    pub fn get_or_compile<E>(
        &self,
        key: &Key,
        compile: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<Vec<u8>, E> {
        let Some(folder) = &self.folder else { return compile() };
        let path = folder.join(format!("{key}.cubin"));
        if let Some(cubin) = read(&path, key) {
            return Ok(cubin);
        }
        let cubin = compile()?;
        if let Err(error) = write(folder, &path, key, &cubin)
            && !self.warned.swap(true, Ordering::Relaxed)
        {
            log::warn!("kernels are compiled anew in each run: {}: {error}", path.display());
        }
        Ok(cubin)
    }
}

/// The rule of the XDG Base Directory Specification: a relative path in the variable does not count.
fn user_folder(xdg_cache_home: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
    let absolute = |path: OsString| Some(PathBuf::from(path)).filter(|path| path.is_absolute());
    let cache = xdg_cache_home.and_then(absolute);
    cache.or_else(|| Some(home.and_then(absolute)?.join(".cache"))).map(|cache| cache.join("moe4"))
}

/// The cubin in a file, if it is whole and of that key.
fn read(path: &Path, key: &Key) -> Option<Vec<u8>> {
    // Of anything but a plain file, such as a pipe, the read might not end.
    if !fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let file = fs::read(path).ok()?;
    let (header, cubin) = file.split_at_checked(HEADER)?;
    if header != header_of(key, cubin) {
        log::info!("{}: damaged or of another format: compiled again", path.display());
        return None;
    }
    Some(cubin.to_vec())
}

fn write(folder: &Path, path: &Path, key: &Key, cubin: &[u8]) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let mut file = tempfile::Builder::new().prefix(".new-").tempfile_in(folder)?;
    file.write_all(&header_of(key, cubin))?;
    file.write_all(cubin)?;
    file.persist(path)?;
    Ok(())
}

fn header_of(key: &Key, cubin: &[u8]) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(MAGIC);
    header[8..40].copy_from_slice(key.bytes());
    header[40..].copy_from_slice(&Sha256::digest(cubin));
    header
}

#[cfg(test)]
mod tests;
