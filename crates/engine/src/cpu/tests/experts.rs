//! Mixtures of experts.

use super::*;
use crate::ops::{
    BIAS_GRADIENT, ChoiceGradients, Combine, Dispatch, ExpertRange, GROUP_ROWS, Groups, Route, RouteBackward, Router,
    RouterScores,
};

/// The tensors that [`Route`] writes.
struct Routing {
    experts: Tensor,
    weights: Tensor,
    positions: Tensor,
    sources: Tensor,
    groups: Tensor,
    loads: Tensor,
}

impl Bench {
    fn routing(&mut self, router: Router, rows: usize) -> Routing {
        let choices = rows * router.active;
        Routing {
            experts: self.ints(choices),
            weights: self.normal(choices),
            positions: self.ints(choices),
            sources: self.ints(router.rows(rows)),
            groups: self.ints(router.layout_len(rows)),
            loads: self.ints(router.count),
        }
    }

    fn read_ints(&mut self, tensor: Tensor) -> Vec<i32> {
        let mut bytes = vec![0; tensor.bytes()];
        self.engine.read_bytes(tensor, &mut bytes).unwrap();
        bytes.as_chunks::<4>().0.iter().map(|&word| i32::from_ne_bytes(word)).collect()
    }
}

impl Routing {
    fn route(&self, logits: Tensor, bias: Option<Tensor>, router: Router) -> Route {
        let Self { experts, weights, positions, sources, groups, loads } = *self;
        Route { logits, bias, experts, weights, positions, sources, groups, loads, router, trains: true }
    }
}

fn scores(logits: &[f64], kind: RouterScores) -> Vec<f64> {
    match kind {
        RouterScores::Softmax => {
            let sum: f64 = logits.iter().map(|x| x.exp()).sum();
            logits.iter().map(|x| x.exp() / sum).collect()
        }
        RouterScores::Sigmoid => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
    }
}

/// Returns the weights of these experts.
fn weights(logits: &[f64], router: Router, experts: &[usize]) -> Vec<f64> {
    let scores = scores(logits, router.scores);
    let sum: f64 = experts.iter().map(|&expert| scores[expert]).sum();
    experts.iter().map(|&expert| scores[expert] / if router.normalized { sum } else { 1.0 }).collect()
}

/// Routes these logits, checks the order of rows, and returns the experts and the weights of each token.
fn route(router: Router, logits: Vec<f32>, bias: Option<&[f32]>) -> (Vec<Vec<usize>>, Vec<f64>) {
    let (mut bench, rows) = (Bench::new(), logits.len() / router.count);
    let logits = bench.with(logits);
    let bias = bias.map(|bias| bench.with(bias.to_vec()));
    let routing = bench.routing(router, rows);
    bench.ready();
    bench.dyn_engine().run(routing.route(logits, bias, router)).unwrap();
    let Routing { experts, positions, sources, groups, loads, .. } = routing;
    let [experts, positions, sources, groups, loads] =
        [experts, positions, sources, groups, loads].map(|tensor| bench.read_ints(tensor));
    let ExpertRange { first, count } = router.local;
    let (starts, rest) = groups.split_at(count + 1);
    let (counts, blocks) = rest.split_at(count);
    assert_eq!((starts[0], loads.iter().sum::<i32>()), (0, (rows * router.active) as i32));
    assert_eq!(counts, &loads[first..][..count]);
    let mut used = 0;
    for expert in 0..count {
        let of_expert: Vec<i32> =
            (0..experts.len()).filter(|&i| experts[i] == (first + expert) as i32).map(|i| i as i32).collect();
        let (start, end) = (starts[expert] as usize, starts[expert + 1] as usize);
        let padded = of_expert.len().div_ceil(GROUP_ROWS).max(1) * GROUP_ROWS;
        assert_eq!((counts[expert] as usize, end - start), (of_expert.len(), padded));
        assert_eq!(sources[start..][..of_expert.len()], of_expert, "in the order of tokens");
        assert!(sources[start + of_expert.len()..end].iter().all(|&source| source == -1));
        assert!(blocks[start / GROUP_ROWS..end / GROUP_ROWS].iter().all(|&block| block == expert as i32));
        used = end;
    }
    assert!(sources[used..].iter().all(|&source| source == -1));
    assert!(blocks[used / GROUP_ROWS..].iter().all(|&block| block == 0));
    for (choice, &position) in positions.iter().enumerate() {
        if (first..first + count).contains(&(experts[choice] as usize)) {
            assert_eq!(sources[position as usize], choice as i32);
        } else {
            assert_eq!(position, -1);
        }
    }
    let experts = experts.chunks(router.active).map(|of| of.iter().map(|&expert| expert as usize).collect()).collect();
    (experts, bench.after(routing.weights))
}

const ROUTER: Router = Router {
    count: 4,
    active: 2,
    scores: RouterScores::Softmax,
    normalized: true,
    local: ExpertRange { first: 0, count: 4 },
};

#[test]
fn equal_logits_choose_the_lower_index_and_nan_is_the_smallest() {
    let nan = f32::NAN;
    let cases = [
        ([0.0, 0.0, 0.0, 0.0], [0, 1]),
        ([0.0, -0.0, 0.0, -1.0], [0, 1]),
        ([1.0, 2.0, 2.0, 3.0], [3, 1]),
        ([nan, -1.0, nan, -2.0], [1, 3]),
        ([nan, nan, nan, 5.0], [3, 0]),
        ([nan, nan, nan, nan], [0, 1]),
        ([f32::NEG_INFINITY, nan, f32::NEG_INFINITY, f32::INFINITY], [3, 0]),
    ];
    for (logits, expected) in cases {
        assert_eq!(route(ROUTER, logits.to_vec(), None).0, [expected], "{logits:?}");
    }
}

#[test]
fn a_bias_changes_the_choice_and_not_the_weights() {
    let (nan, router) = (f32::NAN, Router { scores: RouterScores::Sigmoid, normalized: false, ..ROUTER });
    let cases = [
        ([0.0, 0.0, 0.0, 0.0], [0, 1]),
        ([0.0, 0.0, 0.25, 0.5], [3, 2]),
        ([0.25, -0.5, 0.25, 0.25], [0, 2]),
        ([nan, 0.0, nan, -0.5], [1, 3]),
    ];
    for (bias, expected) in cases {
        assert_eq!(route(router, vec![0.0; 4], Some(&bias)), (vec![expected.to_vec()], vec![0.5; 2]), "{bias:?}");
    }
    // Scores are compared, not logits: those of 2 and 3 differ by 0.07, and those of 0 and 1 by 0.23.
    let logits = vec![0.0, 1.0, 2.0, 3.0];
    assert_eq!(route(router, logits, Some(&[0.3, 0.0, 0.15, 0.0])).0, [[2, 3]]);
    let softmax = route(ROUTER, vec![1.0, 0.0, 2.0, f32::NAN], Some(&[0.0, 0.1, 0.0, 9.0]));
    assert_eq!(softmax.0, [[0, 1]], "all scores are NaN");
}

#[test]
fn an_expert_may_have_no_token_one_token_or_all() {
    // All tokens choose expert 2; one of them chooses expert 3, the others expert 0.
    let rows = 2 * GROUP_ROWS + 1;
    let logits = (0..rows).flat_map(|row| if row == 7 { [0.0, 0.0, 9.0, 1.0] } else { [1.0, 0.0, 9.0, 0.0] }).collect();
    let logits: Vec<f32> = logits;
    for (first, count) in [(0, 1), (1, 1), (2, 2), (3, 1)] {
        route(Router { local: ExpertRange { first, count }, ..ROUTER }, logits.clone(), None);
    }
    let (experts, _) = route(ROUTER, logits, None);
    let count = |expert: usize| experts.iter().filter(|of_token| of_token.contains(&expert)).count();
    assert_eq!([0, 1, 2, 3].map(count), [rows - 1, 0, rows, 1]);
}

/// Returns the sum over tokens of weight · value of each choice, the load-balancing loss and the z-loss.
fn router_loss(logits: &[f64], values: &[f64], router: Router, experts: &[Vec<usize>], aux: f64, z: f64) -> f64 {
    let (rows, count) = (experts.len(), router.count);
    let mut loss = 0.0;
    for (row, of_token) in experts.iter().enumerate() {
        let logits = &logits[row * count..][..count];
        let weights = weights(logits, router, of_token);
        loss += weights.iter().zip(&values[row * router.active..]).map(|(w, x)| w * x).sum::<f64>();
        let scores = scores(logits, router.scores);
        for (expert, score) in scores.iter().enumerate() {
            let load = experts.iter().filter(|of_token| of_token.contains(&expert)).count() as f64 / rows as f64;
            loss += aux * count as f64 * load * score;
        }
        loss += z * logits.iter().map(|x| x.exp()).sum::<f64>().ln().powi(2);
    }
    loss
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn routers_and_their_gradients(
        rows in 1usize..20,
        count in 1usize..7,
        active in 1usize..7,
        sigmoid: bool,
        normalized: bool,
        aux in 0usize..2,
        z in 0usize..2,
    ) {
        let scores = if sigmoid { RouterScores::Sigmoid } else { RouterScores::Softmax };
        let local = ExpertRange { first: 0, count };
        let router = Router { count, active: active.min(count), scores, normalized, local };
        let (active, channels) = (router.active, 3);
        let mut bench = Bench::new();
        let logits = bench.normal(rows * count);
        let dlogits = bench.normal(rows * count);
        let dbias = bench.with(vec![3.0 * BIAS_GRADIENT; count]);
        let routing = bench.routing(router, rows);
        let wide = router.rows(rows) * 2 * channels;
        let (preactivation, dpreactivation) = (bench.normal(wide), bench.normal(wide));
        let gradients = bench.normal(rows * active);
        bench.ready();
        bench.dyn_engine().run(routing.route(logits, None, router)).unwrap();
        let Routing { experts, weights: weight, positions, loads, .. } = routing;
        let (aux_loss, z_loss) = (0.7 * aux as f32, 0.3 * z as f32);
        let of_choices = ChoiceGradients { out: gradients, positions, preactivation, dpreactivation, channels };
        bench.dyn_engine().run(of_choices).unwrap();
        let op = RouteBackward {
            dlogits, dbias: Some(dbias), logits, experts, weights: weight, gradients, loads, tokens: rows, router, aux_loss, z_loss,
        };
        bench.dyn_engine().run(op).unwrap();

        let x = bench.before(logits);
        let (chosen, _) = route(router, x.iter().map(|&x| x as f32).collect(), None);
        for (expert, found) in bench.after(dbias).into_iter().enumerate() {
            let load = chosen.iter().filter(|of_token| of_token.contains(&expert)).count();
            let expected = (3 + load * count) as f64 - (rows * active) as f64;
            prop_assert_eq!(found.to_bits(), (f64::from(BIAS_GRADIENT) * expected).to_bits());
        }
        let expected: Vec<f64> =
            chosen.iter().zip(x.chunks(count)).flat_map(|(chosen, logits)| weights(logits, router, chosen)).collect();
        bench.assert_of(1.0, "weights", weight, &expected);
        // The gradient of a weight is Σ dup · up of its row, divided by the weight.
        let (up, dup) = (bench.before(preactivation), bench.before(dpreactivation));
        let of_row = |row: usize| (0..channels).map(|i| up[row * 2 * channels + i] * dup[row * 2 * channels + i]).sum::<f64>();
        let values: Vec<f64> = bench
            .read_ints(positions)
            .iter()
            .zip(&expected)
            .map(|(&row, weight)| of_row(row as usize) / weight)
            .collect();
        prop_assert_eq!(values.len(), rows * active);
        let h = 1e-5;
        let slope = |i: usize| {
            let at = |shift: f64| {
                let mut x = x.clone();
                x[i] += shift;
                router_loss(&x, &values, router, &chosen, f64::from(aux_loss), f64::from(z_loss))
            };
            (at(h) - at(-h)) / (2.0 * h)
        };
        let gradient: Vec<f64> = (0..x.len()).map(slope).collect();
        bench.assert_of(1.0, "dlogits", dlogits, &gradient);
    }

    #[test]
    fn matmuls_of_experts_are_those_of_each_token(
        rows in 1usize..300,
        count in 1usize..5,
        active in 1usize..5,
        c in 1usize..12,
        channels in 1usize..10,
        weighted: bool,
    ) {
        let router = Router { count, active: active.min(count), local: ExpertRange { first: 0, count }, ..ROUTER };
        let (k, p) = (router.active, router.rows(rows));
        let mut bench = Bench::new();
        let (logits, tokens, residual) = (bench.normal(rows * count), bench.normal(rows * c), bench.normal(rows * c));
        let routing = bench.routing(router, rows);
        let dispatched = bench.normal(p * c);
        let (fc, activated, outputs) = (bench.normal(p * 2 * channels), bench.normal(p * channels), bench.normal(p * c));
        let (fcw, projw) = (bench.normal(count * 2 * channels * c), bench.normal(count * c * channels));
        let (dfcw, dprojw) = (bench.normal(fcw.len), bench.normal(projw.len));
        let (out, dout, dfc, dinp) = (bench.normal(rows * c), bench.normal(rows * c), bench.normal(fc.len), bench.normal(rows * c));
        bench.ready();
        let Routing { experts, weights: weight, positions, sources, groups, .. } = routing;
        let weights = weighted.then_some(weight);
        let of = Groups { layout: groups, count };
        let groups = Some(of);
        let engine = bench.dyn_engine();
        engine.run(routing.route(logits, None, router)).unwrap();
        engine.run(Dispatch { out: dispatched, inp: tokens, sources, groups: of, weights: None, c, active: k, fp8: None }).unwrap();
        let shape = MatmulShape { rows: p, c, oc: 2 * channels };
        let epilogue = Epilogue::Activation(Activation::SwiGlu, fc);
        engine.run(MatmulForward { epilogue, groups, ..MatmulForward::new([activated, dispatched, fcw], shape) }).unwrap();
        let proj = MatmulShape { rows: p, c: channels, oc: c };
        engine.run(MatmulForward { groups, ..MatmulForward::new([outputs, activated, projw], proj) }).unwrap();
        engine.run(Combine { out, residual: Some(residual), inp: outputs, weights, positions, c, active: k }).unwrap();
        let found = bench.after(activated);
        let engine = bench.dyn_engine();
        // Also the sums of all rows, which are added to the output.
        engine.run(Combine { out: dinp, residual: Some(dinp), inp: outputs, weights: None, positions, c, active: k }).unwrap();
        engine.run(Dispatch { out: outputs, inp: dout, sources, groups: of, weights, c, active: k, fp8: None }).unwrap();
        let activation = Some(ActivationInput { activation: Activation::SwiGlu, preactivation: fc, recompute: None });
        let backward = MatmulBackward::new(dfc, Some(dprojw), [outputs, activated, projw], proj);
        engine.run(MatmulBackward { activation, groups, ..backward }).unwrap();
        let backward = MatmulBackward::new(outputs, Some(dfcw), [dfc, dispatched, fcw], shape);
        engine.run(MatmulBackward { groups, ..backward }).unwrap();

        // Every choice by itself, from the rows of its token.
        let (x, expected_weights) = (bench.before(tokens), bench.after(weight));
        let [w1, w2, d] = [fcw, projw, dout].map(|tensor| bench.before(tensor));
        let (experts, positions) = (bench.read_ints(experts), bench.read_ints(positions));
        let [mut y, mut sums, mut dw1, mut dw2] = [residual, dinp, dfcw, dprojw].map(|tensor| bench.before(tensor));
        let mut dx = vec![0.0; p * c];
        let mut of_rows = vec![0.0; p * channels];
        for (choice, (&expert, &position)) in experts.iter().zip(&positions).enumerate() {
            let (token, expert, position) = (choice / k, expert as usize, position as usize);
            let weight = if weighted { expected_weights[choice] } else { 1.0 };
            let w1 = &w1[expert * 2 * channels * c..][..2 * channels * c];
            let w2 = &w2[expert * c * channels..][..c * channels];
            let x = &x[token * c..][..c];
            let pre: Vec<f64> = w1.chunks(c).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect();
            let hidden = activate(Activation::SwiGlu, &pre, channels);
            of_rows[position * channels..][..channels].copy_from_slice(&hidden);
            let output: Vec<f64> = w2.chunks(channels).map(|row| row.iter().zip(&hidden).map(|(w, h)| w * h).sum()).collect();
            for i in 0..c {
                y[token * c + i] += weight * output[i];
                sums[token * c + i] += output[i];
            }
            let dy: Vec<f64> = d[token * c..][..c].iter().map(|d| weight * d).collect();
            let dhidden: Vec<f64> = (0..channels).map(|j| (0..c).map(|i| dy[i] * w2[i * channels + j]).sum()).collect();
            for (i, j) in (0..c).flat_map(|i| (0..channels).map(move |j| (i, j))) {
                dw2[(expert * c + i) * channels + j] += dy[i] * hidden[j];
            }
            let dpre = activation_gradient(Activation::SwiGlu, &pre, &dhidden, channels);
            for (i, j) in (0..2 * channels).flat_map(|i| (0..c).map(move |j| (i, j))) {
                dw1[(expert * 2 * channels + i) * c + j] += dpre[i] * x[j];
                dx[position * c + j] += dpre[i] * w1[i * c + j];
            }
        }
        let scale = of_rows.iter().fold(1.0, |max: f64, x| max.max(x.abs()));
        let error = found.iter().zip(&of_rows).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        prop_assert!(error <= 2e-6 * scale, "activated: {}", error);
        bench.assert_of(1.0, "out", out, &y);
        bench.assert_of(1.0, "sums", dinp, &sums);
        bench.assert_of(1.0, "dfcw", dfcw, &dw1);
        bench.assert_of(1.0, "dprojw", dprojw, &dw2);
        bench.assert_of(1.0, "dispatched gradient", outputs, &dx);
    }
}
