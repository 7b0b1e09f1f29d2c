//! Finding NVRTC: an ordered list of places, each tried, each failure kept for the message.
//!
//! ```text
//! folders that the caller names       <folder>/libnvrtc.so.13, .12, .so
//! the loader's own search             libnvrtc.so.13, .12, .so
//! where the CUDA toolkit puts it      /usr/local/cuda/...
//! ```
//!
//! NVRTC opens `libnvrtc-builtins.so.<version>` by its bare name when it compiles first. In a Python wheel that file
//! lies beside it, where the loader does not look, so it is loaded beforehand by its path.
#![forbid(unsafe_code)]

use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};

use super::error::{Attempt, LoadError};
use super::raw::{self, Nvrtc};

/// File names, newest first. The plain name comes last: it exists in toolkits only and says no version.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// Where the CUDA toolkit puts its libraries.
const TOOLKIT_FOLDERS: [&str; 2] = ["/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib"];

/// Version of NVRTC, which is that of its CUDA toolkit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version {
    /// 13 of 13.0.
    pub major: u32,
    /// 0 of 13.0.
    pub minor: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// An NVRTC that was opened and that answers.
pub(super) struct Library {
    pub nvrtc: Nvrtc,
    /// Its path, or the bare name that the loader resolved.
    pub path: PathBuf,
    pub version: Version,
    /// Architectures that it compiles for, as 90 for sm_90.
    pub archs: Vec<u32>,
}

/// Where to look.
pub(super) enum Place {
    Folder(PathBuf),
    LoaderSearch,
}

/// The given folders, then the loader's search, then the toolkit's folders.
pub(super) fn all_places(folders: &[PathBuf]) -> Vec<Place> {
    let given = folders.iter().cloned().map(Place::Folder);
    let toolkit = TOOLKIT_FOLDERS.iter().map(|folder| Place::Folder(folder.into()));
    given.chain([Place::LoaderSearch]).chain(toolkit).collect()
}

/// Opens the first NVRTC that works.
pub(super) fn find(places: &[Place]) -> Result<Library, LoadError> {
    let mut tried = Vec::new();
    for place in places {
        match place {
            Place::LoaderSearch => {
                for name in NAMES {
                    match open(Path::new(name)) {
                        Ok(library) => return Ok(library),
                        Err(reason) => tried.push(Attempt { place: name.into(), reason }),
                    }
                }
            }
            Place::Folder(folder) => {
                let present: Vec<PathBuf> =
                    NAMES.iter().map(|name| folder.join(name)).filter(|path| path.is_file()).collect();
                if present.is_empty() {
                    let reason = format!("holds none of {}", NAMES.join(", "));
                    tried.push(Attempt { place: folder.display().to_string(), reason });
                }
                for path in present {
                    match open_with_builtins(&path, folder) {
                        Ok(library) => return Ok(library),
                        Err(reason) => tried.push(Attempt { place: path.display().to_string(), reason }),
                    }
                }
            }
        }
    }
    Err(LoadError { tried })
}

fn open_with_builtins(path: &Path, folder: &Path) -> Result<Library, String> {
    let library = open(path)?;
    let builtins = folder.join(format!("libnvrtc-builtins.so.{}", library.version));
    // Absent beside it: NVRTC may still find it by name, and says so itself if it does not.
    if builtins.is_file() {
        raw::preload(&builtins).map_err(|error| reason(&error))?;
    }
    Ok(library)
}

fn open(path: &Path) -> Result<Library, String> {
    let nvrtc = Nvrtc::open(path).map_err(|error| reason(&error))?;
    let failed = |call: &str, code| format!("{call} failed with code {code} ({})", nvrtc.error_string(code));
    let (major, minor) = nvrtc.version().map_err(|code| failed("nvrtcVersion", code))?;
    let archs = nvrtc.supported_archs().map_err(|code| failed("nvrtcGetSupportedArchs", code))?;
    let unsigned = |number: i32| u32::try_from(number).unwrap_or(0);
    let version = Version { major: unsigned(major), minor: unsigned(minor) };
    log::info!("NVRTC {version} from {}", path.display());
    Ok(Library { nvrtc, path: path.into(), version, archs: archs.into_iter().map(unsigned).collect() })
}

/// The loader's own words, which are the source of an error that says no more than that it failed. They name the file.
fn reason(error: &dyn Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::{NAMES, Place, all_places, find};

    #[test]
    fn an_absent_library_is_a_reason_and_a_fix() {
        let folder = tempfile::tempdir().unwrap();
        let error = find(&[Place::Folder(folder.path().into())]).err().unwrap();
        assert_eq!(error.tried.len(), 1);
        let message = error.to_string();
        assert!(message.contains(&format!("{}: holds none of", folder.path().display())), "{message}");
        assert!(message.contains("install the CUDA toolkit"), "{message}");
    }

    #[test]
    fn a_file_that_is_no_library_is_passed_over_with_the_loaders_reason() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(NAMES[0]), "no library").unwrap();
        let error = find(&[Place::Folder(folder.path().into())]).err().unwrap();
        assert_eq!(error.tried.len(), 1);
        assert_eq!(Path::new(&error.tried[0].place), folder.path().join(NAMES[0]));
        assert!(error.tried[0].reason.contains(NAMES[0]), "{}", error.tried[0].reason);
    }

    #[test]
    fn the_callers_folders_come_first() {
        let places = all_places(&["/given".into()]);
        assert!(matches!(&places[0], Place::Folder(folder) if folder == Path::new("/given")));
        assert!(matches!(places[1], Place::LoaderSearch));
        assert!(matches!(&places[2], Place::Folder(folder) if folder.starts_with("/usr/local/cuda")));
    }
}
