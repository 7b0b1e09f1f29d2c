//! A plan as text: what each tensor becomes, what is saved, which passes run.

use super::config::{GradientRounding, Precision};
use super::plan::{AmaxSource, CopyPlan, Phase, Plan, PlannedPass, SavedAs};
use std::fmt;

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let c = &self.config;
        writeln!(
            f,
            "grouped MLP, {}: E={} H={} F={} {}{}{}",
            c.precision,
            c.experts,
            c.hidden,
            c.ffn,
            c.activation,
            if c.activation.is_gated() { format!(" ({})", c.glu_layout) } else { String::new() },
            if c.recompute_activation { ", recompute" } else { "" },
        )?;
        let mut rows =
            vec![["tensor", "copy", "made in", "tile", "rounding", "RHT", "amax from"].map(String::from)];
        if c.precision == Precision::Nvfp4 {
            let operands = [("x", &self.x), ("h", &self.h), ("dy", &self.dy), ("dc", &self.dc)];
            for (name, operand) in operands {
                rows.extend(operand.rowwise.map(|copy| copy_row(name, "rowwise", copy)));
                rows.extend(operand.columnwise.map(|copy| copy_row(name, "columnwise", copy)));
            }
            for name in ["w1", "w2"] {
                rows.push([name, "both", "prepare", "16x16", "nearest", "-", "pass"].map(String::from));
            }
            write_table(f, &rows)?;
        }
        writeln!(f, "saved: {}", self.saved_list())?;
        write_passes(f, "forward", &self.forward)?;
        write_passes(f, "backward", &self.backward)
    }
}

impl Plan {
    fn saved_list(&self) -> String {
        let one = |name: &str, saved| match saved {
            SavedAs::Nothing => None,
            SavedAs::Columnwise => Some(format!("{name} (columnwise)")),
            SavedAs::Amax => Some(format!("amax of {name}")),
            SavedAs::Bf16 => Some(format!("{name} (bf16)")),
        };
        let c = self.saved_c.then(|| "c (bf16), prob".to_owned());
        let all: Vec<_> = [one("x", self.saved_x), c, one("h", self.saved_h)].into_iter().flatten().collect();
        if all.is_empty() { "nothing".into() } else { all.join(", ") }
    }
}

fn copy_row(tensor: &str, copy: &str, plan: CopyPlan) -> [String; 7] {
    let made = match plan.made {
        Phase::Forward => "forward",
        Phase::Backward => "backward",
    };
    let rounding = match plan.rounding {
        GradientRounding::Nearest => "nearest",
        GradientRounding::Stochastic => "stochastic",
    };
    let amax = match plan.amax {
        AmaxSource::Pass => "pass",
        AmaxSource::Epilogue => "epilogue",
        AmaxSource::Reused => "forward's epilogue",
        AmaxSource::Bound => "4 x epilogue",
    };
    let rht = plan.rht.map_or("-".to_owned(), |mask| mask.to_string());
    [tensor.into(), copy.into(), made.into(), "1x16".into(), rounding.into(), rht, amax.into()]
}

fn write_table(f: &mut fmt::Formatter<'_>, rows: &[[String; 7]]) -> fmt::Result {
    let width = |column: usize| rows.iter().map(|r| r[column].chars().count()).max().unwrap_or(0);
    for row in rows {
        let cells: Vec<_> =
            row.iter().enumerate().map(|(i, cell)| format!("{cell:<w$}", w = width(i))).collect();
        writeln!(f, "  {}", cells.join("  ").trim_end())?;
    }
    Ok(())
}

fn write_passes(f: &mut fmt::Formatter<'_>, title: &str, passes: &[PlannedPass]) -> fmt::Result {
    writeln!(f, "{title}: {} passes", passes.len())?;
    for (i, pass) in passes.iter().enumerate() {
        writeln!(f, "  {:>2}. {}: {}", i + 1, pass.tensor, pass.name)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::mlp::{GroupedMlpConfig, Needs, Plan};

    #[test]
    fn the_table_shows_every_decision() {
        let config = GroupedMlpConfig { recompute_activation: true, ..GroupedMlpConfig::new(8, 128, 64) };
        let text = Plan::new(&config, Needs::ALL).to_string();
        for line in [
            "grouped MLP, nvfp4: E=8 H=128 F=64 swiglu (halves), recompute",
            "  h       columnwise  backward  1x16   nearest     0xD7E8  forward's epilogue",
            "  dc      rowwise     backward  1x16   stochastic  -       epilogue",
            "saved: x (columnwise), c (bf16), prob, amax of h",
            "   3. c, h: grouped_gemm_act (amax + RHT amax)",
        ] {
            assert!(text.lines().any(|l| l == line), "'{line}' is not in:\n{text}");
        }
    }
}
