//! Rows as a table.

use super::row::{PeerTime, Row};
use crate::output;

/// A line a row; with peers a line for each of them, the row's own numbers on the first.
pub(super) fn format(rows: &[Row]) -> String {
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
    let rate = |amount: u64, unit: f64| amount as f64 / row.median_ms / unit;
    let flops = if row.flops > 0 { digits(rate(row.flops, 1e9)) } else { String::new() };
    let share =
        row.floor_ms.map_or_else(String::new, |floor| format!("{:.0} %", 100.0 * floor / row.median_ms));
    let ms = digits(row.median_ms);
    vec![row.name.clone(), row.shape.name.clone(), ms, digits(rate(row.bytes, 1e6)), flops, share]
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
