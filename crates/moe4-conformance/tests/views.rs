//! Tensors that the caller keeps, on a backend that asks for unpacked operands: weights come packed, copies that the
//! operator makes come unpacked, and every byte is that of packed operands throughout.

use half::bf16;
use moe4::kernels::Host;
use moe4::kernels::cpu::Cpu;
use moe4::mlp::{
    BackwardArgs, BackwardTensors, ForwardTensors, ForwardViewArgs, GradMode, GroupedMlp, GroupedMlpConfig,
    Needs, RandomSeed, SavedParts, WeightGrad, WeightGrads, WeightSource, WgradParts,
};
use moe4::tensor::Groups;
use moe4_conformance::alter::{Altered, UnpackedOperands};
use moe4_conformance::data;
use moe4_conformance::drive::Step;

#[test]
fn packed_weights_meet_unpacked_copies() {
    let cpu = Cpu::new();
    let unpacking = Altered { inner: &cpu, alteration: UnpackedOperands(true) };
    let (groups, hidden, ffn) = (Groups::new(&[21, 0, 33], 56).unwrap(), 32, 48);
    let (experts, rows) = (groups.experts(), groups.rows());
    for recompute_activation in [false, true] {
        let config = GroupedMlpConfig { recompute_activation, ..GroupedMlpConfig::new(experts, hidden, ffn) };
        let mlp = GroupedMlp::new(config.clone()).unwrap();
        let [s1, s2] = mlp.weight_shapes().map(|s| experts * s.n * s.k);
        let (w1, w2) = (data::normal(s1, 0.3, 1), data::normal(s2, 0.3, 2));
        let (x, dy) = (data::normal(rows * hidden, 1.0, 3), data::normal(rows * hidden, 1.0, 4));
        let prob: Vec<f32> = (0..rows).map(|r| 0.25 + r as f32 / rows as f32).collect();
        let random = RandomSeed { seed: 5, call: 6 };
        let step = Step {
            config,
            groups: &groups,
            x: &x,
            w1: &w1,
            w2: &w2,
            biases: None,
            prob: &prob,
            dy: &dy,
            needs: Needs::ALL,
            random,
            weights_per_expert: false,
            accumulate_onto: None,
            delayed: false,
            traced: true,
        };
        let expected = step.run(&cpu).unwrap();

        let prepared = mlp
            .prepare_weights(&cpu, WeightSource::Packed(&w1[..]), WeightSource::Packed(&w2[..]), None)
            .unwrap();
        let weights = || {
            let [q1, q2] = prepared.nvfp4().expect("the precision is NVFP4");
            mlp.weights_nvfp4::<Host>(q1, q2, None).unwrap()
        };
        let (needs, kept) = (Needs::ALL, weights());
        let args = ForwardViewArgs {
            x: &x[..],
            prob: &prob[..],
            groups: &groups,
            weights: &kept,
            needs,
            trace: None,
        };
        let ForwardTensors { y, c, x: saved_x, h: saved_h } = mlp.forward_view(&unpacking, args).unwrap();
        assert!(same_bits(&y, &expected.y));
        let c = c.expect("there will be a backward");
        for delayed in [false, true] {
            let parts = SavedParts {
                groups: &groups,
                weights: weights(),
                c: &c[..],
                prob: &prob[..],
                x: saved_x.view(),
                h: saved_h.view(),
            };
            let saved = mlp.saved_view::<Host>(needs, parts).unwrap();
            let (mut dw1, mut dw2) = (vec![f32::NAN; s1], vec![f32::NAN; s2]);
            let dw = WeightGrads::<Host> {
                dw1: WeightGrad::packed_f32(&mut dw1[..], experts, GradMode::Overwrite),
                dw2: WeightGrad::packed_f32(&mut dw2[..], experts, GradMode::Overwrite),
            };
            let args = BackwardArgs { dy: &dy[..], random, dw: None, trace: None };
            let gradients = if delayed {
                let BackwardTensors { gradients, weights } =
                    mlp.backward_delayed_view(&unpacking, &saved, args).unwrap();
                let parts = WgradParts { dy: None, x: saved_x.view(), h: saved_h.view() };
                weights.run(&unpacking, parts, dw).unwrap();
                gradients
            } else {
                mlp.backward_view(&unpacking, &saved, BackwardArgs { dw: Some(dw), ..args }).unwrap()
            };
            let label = format!("recompute {recompute_activation}, delayed {delayed}");
            assert!(same_bits(&gradients.dx.unwrap(), expected.dx.as_ref().unwrap()), "{label}");
            assert_eq!(gradients.dprob, expected.dprob, "{label}");
            assert_eq!(&dw1, expected.dw1.as_ref().unwrap(), "{label}");
            assert_eq!(&dw2, expected.dw2.as_ref().unwrap(), "{label}");
        }
    }
}

fn same_bits(got: &[bf16], expected: &[bf16]) -> bool {
    let bits = |values: &[bf16]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    bits(got) == bits(expected) && got.iter().any(|v| v.to_f32() != 0.0)
}
