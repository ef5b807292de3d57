//! Low-rank adapters in the passes: linear layers of a frozen model with trained matrices beside them.
//!
//! With W (OC, C) frozen, a linear layer computes W x + s B (A x), where s = α / R. A and B of the matrices in W (queries, keys and values)
//! are one A (P R, C), whose rows are those of the P adapters, and one block diagonal B (OC, P R). Four GEMMs of width P R follow those of W
//! in a pass. They read the unquantized input, and add to the sums before the activation function.

use super::activations::Activations;
use super::decoder::{BackwardPass, Decoder};
use super::descriptor::Descriptor;
use super::params::Param;
use engine::ops::{Activate, ActivateBackward, Epilogue, MatmulBackward, MatmulForward, MatmulShape, ScaleBlocks};
use engine::plan::Group;
use engine::tensor::Tensor;
use engine::{Engine, Result};

/// The buffers of adapters.
#[derive(Clone, Copy, Debug)]
pub(super) struct AdapterBuffers {
    /// (kept, B, T, P R): the outputs of A, scaled, of each linear layer.
    reduced: [Option<Tensor>; Param::ALL.len()],
    /// Layers of which `reduced` has the outputs.
    kept: usize,
    /// Set in training.
    backward: Option<BackwardBuffers>,
}

#[derive(Clone, Copy, Debug)]
struct BackwardBuffers {
    /// (B, T, P R): the gradient of A's output.
    dreduced: Tensor,
    /// (B, T, F): the gradient of a gated activation's output.
    dactivated: Option<Tensor>,
    /// (2, width): gradients of frozen vectors, which kernels compute but nobody reads.
    discarded: Tensor,
}

impl AdapterBuffers {
    /// Plans the buffers of a model with adapters. `dtype` of the gradients is that of the activations.
    pub(super) fn plan(activations: &mut Activations, d: &Descriptor, training: bool) -> Self {
        let (kept, dtype) = (activations.kept, activations.dtype);
        let mut reduced = [None; Param::ALL.len()];
        let mut widest = 0;
        for weight in Param::linear(d) {
            let Some([a, _]) = weight.adapters().filter(|[a, _]| a.is_in(d)) else { continue };
            let width = a.shape(d).0;
            widest = widest.max(width);
            reduced[weight as usize] =
                Some(activations.add(&format!("adapters of {}", weight.name()), kept, width, dtype));
        }
        let backward = training.then(|| BackwardBuffers {
            dreduced: activations.add("d adapters", 1, widest, dtype),
            dactivated: d.activation.is_gated().then(|| activations.add("d activated", 1, d.mlp_channels, dtype)),
            discarded: activations.plan.add(
                Group::Activations,
                "d frozen vectors",
                &[2, d.channels.max(d.qk_norm_widths()[0])],
                dtype,
            ),
        });
        Self { reduced, kept, backward }
    }
}

/// The adapters of a linear layer.
#[derive(Clone, Copy)]
struct Adapter {
    /// (P R, C)
    a: Tensor,
    /// (OC, P R)
    b: Tensor,
    /// (rows, P R): the output of A, scaled
    reduced: Tensor,
    /// P R
    width: usize,
    scale: f32,
    shape: MatmulShape,
}

impl Adapter {
    /// Returns the sizes of the layer A.
    fn shape_a(&self) -> MatmulShape {
        MatmulShape { oc: self.width, ..self.shape }
    }

    /// Returns the sizes of the layer B.
    fn shape_b(&self) -> MatmulShape {
        MatmulShape { c: self.width, ..self.shape }
    }

    /// Computes the scaled output of A from the layer's input (rows, C).
    fn reduce(&self, engine: &mut dyn Engine, inp: Tensor) -> Result<()> {
        let (out, weight, shape) = (self.reduced, self.a, self.shape_a());
        let epilogue = Epilogue::None;
        engine.run(MatmulForward { epilogue, ..MatmulForward::new([out, inp, weight], shape) })?;
        engine.run(ScaleBlocks::whole(out, self.width, self.scale))
    }
}

impl Decoder {
    /// Returns the adapters of a linear layer, if it has any.
    fn adapter(&self, layer: usize, weight: Param, shape: MatmulShape) -> Option<Adapter> {
        let (adapters, frozen) = (self.descriptor.adapters?, self.frozen.as_ref()?);
        let AdapterBuffers { reduced, kept, .. } = frozen.adapters;
        let reduced = reduced[weight as usize]?.part(layer % kept, kept);
        let [a, b] = weight.adapters()?;
        let width = a.shape(&self.descriptor).0;
        Some(Adapter {
            a: self.param(a, layer),
            b: self.param(b, layer),
            reduced: reduced.slice(0, shape.rows * width),
            width,
            scale: adapters.scale(),
            shape,
        })
    }

    /// Computes a linear layer, with its adapters. Converts a weight in FP8 before.
    pub(super) fn run_linear(
        &self,
        engine: &mut dyn Engine,
        layer: usize,
        weight: Param,
        op: &MatmulForward,
    ) -> Result<()> {
        self.stage_weight(engine, weight, layer)?;
        if self.frozen.is_some() && op.fp8.is_some() {
            // The adapters read the input, so the operation that computes it writes it unquantized.
            self.quantized_input(layer, weight, op.inp).map_or(Ok(()), |quantize| engine.run(quantize))?;
        }
        let Some(adapter) = self.adapter(layer, weight, op.shape) else { return engine.run(*op) };
        let frozen = match op.epilogue {
            Epilogue::Activation(_, sums) => MatmulForward { out: sums, epilogue: Epilogue::None, ..*op },
            _ => *op,
        };
        engine.run(frozen)?;
        adapter.reduce(engine, op.inp)?;
        let (shape, epilogue) = (adapter.shape_b(), Epilogue::Residual(frozen.out));
        let (inp, weight) = (adapter.reduced, adapter.b);
        engine.run(MatmulForward { inp, weight, bias: None, epilogue, shape, fp8: None, ..frozen })?;
        let Epilogue::Activation(activation, preactivation) = op.epilogue else { return Ok(()) };
        let columns = op.shape.oc / activation.inputs();
        engine.run(Activate { activation, out: op.out, preactivation, columns })
    }

    /// Computes what the backward pass of a linear layer's adapters reads, from the layer's input `inp` (rows, C).
    pub(super) fn recompute_adapter(
        &self,
        engine: &mut dyn Engine,
        layer: usize,
        weight: Param,
        inp: Tensor,
    ) -> Result<()> {
        let adapter = self.adapter(layer, weight, self.linear_shape(weight, inp));
        adapter.map_or(Ok(()), |adapter| adapter.reduce(engine, inp))
    }

    /// Returns the operation that zeroes the gradient of B (OC, P R) outside of the blocks of the adapters, if there are such elements.
    fn keep_blocks(&self, weight: Param, db: Tensor, columns: usize) -> Option<ScaleBlocks> {
        let d = &self.descriptor;
        let (adapters, targets) = (d.adapters?, d.targets(weight));
        let mut op = ScaleBlocks::whole(db, columns, 1.0);
        op.block_columns = adapters.padded_rank();
        let mut end = 0;
        for (i, (&target, rows)) in targets.iter().zip(d.target_rows(weight)).enumerate() {
            end += rows;
            (op.ends[i], op.kept[i]) = (end, adapters.targets.contains(target));
        }
        (targets.len() > 1).then_some(op)
    }
}

impl BackwardPass<'_> {
    /// Computes the gradients of a linear layer, or those of its adapters.
    pub(super) fn run_linear(
        &self,
        engine: &mut dyn Engine,
        layer: usize,
        weight: Param,
        op: &MatmulBackward,
    ) -> Result<()> {
        let model = self.model;
        let Some(adapter) = model.adapter(layer, weight, op.shape) else { return engine.run(*op) };
        let Some([param_a, param_b]) = weight.adapters() else { return engine.run(*op) };
        let Some(buffers) = self.adapter_buffers() else { return engine.run(*op) };
        let Adapter { a, b, reduced, width, scale, shape, .. } = adapter;
        let (rows, columns) = (shape.rows, shape.c);
        let dreduced = buffers.dreduced.slice(0, reduced.len);
        let mut dinp = op.dinp;
        if let Some(input) = op.activation {
            let (activation, preactivation) = (input.activation, input.preactivation);
            if input.recompute.is_some() {
                engine.run(Activate { activation, out: op.inp, preactivation, columns })?;
            }
            dinp = buffers.dactivated.map_or(dinp, |buffer| buffer.slice(0, rows * columns));
        }
        engine.run(MatmulBackward { dinp, activation: None, ..*op })?;
        let [da, db] = [param_a, param_b].map(|param| model.gradient(self.grads, param, layer));
        let of_adapter = MatmulBackward { adds_to_dinp: false, activation: None, dbias: None, fp8: None, ..*op };
        engine.run(MatmulBackward {
            dinp: dreduced,
            dweight: db,
            inp: reduced,
            weight: b,
            shape: adapter.shape_b(),
            ..of_adapter
        })?;
        db.and_then(|db| model.keep_blocks(weight, db, width)).map_or(Ok(()), |op| engine.run(op))?;
        engine.run(ScaleBlocks::whole(dreduced, width, scale))?;
        engine.run(MatmulBackward {
            dinp,
            adds_to_dinp: true,
            dweight: da,
            dout: dreduced,
            inp: op.inp,
            weight: a,
            shape: adapter.shape_a(),
            ..of_adapter
        })?;
        let Some(input) = op.activation else { return Ok(()) };
        let (activation, preactivation) = (input.activation, input.preactivation);
        let dout = activation.is_gated().then_some(dinp);
        engine.run(ActivateBackward { activation, dinp: op.dinp, dout, preactivation, columns })
    }

    /// Zeroes the gradients of frozen vectors, to which kernels add.
    pub(super) fn zero_discarded(&self, engine: &mut dyn Engine) -> Result<()> {
        self.adapter_buffers().map_or(Ok(()), |buffers| engine.zero(buffers.discarded))
    }

    fn adapter_buffers(&self) -> Option<BackwardBuffers> {
        self.model.frozen.as_ref()?.adapters.backward
    }

    /// Returns where the gradient of a vector goes, or `None` if the model lacks it. The gradient of a frozen one is discarded, in one of two
    /// places.
    pub(super) fn vector_gradient(&self, param: Param, layer: usize, place: usize) -> Option<Tensor> {
        let d = &self.model.descriptor;
        let discarded = || {
            let place = self.adapter_buffers()?.discarded.part(place, 2);
            Some(place.slice(0, param.len(d)))
        };
        if param.is_in(d) { self.model.gradient(self.grads, param, layer).or_else(discarded) } else { None }
    }
}
