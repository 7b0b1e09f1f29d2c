//! Expert weights in and out of model files. The library does the work; here rows are put into the layout asked for.

use std::path::PathBuf;

use half::bf16;
use moe4::checkpoint::{
    CheckpointError, Dtype, ExpertFormat, ExpertLayer, ModelFiles, Projection, TensorSpec, TensorWriter,
    convert,
};
use moe4::kernels::Host;
use moe4::mlp::GluLayout;
use moe4::numerics::BLOCK;
use moe4::tensor::Tile;
use pyo3::PyErr;
use pyo3::exceptions::{PyKeyboardInterrupt, PyOSError, PyValueError};
use pyo3::prelude::*;

use crate::cpu::OnCpu;
use crate::place::Place;
use crate::tensor::Tensor;

type Object<'py> = Bound<'py, PyAny>;

fn raise(error: CheckpointError) -> PyErr {
    let message = error.to_string();
    match error {
        CheckpointError::Open { .. } | CheckpointError::Read { .. } | CheckpointError::Write { .. } => {
            PyOSError::new_err(message)
        }
        CheckpointError::Interrupted { .. } => PyKeyboardInterrupt::new_err(message),
        _ => PyValueError::new_err(message),
    }
}

/// `(prefix, experts, hidden, ffn, gated, bias, format)` of each layer of experts.
type Found = (String, usize, usize, usize, bool, bool, String);

/// The layers of experts in a file or folder.
#[pyfunction]
pub(crate) fn find_experts(path: PathBuf) -> PyResult<Vec<Found>> {
    let layers = ModelFiles::open(&path).and_then(|files| ExpertLayer::find(&files)).map_err(raise)?;
    let told = |l: ExpertLayer| (l.prefix, l.experts, l.hidden, l.ffn, l.gated, l.bias, l.format.to_string());
    Ok(layers.into_iter().map(told).collect())
}

/// Where the rows of gate and up lie in `W1`.
fn rows(layout: GluLayout, gated: bool, ffn: usize, projection: Projection) -> PyResult<Vec<usize>> {
    let multiple = if gated && layout == GluLayout::Interleaved32 { 2 * BLOCK } else { BLOCK };
    if !ffn.is_multiple_of(multiple) {
        let message = format!("ffn: expected a multiple of {multiple} for this glu_layout, got {ffn}");
        return Err(PyValueError::new_err(message));
    }
    Ok((0..ffn)
        .map(|feature| {
            let run = layout.run(gated, feature / BLOCK * BLOCK, ffn);
            let first = if projection == Projection::Gate { run.gate } else { run.up };
            first + feature % BLOCK * run.stride
        })
        .collect())
}

fn parse_layout(text: &str) -> PyResult<GluLayout> {
    text.parse().map_err(|e| PyValueError::new_err(format!("glu_layout: {e}")))
}

/// `(w1 [E, N1, H], w2 [E, H, F], b1, b2)` of one layer, bfloat16.
#[pyfunction]
pub(crate) fn read_experts<'py>(
    py: Python<'py>,
    path: PathBuf,
    prefix: &str,
    experts: Option<usize>,
    glu_layout: &str,
) -> PyResult<(Object<'py>, Object<'py>, Option<Object<'py>>, Option<Object<'py>>)> {
    let layout = parse_layout(glu_layout)?;
    let mut files = ModelFiles::open(&path).map_err(raise)?;
    let layers = ExpertLayer::find(&files).map_err(raise)?;
    let Some(layer) = layers.iter().find(|layer| layer.prefix == prefix) else {
        let known: Vec<_> = layers.iter().map(|layer| format!("'{}'", layer.prefix)).collect();
        let message = format!("prefix: expected one of {}, got '{prefix}'", known.join(", "));
        return Err(PyValueError::new_err(message));
    };
    if let Some(experts) = experts {
        layer.expect_experts(&files, experts).map_err(raise)?;
    }
    let (e, h, f) = (layer.experts, layer.hidden, layer.ffn);
    let n1 = if layer.gated { 2 * f } else { f };
    let (mut w1, mut w2) = (vec![bf16::ZERO; e * n1 * h], Vec::with_capacity(e * h * f));
    let places = layer
        .projections()
        .filter(|p| *p != Projection::Down)
        .map(|p| Ok((p, rows(layout, layer.gated, f, p)?)))
        .collect::<PyResult<Vec<_>>>()?;
    for expert in 0..e {
        py.check_signals()?;
        for (projection, places) in &places {
            let weight = py.detach(|| layer.read_bf16(&mut files, expert, *projection)).map_err(raise)?;
            for (row, &to) in weight.chunks_exact(h).zip(places) {
                w1[(expert * n1 + to) * h..][..h].copy_from_slice(row);
            }
        }
        w2.extend(py.detach(|| layer.read_bf16(&mut files, expert, Projection::Down)).map_err(raise)?);
    }
    let (mut b1, mut b2) = (None, None);
    if let Some([stored, second]) = layer.read_biases(&mut files).map_err(raise)? {
        let mut first = vec![bf16::ZERO; e * n1];
        let from = if layer.elementwise() { GluLayout::Elementwise } else { GluLayout::Halves };
        for (projection, places) in &places {
            let places_from = rows(from, layer.gated, f, *projection)?;
            for expert in 0..e {
                for (&to, &from) in places.iter().zip(&places_from) {
                    first[expert * n1 + to] = stored[expert * n1 + from];
                }
            }
        }
        b1 = Some(OnCpu.hand_over(py, first, &[e, n1])?);
        b2 = Some(OnCpu.hand_over(py, second, &[e, h])?);
    }
    Ok((OnCpu.hand_over(py, w1, &[e, n1, h])?, OnCpu.hand_over(py, w2, &[e, h, f])?, b1, b2))
}

/// Writes layers `(prefix, w1, w2, glu_layout)`, bfloat16, one tensor an expert and projection.
#[pyfunction]
pub(crate) fn write_experts(
    py: Python<'_>,
    path: PathBuf,
    layers: Vec<(String, Object<'_>, Object<'_>, String)>,
    format: &str,
    mixtral: bool,
    square: bool,
) -> PyResult<()> {
    let format = match format {
        "bf16" => ExpertFormat::Bf16,
        "modelopt" => ExpertFormat::ModelOpt,
        "compressed-tensors" => ExpertFormat::CompressedTensors,
        other => {
            let message = format!("format: expected bf16, modelopt or compressed-tensors, got '{other}'");
            return Err(PyValueError::new_err(message));
        }
    };
    let names = if mixtral { ["w1", "w3", "w2"] } else { ["gate_proj", "up_proj", "down_proj"] };
    let mut specs = vec![];
    let mut weights = vec![];
    for (prefix, w1, w2, layout) in &layers {
        let (w1, w2) = (Tensor::new(format!("{prefix}: w1"), w1)?, Tensor::new(format!("{prefix}: w2"), w2)?);
        let ([e, n1, h], [_, _, f]) = (w1.dims()?, w2.dims()?);
        w2.expect(&[e, h, f])?;
        let gated = n1 == 2 * f;
        w1.expect(&[e, if gated { n1 } else { f }, h])?;
        let dot = if prefix.is_empty() { "" } else { "." };
        let name = move |e: usize, which: usize| format!("{prefix}{dot}experts.{e}.{}.weight", names[which]);
        for expert in 0..e {
            for which in usize::from(!gated)..3 {
                let shape = if which == 2 { [h, f] } else { [f, h] };
                specs.push(TensorSpec::new(name(expert, which), Dtype::BF16, &shape));
            }
        }
        weights.push((w1, w2, parse_layout(layout)?, gated, name));
    }
    // Quantized formats are made from a BF16 file beside the target.
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(".".as_ref());
    let temporary = tempfile::Builder::new().prefix(".moe4-").tempdir_in(folder)?;
    let plain =
        if format == ExpertFormat::Bf16 { path.clone() } else { temporary.path().join("bf16.safetensors") };
    let mut writer = TensorWriter::create(&plain, &specs, &[("format", "pt".into())]).map_err(raise)?;
    for (w1, w2, layout, gated, name) in &weights {
        let ([e, n1, h], [_, _, f]) = (w1.dims()?, w2.dims()?);
        let (w1, w2) = (w1.view::<Host, bf16>()?, w2.view::<Host, bf16>()?);
        for expert in 0..e {
            py.check_signals()?;
            for which in usize::from(!gated)..3 {
                let data = match which {
                    2 => w2[expert * h * f..(expert + 1) * h * f].to_vec(),
                    _ => {
                        let projection = if which == 0 { Projection::Gate } else { Projection::Up };
                        let places = rows(*layout, *gated, f, projection)?;
                        let row = |place: &usize| &w1[(expert * n1 + place) * h..][..h];
                        places.iter().flat_map(row).copied().collect()
                    }
                };
                writer.write(&name(expert, which), &data).map_err(raise)?;
            }
        }
    }
    writer.finish().map_err(raise)?;
    if format == ExpertFormat::Bf16 {
        return Ok(());
    }
    let tile = if square { Tile::Square16 } else { Tile::Row16 };
    let made = temporary.path().join("nvfp4.safetensors");
    let mut files = ModelFiles::open(&plain).map_err(raise)?;
    py.detach(|| {
        let mut go_on =
            |_: moe4::checkpoint::ConvertProgress<'_>| Python::attach(|py| py.check_signals()).is_ok();
        convert(&mut files, &made, format, tile, &mut go_on)
    })
    .map_err(raise)?;
    std::fs::rename(&made, &path)?;
    Ok(())
}
