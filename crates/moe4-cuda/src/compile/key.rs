//! The key of a cubin: a hash of everything that it depends on.
#![forbid(unsafe_code)]

use std::fmt;

use sha2::{Digest, Sha256};

use super::{Arch, Version};

/// SHA-256 over source, headers, compiler version, architecture and options.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key([u8; 32]);

/// What a cubin depends on.
#[derive(Clone, Debug)]
pub(super) struct Inputs<'a> {
    /// Name of the source file, which is in the line information.
    pub name: &'a str,
    pub source: &'a str,
    pub headers: &'a [(&'a str, &'a str)],
    pub version: Version,
    pub arch: Arch,
    pub options: &'a [String],
}

impl Key {
    /// Every text goes in with its length before it, every list with its count, so that no two inputs read alike.
    pub(super) fn of(inputs: &Inputs<'_>) -> Self {
        let mut hash = Sha256::new();
        let number = |hash: &mut Sha256, value: usize| hash.update((value as u64).to_le_bytes());
        let text = |hash: &mut Sha256, text: &str| {
            number(hash, text.len());
            hash.update(text);
        };
        text(&mut hash, inputs.name);
        text(&mut hash, inputs.source);
        number(&mut hash, inputs.headers.len());
        for (name, content) in inputs.headers {
            text(&mut hash, name);
            text(&mut hash, content);
        }
        text(&mut hash, &inputs.version.to_string());
        text(&mut hash, &inputs.arch.to_string());
        number(&mut hash, inputs.options.len());
        for option in inputs.options {
            text(&mut hash, option);
        }
        Self(hash.finalize().into())
    }

    /// The hash itself.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for Key {
    /// 64 hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({self})")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::{Arch, Inputs, Key, Version};

    #[test]
    fn every_input_changes_the_key() {
        let options = ["--fmad=false".to_owned(), "-DN=1".to_owned()];
        let other_options = ["--fmad=false".to_owned(), "-DN=2".to_owned()];
        let base = Inputs {
            name: "k.cu",
            source: "source",
            headers: &[("a.cuh", "A"), ("b.cuh", "B")],
            version: Version { major: 13, minor: 0 },
            arch: Arch::new(10, 0).unwrap(),
            options: &options,
        };
        let changed = [
            base.clone(),
            Inputs { name: "l.cu", ..base.clone() },
            Inputs { source: "source ", ..base.clone() },
            Inputs { headers: &[("a.cuh", "A"), ("b.cuh", "C")], ..base.clone() },
            Inputs { headers: &[("a.cuh", "A"), ("c.cuh", "B")], ..base.clone() },
            Inputs { headers: &[("a.cuh", "A")], ..base.clone() },
            Inputs { headers: &[], ..base.clone() },
            Inputs { version: Version { major: 13, minor: 1 }, ..base.clone() },
            Inputs { version: Version { major: 12, minor: 0 }, ..base.clone() },
            Inputs { arch: Arch::new(10, 3).unwrap(), ..base.clone() },
            Inputs { options: &other_options, ..base.clone() },
            Inputs { options: &options[..1], ..base.clone() },
        ];
        let keys: HashSet<Key> = changed.iter().map(Key::of).collect();
        assert_eq!(keys.len(), changed.len());
        assert_eq!(Key::of(&base), Key::of(&base.clone()));
    }

    #[test]
    fn text_moved_over_a_border_changes_the_key() {
        let arch = Arch::new(9, 0).unwrap();
        let version = Version { major: 13, minor: 0 };
        let key =
            |name, source, headers| Key::of(&Inputs { name, source, headers, version, arch, options: &[] });
        assert_ne!(key("a", "bc", &[]), key("ab", "c", &[]));
        assert_ne!(key("a", "b", &[("c", "d")]), key("a", "b", &[("cd", "")]));
    }
}
