//! Captured work: replays, fallbacks and errors.

use engine::cuda::{EmulatedGpu, Precision, emulated};
use engine::ops::{Epilogue, MatmulForward, MatmulShape};
use engine::plan::{Group, Plan};
use engine::tensor::{DType, Tensor};
use engine::{Engine, GraphKey};

/// An engine with the kernels for sm_90a, and work to capture: casts, a copy, a memset and a matmul.
struct GraphTest {
    engine: Box<dyn Engine>,
    plan: Plan,
    tensors: [Tensor; 5],
}

const SIDE: usize = 16;

impl GraphTest {
    fn new() -> Self {
        let mut plan = Plan::new();
        let tensors = ["a", "b", "wide", "copy", "out"].map(|name| {
            let dtype = if name == "wide" { DType::F32 } else { DType::Bf16 };
            plan.add(Group::Parameters, name, &[SIDE, SIDE], dtype)
        });
        let mut engine = emulated(EmulatedGpu::new(true), Precision::Bf16, None, true);
        engine.allocate(&plan).unwrap();
        Self { engine, plan, tensors }
    }

    /// Returns the work `out = b + a @ copy.T`, where `copy` is `a`, cast to f32 and back, with its second half zeroed.
    fn work(&self) -> impl Fn(&mut dyn Engine) -> anyhow::Result<()> + use<> {
        let [a, b, wide, copy, out] = self.tensors;
        let half = SIDE * SIDE / 2;
        move |engine| {
            engine.cast(wide, a)?;
            engine.cast(copy, wide)?;
            engine.copy(copy.slice(0, half), a.slice(0, half))?;
            engine.zero(copy.slice(half, half))?;
            let shape = MatmulShape { rows: SIDE, c: SIDE, oc: SIDE };
            let epilogue = Epilogue::Residual(b);
            engine.run(MatmulForward { epilogue, ..MatmulForward::new([out, a, copy], shape) })
        }
    }

    /// Writes the operands of round `i` and returns the expected output.
    fn fill(&mut self, i: usize) -> Vec<f32> {
        let values = |shift| (0..SIDE * SIDE).map(move |k| ((k * 7 + i * shift) % 5) as f32 - 2.0).collect::<Vec<_>>();
        let (a, b) = (values(1), values(3));
        self.engine.write(self.tensors[0], &a).unwrap();
        self.engine.write(self.tensors[1], &b).unwrap();
        self.engine.write(self.tensors[4], &[9.0; SIDE * SIDE]).unwrap();
        let at = |row: usize, column: usize| {
            let part = |k| if column < SIDE / 2 { a[column * SIDE + k] } else { 0.0 };
            b[row * SIDE + column] + (0..SIDE).map(|k| a[row * SIDE + k] * part(k)).sum::<f32>()
        };
        (0..SIDE * SIDE).map(|i| at(i / SIDE, i % SIDE)).collect()
    }

    /// Returns the output of the work.
    fn output(&mut self) -> Vec<f32> {
        self.engine.read(self.tensors[4]).unwrap()
    }
}

#[test]
fn captured_work_is_replayed_on_current_memory() {
    let mut test = GraphTest::new();
    let (work, key, mut calls) = (test.work(), GraphKey::new(), Vec::new());
    for i in 0..8 {
        if i == 5 {
            test.engine.allocate(&test.plan).unwrap();
        }
        let expected = test.fill(i);
        let mut called = 0;
        let reason = test.engine.capture_or_replay(&key, &mut |engine| {
            called += 1;
            work(engine)
        });
        assert_eq!(reason.unwrap(), None);
        assert_eq!(test.output(), expected, "round {i}");
        calls.push(called);
    }
    // The first call runs the work, the second captures it, and later calls replay it. An allocation invalidates the
    // graph.
    assert_eq!(calls, [1, 1, 0, 0, 0, 1, 1, 0]);

    // Another key identifies other work.
    let expected = test.fill(8);
    let out = test.tensors[4];
    test.engine.capture_or_replay(&GraphKey::new(), &mut |engine| engine.zero(out)).unwrap();
    assert_eq!(test.output(), [0.0; SIDE * SIDE]);
    test.engine.capture_or_replay(&key, &mut |_| panic!("the graph exists")).unwrap();
    assert_eq!(test.output(), expected);
}

#[test]
fn work_that_cannot_be_captured_runs_and_the_reason_is_returned_once() {
    type Work = Box<dyn Fn(&mut dyn Engine, usize) -> anyhow::Result<()>>;
    let mut test = GraphTest::new();
    let [a, b, _, _, out] = test.tensors;
    let reads: Work = Box::new(move |engine, _| engine.read(a).map(drop));
    let writes: Work = Box::new(move |engine, _| engine.write(a.slice(0, 0), &[]));
    let loads: Work = Box::new(move |engine, _| engine.write_bytes(a.slice(0, 0), &[]));
    let exports: Work = Box::new(move |engine, _| engine.device_tensor(a).map(drop));
    // Each call uses a new shape, for which there are no tensor maps yet.
    let varies: Work = Box::new(move |engine, i| {
        let shape = MatmulShape { rows: 8 + i, c: SIDE, oc: SIDE };
        let out = out.slice(0, shape.rows * SIDE);
        engine.run(MatmulForward::new([out, b, a], shape))
    });
    for (before, reason) in [
        (reads, "a copy to the host cannot be captured"),
        (writes, "a copy from the host cannot be captured"),
        (loads, "a copy from the host cannot be captured"),
        (exports, "work of another library cannot be captured"),
        (varies, "none can be created during graph capture"),
    ] {
        let (work, key) = (test.work(), GraphKey::new());
        let mut reasons = Vec::new();
        for i in 0..4 {
            let expected = test.fill(i);
            let outcome = test.engine.capture_or_replay(&key, &mut |engine| {
                before(engine, i)?;
                work(engine)
            });
            assert_eq!(test.output(), expected, "{reason}, round {i}");
            reasons.push(outcome.unwrap());
        }
        assert!(reasons[1].as_ref().is_some_and(|found| found.contains(reason)), "{reasons:?}");
        assert!([0, 2, 3].iter().all(|&i| reasons[i].is_none()), "{reasons:?}");
    }
}

#[test]
fn errors_in_captured_work_are_returned() {
    let mut test = GraphTest::new();
    let [a, .., out] = test.tensors;
    let key = GraphKey::new();
    for _ in 0..3 {
        let shape = MatmulShape { rows: SIDE, c: SIDE, oc: SIDE };
        let mut work = |engine: &mut dyn Engine| {
            let inp = a.slice(0, 8);
            engine.run(MatmulForward::new([out, inp, a], shape))
        };
        let text = test.engine.capture_or_replay(&key, &mut work).unwrap_err().to_string();
        assert_eq!(text, "inp: expected at least 256 elements, found 8");
    }
}
