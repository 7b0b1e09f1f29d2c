//! The expert layer on plain slices: tokens are copied to expert order, run through the grouped MLP, and each
//! token's `top_k` results are added up.
//!
//! ```text
//! xs[r] = x[token(r)]           ps[r] = gates[assignment(r)]
//! ys    = grouped_mlp(xs, w1, w2, ps)            probabilities scale the activation inside
//! y[t]  = sum over choices of ys[row(t, choice)] in FP32, in the order of the choices
//! ```

use crate::config::{ModelConfig, Precision};
use crate::routing::Routing;
use crate::Error;

pub(crate) struct Operator { experts: usize, hidden: usize, ffn: usize }
#[derive(Debug)]
pub(crate) struct Weights { w1: Vec<f32>, w2: Vec<f32> }
#[derive(Debug)]
pub(crate) struct Saved { x: Vec<f32>, c: Vec<f32>, p: Vec<f32> }
pub(crate) struct Gradients { pub(crate) x: Vec<f32>, pub(crate) w1: Vec<f32>, pub(crate) w2: Vec<f32>, pub(crate) gates: Vec<f32> }
impl std::fmt::Debug for Operator { fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { f.write_str("Operator") } }

// [m,k] x [n,k]T
fn nt(a: &[f32], b: &[f32], k: usize, n: usize) -> Vec<f32> {
    a.chunks_exact(k).flat_map(|r| b.chunks_exact(k).map(move |c| { let mut s=[0f32;16]; for (x,y) in r.chunks_exact(16).zip(c.chunks_exact(16)) { for i in 0..16 { s[i]+=x[i]*y[i]; } } s.iter().sum::<f32>() }).take(n)).collect()
}
fn tr(a: &[f32], c: usize) -> Vec<f32> { let r = a.len()/c; let mut o = vec![0.; a.len()]; for i in 0..r { for j in 0..c { o[j*r+i]=a[i*c+j]; } } o }
// [t,m]T x [t,n]
fn tn(a: &[f32], b: &[f32], m: usize, n: usize) -> Vec<f32> { let mut o = vec![0.; m*n]; for (ra, rb) in a.chunks_exact(m).zip(b.chunks_exact(n)) { for (i,&x) in ra.iter().enumerate() { for (d,&y) in o[i*n..(i+1)*n].iter_mut().zip(rb) { *d += x*y; } } } o }

impl Operator {
    pub(crate) fn new(c: &ModelConfig, _: Precision, _: bool) -> Result<Self, Error> { Ok(Self { experts: c.experts, hidden: c.hidden, ffn: c.ffn }) }
    pub(crate) fn fc1_rows(&self) -> usize { 2 * self.ffn }
    pub(crate) fn prepare(&self, w1: &[f32], w2: &[f32]) -> Result<Weights, Error> { Ok(Weights { w1: w1.to_vec(), w2: w2.to_vec() }) }
    pub(crate) fn forward(&self, weights: &Weights, x: &[f32], gates: &[f32], routing: &Routing, _keep: bool) -> Result<(Vec<f32>, Option<Saved>), Error> {
        let (h, f) = (self.hidden, self.ffn);
        let xs: Vec<f32> = routing.order.iter().flat_map(|&a| { let t = a / routing.top_k; x[t*h..(t+1)*h].iter().copied() }).collect();
        let p: Vec<f32> = routing.order.iter().map(|&a| gates[a]).collect();
        let mut y = vec![0.0; x.len()]; let mut call = Vec::new(); let mut o = 0;
        for e in 0..self.experts { let n = routing.splits[e];
            let c = nt(&xs[o*h..(o+n)*h], &weights.w1[e*2*f*h..(e+1)*2*f*h], h, 2*f);
            let hh: Vec<f32> = c.chunks_exact(2*f).zip(&p[o..]).flat_map(|(r, &p)| { let (g,u)=r.split_at(f); g.iter().zip(u).map(move |(g,u)| g/(1.0+(-g).exp())*u*p) }).collect();
            let ys = nt(&hh, &weights.w2[e*h*f..(e+1)*h*f], f, h);
            for (r, row) in ys.chunks_exact(h).enumerate() { let t = routing.order[o+r]/routing.top_k; for (d,s) in y[t*h..(t+1)*h].iter_mut().zip(row) { *d += s; } }
            call.extend(c); o += n; }
        Ok((y, Some(Saved { x: xs, c: call, p })))
    }
    pub(crate) fn backward(&self, weights: &Weights, s: &Saved, dy: &[f32], routing: &Routing, _seed: u64, _step: u64) -> Result<Gradients, Error> {
        let (h, f) = (self.hidden, self.ffn);
        let dys: Vec<f32> = routing.order.iter().flat_map(|&a| { let t = a / routing.top_k; dy[t*h..(t+1)*h].iter().copied() }).collect();
        let mut g = Gradients { x: vec![0.0; dy.len()], w1: vec![], w2: vec![], gates: vec![0.0; routing.order.len()] }; let mut o = 0;
        for e in 0..self.experts { let n = routing.splits[e];
            let dyr = &dys[o*h..(o+n)*h];
            let dh = nt(dyr, &tr(&weights.w2[e*h*f..(e+1)*h*f], f), h, f);
            let mut dc = vec![0.0; n*2*f]; let mut hh = vec![0.0; n*f];
            for r in 0..n { let c = &s.c[(o+r)*2*f..(o+r+1)*2*f]; let p = s.p[o+r]; let mut dp = 0.0;
                for i in 0..f { let (gg,u) = (c[i], c[f+i]); let sg = 1.0/(1.0+(-gg).exp()); let act = gg*sg*u; let d = dh[r*f+i]; dp += act*d; hh[r*f+i]=act*p; let d = d*p; dc[r*2*f+i] = d*u*sg*(1.0+gg*(1.0-sg)); dc[r*2*f+f+i] = d*gg*sg; }
                g.gates[routing.order[o+r]] = dp; }
            let dx = nt(&dc, &tr(&weights.w1[e*2*f*h..(e+1)*2*f*h], h), 2*f, h);
            for (r,row) in dx.chunks_exact(h).enumerate() { let t = routing.order[o+r]/routing.top_k; for (d,s) in g.x[t*h..(t+1)*h].iter_mut().zip(row) { *d += s; } }
            g.w2.extend(tn(dyr, &hh, h, f)); g.w1.extend(tn(&dc, &s.x[o*h..(o+n)*h], 2*f, h)); o += n; }
        Ok(g)
    }
}
