//! Draws the data flow of a plan as SVG: `cargo run -p moe4 --example figures` writes `docs/figures/`.
//!
//! Boxes are the plan's own passes; between the two rows stands what is saved for the backward. A test keeps the
//! files equal to what this draws.

use moe4::mlp::{GroupedMlpConfig, Needs, Plan, PlannedPass, SavedAs};
use std::fmt::Write;
use std::path::{Path, PathBuf};

const BOX: (f64, f64) = (136.0, 62.0);
const GAP: f64 = 22.0;
const MARGIN: f64 = 20.0;
const ROWS: [f64; 3] = [58.0, 186.0, 314.0]; // top of forward, saved, backward

/// File names and drawings.
pub(crate) fn figures() -> Vec<(&'static str, String)> {
    [("flow-saved.svg", false), ("flow-recompute.svg", true)]
        .into_iter()
        .map(|(name, recompute_activation)| {
            let config = GroupedMlpConfig { recompute_activation, ..GroupedMlpConfig::new(8, 4096, 14336) };
            (name, draw(&Plan::new(&config, Needs::ALL)))
        })
        .collect()
}

/// Where the drawings are kept.
pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/figures")
}

/// One saved tensor: what it is called, the pass that makes it and the pass that reads it.
struct Saved {
    label: String,
    from: usize,
    to: usize,
}

fn draw(plan: &Plan) -> String {
    let columns = plan.forward.len().max(plan.backward.len());
    let width = 2.0 * MARGIN + columns as f64 * (BOX.0 + GAP) - GAP;
    let height = ROWS[2] + BOX.1 + MARGIN;
    let mut svg = String::new();
    let _ = writeln!(
        svg,
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>
<rect width="{width}" height="{height}" fill="#fff"/>"##
    );
    let recompute = if plan.rebuilds_h { "recompute on: h is rebuilt" } else { "recompute off: h is saved" };
    heading(&mut svg, ROWS[0], &format!("forward ({recompute})"));
    heading(&mut svg, ROWS[1], "saved for the backward");
    heading(&mut svg, ROWS[2], "backward");
    row(&mut svg, ROWS[0], &plan.forward, "#e8f0fe", "#3367d6");
    row(&mut svg, ROWS[2], &plan.backward, "#fdeee2", "#c05a12");
    let mut free = MARGIN;
    for saved in saved_tensors(plan) {
        // Half-way between maker and reader, unless another one stands there.
        let x = f64::max((center(saved.from) + center(saved.to)) / 2.0, free + BOX.0 / 2.0);
        free = x + BOX.0 / 2.0 + GAP;
        rectangle(&mut svg, x, ROWS[1], "#eaf6ea", "#2e7d32", &[saved.label.as_str()]);
        arrow(&mut svg, (center(saved.from), ROWS[0] + BOX.1), (x, ROWS[1]));
        arrow(&mut svg, (x, ROWS[1] + BOX.1), (center(saved.to), ROWS[2]));
    }
    svg.push_str("</svg>\n");
    svg
}

fn saved_tensors(plan: &Plan) -> Vec<Saved> {
    let find = |passes: &[PlannedPass], tensor: &str, pass: &str| {
        passes.iter().position(|p| p.tensor == tensor && p.name.to_string().starts_with(pass))
    };
    let mut all = vec![];
    let mut add = |label: &str, from: Option<usize>, to: Option<usize>| {
        if let (Some(from), Some(to)) = (from, to) {
            all.push(Saved { label: label.into(), from, to });
        }
    };
    let (forward, backward) = (&plan.forward[..], &plan.backward[..]);
    let act = find(forward, "c, h", "grouped_gemm_act");
    add("c, prob", act, find(backward, "dc", "grouped_gemm_dact"));
    match plan.saved_h {
        SavedAs::Amax => add("amax of h", act, find(backward, "h", "group_quantize")),
        _ => add("h, 4 bits", find(forward, "h", "group_quantize"), find(backward, "dw2", "grouped_wgrad")),
    }
    add("x, 4 bits", find(forward, "x", "group_quantize"), find(backward, "dw1", "grouped_wgrad"));
    all.sort_by_key(|s| s.from + s.to);
    all
}

fn left(column: usize) -> f64 {
    MARGIN + column as f64 * (BOX.0 + GAP)
}

fn center(column: usize) -> f64 {
    left(column) + BOX.0 / 2.0
}

fn heading(svg: &mut String, top: f64, text: &str) {
    let y = top - 12.0;
    let _ = writeln!(svg, r##"<text x="{MARGIN}" y="{y}" fill="#333" font-weight="bold">{text}</text>"##);
}

fn row(svg: &mut String, top: f64, passes: &[PlannedPass], fill: &str, stroke: &str) {
    for (i, pass) in passes.iter().enumerate() {
        let name = pass.name.to_string();
        let (name, detail) = name.split_once(" (").unwrap_or((&name, ""));
        let detail = detail.trim_end_matches(')').replace(" + ", ", ");
        let mut lines = vec![pass.tensor, name];
        lines.extend((!detail.is_empty()).then_some(detail.as_str()));
        rectangle(svg, center(i), top, fill, stroke, &lines);
        if i > 0 {
            arrow(svg, (left(i) - GAP, top + BOX.1 / 2.0), (left(i), top + BOX.1 / 2.0));
        }
    }
}

fn rectangle(svg: &mut String, center: f64, top: f64, fill: &str, stroke: &str, lines: &[&str]) {
    let (w, h) = BOX;
    let x = center - w / 2.0;
    let _ = writeln!(
        svg,
        r#"<rect x="{x}" y="{top}" width="{w}" height="{h}" rx="6" fill="{fill}" stroke="{stroke}"/>"#
    );
    let first = top + h / 2.0 + 4.0 - 8.0 * (lines.len() - 1) as f64;
    for (i, line) in lines.iter().enumerate() {
        let (y, weight) = (first + 16.0 * i as f64, if i == 0 { "bold" } else { "normal" });
        // A character is about 0.6 of the font size wide.
        let size = f64::min(12.0, (w - 10.0) / (0.6 * line.len() as f64));
        let _ = writeln!(
            svg,
            r##"<text x="{center}" y="{y}" text-anchor="middle" fill="#222" font-weight="{weight}" font-size="{size:.1}">{line}</text>"##
        );
    }
}

fn arrow(svg: &mut String, from: (f64, f64), to: (f64, f64)) {
    let _ = writeln!(
        svg,
        r##"<line x1="{}" y1="{}" x2="{}" y2="{}" stroke="#555" marker-end="url(#tip)"/>"##,
        from.0, from.1, to.0, to.1
    );
}

#[allow(dead_code, reason = "the test that includes this file calls `figures` itself")]
fn main() -> std::io::Result<()> {
    std::fs::create_dir_all(folder())?;
    for (name, svg) in figures() {
        std::fs::write(folder().join(name), svg)?;
        println!("{}", folder().join(name).display());
    }
    Ok(())
}
