//! Weights made ready for products: quantized once, used by any number of micro-batches.

use super::GroupedMlp;
use super::config::Precision;
use super::saved::Packed;
use crate::kernels::contract::{QuantizeWeights, WeightOperand, WeightShape};
use crate::kernels::error::expect_len;
use crate::kernels::{Backend, Buffer, Error, Memory, Misuse, View};
use crate::numerics::BLOCK;
use crate::tensor::Nvfp4;
use half::bf16;

/// A packed operand, borrowed.
pub type PackedView<'a, M> = Nvfp4<View<'a, M, u8>, View<'a, M, f32>>;

/// Quantized weights of one projection, as `quantize_weights` makes them.
pub struct Nvfp4Weights<'a, M: Memory> {
    /// Codes `[E, n, k/2]`, scales `[E, n, k/16]`, amax `[E]`.
    pub packed: PackedView<'a, M>,
    /// The values `[E, n, k]` that the codes stand for, for a backend that asks for
    /// [unpacked operands](crate::kernels::Capabilities::unpacked_operands); without them it unpacks in each product.
    pub unpacked: Option<View<'a, M, bf16>>,
}

impl<'a, M: Memory> From<PackedView<'a, M>> for Nvfp4Weights<'a, M> {
    fn from(packed: PackedView<'a, M>) -> Self {
        Self { packed, unpacked: None }
    }
}

/// The weights of one projection, BF16.
pub enum WeightSource<'a, M: Memory> {
    /// One tensor `[E, n, k]`.
    Packed(View<'a, M, bf16>),
    /// One tensor `[n, k]` an expert.
    PerExpert(Vec<View<'a, M, bf16>>),
}

/// Biases of both projections, FP32.
pub struct Biases<'a, M: Memory> {
    /// `[E, N1]`.
    pub b1: View<'a, M, f32>,
    /// `[E, H]`; scaled by the routing probability.
    pub b2: View<'a, M, f32>,
}

/// Both projections as the products read them. Owned: later changes of the BF16 weights do not reach it.
///
/// In NVFP4 a weight takes 0.5625 B an element; on a backend that asks for
/// [unpacked operands](crate::kernels::Capabilities::unpacked_operands) its BF16 values lie beside the codes, 2 B an
/// element more, for as long as this lives.
#[derive(Debug)]
pub struct PreparedWeights<M: Memory> {
    pub(super) w1: Projection<M>,
    pub(super) w2: Projection<M>,
}

/// One projection of all experts.
#[derive(Debug)]
pub(super) struct Projection<M: Memory> {
    shape: WeightShape,
    experts: usize,
    pub(super) values: Values<M>,
    pub(super) bias: Option<Buffer<M, f32>>,
}

#[derive(Debug)]
pub(super) enum Values<M: Memory> {
    Nvfp4 { packed: Packed<M>, unpacked: Option<Buffer<M, bf16>> },
    Bf16(Vec<Buffer<M, bf16>>),
}

/// [`PreparedWeights`], borrowed: both projections as the products read them.
///
/// Made by [`PreparedWeights::view`], or from tensors that the caller owns by [`GroupedMlp::weights_nvfp4`] and
/// [`GroupedMlp::weights_bf16`].
pub struct WeightsView<'a, M: Memory> {
    pub(super) w1: ProjectionView<'a, M>,
    pub(super) w2: ProjectionView<'a, M>,
}

pub(super) struct ProjectionView<'a, M: Memory> {
    shape: WeightShape,
    experts: usize,
    values: WeightOperand<'a, M>,
    bias: Option<View<'a, M, f32>>,
}

impl<M: Memory> ProjectionView<'_, M> {
    pub(super) fn operand(&self) -> WeightOperand<'_, M> {
        match &self.values {
            WeightOperand::Nvfp4 { packed, unpacked } => WeightOperand::Nvfp4 {
                packed: Nvfp4 {
                    codes: M::shorten(packed.codes),
                    scales: M::shorten(packed.scales),
                    amax: M::shorten(packed.amax),
                },
                unpacked: unpacked.map(M::shorten),
            },
            WeightOperand::Bf16(w) => WeightOperand::Bf16(w.iter().map(|w| M::shorten(*w)).collect()),
        }
    }

    pub(super) fn bias(&self) -> Option<View<'_, M, f32>> {
        self.bias.map(M::shorten)
    }
}

impl<M: Memory> Projection<M> {
    fn view(&self) -> ProjectionView<'_, M> {
        let values = match &self.values {
            Values::Nvfp4 { packed, unpacked } => {
                WeightOperand::Nvfp4 { packed: packed.view(), unpacked: unpacked.as_ref().map(M::view) }
            }
            Values::Bf16(experts) => WeightOperand::Bf16(experts.iter().map(M::view).collect()),
        };
        let bias = self.bias.as_ref().map(M::view);
        ProjectionView { shape: self.shape, experts: self.experts, values, bias }
    }
}

impl<M: Memory> PreparedWeights<M> {
    /// The packed form of `W1` and `W2`; `None` in BF16.
    pub fn nvfp4(&self) -> Option<[PackedView<'_, M>; 2]> {
        match (&self.w1.values, &self.w2.values) {
            (Values::Nvfp4 { packed: w1, .. }, Values::Nvfp4 { packed: w2, .. }) => {
                Some([w1.view(), w2.view()])
            }
            _ => None,
        }
    }

    /// The same weights, borrowed.
    pub fn view(&self) -> WeightsView<'_, M> {
        WeightsView { w1: self.w1.view(), w2: self.w2.view() }
    }
}

impl<M: Memory> WeightsView<'_, M> {
    /// Whether they were prepared for this operator.
    pub(super) fn check(&self, mlp: &GroupedMlp) -> Result<(), Misuse> {
        let config = mlp.config();
        let [s1, s2] = mlp.weight_shapes();
        let fits = |p: &ProjectionView<'_, M>, shape| {
            let precision = match p.values {
                WeightOperand::Nvfp4 { .. } => Precision::Nvfp4,
                WeightOperand::Bf16(_) => Precision::Bf16,
            };
            p.shape == shape
                && p.experts == config.experts
                && precision == config.precision
                && p.bias.is_some() == config.bias
        };
        if fits(&self.w1, s1) && fits(&self.w2, s2) {
            return Ok(());
        }
        Err(Misuse::Conflict {
            what: "weights",
            conflict: format!(
                "expected E={} W1 {s1:?} W2 {s2:?} in {}, got E={} W1 {:?} W2 {:?}",
                config.experts, config.precision, self.w1.experts, self.w1.shape, self.w2.shape
            ),
            fix: "prepare them with this operator's prepare_weights",
        })
    }
}

impl GroupedMlp {
    /// Stored shapes of `W1` and `W2`.
    pub fn weight_shapes(&self) -> [WeightShape; 2] {
        let c = &self.config;
        [WeightShape { n: c.fc1_rows(), k: c.hidden }, WeightShape { n: c.hidden, k: c.ffn }]
    }

    /// Quantizes the weights in 16x16 tiles, or copies them in BF16. `w1: [E, N1, H]`, `w2: [E, H, F]`.
    ///
    /// Errors name a tensor whose length does not fit, and biases missing or unexpected.
    pub fn prepare_weights<B: Backend>(
        &self,
        backend: &B,
        w1: WeightSource<'_, B::Memory>,
        w2: WeightSource<'_, B::Memory>,
        biases: Option<Biases<'_, B::Memory>>,
    ) -> Result<PreparedWeights<B::Memory>, Error> {
        self.check_biases(&biases)?;
        let [s1, s2] = self.weight_shapes();
        let (b1, b2) = biases.map_or((None, None), |b| (Some(b.b1), Some(b.b2)));
        Ok(PreparedWeights {
            w1: self.project(backend, "w1", w1, s1, b1)?,
            w2: self.project(backend, "w2", w2, s2, b2)?,
        })
    }

    /// BF16 weights that the caller owns, for [`GroupedMlp::forward_view`]. `w1: [E, N1, H]`, `w2: [E, H, F]`.
    ///
    /// Errors are those of [`GroupedMlp::prepare_weights`].
    pub fn weights_bf16<'a, M: Memory>(
        &self,
        w1: WeightSource<'a, M>,
        w2: WeightSource<'a, M>,
        biases: Option<Biases<'a, M>>,
    ) -> Result<WeightsView<'a, M>, Misuse> {
        let (kernel, experts, [s1, s2]) = ("weights_bf16", self.config.experts, self.weight_shapes());
        let w1 = WeightOperand::Bf16(per_expert(kernel, "w1", w1, s1, experts)?);
        let w2 = WeightOperand::Bf16(per_expert(kernel, "w2", w2, s2, experts)?);
        self.weights_view(kernel, w1, w2, biases)
    }

    /// Quantized weights that the caller owns, as [`GroupedMlp::prepare_weights`] makes them, for
    /// [`GroupedMlp::forward_view`].
    pub fn weights_nvfp4<'a, M: Memory>(
        &self,
        w1: impl Into<Nvfp4Weights<'a, M>>,
        w2: impl Into<Nvfp4Weights<'a, M>>,
        biases: Option<Biases<'a, M>>,
    ) -> Result<WeightsView<'a, M>, Misuse> {
        let (w1, w2) = (w1.into(), w2.into());
        let (kernel, experts, [s1, s2]) = ("weights_nvfp4", self.config.experts, self.weight_shapes());
        for (name, w, WeightShape { n, k }) in [("w1", &w1, s1), ("w2", &w2, s2)] {
            let Nvfp4Weights { packed: q, unpacked } = w;
            expect_len(kernel, name, &[experts, n, k / 2], M::len(&q.codes))?;
            expect_len(kernel, name, &[experts, n, k / BLOCK], M::len(&q.scales))?;
            expect_len(kernel, name, &[experts], M::len(&q.amax))?;
            unpacked.iter().try_for_each(|w| expect_len(kernel, name, &[experts, n, k], M::len(w)))?;
        }
        let [w1, w2] =
            [w1, w2].map(|Nvfp4Weights { packed, unpacked }| WeightOperand::Nvfp4 { packed, unpacked });
        self.weights_view(kernel, w1, w2, biases)
    }

    fn weights_view<'a, M: Memory>(
        &self,
        kernel: &'static str,
        w1: WeightOperand<'a, M>,
        w2: WeightOperand<'a, M>,
        biases: Option<Biases<'a, M>>,
    ) -> Result<WeightsView<'a, M>, Misuse> {
        self.check_biases(&biases)?;
        let (experts, [s1, s2]) = (self.config.experts, self.weight_shapes());
        let (b1, b2) = biases.map_or((None, None), |b| (Some(b.b1), Some(b.b2)));
        for (bias, shape) in [(&b1, s1), (&b2, s2)] {
            if let Some(bias) = bias {
                expect_len(kernel, "bias", &[experts, shape.n], M::len(bias))?;
            }
        }
        Ok(WeightsView {
            w1: ProjectionView { shape: s1, experts, values: w1, bias: b1 },
            w2: ProjectionView { shape: s2, experts, values: w2, bias: b2 },
        })
    }

    fn check_biases<M: Memory>(&self, biases: &Option<Biases<'_, M>>) -> Result<(), Misuse> {
        if biases.is_some() == self.config.bias {
            return Ok(());
        }
        Err(Misuse::Conflict {
            what: "biases",
            conflict: format!("expected bias={}, got bias={}", self.config.bias, biases.is_some()),
            fix: "set GroupedMlpConfig::bias, or pass both b1 and b2",
        })
    }

    fn project<B: Backend>(
        &self,
        backend: &B,
        name: &'static str,
        source: WeightSource<'_, B::Memory>,
        shape: WeightShape,
        bias: Option<View<'_, B::Memory, f32>>,
    ) -> Result<Projection<B::Memory>, Error> {
        let experts = self.config.experts;
        let WeightShape { n, k } = shape;
        let w = per_expert("prepare_weights", name, source, shape, experts)?;
        if let Some(bias) = &bias {
            expect_len("prepare_weights", "bias", &[experts, n], B::Memory::len(bias))?;
        }
        let values = match self.config.precision {
            Precision::Bf16 => {
                Values::Bf16(w.into_iter().map(|w| backend.duplicate(w)).collect::<Result<_, _>>()?)
            }
            Precision::Nvfp4 => {
                let mut q = Nvfp4 {
                    codes: backend.empty(experts * n * (k / 2))?,
                    scales: backend.empty(experts * n * (k / BLOCK))?,
                    amax: backend.empty(experts)?,
                };
                let unpack = backend.capabilities().unpacked_operands;
                let mut unpacked = unpack.then(|| backend.empty(experts * n * k)).transpose()?;
                backend.quantize_weights(QuantizeWeights {
                    w: w.into_iter().map(B::Memory::shorten).collect(),
                    shape,
                    codes: B::Memory::view_mut(&mut q.codes),
                    scales: B::Memory::view_mut(&mut q.scales),
                    unpacked: unpacked.as_mut().map(B::Memory::view_mut),
                    amax: B::Memory::view_mut(&mut q.amax),
                })?;
                Values::Nvfp4 { packed: Packed(q), unpacked }
            }
        };
        let bias = bias.map(|b| backend.duplicate(b)).transpose()?;
        Ok(Projection { shape, experts, values, bias })
    }
}

/// One view an expert, whichever way they came.
fn per_expert<'a, M: Memory>(
    kernel: &'static str,
    name: &'static str,
    source: WeightSource<'a, M>,
    WeightShape { n, k }: WeightShape,
    experts: usize,
) -> Result<Vec<View<'a, M, bf16>>, Misuse> {
    match source {
        WeightSource::Packed(w) => {
            expect_len(kernel, name, &[experts, n, k], M::len(&w))?;
            Ok(M::split(w, experts))
        }
        WeightSource::PerExpert(w) => {
            expect_len(kernel, "list of experts' weights", &[experts], w.len())?;
            w.iter().try_for_each(|w| expect_len(kernel, name, &[n, k], M::len(w)))?;
            Ok(w)
        }
    }
}
