//! Grouped products with their epilogues.

use super::{Side, host, poisoned};
use half::bf16;
use moe4::kernels::Backend;
use moe4::kernels::activation::{Activation, GluLayout};
use moe4::kernels::contract::{
    self, AmaxOut, GradBuffers, GradMode, GroupedGemm, GroupedGemmAct, GroupedGemmDact, GroupedWgrad,
    RhtAmax, WeightGrad, WeightShape,
};
use moe4::kernels::{Buffer, Error, Memory};
use moe4::numerics::hadamard::SignMask;
use moe4::tensor::Groups;

/// A bias of each expert.
#[derive(Clone, Copy, Debug)]
pub struct Bias<'a> {
    /// `[E, output columns]`.
    pub bias: &'a [f32],
    /// `[T]`.
    pub prob: Option<&'a [f32]>,
}

/// `grouped_gemm`.
#[derive(Clone, Debug)]
pub struct Gemm<'a> {
    /// `[T, contraction]`.
    pub a: &'a Side,
    /// `[E, n, k]`.
    pub w: &'a Side,
    /// Stored shape of a weight.
    pub shape: WeightShape,
    /// Contraction over stored columns or rows.
    pub side: contract::Side,
    /// Rows of each expert.
    pub groups: &'a Groups,
    /// Added before rounding.
    pub bias: Option<Bias<'a>>,
}

impl Gemm<'_> {
    /// `[T, output columns]`.
    pub fn run<B: Backend>(&self, b: &B) -> Result<Vec<bf16>, Error> {
        let (a, w, groups) = (self.a.upload(b)?, self.w.upload(b)?, b.groups(self.groups)?);
        let bias = self.bias.map(|bias| b.upload(bias.bias)).transpose()?;
        let prob = self.bias.and_then(|bias| bias.prob).map(|prob| b.upload(prob)).transpose()?;
        let mut out = poisoned::<B, bf16>(b, self.groups.rows() * self.side.dims(self.shape).0)?;
        b.grouped_gemm(GroupedGemm {
            a: a.operand(),
            w: w.weights(self.groups.experts()),
            shape: self.shape,
            side: self.side,
            groups: &groups,
            bias: bias.as_ref().map(|bias| contract::Bias {
                bias: B::Memory::view(bias),
                prob: prob.as_ref().map(B::Memory::view),
            }),
            out: B::Memory::view_mut(&mut out),
        })?;
        host(b, &out)
    }
}

/// Both amaxes of an epilogue.
struct Amaxes<M: Memory> {
    before: Buffer<M, f32>,
    after: Buffer<M, f32>,
}

impl<M: Memory> Amaxes<M> {
    fn new<B: Backend<Memory = M>>(b: &B, experts: usize) -> Result<Self, Error> {
        Ok(Self { before: poisoned(b, experts)?, after: poisoned(b, experts)? })
    }

    fn out(&mut self, mask: SignMask) -> AmaxOut<'_, M> {
        AmaxOut {
            amax: M::view_mut(&mut self.before),
            rht: Some((RhtAmax::Exact(mask), M::view_mut(&mut self.after))),
        }
    }

    fn download<B: Backend<Memory = M>>(&self, b: &B) -> Result<(Vec<f32>, Vec<f32>), Error> {
        Ok((host(b, &self.before)?, host(b, &self.after)?))
    }
}

/// `grouped_gemm_act`.
#[derive(Clone, Debug)]
pub struct GemmAct<'a> {
    /// `[T, H]`.
    pub x: &'a Side,
    /// `[E, N1, H]`.
    pub w1: &'a Side,
    /// `[E, N1]`.
    pub b1: Option<&'a [f32]>,
    /// `H`.
    pub hidden: usize,
    /// `F`.
    pub ffn: usize,
    /// The activation.
    pub activation: Activation,
    /// Order of the rows of `W1`.
    pub layout: GluLayout,
    /// `[T]`.
    pub prob: &'a [f32],
    /// Rows of each expert.
    pub groups: &'a Groups,
    /// Asks for the amaxes of `h`.
    pub amax: Option<SignMask>,
}

/// What `grouped_gemm_act` wrote.
#[derive(Clone, Debug, PartialEq)]
pub struct GemmActOut {
    /// `[T, N1]`.
    pub c: Vec<bf16>,
    /// `[T, F]`.
    pub h: Vec<bf16>,
    /// `[E]` before and after the transform.
    pub amax: Option<(Vec<f32>, Vec<f32>)>,
}

impl GemmAct<'_> {
    /// `N1`.
    pub fn n1(&self) -> usize {
        self.activation.fc1_rows(self.ffn)
    }

    /// `c`, `h` and the amaxes.
    pub fn run<B: Backend>(&self, b: &B) -> Result<GemmActOut, Error> {
        let (x, w1, prob) = (self.x.upload(b)?, self.w1.upload(b)?, b.upload(self.prob)?);
        let b1 = self.b1.map(|b1| b.upload(b1)).transpose()?;
        let groups = b.groups(self.groups)?;
        let (rows, experts) = (self.groups.rows(), self.groups.experts());
        let mut c = poisoned::<B, bf16>(b, rows * self.n1())?;
        let mut h = poisoned::<B, bf16>(b, rows * self.ffn)?;
        let mut amax = Amaxes::new(b, experts)?;
        b.grouped_gemm_act(GroupedGemmAct {
            x: x.operand(),
            w1: w1.weights(experts),
            b1: b1.as_ref().map(B::Memory::view),
            hidden: self.hidden,
            ffn: self.ffn,
            activation: self.activation,
            layout: self.layout,
            prob: B::Memory::view(&prob),
            groups: &groups,
            c: B::Memory::view_mut(&mut c),
            h: B::Memory::view_mut(&mut h),
            h_amax: self.amax.map(|mask| amax.out(mask)),
        })?;
        let amax = self.amax.map(|_| amax.download(b)).transpose()?;
        Ok(GemmActOut { c: host(b, &c)?, h: host(b, &h)?, amax })
    }
}

/// `grouped_gemm_dact`.
#[derive(Clone, Debug)]
pub struct GemmDact<'a> {
    /// `[T, H]`.
    pub dy: &'a Side,
    /// `[E, H, F]`.
    pub w2: &'a Side,
    /// `H`.
    pub hidden: usize,
    /// `F`.
    pub ffn: usize,
    /// The activation.
    pub activation: Activation,
    /// Order of the columns of `c`.
    pub layout: GluLayout,
    /// `[T, N1]`.
    pub c: &'a [bf16],
    /// `[T]`.
    pub prob: &'a [f32],
    /// Rows of each expert.
    pub groups: &'a Groups,
    /// Asks for everything that is optional.
    pub extras: Option<SignMask>,
}

/// What `grouped_gemm_dact` wrote.
#[derive(Clone, Debug, PartialEq)]
pub struct GemmDactOut {
    /// `[T, N1]`.
    pub dc: Vec<bf16>,
    /// `[T]`.
    pub dprob: Vec<f32>,
    /// What was asked for on top.
    pub extras: Option<GemmDactExtras>,
}

/// The optional outputs of `grouped_gemm_dact`.
#[derive(Clone, Debug, PartialEq)]
pub struct GemmDactExtras {
    /// `[E, N1]`.
    pub db1: Vec<f32>,
    /// `[T, F]`.
    pub h: Vec<bf16>,
    /// `[T, F]`.
    pub dh: Vec<f32>,
    /// `[E]` before and after the transform, of `dc`.
    pub amax: (Vec<f32>, Vec<f32>),
}

impl GemmDact<'_> {
    /// `N1`.
    pub fn n1(&self) -> usize {
        self.activation.fc1_rows(self.ffn)
    }

    /// `dc`, `dprob` and the extras.
    pub fn run<B: Backend>(&self, b: &B) -> Result<GemmDactOut, Error> {
        let (dy, w2) = (self.dy.upload(b)?, self.w2.upload(b)?);
        let (c, prob, groups) = (b.upload(self.c)?, b.upload(self.prob)?, b.groups(self.groups)?);
        let (rows, experts) = (self.groups.rows(), self.groups.experts());
        let mut dc = poisoned::<B, bf16>(b, rows * self.n1())?;
        let mut dprob = poisoned::<B, f32>(b, rows)?;
        let mut db1 = poisoned::<B, f32>(b, experts * self.n1())?;
        let mut h = poisoned::<B, bf16>(b, rows * self.ffn)?;
        let mut dh = poisoned::<B, f32>(b, rows * self.ffn)?;
        let mut amax = Amaxes::new(b, experts)?;
        let wanted = self.extras.is_some();
        b.grouped_gemm_dact(GroupedGemmDact {
            dy: dy.operand(),
            w2: w2.weights(experts),
            hidden: self.hidden,
            ffn: self.ffn,
            activation: self.activation,
            layout: self.layout,
            c: B::Memory::view(&c),
            prob: B::Memory::view(&prob),
            groups: &groups,
            dc: B::Memory::view_mut(&mut dc),
            dprob: B::Memory::view_mut(&mut dprob),
            db1: wanted.then(|| B::Memory::view_mut(&mut db1)),
            dc_amax: self.extras.map(|mask| amax.out(mask)),
            h: wanted.then(|| B::Memory::view_mut(&mut h)),
            dh: wanted.then(|| B::Memory::view_mut(&mut dh)),
        })?;
        let extras = || -> Result<_, Error> {
            let amax = amax.download(b)?;
            Ok(GemmDactExtras { db1: host(b, &db1)?, h: host(b, &h)?, dh: host(b, &dh)?, amax })
        };
        let extras = wanted.then(extras).transpose()?;
        Ok(GemmDactOut { dc: host(b, &dc)?, dprob: host(b, &dprob)?, extras })
    }
}

/// Weight gradients `[E, n, k]` on the host.
#[derive(Clone, Debug, PartialEq)]
pub enum Grads {
    /// FP32.
    F32(Vec<f32>),
    /// BF16.
    Bf16(Vec<bf16>),
}

impl Grads {
    /// Poison in FP32.
    pub fn poison(experts: usize, shape: WeightShape) -> Self {
        Grads::F32(vec![f32::NAN; experts * shape.n * shape.k])
    }

    /// The FP32 values.
    ///
    /// # Panics
    /// If these are BF16.
    pub fn into_f32(self) -> Vec<f32> {
        match self {
            Grads::F32(dw) => dw,
            Grads::Bf16(_) => panic!("gradients were asked for in BF16"),
        }
    }
}

/// `grouped_wgrad`.
#[derive(Clone, Debug)]
pub struct Wgrad<'a> {
    /// Output side: columnwise `[n, Tp]`, or BF16 `[T, n]`.
    pub a: &'a Side,
    /// Input side: columnwise `[k, Tp]`, or BF16 `[T, k]`.
    pub b: &'a Side,
    /// Shape of a weight gradient.
    pub shape: WeightShape,
    /// Rows of each expert.
    pub groups: &'a Groups,
    /// Overwrite or add.
    pub mode: GradMode,
    /// What the buffers hold before the pass.
    pub before: Grads,
}

impl Wgrad<'_> {
    /// The buffers after the pass.
    pub fn run<B: Backend>(&self, backend: &B) -> Result<Grads, Error> {
        let experts = self.groups.experts();
        match &self.before {
            Grads::F32(before) => {
                let mut dw = backend.upload(before)?;
                let buffers = GradBuffers::F32(B::Memory::split_mut(B::Memory::view_mut(&mut dw), experts));
                self.run_into(backend, buffers)?;
                Ok(Grads::F32(host(backend, &dw)?))
            }
            Grads::Bf16(before) => {
                let mut dw = backend.upload(before)?;
                let buffers = GradBuffers::Bf16(B::Memory::split_mut(B::Memory::view_mut(&mut dw), experts));
                self.run_into(backend, buffers)?;
                Ok(Grads::Bf16(host(backend, &dw)?))
            }
        }
    }

    fn run_into<B: Backend>(&self, backend: &B, buffers: GradBuffers<'_, B::Memory>) -> Result<(), Error> {
        let (a, b, groups) = (self.a.upload(backend)?, self.b.upload(backend)?, backend.groups(self.groups)?);
        backend.grouped_wgrad(GroupedWgrad {
            a: a.operand(),
            b: b.operand(),
            shape: self.shape,
            groups: &groups,
            dw: WeightGrad { buffers, mode: self.mode }.reborrow(),
        })
    }
}
