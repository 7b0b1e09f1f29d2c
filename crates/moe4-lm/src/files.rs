//! Files appear under their name whole or not at all.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use crate::Error;

/// Writes `contents` to a file beside `path`, forces it to the disk and renames it.
pub(crate) fn write_whole(path: &Path, contents: &[u8]) -> Result<(), Error> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    let partial = path.with_file_name(name);
    let write = || {
        let mut file = File::create(&partial)?;
        file.write_all(contents)?;
        file.sync_all()?;
        std::fs::rename(&partial, path)
    };
    write().map_err(|error| {
        // The write has failed already; a partial file that cannot be removed either adds nothing.
        let _ = std::fs::remove_file(&partial);
        Error::io("write", path)(error)
    })
}

/// FNV-1a, 64 bits, over parts one after the other.
pub(crate) fn fnv1a<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u64 {
    let bytes = parts.into_iter().flatten();
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_nothing_behind() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let target = folder.path().join("taken");
        std::fs::create_dir(&target).expect("folder in the way");
        assert!(write_whole(&target, b"contents").is_err());
        assert_eq!(std::fs::read_dir(folder.path()).expect("list").count(), 1);
        write_whole(&folder.path().join("free"), b"contents").expect("write");
        assert_eq!(std::fs::read(folder.path().join("free")).expect("read"), b"contents");
    }
}
