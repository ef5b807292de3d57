//! Generation of several texts at a time, and the text of their tokens.

mod text;

pub use text::TextStream;

use anyhow::{Result, bail, ensure};
use engine::ops::SlotSampling;
use engine::{Engine, PendingRead};
use model::Generator;
use std::collections::VecDeque;

/// A text to generate.
#[derive(Clone, Debug)]
pub struct Request {
    /// At least one token. Only the end of a prompt beyond the generator's capacity is read.
    pub prompt: Vec<u32>,
    /// Maximum number of tokens to generate.
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
    /// The model chose this token, which ends the text.
    EndOfText(u32),
    /// The receiver of the tokens wants no more, for example at a stop string.
    Stop,
    /// The context is full, before the text has the requested number of tokens.
    Context,
}

impl Finish {
    /// Returns OpenAI's name of the reason.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Length | Self::Context => "length",
            Self::EndOfText(_) | Self::Stop => "stop",
        }
    }
}

/// A request in a slot.
#[derive(Debug)]
struct Active {
    /// The caller's number of the request.
    id: usize,
    request: Request,
    /// The prompt and the tokens generated so far.
    text: Vec<u32>,
    generated: usize,
    /// Steps in flight since the slot began: the tokens of earlier steps belong to its predecessor.
    in_flight: usize,
}

/// Generates the texts of `requests` in the generator's slots, in order as slots become free, and returns why each ended.
///
/// `each` receives the index of a request and its next token, and returns whether the text continues. See [`Scheduler`] for `run_ahead`.
pub fn generate(
    generator: &Generator,
    engine: &mut dyn Engine,
    requests: &[Request],
    run_ahead: bool,
    each: &mut dyn FnMut(usize, u32) -> Result<bool>,
) -> Result<Vec<Finish>> {
    let mut scheduler = Scheduler::new(generator, engine, run_ahead)?;
    let mut finished = vec![Finish::Length; requests.len()];
    let mut waiting = requests.iter().enumerate().filter(|(_, request)| request.tokens > 0).peekable();
    loop {
        while scheduler.has_room()
            && let Some((id, request)) = waiting.next()
        {
            scheduler.begin(generator, engine, id, request.clone())?;
        }
        if !scheduler.advance(generator, engine, each, &mut |id, finish| finished[id] = finish)? {
            return Ok(finished);
        }
    }
}

/// Generates texts in the slots of a generator. A new text can begin whenever a slot is free, while others continue (continuous
/// batching).
///
/// With `run_ahead`, a step is queued before the tokens of the previous one are known: a GPU does not wait for the host, and the tokens
/// of a step after the end of a text are discarded. It does not change the texts.
///
/// A text beyond the generator's capacity continues from its newest half: their keys and values are computed again, from position 0.
#[derive(Debug)]
pub struct Scheduler {
    slots: Vec<Option<Active>>,
    /// Steps in flight, oldest first.
    steps: VecDeque<PendingRead>,
    run_ahead: bool,
}

impl Scheduler {
    /// Empties the slots of a generator.
    pub fn new(generator: &Generator, engine: &mut dyn Engine, run_ahead: bool) -> Result<Self> {
        generator.clear(engine)?;
        let mut slots = Vec::new();
        slots.resize_with(generator.slots(), || None);
        Ok(Self { slots, steps: VecDeque::new(), run_ahead })
    }

    /// Returns whether a slot is free.
    pub fn has_room(&self) -> bool {
        self.slots.iter().any(Option::is_none)
    }

    /// Returns the number of texts in slots.
    pub fn active(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    /// Begins a text of at least one token in a free slot. The caller chooses `id`.
    pub fn begin(&mut self, generator: &Generator, engine: &mut dyn Engine, id: usize, request: Request) -> Result<()> {
        ensure!(!request.prompt.is_empty(), "prompt: expected at least one token, found none");
        let Some(slot) = self.slots.iter().position(Option::is_none) else {
            bail!("generation: expected a free slot, found none")
        };
        let Request { prompt, seed, sampling, .. } = &request;
        let fits = prompt.len() <= generator.capacity();
        // A slot whose text begins with the same prompt holds its keys and values, until it moves to a later window.
        let holds = |active: &Active| {
            active.text.len() + active.in_flight <= generator.kept() && active.text.starts_with(prompt)
        };
        let same = self.slots.iter().position(|other| other.as_ref().is_some_and(holds));
        match same.filter(|_| fits) {
            Some(from) => generator.begin_copy(engine, [slot, from], prompt, *seed, *sampling)?,
            None => begin_window(generator, engine, slot, &request, prompt)?,
        }
        let text = prompt.clone();
        self.slots[slot] = Some(Active { id, request, text, generated: 0, in_flight: 0 });
        Ok(())
    }

    /// Ends the texts for which `ends` holds, without their last tokens.
    pub fn stop(&mut self, ends: impl Fn(usize) -> bool) {
        for slot in &mut self.slots {
            slot.take_if(|active| ends(active.id));
        }
    }

    /// Computes a step and waits for the tokens of the oldest one. Returns false if there was nothing to do.
    ///
    /// `each` receives the number of a request and its next token, and returns whether the text continues. `ended` receives the number of
    /// each request that ends.
    pub fn advance(
        &mut self,
        generator: &Generator,
        engine: &mut dyn Engine,
        each: &mut dyn FnMut(usize, u32) -> Result<bool>,
        ended: &mut dyn FnMut(usize, Finish),
    ) -> Result<bool> {
        while self.steps.len() < 1 + usize::from(self.run_ahead) && self.needs_step() {
            for active in self.slots.iter_mut().flatten() {
                active.in_flight += 1;
            }
            self.steps.push_back(generator.step(engine)?.tokens);
        }
        let Some(step) = self.steps.pop_front() else { return Ok(false) };
        let tokens = engine.wait(step)?.values;
        for (slot, token) in tokens.into_iter().enumerate() {
            self.receive(generator, engine, [slot, token as usize], each, ended)?;
        }
        Ok(true)
    }

    /// Returns whether a text needs more tokens than the steps in flight give.
    fn needs_step(&self) -> bool {
        let needs = |active: &Active| active.generated + active.in_flight < active.request.tokens;
        self.slots.iter().flatten().any(needs)
    }

    /// Takes a slot's token of the oldest step.
    fn receive(
        &mut self,
        generator: &Generator,
        engine: &mut dyn Engine,
        [slot, token]: [usize; 2],
        each: &mut dyn FnMut(usize, u32) -> Result<bool>,
        ended: &mut dyn FnMut(usize, Finish),
    ) -> Result<()> {
        let (later, token) = (self.steps.len(), token as u32);
        let Some(mut active) = self.slots[slot].take() else { return Ok(()) };
        if active.in_flight <= later {
            // The slot began after this step.
            self.slots[slot] = Some(active);
            return Ok(());
        }
        active.in_flight -= 1;
        active.text.push(token);
        active.generated += 1;
        let finish = if active.request.ends.contains(&token) {
            Some(Finish::EndOfText(token))
        } else if !each(active.id, token)? {
            Some(Finish::Stop)
        } else {
            (active.generated >= active.request.tokens).then_some(Finish::Length)
        };
        if let Some(finish) = finish {
            ended(active.id, finish);
            return Ok(());
        }
        let (prompt, capacity) = (active.request.prompt.len(), generator.capacity());
        let window = window_start(prompt, active.text.len(), capacity);
        if window != window_start(prompt, active.text.len() - 1, capacity) {
            begin_window(generator, engine, slot, &active.request, &active.text)?;
            active.in_flight = 0;
        }
        self.slots[slot] = Some(active);
        Ok(())
    }
}

/// Begins or continues a slot with the end of `text` that the cache holds.
fn begin_window(
    generator: &Generator,
    engine: &mut dyn Engine,
    slot: usize,
    request: &Request,
    text: &[u32],
) -> Result<()> {
    let capacity = generator.capacity();
    let kept = if text.len() <= capacity { text.len() } else { (capacity / 2).max(1) };
    // A seed of its own for each window, because random numbers depend on the position.
    let seed = request.seed.wrapping_add((text.len() - kept) as u32);
    generator.begin(engine, slot, &text[text.len() - kept..], seed, request.sampling)?;
    if kept < text.len() { generator.mark_seen(engine, slot, text) } else { Ok(()) }
}

/// Returns the index of the first token that the cache holds, of a text of `len` tokens. When the cache is full, the next window starts
/// with its newest half.
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
