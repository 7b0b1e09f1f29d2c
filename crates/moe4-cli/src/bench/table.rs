//! Rows as tables: all of them, then the passes within a row, then what is saved on `h`.

use super::row::{PeerTime, Row};
use crate::output;

/// All tables.
pub(super) fn all(rows: &[Row]) -> String {
    let mut text = format(rows);
    let with_passes = |row: &&Row| !row.passes.is_empty() && row.saved_h_bytes.is_none();
    for row in rows.iter().filter(with_passes) {
        text.push_str(&format!("\n{} on {}, pass by pass\n{}", row.name, row.shape.name, passes(row)));
    }
    let of_h: Vec<_> = rows.iter().filter_map(|row| Some((row, row.saved_h_bytes?))).collect();
    if !of_h.is_empty() {
        text.push_str(&format!("\npasses over h\n{}", h_table(&of_h)));
    }
    text
}

/// A line a pass, and what the row's time holds beside them.
fn passes(row: &Row) -> String {
    let mut lines: Vec<_> = row
        .passes
        .iter()
        .map(|pass| {
            let mut line = vec![pass.phase.to_owned(), pass.pass.clone(), pass.tensor.to_owned()];
            line.extend(numbers(pass.ms, pass.bytes, pass.flops, pass.floor_ms));
            line
        })
        .collect();
    let sum = row.passes.iter().map(|pass| pass.ms).sum();
    let mut line = vec![String::new(), "all passes".into(), String::new()];
    line.extend(numbers(sum, row.bytes, row.flops, row.floor_ms));
    lines.push(line);
    let mut line = vec![String::new(), "the row".into(), String::new()];
    line.extend(numbers(row.median_ms, row.bytes, row.flops, row.floor_ms));
    lines.push(line);
    output::table(&["phase", "pass", "tensor", "ms", "GB/s", "TFLOP/s", "of floor"], 3, lines)
}

/// What each way to `h`'s copies takes, beside the one with a pass of its own for the amaxes.
fn h_table(rows: &[(&Row, usize)]) -> String {
    let of_phase = |row: &Row, phase: &str| -> f64 {
        // From 0: an empty sum is -0, and shows it.
        row.passes.iter().filter(|pass| pass.phase == phase).fold(0.0, |sum, pass| sum + pass.ms)
    };
    let sum = |row: &Row| of_phase(row, "forward") + of_phase(row, "backward");
    let separate = |shape: &str| {
        rows.iter()
            .find(|(row, _)| row.name == "h_separate" && row.shape.name == shape)
            .map(|(row, _)| sum(row))
    };
    let line = |&(row, saved): &(&Row, usize)| {
        let share = separate(&row.shape.name)
            .map_or_else(String::new, |separate| format!("{:.0} %", 100.0 * sum(row) / separate));
        vec![
            row.name.clone(),
            row.shape.name.clone(),
            digits(of_phase(row, "forward")),
            digits(of_phase(row, "backward")),
            digits(sum(row)),
            share,
            row.passes.len().to_string(),
            saved.to_string(),
        ]
    };
    let heads =
        ["passes", "shape", "forward ms", "backward ms", "sum", "of separate", "launches", "saved bytes"];
    output::table(&heads, 2, rows.iter().map(line).collect())
}

/// A line a row; with peers a line for each of them, the row's own numbers on the first.
fn format(rows: &[Row]) -> String {
    let with_peers = rows.iter().any(|row| !row.peers.is_empty());
    let mut heads = vec!["pass", "shape", "ms", "GB/s", "TFLOP/s", "of floor"];
    if with_peers {
        heads.extend(["ours/peer", "peer ms", "peer"]);
    }
    let mut lines = vec![];
    for row in rows {
        let mut line = own(row);
        let mut peers = row.peers.iter();
        if with_peers {
            line.extend(peers.next().map_or_else(|| vec![String::new(); 3], peer));
        }
        lines.push(line);
        for other in peers {
            let mut line = vec![String::new(); 6];
            line.extend(peer(other));
            lines.push(line);
        }
    }
    output::table(&heads, 2, lines)
}

fn own(row: &Row) -> Vec<String> {
    let mut line = vec![row.name.clone(), row.shape.name.clone()];
    line.extend(numbers(row.median_ms, row.bytes, row.flops, row.floor_ms));
    line
}

/// Time, rates, and the floor's share of the time.
fn numbers(ms: f64, bytes: u64, flops: u64, floor_ms: Option<f64>) -> [String; 4] {
    let rate = |amount: u64, unit: f64| amount as f64 / ms / unit;
    let flops = if flops > 0 { digits(rate(flops, 1e9)) } else { String::new() };
    let share = floor_ms.map_or_else(String::new, |floor| format!("{:.0} %", 100.0 * floor / ms));
    [digits(ms), digits(rate(bytes, 1e6)), flops, share]
}

fn peer(peer: &PeerTime) -> Vec<String> {
    vec![digits(peer.ratio), digits(peer.peer_ms), peer.peer.clone()]
}

/// Three digits or more.
fn digits(value: f64) -> String {
    match value {
        v if v < 1.0 => format!("{v:.3}"),
        v if v < 10.0 => format!("{v:.2}"),
        v if v < 100.0 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}
