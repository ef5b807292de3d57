//! Where a model's values are when ranks divide them: ZeRO.
//!
//! A layer's parts of all ranks make the layer; each rank keeps its part. What needs whole layers, the passes, find them in one
//! of two buffers that layers take turns in: layer `l` in buffer `l % 2`, so that one can be filled or emptied while the
//! other is used.

use super::params::{Param, Params, Share, Unit};
use super::{Descriptor, Gpt2};
use engine::plan::{Group, Plan};
use engine::tensor::{DType, Divided, Tensor};
use engine::{Engine, Result};
use std::ops::Range;

/// What ranks divide among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zero {
    /// 0: nothing; 1: optimizer state; 2: gradients as well; 3: parameters as well.
    stage: u8,
    share: Share,
}

impl Zero {
    /// Every rank has everything.
    pub const NONE: Self = Self { stage: 0, share: Share::WHOLE };

    /// One rank has nothing to divide.
    pub fn new(stage: u8, share: Share) -> Self {
        if share.ranks == 1 || stage == 0 { Self::NONE } else { Self { stage, share } }
    }

    pub fn stage(self) -> u8 {
        self.stage
    }

    /// What this rank keeps of what is divided.
    pub fn share(self) -> Share {
        self.share
    }

    pub fn divides_optimizer(self) -> bool {
        self.stage >= 1
    }

    pub fn divides_gradients(self) -> bool {
        self.stage >= 2
    }

    pub fn divides_parameters(self) -> bool {
        self.stage >= 3
    }

    /// What the loss of one of a rank's `tokens` of a step counts for in its gradients: where those are divided they are summed
    /// over the ranks after every micro-step, else averaged after the last.
    pub fn dloss(self, tokens: usize) -> f32 {
        let summed = if self.divides_gradients() { self.share.ranks } else { 1 };
        1.0 / (tokens * summed) as f32
    }

    /// How parameters, and all that is like them, are laid out.
    pub fn layout(self, descriptor: Descriptor) -> Params {
        Params::shared(descriptor, self.share)
    }
}

/// A value for every parameter: parameters, gradients, moments or master weights.
#[derive(Clone, Copy, Debug)]
pub struct Store<'a> {
    layout: &'a Params,
    kept: Tensor,
    form: Form,
}

#[derive(Clone, Copy, Debug)]
enum Form {
    /// All of them, as the layout has them.
    Whole,
    /// This rank's parts of all units, one after another.
    Parts,
    /// All embeddings, then this rank's parts of the layers; whole layers in the halves of this buffer.
    Turns(Tensor),
}

impl<'a> Store<'a> {
    /// Plans what is kept of parameters or gradients and, if ranks divide those of layers, the buffer that whole layers pass
    /// through.
    pub(super) fn plan(
        plan: &mut Plan,
        group: Group,
        name: &str,
        layout: &Params,
        dtype: DType,
        divided: bool,
    ) -> (Tensor, Option<Tensor>) {
        if !divided {
            return (plan.add(group, name, &[layout.elements()], dtype), None);
        }
        let embeddings = layout.unit(Unit::Embeddings).len();
        let layers = (layout.elements() - embeddings) / layout.share().ranks;
        let kept = plan.add(group, name, &[embeddings + layers], dtype);
        let turns = plan.add(group, format!("{name} of two layers"), &[2, layout.largest_layer()], dtype);
        (kept, Some(turns))
    }

    pub(super) fn whole_or_turns(layout: &'a Params, kept: Tensor, turns: Option<Tensor>) -> Self {
        Self { layout, kept, form: turns.map_or(Form::Whole, Form::Turns) }
    }

    pub(super) fn parts(layout: &'a Params, kept: Tensor) -> Self {
        Self { layout, kept, form: Form::Parts }
    }

    /// Elements that a rank keeps of what is divided altogether.
    pub(super) fn elements_of_parts(layout: &Params) -> usize {
        layout.elements() / layout.share().ranks
    }

    /// A whole unit: for layers that take turns, the buffer that it comes into.
    ///
    /// # Panics
    /// If there are parts only.
    pub fn unit(&self, unit: Unit) -> Tensor {
        let range = self.layout.unit(unit);
        match (self.form, unit) {
            (Form::Parts, _) => panic!("of divided {unit:?} there is no whole"),
            (Form::Turns(turns), Unit::Layer(layer)) => turns.part(layer % 2, 2).slice(0, range.len()),
            _ => self.kept.slice(range.start, range.len()),
        }
    }

    /// A whole tensor, in its [`unit`](Self::unit).
    pub fn tensor(&self, param: Param, layer: usize) -> Tensor {
        let (range, unit) = (self.layout.range(param, layer), self.layout.unit_of(param, layer));
        self.unit(unit).slice(range.start - self.layout.unit(unit).start, range.len())
    }

    pub fn divided(&self, unit: Unit) -> Divided {
        Divided { whole: self.unit(unit), part: self.own(unit) }
    }

    /// This rank's part of a unit, the gap's part of it included.
    pub fn own(&self, unit: Unit) -> Tensor {
        let (own, start) = (self.layout.own(unit), self.layout.unit(unit).start);
        let ranks = self.layout.share().ranks;
        let embeddings = self.layout.unit(Unit::Embeddings).len();
        let at = match (self.form, unit) {
            (Form::Parts, _) => start / ranks,
            (Form::Turns(_), Unit::Layer(_)) => embeddings + (start - embeddings) / ranks,
            _ => own.start,
        };
        self.kept.slice(at, own.len())
    }

    /// Elements of the layout, which lie in this rank's part of `unit`.
    pub fn at(&self, unit: Unit, elements: Range<usize>) -> Tensor {
        self.own(unit).slice(elements.start - self.layout.own(unit).start, elements.len())
    }

    /// All units in their order.
    ///
    /// # Panics
    /// If ranks divide them.
    pub fn all(&self) -> Tensor {
        assert_eq!(self.kept.len, self.layout.elements(), "of what is divided there is no whole");
        self.kept
    }

    /// Tensors that together are this rank's parts of all units.
    pub fn all_own(&self) -> Vec<Tensor> {
        match self.form {
            Form::Parts => vec![self.kept],
            Form::Whole => self.layout.units().map(|unit| self.own(unit)).collect(),
            Form::Turns(_) => {
                let embeddings = self.layout.unit(Unit::Embeddings).len();
                vec![self.own(Unit::Embeddings), self.kept.slice(embeddings, self.kept.len - embeddings)]
            }
        }
    }

    /// What this rank keeps of a tensor, from one step to the next: which of its elements, and where they are.
    pub fn held(&self, param: Param, layer: usize) -> Option<(Range<usize>, Tensor)> {
        let (range, unit) = (self.layout.range(param, layer), self.layout.unit_of(param, layer));
        if matches!((self.form, unit), (Form::Whole, _) | (Form::Turns(_), Unit::Embeddings)) {
            return Some((0..range.len(), self.kept.slice(range.start, range.len())));
        }
        let own = self.layout.own(unit);
        let held = range.start.max(own.start)..range.end.min(own.end);
        (!held.is_empty()).then(|| (held.start - range.start..held.end - range.start, self.at(unit, held)))
    }

    /// Puts the values of a tensor where they are kept.
    pub fn write(&self, engine: &mut dyn Engine, param: Param, layer: usize, values: &[f32]) -> Result<()> {
        match self.held(param, layer) {
            Some((elements, to)) => engine.write(to, &values[elements]),
            None => Ok(()),
        }
    }
}

/// Brings layers' parameters to where a pass reads them, takes their gradients from where it leaves them.
pub trait Layers {
    /// Before the pass reads the parameters of `layer`, again and again until it calls this for another one; those of `next`
    /// will follow.
    fn parameters(&mut self, engine: &mut dyn Engine, layer: usize, next: Option<usize>) -> Result<()>;

    /// Before the pass adds to the gradients of `layer`; it still adds to those of the layer above until that is
    /// [`differentiated`](Self::differentiated).
    fn gradients(&mut self, engine: &mut dyn Engine, layer: usize) -> Result<()>;

    /// Once the pass will not touch the gradients of `unit` again.
    fn differentiated(&mut self, engine: &mut dyn Engine, unit: Unit) -> Result<()>;

    /// Once this rank's part of `unit` is updated.
    fn updated(&mut self, engine: &mut dyn Engine, unit: Unit) -> Result<()>;
}

/// Nothing is divided: all is where it is.
#[derive(Clone, Copy, Debug)]
pub struct Undivided;

impl Layers for Undivided {
    fn parameters(&mut self, _: &mut dyn Engine, _: usize, _: Option<usize>) -> Result<()> {
        Ok(())
    }

    fn gradients(&mut self, _: &mut dyn Engine, _: usize) -> Result<()> {
        Ok(())
    }

    fn differentiated(&mut self, _: &mut dyn Engine, _: Unit) -> Result<()> {
        Ok(())
    }

    fn updated(&mut self, _: &mut dyn Engine, _: Unit) -> Result<()> {
        Ok(())
    }
}

impl Gpt2 {
    pub fn param_store(&self) -> Store<'_> {
        Store::whole_or_turns(&self.layout, self.params, self.param_turns)
    }

    /// `m`, `v` or the master weights.
    pub fn state_store(&self, kept: Tensor) -> Store<'_> {
        Store::parts(&self.layout, kept)
    }
}
