//! Generation of several texts at a time, and the text of their tokens.

mod text;

pub use text::TextStream;

use anyhow::{Result, bail, ensure};
use engine::ops::SlotSampling;
use engine::{Engine, PendingRead};
use model::{Generator, Held};
use std::collections::VecDeque;

/// Fewest tokens of a longer prompt that are taken from a slot: fewer cost less to compute than to look up.
const MIN_REUSED: usize = 16;
/// The default of [`Scheduler::prompt_part`].
const PROMPT_PART: usize = 1024;

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
    /// Number of positions that the cache holds, while the prompt is computed in parts.
    computed: Option<usize>,
}

/// A sequence of the generator.
#[derive(Debug, Default)]
struct Slot {
    active: Option<Active>,
    /// The text of the cache, from position 0 on, while there is no request. The cache of an active slot follows from its text.
    kept: Cached,
    /// Whether steps leave the slot alone.
    is_idle: bool,
    /// When the last request ended: the number of requests that had ended before.
    ended: u64,
}

/// The contents of the cache of a slot.
#[derive(Clone, Debug, Default)]
struct Cached {
    tokens: Vec<u32>,
    /// Number of positions that have been written.
    written: usize,
}

impl Active {
    /// Returns the tokens that the cache has or will have when the steps in flight are complete, and the number of written positions.
    fn cached(&self, capacity: usize) -> (&[u32], usize) {
        let window = &self.text[window_start(self.request.prompt.len(), self.text.len(), capacity)..];
        if let Some(computed) = self.computed {
            return (&window[..computed], computed);
        }
        // The newest token is not in the cache before the next step. A step beyond the last position writes to it, but no prompt is so long
        // that it could reuse this position.
        let written = (window.len() - 1 + self.in_flight).min(capacity);
        (&window[..written.min(window.len())], written)
    }
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
    Scheduler::new(generator, engine, run_ahead)?.generate(generator, engine, requests, each)
}

/// Generates texts in the slots of a generator. A new text can begin whenever a slot is free, while others continue (continuous
/// batching).
///
/// With `run_ahead`, a step is queued before the tokens of the previous one are known: a GPU does not wait for the host, and the tokens
/// of a step after the end of a text are discarded. It does not change the texts.
///
/// A text beyond the generator's capacity continues from its newest half: their keys and values are computed again, from position 0.
///
/// Slots keep their keys and values after the end of a text. A prompt that begins with the same tokens uses them, and only its other tokens
/// are computed ([`begin`](Self::begin)).
///
/// A long prompt is computed in parts with steps in between, so that it does not stall the other texts. No other text begins meanwhile: the
/// next prompt may begin with the same tokens.
#[derive(Debug)]
pub struct Scheduler {
    slots: Vec<Slot>,
    /// Steps in flight, oldest first.
    steps: VecDeque<PendingRead>,
    run_ahead: bool,
    /// Number of requests that have ended.
    ended: u64,
    /// Tokens of prompts that were computed since the last step.
    prompt_tokens: usize,
    /// Tokens of prompts after which a step of the other texts follows: 1,024, or another positive number. Longer prompts are computed in
    /// parts of this length. The parts do not depend on the other texts, so neither do the keys and values.
    pub prompt_part: usize,
}

/// The start of a prompt.
struct Place {
    slot: usize,
    /// The slot that holds the beginning of the prompt, and the number of its tokens.
    from: Option<(usize, usize)>,
}

impl Scheduler {
    /// Empties the slots of a generator.
    pub fn new(generator: &Generator, engine: &mut dyn Engine, run_ahead: bool) -> Result<Self> {
        generator.clear(engine)?;
        let mut slots = Vec::new();
        slots.resize_with(generator.slots(), || Slot { is_idle: true, ..Slot::default() });
        Ok(Self { slots, steps: VecDeque::new(), run_ahead, ended: 0, prompt_tokens: 0, prompt_part: PROMPT_PART })
    }

    /// Does what [`generate`] does, with the keys and values that earlier texts have left.
    pub fn generate(
        &mut self,
        generator: &Generator,
        engine: &mut dyn Engine,
        requests: &[Request],
        each: &mut dyn FnMut(usize, u32) -> Result<bool>,
    ) -> Result<Vec<Finish>> {
        let mut finished = vec![Finish::Length; requests.len()];
        let mut waiting = requests.iter().enumerate().filter(|(_, request)| request.tokens > 0).peekable();
        loop {
            while self.has_room()
                && let Some((id, request)) = waiting.next()
            {
                self.begin(generator, engine, id, request.clone())?;
            }
            if !self.advance(generator, engine, each, &mut |id, finish| finished[id] = finish)? {
                return Ok(finished);
            }
        }
    }

    /// Returns whether a text can begin: a slot is free, and the steps of other texts need not come first.
    pub fn has_room(&self) -> bool {
        let is_free = |slot: &Slot| slot.active.is_none();
        self.prompt_tokens < self.prompt_part && self.computing().is_none() && self.slots.iter().any(is_free)
    }

    /// Returns the slot whose prompt is computed in parts.
    fn computing(&self) -> Option<usize> {
        self.slots.iter().position(|slot| slot.active.as_ref().is_some_and(|active| active.computed.is_some()))
    }

    /// Returns the number of texts in slots.
    pub fn active(&self) -> usize {
        self.slots.iter().filter(|slot| slot.active.is_some()).count()
    }

    /// Begins a text of at least one token in a free slot if there [is room](Self::has_room). The caller chooses `id`. Returns the number of
    /// tokens of the prompt whose keys and values a slot held.
    pub fn begin(
        &mut self,
        generator: &Generator,
        engine: &mut dyn Engine,
        id: usize,
        request: Request,
    ) -> Result<usize> {
        ensure!(!request.prompt.is_empty(), "prompt: expected at least one token, found none");
        let window = &request.prompt[window_start(request.prompt.len(), request.prompt.len(), generator.capacity())..];
        let Some(Place { slot, from }) = self.place(generator, window) else {
            bail!("generation: expected a free slot, found none")
        };
        // An error leaves the slot without text.
        self.slots[slot].kept = Cached::default();
        let past = match from {
            Some((from, past)) if from != slot => {
                generator.copy_slot(engine, [slot, from], past)?;
                past
            }
            Some((_, past)) => past,
            None => 0,
        };
        let text = request.prompt.clone();
        let active = Active { id, request, text, generated: 0, in_flight: 0, computed: Some(past) };
        self.compute_part(generator, engine, slot, active)?;
        Ok(past)
    }

    /// Computes the next part of a prompt. After the last one, the slot takes part in steps.
    fn compute_part(
        &mut self,
        generator: &Generator,
        engine: &mut dyn Engine,
        slot: usize,
        mut active: Active,
    ) -> Result<()> {
        let (computed, text) = (active.computed.unwrap_or(0), &active.text);
        let window = &text[window_start(text.len(), text.len(), generator.capacity())..];
        let end = computed + self.prompt_part;
        if end < window.len() - 1 {
            generator.extend(engine, slot, computed, &window[..end])?;
            active.computed = Some(end);
            self.prompt_tokens += self.prompt_part;
        } else {
            begin_window(generator, engine, slot, computed, &active.request, text)?;
            self.prompt_tokens += window.len() - computed;
            active.computed = None;
            self.slots[slot].is_idle = false;
        }
        self.slots[slot].active = Some(active);
        Ok(())
    }

    /// Returns a free slot for a prompt, and the slot that holds the most of its first tokens.
    ///
    /// A free slot is continued if the prompt has at least half of its text. A shorter beginning, such as the instructions of another
    /// conversation, is copied to the slot that has been free for the longest time, and so is the beginning of an active slot.
    fn place(&self, generator: &Generator, prompt: &[u32]) -> Option<Place> {
        let held = |(i, slot): (usize, &Slot)| {
            let (tokens, written) = match &slot.active {
                Some(active) => active.cached(generator.capacity()),
                None => (&slot.kept.tokens[..], slot.kept.written),
            };
            // The last token of a prompt is computed by the first step.
            let common = tokens.iter().zip(&prompt[..prompt.len() - 1]).take_while(|(a, b)| a == b).count();
            let past = generator.reusable(Held { written, valid: tokens.len() }, common);
            let is_whole = slot.active.is_none() && 2 * past >= tokens.len();
            (past >= MIN_REUSED.min(prompt.len() - 1).max(1)).then_some((past, is_whole, i))
        };
        let best = self.slots.iter().enumerate().filter_map(held).max();
        let free = self.slots.iter().enumerate().filter(|(_, slot)| slot.active.is_none());
        let oldest = free.min_by_key(|(_, slot)| slot.ended).map(|(i, _)| i)?;
        Some(match best {
            Some((past, is_whole, i)) => Place { slot: if is_whole { i } else { oldest }, from: Some((i, past)) },
            None => Place { slot: oldest, from: None },
        })
    }

    /// Ends the texts for which `ends` holds, without their last tokens.
    pub fn stop(&mut self, generator: &Generator, ends: impl Fn(usize) -> bool) {
        for slot in 0..self.slots.len() {
            if let Some(active) = self.slots[slot].active.take_if(|active| ends(active.id)) {
                self.release(generator, slot, &active);
            }
        }
    }

    /// Keeps the text of a request that has ended.
    fn release(&mut self, generator: &Generator, slot: usize, active: &Active) {
        let (tokens, written) = active.cached(generator.capacity());
        self.slots[slot].kept = Cached { tokens: tokens.to_vec(), written };
        self.ended += 1;
        self.slots[slot].ended = self.ended;
    }

    /// Computes a part of a prompt and a step, and waits for the tokens of the oldest step. Returns false if there was nothing to do.
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
        if self.prompt_tokens == 0
            && let Some(slot) = self.computing()
            && let Some(active) = self.slots[slot].active.take()
        {
            self.compute_part(generator, engine, slot, active)?;
        }
        self.prompt_tokens = 0;
        while self.steps.len() < 1 + usize::from(self.run_ahead) && self.needs_step() {
            self.step(generator, engine)?;
        }
        let Some(step) = self.steps.pop_front() else { return Ok(self.computing().is_some()) };
        let tokens = engine.wait(step)?.values;
        for (slot, token) in tokens.into_iter().enumerate() {
            self.receive(generator, engine, [slot, token as usize], each, ended)?;
        }
        Ok(true)
    }

    /// Queues a step. It leaves the caches of free slots as they are.
    fn step(&mut self, generator: &Generator, engine: &mut dyn Engine) -> Result<()> {
        for (i, slot) in self.slots.iter_mut().enumerate() {
            match &mut slot.active {
                Some(active) if active.computed.is_none() => active.in_flight += 1,
                _ if !slot.is_idle => {
                    generator.park(engine, i)?;
                    slot.is_idle = true;
                }
                _ => {}
            }
        }
        self.steps.push_back(generator.step(engine)?.tokens);
        Ok(())
    }

    /// Returns whether a text needs more tokens than the steps in flight give.
    fn needs_step(&self) -> bool {
        let needs =
            |active: &Active| active.computed.is_none() && active.generated + active.in_flight < active.request.tokens;
        self.slots.iter().filter_map(|slot| slot.active.as_ref()).any(needs)
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
        let Some(mut active) = self.slots[slot].active.take() else { return Ok(()) };
        if active.in_flight <= later {
            // The slot began after this step.
            self.slots[slot].active = Some(active);
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
            self.release(generator, slot, &active);
            ended(active.id, finish);
            return Ok(());
        }
        let (prompt, capacity) = (active.request.prompt.len(), generator.capacity());
        let window = window_start(prompt, active.text.len(), capacity);
        if window != window_start(prompt, active.text.len() - 1, capacity) {
            begin_window(generator, engine, slot, 0, &active.request, &active.text)?;
            active.in_flight = 0;
        }
        self.slots[slot].active = Some(active);
        Ok(())
    }
}

/// Begins or continues a slot with the end of `text` that the cache holds. The slot holds its first `past` tokens.
fn begin_window(
    generator: &Generator,
    engine: &mut dyn Engine,
    slot: usize,
    past: usize,
    request: &Request,
    text: &[u32],
) -> Result<()> {
    let capacity = generator.capacity();
    let kept = if text.len() <= capacity { text.len() } else { (capacity / 2).max(1) };
    // A seed of its own for each window, because random numbers depend on the position.
    let seed = request.seed.wrapping_add((text.len() - kept) as u32);
    generator.begin(engine, slot, past, &text[text.len() - kept..], seed, request.sampling)?;
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
