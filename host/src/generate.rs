//! Generation of several texts at a time, and the text of their tokens.

mod text;

pub use text::TextStream;

use anyhow::{Result, ensure};
use engine::Engine;
use engine::ops::SlotSampling;
use model::Generator;
use std::collections::VecDeque;

/// A text to generate.
#[derive(Clone, Debug)]
pub struct Request {
    /// At least one token. Only the end of a prompt beyond the generator's capacity is read.
    pub prompt: Vec<u32>,
    /// Most tokens to generate.
    pub tokens: usize,
    /// Seed of the random numbers.
    pub seed: u32,
    /// How tokens are chosen.
    pub sampling: SlotSampling,
    /// Tokens that end the text. They are not part of it.
    pub ends: Vec<u32>,
}

/// The reason why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// It has the requested number of tokens.
    Length,
    /// The model chose a token that ends the text.
    EndOfText,
    /// The receiver of the tokens wants no more, for example at a stop string.
    Stop,
}

impl Finish {
    /// Returns OpenAI's name of the reason.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::EndOfText | Self::Stop => "stop",
        }
    }
}

/// A request in a slot.
struct Active {
    /// Index of the request.
    request: usize,
    /// The prompt and the tokens generated so far.
    text: Vec<u32>,
    generated: usize,
    /// Steps in flight since the slot began: the tokens of earlier steps belong to its predecessor.
    in_flight: usize,
}

/// Generates the texts of `requests` in the generator's slots, in order as slots become free, and returns why each ended.
///
/// `each` receives the index of a request and its next token, and returns whether the text goes on. With `run_ahead`, a step is queued
/// before the tokens of the previous one are known: a GPU does not wait for the host, and the tokens of a step after the end of a
/// text are discarded. It does not change the texts.
///
/// A text beyond the generator's capacity continues from its newest half: their keys and values are computed again, from position 0.
pub fn generate(
    generator: &Generator,
    engine: &mut dyn Engine,
    requests: &[Request],
    run_ahead: bool,
    each: &mut dyn FnMut(usize, u32) -> Result<bool>,
) -> Result<Vec<Finish>> {
    ensure!(
        requests.iter().all(|request| !request.prompt.is_empty()),
        "prompt: expected at least one token, found none"
    );
    let mut batch = Batch { generator, requests, slots: Vec::new(), next: 0, finished: vec![None; requests.len()] };
    batch.slots.resize_with(generator.slots(), || None);
    generator.clear(engine)?;
    let mut steps = VecDeque::new();
    loop {
        batch.fill_slots(engine)?;
        while steps.len() < 1 + usize::from(run_ahead) && batch.needs_step() {
            for active in batch.slots.iter_mut().flatten() {
                active.in_flight += 1;
            }
            steps.push_back(generator.step(engine)?.tokens);
        }
        let Some(step) = steps.pop_front() else { break };
        let tokens = engine.wait(step)?.values;
        for (slot, token) in tokens.into_iter().enumerate() {
            batch.receive(engine, slot, token as u32, steps.len(), each)?;
        }
    }
    Ok(batch.finished.into_iter().map(|finish| finish.unwrap_or(Finish::Length)).collect())
}

struct Batch<'a> {
    generator: &'a Generator,
    requests: &'a [Request],
    slots: Vec<Option<Active>>,
    /// The next request to begin.
    next: usize,
    finished: Vec<Option<Finish>>,
}

impl Batch<'_> {
    /// Begins requests in free slots.
    fn fill_slots(&mut self, engine: &mut dyn Engine) -> Result<()> {
        for slot in 0..self.slots.len() {
            while self.slots[slot].is_none() && self.next < self.requests.len() {
                let (index, request) = (self.next, &self.requests[self.next]);
                self.next += 1;
                if request.tokens == 0 {
                    self.finished[index] = Some(Finish::Length);
                    continue;
                }
                let Request { prompt, seed, sampling, .. } = request;
                let fits = prompt.len() <= self.generator.capacity();
                // A slot whose text begins with the same prompt holds its keys and values, until it moves to a later window.
                let holds =
                    |active: &Active| active.text.len() <= self.generator.capacity() && active.text.starts_with(prompt);
                let same = self.slots.iter().position(|other| other.as_ref().is_some_and(holds));
                match same.filter(|_| fits) {
                    Some(from) => self.generator.begin_copy(engine, [slot, from], prompt, *seed, *sampling)?,
                    None => self.begin(engine, slot, request, prompt)?,
                }
                self.slots[slot] = Some(Active { request: index, text: prompt.clone(), generated: 0, in_flight: 0 });
            }
        }
        Ok(())
    }

    /// Begins or continues a slot with the end of `text` that the cache holds.
    fn begin(&self, engine: &mut dyn Engine, slot: usize, request: &Request, text: &[u32]) -> Result<()> {
        let capacity = self.generator.capacity();
        let kept = if text.len() <= capacity { text.len() } else { (capacity / 2).max(1) };
        // A seed of its own for each window, because random numbers depend on the position.
        let seed = request.seed.wrapping_add((text.len() - kept) as u32);
        self.generator.begin(engine, slot, &text[text.len() - kept..], seed, request.sampling)?;
        if kept < text.len() { self.generator.mark_seen(engine, slot, text) } else { Ok(()) }
    }

    /// Returns whether a text needs more tokens than the steps in flight give.
    fn needs_step(&self) -> bool {
        let needs = |active: &Active| active.generated + active.in_flight < self.requests[active.request].tokens;
        self.slots.iter().flatten().any(needs)
    }

    /// Takes a slot's token of the oldest step. `later` steps are in flight after it.
    fn receive(
        &mut self,
        engine: &mut dyn Engine,
        slot: usize,
        token: u32,
        later: usize,
        each: &mut dyn FnMut(usize, u32) -> Result<bool>,
    ) -> Result<()> {
        let Some(mut active) = self.slots[slot].take() else { return Ok(()) };
        if active.in_flight <= later {
            // The slot began after this step.
            self.slots[slot] = Some(active);
            return Ok(());
        }
        active.in_flight -= 1;
        let request = &self.requests[active.request];
        active.text.push(token);
        active.generated += 1;
        let finish = if request.ends.contains(&token) {
            Some(Finish::EndOfText)
        } else if !each(active.request, token)? {
            Some(Finish::Stop)
        } else {
            (active.generated >= request.tokens).then_some(Finish::Length)
        };
        if finish.is_some() {
            self.finished[active.request] = finish;
            return Ok(());
        }
        let capacity = self.generator.capacity();
        let window = window_start(request.prompt.len(), active.text.len(), capacity);
        if window != window_start(request.prompt.len(), active.text.len() - 1, capacity) {
            self.begin(engine, slot, request, &active.text)?;
            active.in_flight = 0;
        }
        self.slots[slot] = Some(active);
        Ok(())
    }
}

/// Returns the index of the first token that the cache holds, of a text of `len` tokens. Windows start anew, with the newest half of a
/// cache, whenever it is full.
fn window_start(prompt: usize, len: usize, capacity: usize) -> usize {
    let kept = (capacity / 2).max(1);
    let mut start = if prompt <= capacity { 0 } else { prompt - kept };
    while len - start > capacity {
        start += capacity + 1 - kept;
    }
    start
}

#[cfg(test)]
mod tests {
    use super::window_start;

    #[test]
    fn windows_keep_the_newest_half_when_the_cache_is_full() {
        let starts =
            |prompt, lens: std::ops::Range<usize>| lens.map(|len| window_start(prompt, len, 8)).collect::<Vec<_>>();
        assert_eq!(starts(3, 3..18), [0, 0, 0, 0, 0, 0, 5, 5, 5, 5, 5, 10, 10, 10, 10]);
        assert_eq!(starts(20, 20..26), [16, 16, 16, 16, 16, 21]);
        assert_eq!((window_start(1, 1, 1), window_start(1, 2, 1), window_start(1, 3, 1)), (0, 1, 2));
    }
}
