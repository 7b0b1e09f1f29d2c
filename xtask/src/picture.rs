//! `docs/steps.svg`: how long training steps take beside PyTorch, from the records of `moe4 bench`.
//!
//! Of each step that was measured with peers: a bar of our time and one of each peer's best, on a scale of powers of ten.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use plotters::prelude::*;
use serde_json::Value;

const RECORDS: &str = "bench/record";
const PICTURE: &str = "docs/steps.svg";
const WIDTH: i32 = 900;
const LABELS: i32 = 130;
const BAR: i32 = 18;
const GAP: i32 = 14;

/// What is drawn in one line.
struct Bar {
    label: &'static str,
    color: RGBColor,
    ms: f64,
}

/// A shape and its bars.
struct Group {
    name: String,
    bars: Vec<Bar>,
}

/// Draws the picture of the repository at `root`.
pub(crate) fn run(root: &Path) -> Result<()> {
    let mut groups = Vec::new();
    for record in newest_records(&root.join(RECORDS))? {
        let text = fs::read_to_string(&record).with_context(|| format!("reading {}", record.display()))?;
        let record: Value =
            serde_json::from_str(&text).with_context(|| format!("reading {}", record.display()))?;
        let rows = record["rows"].as_array().map_or(&[][..], Vec::as_slice);
        groups.extend(rows.iter().filter_map(group));
    }
    if groups.is_empty() {
        bail!(
            "no record holds a step_nvfp4 with peers; measure one with `moe4 bench --peers ... --record {RECORDS}`"
        );
    }
    let picture = root.join(PICTURE);
    draw(&picture, &groups).map_err(|e| anyhow!("drawing {}: {e}", picture.display()))?;
    println!("written: {}", picture.display());
    Ok(())
}

/// The newest file of each machine: names are dates.
fn newest_records(folder: &Path) -> Result<Vec<PathBuf>> {
    let list = |folder: &Path| -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))?;
        let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
        paths.sort();
        Ok(paths)
    };
    let mut newest = Vec::new();
    for machine in list(folder)?.into_iter().filter(|path| path.is_dir()) {
        newest
            .extend(list(&machine)?.into_iter().rfind(|path| path.extension().is_some_and(|e| e == "json")));
    }
    Ok(newest)
}

/// A row as bars, if it is a step in NVFP4 with peers.
fn group(row: &Value) -> Option<Group> {
    let peers = row["peers"].as_array()?;
    if row["name"] != "step_nvfp4" {
        return None;
    }
    let best = |kind: &str| {
        let of_kind =
            peers.iter().filter(|peer| peer["peer"].as_str().is_some_and(|name| name.contains(kind)));
        of_kind.filter_map(|peer| peer["peer_ms"].as_f64()).min_by(f64::total_cmp)
    };
    let ours = Bar { label: "moe4, NVFP4", color: RGBColor(214, 96, 20), ms: row["median_ms"].as_f64()? };
    let bf16 = best("BF16").map(|ms| Bar { label: "PyTorch, BF16", color: RGBColor(31, 96, 180), ms });
    let emulated = best("emulation").map(|ms| Bar {
        label: "PyTorch, NVFP4 emulated",
        color: RGBColor(120, 120, 120),
        ms,
    });
    let bars = [Some(ours), bf16, emulated].into_iter().flatten().collect();
    Some(Group { name: row["shape"]["name"].as_str()?.to_owned(), bars })
}

fn draw(path: &Path, groups: &[Group]) -> Result<(), Box<dyn std::error::Error>> {
    let lines: i32 = groups.iter().map(|group| group.bars.len() as i32).sum();
    let height = lines * BAR + (groups.len() as i32 + 1) * GAP;
    let root = SVGBackend::new(path, (WIDTH as u32, height as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    let times = || groups.iter().flat_map(|group| &group.bars).map(|bar| bar.ms);
    let (least, most) = (times().fold(f64::MAX, f64::min) / 2.0, times().fold(0.0, f64::max));
    let room = f64::from(WIDTH - LABELS - 220);
    let length = |ms: f64| (room * (ms / least).ln() / (most / least).ln()) as i32;
    let text = ("sans-serif", 14).into_font();
    let mut top = GAP;
    for group in groups {
        root.draw(&Text::new(group.name.clone(), (10, top), text.clone()))?;
        for bar in &group.bars {
            let end = LABELS + length(bar.ms);
            let corners = [(LABELS, top), (end, top + BAR - 3)];
            root.draw(&Rectangle::new(corners, bar.color.filled()))?;
            root.draw(&Text::new(format!("{:.0} ms  {}", bar.ms, bar.label), (end + 6, top), text.clone()))?;
            top += BAR;
        }
        top += GAP;
    }
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_step_with_peers_has_three_bars_of_the_best_times() {
        let peer = |name: &str, ms: f64| json!({ "peer": name, "peer_ms": ms });
        let row = json!({
            "name": "step_nvfp4", "median_ms": 31.9, "shape": { "name": "cpu-small" },
            "peers": [peer("PyTorch BF16 loop, eager", 55.4), peer("PyTorch BF16 loop, compiled", 36.7),
                      peer("PyTorch NVFP4 emulation, eager", 766.0)],
        });
        let group = group(&row).unwrap();
        assert_eq!(group.bars.iter().map(|bar| bar.ms).collect::<Vec<_>>(), [31.9, 36.7, 766.0]);
        for other in [json!({ "name": "step_bf16", "peers": [] }), json!({ "name": "step_nvfp4" })] {
            assert!(super::group(&other).is_none());
        }
    }
}
