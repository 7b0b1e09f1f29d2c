//! The golden files beside this crate: where they are, what is in them.
//!
//! The files are part of this crate, so a missing or misshapen one is a panic that names it.

use half::bf16;
use moe4::kernels::activation::{Activation, ClampedQgeglu, GluLayout, SituGlu, TanhSrelu};
use moe4::tensor::Groups;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::path::PathBuf;

/// The folder of golden files.
pub fn dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden")
}

/// The manifest: a legend, settings of each file, and under `mlp` the operator's definition and tolerance rule.
pub fn manifest() -> Value {
    let path = dir().join("manifest.json");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// One file in memory.
#[derive(Clone, Debug)]
pub struct Golden {
    /// Its name, without `.safetensors`.
    pub name: String,
    /// Its settings in the manifest.
    pub settings: Value,
    bytes: Vec<u8>,
}

fn open(files: &Value) -> Vec<Golden> {
    let files = files.as_object().expect("manifest: an object of files");
    let read = |(file, entry): (&String, &Value)| {
        let path = dir().join(file);
        Golden {
            name: file.trim_end_matches(".safetensors").to_owned(),
            settings: entry["settings"].clone(),
            bytes: std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())),
        }
    };
    files.iter().map(read).collect()
}

/// All files of a category such as `q1d_row` or `swizzle`, at least one.
pub fn category(category: &str) -> Vec<Golden> {
    let mut all = open(&manifest()["files"]);
    all.retain(|golden| golden.name.split("__").next() == Some(category));
    assert!(!all.is_empty(), "no golden file of category {category}");
    all
}

impl Golden {
    fn raw(&self, tensor: &str, dtype: Dtype) -> Vec<u8> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        let view = file.tensor(tensor).unwrap_or_else(|e| panic!("{}: {tensor}: {e}", self.name));
        assert_eq!(view.dtype(), dtype, "{}: {tensor}", self.name);
        view.data().to_vec()
    }

    /// Whether the file holds `tensor`.
    pub fn has(&self, tensor: &str) -> bool {
        SafeTensors::deserialize(&self.bytes).is_ok_and(|file| file.tensor(tensor).is_ok())
    }

    /// The shape of `tensor`.
    pub fn shape(&self, tensor: &str) -> Vec<usize> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        file.tensor(tensor).unwrap_or_else(|e| panic!("{}: {tensor}: {e}", self.name)).shape().to_vec()
    }

    /// A BF16 tensor.
    pub fn bf16(&self, tensor: &str) -> Vec<bf16> {
        let pair = |b: &[u8]| bf16::from_le_bytes([b[0], b[1]]);
        self.raw(tensor, Dtype::BF16).chunks_exact(2).map(pair).collect()
    }

    /// An FP32 tensor.
    pub fn f32(&self, tensor: &str) -> Vec<f32> {
        let four = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        self.raw(tensor, Dtype::F32).chunks_exact(4).map(four).collect()
    }

    /// A byte tensor.
    pub fn u8(&self, tensor: &str) -> Vec<u8> {
        self.raw(tensor, Dtype::U8)
    }

    /// An INT64 tensor.
    pub fn i64(&self, tensor: &str) -> Vec<i64> {
        let eight = |b: &[u8]| i64::from_le_bytes(b.try_into().expect("chunks of 8"));
        self.raw(tensor, Dtype::I64).chunks_exact(8).map(eight).collect()
    }

    /// A number in the settings.
    pub fn number(&self, name: &str) -> usize {
        let value = self.settings[name].as_u64();
        value.unwrap_or_else(|| panic!("{}: settings: {name}", self.name)) as usize
    }
}

/// A file of the whole operator, with its settings read.
#[derive(Clone, Debug)]
pub struct MlpGolden {
    /// The file.
    pub file: Golden,
    /// The activation with its parameters.
    pub activation: Activation,
    /// Order of the rows of `w1`.
    pub layout: GluLayout,
    /// Rows of each expert.
    pub groups: Groups,
    /// `H`.
    pub hidden: usize,
    /// `F`.
    pub ffn: usize,
}

/// All files of the whole operator.
pub fn mlp() -> Vec<MlpGolden> {
    open(&manifest()["mlp"]["files"]).into_iter().map(MlpGolden::new).collect()
}

impl MlpGolden {
    fn new(file: Golden) -> Self {
        let settings = &file.settings;
        let parameter = |name: &str| {
            let value = settings["params"][name].as_f64();
            value.unwrap_or_else(|| panic!("{}: params: {name}", file.name)) as f32
        };
        let activation = match settings["act"].as_str() {
            Some("swiglu") => Activation::SWIGLU,
            Some("srelu") => Activation::SRELU,
            Some("tanh_srelu") => Activation::TanhSrelu(TanhSrelu { s: parameter("s") }),
            Some("situ_glu") => {
                Activation::SituGlu(SituGlu { beta1: parameter("beta1"), beta2: parameter("beta2") })
            }
            Some("clamped_qgeglu") => Activation::ClampedQgeglu(ClampedQgeglu {
                limit: parameter("limit"),
                alpha: parameter("alpha"),
                offset: parameter("offset"),
            }),
            other => panic!("{}: activation {other:?}", file.name),
        };
        let layout = match settings["layout"].as_str() {
            None | Some("halves") => GluLayout::Halves,
            Some("interleave32") => GluLayout::Interleaved32,
            Some("elementwise") => GluLayout::Elementwise,
            Some(other) => panic!("{}: layout {other}", file.name),
        };
        let groups = Groups::from_i64(&file.i64("splits"), file.number("T"));
        let groups = groups.unwrap_or_else(|e| panic!("{}: {e}", file.name));
        let (hidden, ffn) = (file.number("H"), file.number("F"));
        Self { activation, layout, groups, hidden, ffn, file }
    }

    /// `N1`.
    pub fn n1(&self) -> usize {
        self.activation.fc1_rows(self.ffn)
    }
}
