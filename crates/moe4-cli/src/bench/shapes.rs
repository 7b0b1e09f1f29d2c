//! The shapes that are measured: `bench/shapes.toml`, which the peers read as well, or another file of that form.

use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use moe4::kernels::work::Rows;
use moe4::mlp::{Activation, GroupedMlpConfig};
use moe4::tensor::Groups;
use serde::{Deserialize, Deserializer, Serialize};

/// The shapes that ship with moe4.
const SHIPPED: &str = include_str!("../../../../bench/shapes.toml");

/// Which kernels are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum BackendArg {
    Cpu,
    Cuda,
}

/// One layer's sizes and the rows of each expert.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Shape {
    pub(super) name: String,
    /// The backend that it is measured on unless asked for by name; `None` for none.
    #[serde(default)]
    pub(super) backend: Option<BackendArg>,
    pub(super) experts: usize,
    pub(super) top_k: usize,
    /// `T`: routed rows, the sum of the splits.
    pub(super) rows: usize,
    pub(super) hidden: usize,
    pub(super) ffn: usize,
    #[serde(deserialize_with = "activation")]
    pub(super) activation: Activation,
    pub(super) splits: Vec<usize>,
}

/// A shape as records keep it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct ShapeId {
    pub(super) name: String,
    #[serde(rename = "E")]
    experts: usize,
    #[serde(rename = "T")]
    rows: usize,
    #[serde(rename = "H")]
    hidden: usize,
    #[serde(rename = "F")]
    ffn: usize,
    activation: String,
}

fn activation<'de, D: Deserializer<'de>>(value: D) -> Result<Activation, D::Error> {
    String::deserialize(value)?.parse().map_err(serde::de::Error::custom)
}

/// A file of shapes, and its text for the peers.
pub(super) struct Shapes {
    pub(super) all: Vec<Shape>,
    pub(super) text: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Listed {
    shape: Vec<Shape>,
}

impl Shapes {
    /// The shipped shapes, or those of `file`.
    pub(super) fn read(file: Option<&Path>) -> Result<Self> {
        let Some(path) = file else { return Self::parse(SHIPPED.into()).context("bench/shapes.toml") };
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the shapes of {}", path.display()))?;
        Self::parse(text).with_context(|| format!("{}", path.display()))
    }

    fn parse(text: String) -> Result<Self> {
        let Listed { shape: all } = toml::from_str(&text).map_err(|error| {
            // The whole message is a drawing of several lines.
            let line = error.span().map_or(1, |span| text[..span.start].lines().count().max(1));
            anyhow::anyhow!("line {line}: {}", error.message())
        })?;
        for (index, shape) in all.iter().enumerate() {
            if shape.name.is_empty() || shape.name.contains(char::is_control) {
                // The name goes to tables, to records, and to the command lines of the peers.
                bail!(
                    "shape {}: expected a name without control characters, got {:?}",
                    index + 1,
                    shape.name
                );
            }
            shape.check().with_context(|| format!("shape '{}'", shape.name))?;
            if all[..index].iter().any(|other| other.name == shape.name) {
                bail!("shape '{}' is there twice; give each its own name", shape.name);
            }
        }
        Ok(Self { all, text })
    }

    /// The shapes of these names, or without names those meant for `backend`.
    pub(super) fn select(&self, names: &[String], backend: BackendArg) -> Result<Vec<&Shape>> {
        let named = |name: &String| {
            self.all.iter().find(|shape| shape.name == *name).with_context(|| {
                let known: Vec<_> = self.all.iter().map(|shape| shape.name.as_str()).collect();
                format!("--shape: expected one of {}, got '{name}'", known.join(", "))
            })
        };
        let named = names.iter().map(named).collect::<Result<Vec<_>>>()?;
        let wanted = |shape: &&Shape| match named[..] {
            [] => shape.backend == Some(backend),
            // In the order of the file, each once.
            _ => named.iter().any(|named| named.name == shape.name),
        };
        let selected: Vec<_> = self.all.iter().filter(wanted).collect();
        if selected.is_empty() {
            bail!("none of the shapes is meant for this backend; choose with --shape");
        }
        Ok(selected)
    }
}

impl Shape {
    /// Sizes that fit together, far beyond any model at most, so that no count of bytes overflows.
    fn check(&self) -> Result<()> {
        for (what, size, most) in [
            ("experts", self.experts, 1 << 16),
            ("hidden", self.hidden, 1 << 16),
            ("ffn", self.ffn, 1 << 16),
            ("rows", self.rows, 1 << 26),
            ("top_k", self.top_k, self.experts),
        ] {
            if !(1..=most).contains(&size) {
                bail!("{what}: expected 1 to {most}, got {size}");
            }
        }
        moe4::mlp::GroupedMlp::new(self.config())?;
        if self.splits.len() != self.experts {
            bail!("splits: expected one for each of {} experts, got {}", self.experts, self.splits.len());
        }
        let sum = self.splits.iter().try_fold(0_usize, |sum, &split| sum.checked_add(split));
        if sum != Some(self.rows) {
            let got = sum.map_or("more than can be counted".into(), |sum| sum.to_string());
            bail!("splits: expected a sum of {} rows, got {got}", self.rows);
        }
        if !self.rows.is_multiple_of(self.top_k) {
            bail!("rows: expected a multiple of top_k = {}, got {}", self.top_k, self.rows);
        }
        Ok(())
    }

    /// Of the same kind and so small that the scalar reference takes no time; with rows that belong to nobody, and
    /// an expert without rows.
    pub(super) fn small(&self) -> Self {
        Self {
            name: format!("a small shape like '{}'", self.name),
            experts: 4,
            top_k: 2,
            rows: 128,
            hidden: 96,
            ffn: 64,
            splits: vec![37, 0, 17, 66],
            ..self.clone()
        }
    }

    pub(super) fn config(&self) -> GroupedMlpConfig {
        GroupedMlpConfig {
            activation: self.activation,
            ..GroupedMlpConfig::new(self.experts, self.hidden, self.ffn)
        }
    }

    pub(super) fn groups(&self) -> Result<Groups> {
        Ok(Groups::new(&self.splits, self.rows)?)
    }

    /// What counts of bytes are made of.
    pub(super) fn counts(&self) -> Result<Rows> {
        let padded = self.groups()?.padded_rows();
        Ok(Rows { rows: self.rows, padded, experts: self.experts })
    }

    pub(super) fn id(&self) -> ShapeId {
        ShapeId {
            name: self.name.clone(),
            experts: self.experts,
            rows: self.rows,
            hidden: self.hidden,
            ffn: self.ffn,
            activation: self.activation.to_string(),
        }
    }
}

#[cfg(test)]
#[path = "splits_tests.rs"]
mod splits_tests;
