//! HellaSwag: the evaluation file against one written by `scripts/multiple_choice_reference.py`, and scores against losses
//! computed from the logits of one row at a time.

use data::hellaswag;
use data::multiple_choice::{COMPLETIONS, Example, MultipleChoice, write};
use engine::cpu::Cpu;
use engine::cuda::{EmulatedGpu, Precision, emulated};
use engine::{BatchLayout, Engine};
use host::evaluate::multiple_choice::{self, Score};
use model::{Decoder, Descriptor, Param, PlanOptions, Unsharded, init};
use rng::Mt19937;
use std::ops::Range;
use std::path::Path;
use tokenizer::Tokenizer;

const JSONL: &str = "data/hellaswag.jsonl";
const BIN: &[u8] = include_bytes!("data/hellaswag.bin");

fn jsonl() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests").join(JSONL)
}

fn set_of(examples: &[Example]) -> MultipleChoice {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("set.bin");
    write(&path, examples).unwrap();
    MultipleChoice::open(&path).unwrap()
}

#[test]
fn evaluation_file_matches_the_reference_writer() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("set.bin");
    let examples = hellaswag::read(&jsonl()).unwrap();
    write(&path, &examples).unwrap();
    assert!(std::fs::read(&path).unwrap() == BIN, "the bytes differ");
    let set = MultipleChoice::read("fixture".into(), BIN).unwrap();
    assert_eq!(set.examples(), examples);
    assert_eq!(examples.iter().map(|e| e.label).collect::<Vec<_>>(), [1, 3, 0, 2]);
    assert_eq!(examples[3].context, [464]);
    assert_eq!(examples[3].completions[0], [886]);
}

/// Uses the full set if `LLM_RS_HELLASWAG` names its JSON lines; otherwise the test does nothing.
#[test]
fn full_validation_set_has_the_expected_size() {
    let Some(path) = std::env::var_os("LLM_RS_HELLASWAG") else { return };
    let dir = tempfile::tempdir().unwrap();
    let examples = hellaswag::read(Path::new(&path)).unwrap();
    assert_eq!(examples.len(), 10_042);
    assert_eq!(examples.iter().map(Example::longest).max(), Some(149));
    let path = dir.path().join("set.bin");
    write(&path, &examples).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 3_467_538);
    assert_eq!(MultipleChoice::open(&path).unwrap().examples(), examples);
}

const VOCAB: usize = 50;

/// Returns a small model with a head size that the kernels support.
fn descriptor() -> Descriptor {
    Descriptor::gpt2(2, 1, 64, 96, VOCAB).unwrap()
}

/// Returns examples with random lengths and tokens.
fn random_examples(n: usize) -> Vec<Example> {
    let mut rng = Mt19937::new(7);
    let mut below = |n: usize| rng.next_u32() as usize % n;
    (0..n)
        .map(|_| {
            let mut tokens = |longest: usize| (0..=below(longest)).map(|_| below(VOCAB) as u32).collect::<Vec<_>>();
            Example { context: tokens(40), completions: std::array::from_fn(|_| tokens(30)), label: 0 }
        })
        .collect()
}

fn planned(engine: &mut dyn Engine, b: usize, t: usize) -> (Decoder, BatchLayout) {
    // Some batches need several chunks of logits.
    let options = PlanOptions { logit_rows: 100, ..PlanOptions::inference(b, t) };
    let (model, plan) = Decoder::plan(descriptor(), options, engine);
    engine.allocate(&plan).unwrap();
    (model, BatchLayout::new(b, t))
}

/// Scores examples without sharding.
fn score(
    model: &Decoder,
    engine: &mut dyn Engine,
    planned: BatchLayout,
    set: &MultipleChoice,
    range: Range<usize>,
) -> engine::Result<Score> {
    multiple_choice::score(model, engine, &mut Unsharded, planned, set, range, 0)
}

/// Initializes weights so large that the losses of completions differ by more than rounding errors.
fn randomize(model: &Decoder, engine: &mut dyn Engine) {
    init::generate(&descriptor(), 3, |param, layer, values| {
        let scale = if matches!(param, Param::Ln1w | Param::Ln2w | Param::Lnfw) { 1.0 } else { 12.0 };
        let values: Vec<f32> = values.iter().map(|v| v * scale).collect();
        engine.write(model.layout.of(model.params, param, layer), &values)
    })
    .unwrap();
}

/// Returns the mean loss of each completion, computed from the logits of its row alone.
fn reference_losses(examples: &[Example]) -> Vec<[f64; COMPLETIONS]> {
    let mut engine = Cpu::new();
    let (model, _) = planned(&mut engine, 1, 96);
    randomize(&model, &mut engine);
    let vp = descriptor().padded_vocab();
    let mut mean = |context: &[u32], completion: &[u32]| {
        let row = [context, completion].concat();
        let layout = BatchLayout::new(1, row.len());
        let mut words = engine.host_buffer(layout.words()).unwrap();
        for (word, &token) in words.iter_mut().zip(&row) {
            *word = token as i32;
        }
        engine.load_batch(model.batch.slice(0, layout.words()), layout, words).unwrap();
        model.forward(&mut engine, layout, &mut Unsharded).unwrap();
        let logits = model.logits(&mut engine, 0..row.len()).unwrap();
        let logits = engine.read(logits).unwrap();
        let sum: f64 = (context.len()..row.len())
            .map(|at| {
                let logits = &logits[(at - 1) * vp..][..VOCAB];
                let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
                total.ln() - f64::from(logits[row[at] as usize])
            })
            .sum();
        sum / completion.len() as f64
    };
    examples.iter().map(|e| std::array::from_fn(|i| mean(&e.context, &e.completions[i]))).collect()
}

fn lowest(losses: &[f64; COMPLETIONS]) -> usize {
    (0..COMPLETIONS).min_by(|&a, &b| losses[a].total_cmp(&losses[b])).unwrap()
}

#[test]
fn scores_match_reference_losses_for_any_batch() {
    let mut examples = random_examples(23);
    let losses = reference_losses(&examples);
    for (example, losses) in examples.iter_mut().zip(&losses) {
        example.label = lowest(losses);
    }
    for label in 0..COMPLETIONS {
        assert!(examples.iter().any(|e| e.label == label), "no example's best completion is {label}");
    }
    // Some examples distinguish sums from means, and would also expose a mask that is off by one.
    let by_sum =
        |e: &Example, l: &[f64; COMPLETIONS]| lowest(&std::array::from_fn(|i| l[i] * e.completions[i].len() as f64));
    assert!(examples.iter().zip(&losses).filter(|(e, l)| by_sum(e, l) != e.label).count() > 5);

    let mislabeled: Vec<usize> = (0..examples.len()).filter(|i| i % 3 == 1).collect();
    for &i in &mislabeled {
        examples[i].label = (examples[i].label + 1 + i % 3) % COMPLETIONS;
    }
    let set = set_of(&examples);
    for (b, t) in [(1, 70), (2, 96), (3, 71), (4, 70), (7, 80), (8, 96), (200, 96)] {
        let mut engine = Cpu::new();
        let (model, layout) = planned(&mut engine, b, t);
        randomize(&model, &mut engine);
        let mut score_of = |range| score(&model, &mut engine, layout, &set, range).unwrap();
        assert_eq!(score_of(0..23), Score { correct: 23 - mislabeled.len(), examples: 23 }, "{b} x {t}");
        // One example at a time fills a small part of a large batch.
        let alone = if b <= 3 { &examples[..] } else { &examples[..4] };
        for (i, example) in alone.iter().enumerate() {
            let correct = usize::from(example.label == lowest(&losses[i]));
            assert_eq!(score_of(i..i + 1), Score { correct, examples: 1 }, "example {i}, {b} x {t}");
        }
    }
}

#[test]
fn emulated_kernels_give_the_same_score() {
    let mut examples = random_examples(6);
    let losses = reference_losses(&examples);
    for (example, losses) in examples.iter_mut().zip(losses) {
        example.label = lowest(&losses);
    }
    let set = set_of(&examples);
    let mut engine = emulated(EmulatedGpu::new(false), Precision::Fp32, None, false);
    let (model, layout) = planned(&mut *engine, 5, 70);
    randomize(&model, &mut *engine);
    assert_eq!(score(&model, &mut *engine, layout, &set, 0..6).unwrap().correct, 6);
}

/// Returns a model that gives token 9 the highest logit at every position, token 8 the second highest, and all others
/// the same.
fn constant_model(b: usize, t: usize) -> (Decoder, Cpu, BatchLayout) {
    let mut engine = Cpu::new();
    let (model, layout) = planned(&mut engine, b, t);
    let c = descriptor().channels;
    let mut bias = vec![0.0; c];
    bias[0] = 1.0;
    engine.write(model.layout.of(model.params, Param::Lnfb, 0), &bias).unwrap();
    let wte = model.layout.of(model.params, Param::Wte, 0);
    for (token, logit) in [(9, 6.0), (8, 5.0)] {
        engine.write(wte.slice(token * c, 1), &[logit]).unwrap();
    }
    (model, engine, layout)
}

#[test]
fn constant_model_prefers_the_completion_with_the_lowest_mean_loss() {
    let (model, mut engine, layout) = constant_model(4, 32);
    let example = |completions: [&[u32]; 4], label| Example {
        context: vec![9, 9, 9, 1],
        completions: completions.map(<[u32]>::to_vec),
        label,
    };
    let mut is_correct = |completions, label| {
        let set = set_of(&[example(completions, label)]);
        score(&model, &mut engine, layout, &set, 0..1).unwrap().correct == 1
    };
    // The completion of the likeliest tokens wins at any index.
    for best in 0..COMPLETIONS {
        let mut completions: [&[u32]; 4] = [&[8, 3], &[1], &[2, 9], &[3, 3, 3]];
        completions[best] = &[9, 9];
        assert!(is_correct(completions, best));
        assert!(!is_correct(completions, (best + 1) % COMPLETIONS));
    }
    // Length does not matter: this completion has the highest summed loss, but the lowest mean.
    assert!(is_correct([&[8], &[1], &[9, 9, 9, 9, 9, 9, 9], &[2]], 2));
    // The first of equal completions wins.
    assert!(is_correct([&[1, 1], &[8, 9], &[9, 8], &[8, 9]], 1));
    assert!(is_correct([&[3], &[3], &[4], &[5, 5]], 0));
}

#[test]
fn ranks_share_the_examples() {
    let set = set_of(&random_examples(10));
    let shares = |ranks| (0..ranks).map(|rank| set.share(rank, ranks)).collect::<Vec<_>>();
    assert_eq!(set.share(0, 1), 0..10);
    assert_eq!(shares(4), [0..3, 3..6, 6..9, 9..10]);
    assert_eq!(shares(8), [0..2, 2..4, 4..6, 6..8, 8..10, 10..10, 10..10, 10..10]);
    let (model, mut engine, layout) = constant_model(2, 96);
    assert_eq!(score(&model, &mut engine, layout, &set, 10..10).unwrap(), Score { correct: 0, examples: 0 });
}

#[test]
fn check_names_the_example_that_does_not_fit_the_model() {
    let mut examples = random_examples(3);
    examples[1] = Example { context: vec![1; 90], completions: std::array::from_fn(|i| vec![2; i + 1]), label: 3 };
    let set = set_of(&examples);
    assert!(set.check(VOCAB, 94).is_ok());
    let error = set.check(VOCAB, 93).unwrap_err().to_string();
    assert!(error.contains("set.bin, example 1") && error.contains("94 tokens") && error.contains("--seq"), "{error}");
    let (model, mut engine, layout) = constant_model(8, 93);
    assert_eq!(score(&model, &mut engine, layout, &set, 0..3).unwrap_err().to_string(), error);
    examples[2].completions[3] = vec![1, 50];
    let error = set_of(&examples).check(VOCAB, 96).unwrap_err().to_string();
    assert!(error.contains("example 2: token 50, expected tokens below 50"), "{error}");
}

#[test]
fn evaluation_file_errors_name_expected_and_found_values() {
    let error_of = |bytes: &[u8]| {
        let message = format!("{:#}", MultipleChoice::read("set.bin".into(), bytes).unwrap_err());
        assert!(message.contains("set.bin"), "{message}");
        message
    };
    let header = |word: usize, value: i32| {
        let mut bytes = BIN.to_vec();
        bytes[4 * word..4 * word + 4].copy_from_slice(&value.to_le_bytes());
        error_of(&bytes)
    };
    // Words of the first example: marker, size, index, label, number of completions, length of the context.
    let body = |word: usize, value: u16| {
        let mut bytes = BIN.to_vec();
        bytes[1024 + 2 * word..][..2].copy_from_slice(&value.to_le_bytes());
        error_of(&bytes)
    };
    let bytes = usize::from(u16::from_le_bytes([BIN[1026], BIN[1027]]));
    assert!(error_of(&BIN[..1000]).contains("a header of 1024 bytes, found 1000 bytes"));
    assert!(header(0, 20240520).contains("expected magic 20240522, found 20240520"));
    assert!(header(1, 2).contains("version 1, found 2"));
    for count in [0, -1, 65536, i32::MAX] {
        assert!(
            header(2, count).contains(&format!("number of examples: expected 1 to 65535 in the header, found {count}"))
        );
    }
    for longest in [0, -1, 29, 65536] {
        assert!(
            header(3, longest)
                .contains(&format!("longest example: expected 30 to 65535 in the header, found {longest}"))
        );
    }
    assert!(header(2, 5).contains("example 4 of 5: truncated: expected 10 bytes, found 0"));
    assert!(header(2, 3).contains("expected the end of the file after 3 examples, found more bytes"));
    assert!(header(3, 40).contains("example 0 of 4: expected an even size of 30 to 40 bytes"));
    assert!(error_of(&BIN[..BIN.len() - 1]).contains("example 3 of 4: truncated"));
    assert!(error_of(&BIN[..1024 + 20]).contains(&format!("truncated: expected {bytes} bytes, found 20")));
    assert!(body(0, 1).contains("expected the marker 65535, found 1"));
    assert!(body(1, 9).contains("found 9"));
    assert!(body(1, bytes as u16 - 1).contains(&format!("found {}", bytes - 1)));
    assert!(body(1, bytes as u16 - 2).contains("completion 3 extends beyond"));
    let text = body(1, bytes as u16 + 2);
    assert!(
        text.contains(&format!("expected {bytes} bytes of context and completions, found {} bytes", bytes + 2)),
        "{text}"
    );
    assert!(body(2, 1).contains("expected index 0, found 1"));
    assert!(body(3, 4).contains("expected a label of 0 to 3, found 4"));
    assert!(body(4, 5).contains("expected 4 completions, found 5"));
    assert!(body(5, 0).contains("the context has no tokens"));
    assert!(body(5, 60000).contains("the context extends beyond"));
    assert!(format!("{:#}", MultipleChoice::open(Path::new("none.bin")).unwrap_err()).contains("none.bin"));
}

#[test]
fn json_errors_name_the_line_and_the_field() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("set.jsonl");
    let good = r#"{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 1}"#;
    let error_of = |line: &str| {
        std::fs::write(&path, format!("{good}\n\n{line}\n{good}\n")).unwrap();
        let message = format!("{:#}", hellaswag::read(&path).unwrap_err());
        assert!(message.contains("set.jsonl, line 3: "), "{message}");
        message
    };
    assert!(error_of("{\"ctx\": ").contains("not valid JSON"));
    assert!(error_of("[1]").contains("expected an object, found an array"));
    for (from, to, part) in [
        ("\"ctx\"", "\"text\"", "field 'ctx' is missing"),
        ("\"ctx\": \"a\"", "\"ctx\": 5", "field 'ctx': expected a string, found 5"),
        ("\"ctx\": \"a\"", "\"ctx\": \"\"", "field 'ctx': expected text, found an empty string"),
        ("\"endings\"", "\"ends\"", "field 'endings' is missing"),
        ("[\"b\", \"c\", \"d\", \"e\"]", "{}", "field 'endings': expected an array of strings, found an object"),
        ("\"d\"", "null", "field 'endings': expected strings, found null"),
        (", \"d\"", "", "field 'endings': expected 4 strings, found 3"),
        ("\"label\"", "\"gold\"", "field 'label' is missing"),
        ("\"label\": 1", "\"label\": 4", "field 'label': expected 0, 1, 2 or 3"),
        ("\"label\": 1", "\"label\": \"\"", "found an empty string"),
        ("\"label\": 1", "\"label\": -1", "found -1"),
    ] {
        assert!(good.contains(from), "{from}");
        let message = error_of(&good.replace(from, to));
        assert!(message.contains(part), "{part}: {message}");
    }
    std::fs::write(&path, "\n").unwrap();
    let message = hellaswag::read(&path).unwrap_err().to_string();
    assert!(message.contains("set.jsonl: expected 1 to 65535 examples, one per line, found 0 examples"), "{message}");
    assert!(format!("{:#}", hellaswag::read(Path::new("none.jsonl")).unwrap_err()).contains("none.jsonl"));
    let long = Example { context: vec![1; 33_000], completions: std::array::from_fn(|_| vec![1]), label: 0 };
    let message = write(&path, &[long]).unwrap_err().to_string();
    assert!(message.contains("example 0 takes 66028 bytes, expected at most 65535"), "{message}");
    let wide = Example { context: vec![1, 65536], completions: std::array::from_fn(|_| vec![1]), label: 0 };
    let message = write(&path, &[wide]).unwrap_err().to_string();
    assert!(message.contains("example 0: expected ids below 65536, found 65536"), "{message}");
    assert_eq!(std::fs::read(&path).unwrap(), b"\n");
}

/// Models with another tokenizer read the same texts.
#[test]
fn examples_are_encoded_again_for_other_tokenizers() {
    let set = MultipleChoice::read("set.bin".into(), BIN).unwrap();
    let gpt2 = Tokenizer::gpt2();
    assert_eq!(set.clone().with_tokenizer(Some(&gpt2)).unwrap().examples(), set.examples());
    let bytes = set.clone().with_tokenizer(Some(&Tokenizer::bytes())).unwrap();
    assert!(bytes.check(256, 1024).is_ok());
    for (before, after) in set.examples().iter().zip(bytes.examples()) {
        let ids = |tokens: &[u32]| gpt2.text(tokens).bytes().map(u32::from).collect::<Vec<_>>();
        assert_eq!((ids(&before.context), before.label), (after.context.clone(), after.label));
        assert_eq!(before.completions.each_ref().map(|tokens| ids(tokens)), after.completions);
    }
    assert!(gpt2.text(&set.examples()[0].completions[0]).starts_with(' '));
}
