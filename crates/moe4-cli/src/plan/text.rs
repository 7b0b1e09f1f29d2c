//! The plan as tables.

use std::fmt::Write;

use crate::output::table;

use super::report::{Pass, Report};

/// All tables, one below the other.
pub(super) fn format(report: &Report) -> String {
    let o = &report.operator;
    let layout = o.glu_layout.as_ref().map_or(String::new(), |layout| format!(", {layout}"));
    let mut text = format!(
        "grouped MLP in {}: {} experts, hidden {}, ffn {}, {}{layout}{}{}\n\
         {} tokens x top {} = {} rows; weights {}\n",
        o.precision,
        o.experts,
        o.hidden,
        o.ffn,
        o.activation,
        if o.bias { ", biases" } else { "" },
        if o.recompute { ", recompute" } else { "" },
        o.tokens,
        o.top_k,
        o.rows,
        bytes(o.weight_bytes as f64),
    );
    let mut section = |title: &str, table: String| {
        text.push_str(&format!("\n{title}\n{table}"));
    };
    if !report.copies.is_empty() {
        section("Quantized copies (weights: 16x16 tiles, once an optimizer step)", copies(report));
    }
    section("Passes, in order", passes(report));
    section("Saved for the backward", saved(report));
    section("At most in memory at once, beside inputs, weights and their gradients", peak(report));
    section("What each option would change", options(report));
    text
}

fn copies(report: &Report) -> String {
    let row = |c: &super::report::Copy| {
        let rht = c.rht.clone().unwrap_or_else(|| "-".into());
        let texts = [c.tensor, c.usage, c.made_in, c.rounding, &rht, c.amax_from, c.saved_as];
        let mut row: Vec<String> = texts.into_iter().map(str::to_owned).collect();
        row.push(bytes(c.bytes as f64));
        row
    };
    let heads = ["tensor", "usage", "made in", "rounding", "RHT", "amax from", "saved", "bytes"];
    table(&heads, 7, report.copies.iter().map(row).collect())
}

fn passes(report: &Report) -> String {
    let measured = report.measured_on.is_some();
    let total_ms: f64 = report.passes.iter().filter_map(|p| p.ms).sum();
    let mut heads = vec!["phase", "tensor", "pass", "read", "written", "FLOP"];
    if measured {
        heads.extend(["ms", "share"]);
    }
    let line = |phase: &str, tensor: &str, name: &str, [read, written, flops]: [u64; 3], ms: Option<f64>| {
        let mut row = vec![
            phase.to_owned(),
            tensor.to_owned(),
            name.to_owned(),
            bytes(read as f64),
            bytes(written as f64),
        ];
        row.push(if flops == 0 { "-".into() } else { scaled(flops as f64) });
        row.extend(ms.map(|ms| format!("{ms:.2}")));
        row.extend(ms.map(|ms| format!("{:.0} %", 100.0 * ms / total_ms)));
        row
    };
    let one = |p: &Pass| line(p.phase, p.tensor, &p.pass, [p.read, p.written, p.flops], p.ms);
    let mut rows: Vec<_> = report.passes.iter().map(one).collect();
    let sum = |of: fn(&Pass) -> u64| report.passes.iter().map(of).sum::<u64>();
    let totals = [sum(|p| p.read), sum(|p| p.written), sum(|p| p.flops)];
    rows.push(line(
        "total",
        "",
        &format!("{} passes", report.passes.len()),
        totals,
        measured.then_some(total_ms),
    ));
    let mut text = table(&heads, 3, rows);
    if let Some(machine) = &report.measured_on {
        let _ = writeln!(text, "measured on {machine}; the median of each pass");
    }
    text
}

fn saved(report: &Report) -> String {
    let count = |n: usize| if n == 0 { "-".to_owned() } else { bytes(n as f64) };
    let mut rows: Vec<Vec<String>> = vec![];
    let mut totals = [0; 4];
    for s in &report.saved {
        let variants = [s.this_plan, s.recompute_off, s.recompute_on, s.bf16];
        totals.iter_mut().zip(variants).for_each(|(total, n)| *total += n);
        let mut row = vec![s.tensor.to_owned(), s.form.to_owned()];
        row.extend(variants.map(count));
        rows.push(row);
    }
    let mut total = vec!["total".to_owned(), String::new()];
    total.extend(totals.map(|n| bytes(n as f64)));
    rows.push(total);
    if totals[3] > 0 {
        let mut shares = vec!["of bf16".to_owned(), String::new()];
        shares.extend(totals.map(|n| format!("{:.2} x", n as f64 / totals[3] as f64)));
        rows.push(shares);
    }
    table(&["tensor", "as", "this plan", "recompute off", "recompute on", "bf16"], 2, rows)
}

fn peak(report: &Report) -> String {
    let row =
        |p: &super::report::Peak| vec![p.phase.to_owned(), bytes(p.packed as f64), bytes(p.unpacked as f64)];
    let heads = ["phase", "packed operands (CPU)", "BF16 values (GPU)"];
    table(&heads, 1, report.peak.iter().map(row).collect())
}

fn options(report: &Report) -> String {
    let signed = |n: i64| match n {
        0 => "0".to_owned(),
        n => format!("{}{}", if n < 0 { '-' } else { '+' }, bytes(n.unsigned_abs() as f64)),
    };
    let row = |a: &super::report::Alternative| {
        let passes = if a.passes == 0 { "0".to_owned() } else { format!("{:+}", a.passes) };
        vec![a.option.to_owned(), a.note.to_owned(), passes, signed(a.bytes_moved), signed(a.bytes_saved)]
    };
    let heads = ["option", "effect on results", "passes", "moved", "saved for backward"];
    table(&heads, 2, report.options.iter().map(row).collect())
}

/// Bytes with a binary unit.
fn bytes(n: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = (0..units.len() - 1).find(|&p| n < 1024f64.powi(p as i32 + 1)).unwrap_or(units.len() - 1);
    let value = n / 1024f64.powi(power as i32);
    if power == 0 { format!("{value:.0} B") } else { format!("{value:.1} {}", units[power]) }
}

/// A count with a decimal unit.
fn scaled(n: f64) -> String {
    let units = ["", " K", " M", " G", " T", " P"];
    let power = (0..units.len() - 1).find(|&p| n < 1000f64.powi(p as i32 + 1)).unwrap_or(units.len() - 1);
    format!("{:.1}{}", n / 1000f64.powi(power as i32), units[power])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units() {
        assert_eq!(
            (bytes(0.0), bytes(1023.0), bytes(1536.0)),
            ("0 B".into(), "1023 B".into(), "1.5 KiB".into())
        );
        assert_eq!(bytes(3.0 * 1024f64.powi(4)), "3.0 TiB");
        assert_eq!((scaled(999.0), scaled(1.5e12)), ("999.0".into(), "1.5 T".into()));
    }
}
