//! Low-rank adapters in files: PEFT's directories, and the checkpoints of runs that train them.
//!
//! A directory of PEFT (`save_pretrained` of its `LoraModel`) has `adapter_config.json`, and `adapter_model.safetensors` with two tensors
//! for each matrix: `base_model.model.NAME.lora_A.weight` (R, C) and `…lora_B.weight` (OC, R), where NAME is that of the module in the class of
//! transformers. In memory, the adapters of a linear layer are one pair of matrices ([`model::descriptor::Adapters`]).

use crate::ModelSource;
use crate::architecture::{Architecture, Instance, Part, TensorNames, exchange_halves};
use crate::element::{Element, NewTensor};
use crate::safetensors_file;
use crate::source::convert_pairs;
use crate::tensor_file::{TensorFile, TensorInfo};
use crate::tokenizer::pretty;
use anyhow::{Context, Result, bail, ensure};
use checkpoint::config;
use checkpoint::model_file::ModelFile;
use engine::Engine;
use engine::ops::RotaryPairs;
use engine::tensor::DType;
use model::descriptor::{AdapterBase, AdapterTarget, Adapters, Positions};
use model::{Decoder, Descriptor, Param};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Name of the file with the settings.
pub const CONFIG: &str = "adapter_config.json";
/// Name of the file with the tensors.
pub const WEIGHTS: &str = "adapter_model.safetensors";

/// Adapters of a model, in a file.
#[derive(Debug)]
pub struct AdapterFile {
    path: PathBuf,
    kind: Kind,
    /// The model that they belong to, as the file names it.
    base: String,
}

#[derive(Debug)]
enum Kind {
    Peft { config: PeftConfig, file: TensorFile },
    Run(Box<ModelFile>),
}

/// The settings of a PEFT directory that change what the adapters compute.
#[derive(Debug, Deserialize)]
struct PeftConfig {
    peft_type: String,
    base_model_name_or_path: Option<String>,
    r: usize,
    lora_alpha: f64,
    /// Scales by α / √R instead of α / R (Kalajdzievski, 2023, arXiv:2312.03732).
    #[serde(default)]
    use_rslora: bool,
    /// All settings.
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// Settings that llm-rs supports only with these values, and without a key.
const SETTINGS: &[(&str, &[&str])] = &[
    ("bias", &["\"none\"", "null"]),
    ("use_dora", &["false"]),
    ("lora_bias", &["false"]),
    ("rank_pattern", &["{}", "null"]),
    ("alpha_pattern", &["{}", "null"]),
    ("modules_to_save", &["null", "[]"]),
    ("layers_to_transform", &["null"]),
    ("layer_replication", &["null"]),
    ("target_parameters", &["null", "[]"]),
    ("trainable_token_indices", &["null", "[]"]),
    ("use_qalora", &["false"]),
];

impl AdapterFile {
    /// Reports whether a directory is one of PEFT.
    pub fn is_in(directory: &Path) -> bool {
        directory.join(CONFIG).is_file()
    }

    /// Opens a directory of PEFT, or the newest checkpoint of a run that trains adapters.
    pub fn open(path: &Path) -> Result<Self> {
        if Self::is_in(path) {
            return Self::open_peft(path);
        }
        let file = checkpoint::resume::newest_model_file(path).ok().flatten();
        let file = file.with_context(|| {
            format!(
                "{}: expected {CONFIG} (a directory of PEFT) or a checkpoint with adapters, found neither",
                path.display()
            )
        })?;
        let file = ModelFile::open(&file)?;
        ensure!(
            file.descriptor().adapters.is_some(),
            "{}: expected a checkpoint with adapters, found a whole model; pass it as the model",
            file.path().display()
        );
        Self::of_run(file)
    }

    /// Wraps the checkpoint of a run that trains adapters.
    pub(crate) fn of_run(file: ModelFile) -> Result<Self> {
        let directory = atomic_file::parent(file.path()).to_owned();
        let base = config::saved(&directory, "model").and_then(|model| model.as_str().map(str::to_owned));
        let base = base.with_context(|| {
            format!("{}: expected the model of the adapters in {}, found none", directory.display(), config::FILE)
        })?;
        Ok(Self { path: directory, kind: Kind::Run(Box::new(file)), base })
    }

    fn open_peft(directory: &Path) -> Result<Self> {
        let path = directory.join(CONFIG);
        let name = path.display();
        let text =
            bounded_file::read(&path, bounded_file::DESCRIPTION).with_context(|| format!("cannot read {name}"))?;
        let config: PeftConfig = serde_json::from_slice(&text).with_context(|| format!("{name}: not valid"))?;
        ensure!(
            config.peft_type == "LORA",
            "{name}: peft_type: expected LORA, found {}; llm-rs supports no other adapters",
            config.peft_type
        );
        ensure!(config.r > 0, "{name}: r: expected at least 1, found 0");
        for (key, accepted) in SETTINGS {
            let Some(found) = config.others.get(*key).map(ToString::to_string) else { continue };
            ensure!(
                accepted.contains(&found.as_str()),
                "{name}: {key}: expected {}, found {found}; llm-rs supports no other value",
                accepted.join(" or ")
            );
        }
        let base = config.base_model_name_or_path.clone().unwrap_or_default();
        let file = safetensors_file::open(&directory.join(WEIGHTS))?;
        Ok(Self { path: directory.to_owned(), kind: Kind::Peft { config, file }, base })
    }

    /// Returns the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether the adapters are a checkpoint of a run.
    pub fn is_run(&self) -> bool {
        matches!(self.kind, Kind::Run(_))
    }

    /// Returns the name of the model that the adapters belong to.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// Opens the model that the adapters belong to. A relative path begins at the working directory, or at a directory above that of the
    /// adapters.
    pub fn open_base(&self) -> Result<ModelSource> {
        let found = paths_of(&self.base, &self.path).into_iter().find(|path| path.exists());
        let found = found.with_context(|| {
            format!(
                "{}: expected the model of the adapters, found no file or directory {}; pass the model, and the adapters with --lora",
                self.path.display(),
                self.base
            )
        })?;
        ModelSource::open(&found).with_context(|| format!("the model of the adapters in {}", self.path.display()))
    }

    /// Returns the shape of a model with these adapters. Fails if they do not fit.
    pub fn descriptor(&self, base: &ModelSource) -> Result<Descriptor> {
        let d = base.descriptor();
        match &self.kind {
            Kind::Run(file) => {
                ensure!(
                    file.descriptor().base() == d,
                    "{}: expected adapters of the model {} ({d}), found those of another one ({})",
                    self.path.display(),
                    base.path().display(),
                    file.descriptor().base()
                );
                Ok(file.descriptor())
            }
            Kind::Peft { config, file } => {
                let architecture = base.architecture()?;
                let settings = peft_settings(config, &d, architecture, file);
                let settings = settings.with_context(|| file.path().display().to_string())?;
                let with = Descriptor { adapters: Some(settings), ..d };
                let with = with.checked().with_context(|| self.path.join(CONFIG).display().to_string())?;
                check_tensors(&with, architecture, file)
                    .with_context(|| format!("{} for the model {}", file.path().display(), base.path().display()))?;
                Ok(with)
            }
        }
    }

    /// Reads a matrix of the adapters of one layer, as it is in memory. `d` is that of [`descriptor`](Self::descriptor).
    pub fn read(&self, d: &Descriptor, architecture: &Architecture, param: Param, layer: usize) -> Result<Vec<f32>> {
        let path = || self.path.display().to_string();
        let values = match &self.kind {
            Kind::Run(run) => {
                let element = Element::from(run.dtype());
                let bytes = run.read_tensor(param, layer)?;
                element.check_finite(&bytes, param.name()).with_context(path)?;
                element.widen(&bytes)
            }
            Kind::Peft { file, .. } => read_peft(d, architecture, file, param, layer).with_context(path)?,
        };
        Ok(values)
    }

    /// Reads the adapters that this rank keeps into a model that was planned for [`descriptor`](Self::descriptor).
    pub fn load(&self, base: &ModelSource, model: &Decoder, engine: &mut dyn Engine) -> Result<()> {
        let (d, architecture) = (self.descriptor(base)?, base.architecture()?);
        // The storage of the frozen weights may differ.
        let of =
            |d: Descriptor| d.adapters.map(|Adapters { rank, alpha, targets, .. }| (rank, alpha.to_bits(), targets));
        ensure!(
            model.descriptor.base() == d.base() && of(model.descriptor) == of(d),
            "{}: expected {}, found {d}; pass the same --lora-rank, --lora-alpha and --lora-targets, or none of them",
            self.path.display(),
            model.descriptor
        );
        for (param, layer) in model.layout.file_order() {
            let values = self.read(&d, architecture, param, layer)?;
            for store in model.weight_stores() {
                if let Some((range, to)) = store.held(param, layer) {
                    store.write(engine, to, &values[range])?;
                }
            }
        }
        Ok(())
    }
}

/// Returns the paths that a file or directory may have which a run or adapters name: relative to the working directory, or to a directory
/// above `from`.
pub fn paths_of(name: &str, from: &Path) -> Vec<PathBuf> {
    let absolute = from.canonicalize().unwrap_or_default();
    [Path::new("")].into_iter().chain(absolute.ancestors()).map(|directory| directory.join(name)).collect()
}

/// A matrix that can have an adapter: its place in memory, and the name of its module.
struct Module {
    target: AdapterTarget,
    /// Number of the adapter among those of the linear layer.
    number: usize,
    names: &'static TensorNames,
}

/// Returns the modules of a linear layer.
fn modules(d: &Descriptor, architecture: &Architecture, weight: Param) -> Vec<Module> {
    let of = |part: Part| match (part, weight) {
        (Part::Query, _) => Some(AdapterTarget::Q),
        (Part::Key, _) => Some(AdapterTarget::K),
        (Part::Value, _) => Some(AdapterTarget::V),
        (Part::Gate, _) => Some(AdapterTarget::Gate),
        (Part::Up, _) => Some(AdapterTarget::Up),
        (Part::All, _) => d.targets(weight).first().copied(),
    };
    let number = |target| d.targets(weight).into_iter().position(|other| other == target);
    let module = |(_, names): (usize, &'static TensorNames)| {
        let target = of(names.part)?;
        Some(Module { target, number: number(target)?, names })
    };
    architecture.parts_of(weight).filter_map(module).collect()
}

/// Returns the names of the two tensors of a module in a PEFT file.
fn tensor_names(architecture: &Architecture, names: &TensorNames, layer: usize) -> [String; 2] {
    let module = architecture.full_name(names, Instance { layer, expert: 0 });
    let module = module.strip_suffix(".weight").unwrap_or(&module);
    ["A", "B"].map(|matrix| format!("base_model.model.{module}.lora_{matrix}.weight"))
}

/// Returns the settings of a PEFT directory. A matrix is a target if the file has tensors for it in the first layer.
fn peft_settings(
    config: &PeftConfig,
    d: &Descriptor,
    architecture: &Architecture,
    file: &TensorFile,
) -> Result<Adapters> {
    let all = Param::linear(d).flat_map(|weight| modules(d, architecture, weight));
    let has = |module: &Module| {
        tensor_names(architecture, module.names, 0).iter().any(|name| file.tensors().contains_key(name))
    };
    let targets: Vec<AdapterTarget> = all.filter(has).map(|module| module.target).collect();
    if targets.is_empty() {
        let wanted =
            modules(d, architecture, Param::Attprojw).first().map(|module| tensor_names(architecture, module.names, 0));
        bail!(
            "expected tensors such as {}, found {}",
            wanted.map_or(String::new(), |names| names[0].clone()),
            file.tensors().keys().next().map_or("none", String::as_str)
        );
    }
    let alpha = if config.use_rslora { config.lora_alpha * (config.r as f64).sqrt() } else { config.lora_alpha };
    Ok(Adapters {
        rank: config.r,
        alpha: alpha as f32,
        targets: targets.into_iter().collect(),
        base: AdapterBase::default(),
    })
}

/// Returns the shapes of A and B of a module.
fn shapes(d: &Descriptor, adapters: Adapters, names: &TensorNames) -> [[usize; 2]; 2] {
    let rows = names.part.rows(names.param, d).len();
    [[adapters.rank, names.param.shape(d).1], [rows, adapters.rank]]
}

/// Checks that a file has the tensors of the adapters and no others.
fn check_tensors(d: &Descriptor, architecture: &Architecture, file: &TensorFile) -> Result<()> {
    let Some(adapters) = d.adapters else { bail!("internal error: no adapters; please report it") };
    let mut known = BTreeSet::new();
    for layer in 0..d.layers {
        for weight in Param::linear(d) {
            let all = modules(d, architecture, weight);
            for Module { names, .. } in all.into_iter().filter(|module| adapters.targets.contains(module.target)) {
                let tensors = tensor_names(architecture, names, layer).into_iter().zip(shapes(d, adapters, names));
                for (name, shape) in tensors {
                    let found = file.tensors().get(&name);
                    let fits = found.is_some_and(|found| {
                        Element::named(&found.dtype).is_some() && found.shape == shape.map(|extent| extent as u64)
                    });
                    ensure!(
                        fits,
                        "tensor {name}: expected F32, BF16 or F16 {shape:?}, found {}; the adapters belong to another model, or their \
                         rank is not that of {CONFIG}",
                        found.map_or_else(|| "none".to_owned(), TensorInfo::describe)
                    );
                    known.insert(name);
                }
            }
        }
    }
    let unknown = file.tensors().keys().find(|name| !known.contains(*name));
    ensure!(
        unknown.is_none(),
        "tensor {}: expected only adapters of linear layers in attention and the MLP, found another one, which llm-rs would ignore",
        unknown.map_or("", String::as_str)
    );
    Ok(())
}

/// Converts B (rows, R) of a module between PEFT and this program, which may have other rotary pairs, and rotate in the other direction.
fn convert_b(
    d: &Descriptor,
    architecture: &Architecture,
    names: &TensorNames,
    rank: usize,
    values: Vec<f32>,
    to: RotaryPairs,
) -> Vec<f32> {
    let Positions::Rotary(rotary) = d.positions else { return values };
    let mut values = values;
    if !names.is_rotated() {
        return values;
    }
    if architecture.reverses_rotation {
        exchange_halves(&mut values, d.head_size * rank);
    }
    if rotary.pairs == RotaryPairs::HalfSplit {
        return values;
    }
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Element::F32.widen(&convert_pairs(&bytes, rank * size_of::<f32>(), d.head_size, to))
}

/// Reads a matrix from a PEFT file.
fn read_peft(
    d: &Descriptor,
    architecture: &Architecture,
    file: &TensorFile,
    param: Param,
    layer: usize,
) -> Result<Vec<f32>> {
    let (adapters, weight) = parts_of(d, param)?;
    let (rows, width) = param.shape(d);
    let (padded, rank) = (adapters.padded_rank(), adapters.rank);
    let mut values = vec![0.0; rows * width];
    let all = modules(d, architecture, weight);
    for Module { number, names, .. } in all.into_iter().filter(|module| adapters.targets.contains(module.target)) {
        let [a, b] = tensor_names(architecture, names, layer);
        let is_a = weight.adapters().is_some_and(|params| params[0] == param);
        let name = if is_a { a } else { b };
        let info = file.tensors().get(&name).with_context(|| format!("tensor {name}: expected one, found none"))?;
        let element = Element::named(&info.dtype).with_context(|| format!("tensor {name}: {}", info.dtype))?;
        let mut bytes = vec![0; (info.data_offsets.1 - info.data_offsets.0) as usize];
        file.read(info, 0, &mut bytes)?;
        element.check_finite(&bytes, &name)?;
        let found = element.widen(&bytes);
        if is_a {
            values[number * padded * width..][..found.len()].copy_from_slice(&found);
        } else {
            let pairs = match d.positions {
                Positions::Rotary(rotary) => rotary.pairs,
                Positions::Learned => RotaryPairs::HalfSplit,
            };
            let found = convert_b(d, architecture, names, rank, found, pairs);
            let first = names.part.rows(names.param, d).start;
            for (row, from) in found.chunks(rank).enumerate() {
                values[(first + row) * width + number * padded..][..rank].copy_from_slice(from);
            }
        }
    }
    Ok(values)
}

/// Returns the adapters and the linear layer of a matrix.
fn parts_of(d: &Descriptor, param: Param) -> Result<(Adapters, Param)> {
    let of = |weight: &Param| weight.adapters().is_some_and(|params| params.contains(&param));
    let weight = Param::linear(d).find(of).context("internal error: not a matrix of adapters; please report it")?;
    Ok((d.adapters.context("internal error: no adapters; please report it")?, weight))
}

/// Merges the adapters of a linear layer into its weight (OC, C): W += α / R · B A.
pub(crate) fn add_products(d: &Descriptor, weight: Param, a: &[f32], b: &[f32], to: &mut [f32]) {
    let Some(adapters) = d.adapters else { return };
    let (c, width) = (weight.shape(d).1, b.len() / weight.shape(d).0);
    let scale = adapters.scale();
    for (row, b) in to.chunks_mut(c).zip(b.chunks(width)) {
        let mut sums = vec![0.0f32; c];
        for (factor, a) in b.iter().zip(a.chunks(c)).filter(|(factor, _)| **factor != 0.0) {
            sums.iter_mut().zip(a).for_each(|(sum, a)| *sum += factor * a);
        }
        row.iter_mut().zip(sums).for_each(|(to, sum)| *to += scale * sum);
    }
}

/// Returns the settings that PEFT reads.
pub(crate) fn config_of(d: &Descriptor, architecture: &Architecture, base: &str) -> Result<Vec<u8>> {
    let Some(Adapters { rank, alpha, targets, .. }) = d.adapters else {
        bail!("internal error: no adapters; please report it")
    };
    let all: Vec<Module> = Param::linear(d).flat_map(|weight| modules(d, architecture, weight)).collect();
    let is_used = |module: &&Module| targets.contains(module.target);
    // A name of several parts selects one of two modules with the same last part, such as GPT-2's c_proj.
    let long = |module: &Module| {
        let name = module.names.hugging_face.trim_end_matches(".weight");
        name.split_once("{}.").map_or(name, |(_, in_layer)| in_layer)
    };
    let short = |module: &Module| long(module).rsplit('.').next().unwrap_or_default();
    let unused: Vec<&str> = all.iter().filter(|module| !is_used(module)).map(short).collect();
    let name = |module: &Module| if unused.contains(&short(module)) { long(module) } else { short(module) };
    let target_modules: BTreeSet<&str> = all.iter().filter(is_used).map(name).collect();
    let transposed = all.iter().any(|module| module.names.transposed);
    pretty(&json!({
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": target_modules,
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": false,
    }))
}

/// A matrix of the adapter of a module.
struct Matrix {
    tensor: NewTensor,
    weight: Param,
    /// Whether it is B.
    is_b: bool,
    module: Module,
    layer: usize,
}

/// Returns the matrices of all adapters by their names in a PEFT file.
fn matrices(d: &Descriptor, adapters: Adapters, architecture: &Architecture, element: Element) -> Vec<Matrix> {
    let mut all = Vec::new();
    for layer in 0..d.layers {
        for weight in Param::linear(d) {
            for is_b in [false, true] {
                let of_weight = modules(d, architecture, weight).into_iter();
                all.extend(of_weight.filter(|module| adapters.targets.contains(module.target)).map(|module| {
                    let i = usize::from(is_b);
                    let name = tensor_names(architecture, module.names, layer)[i].clone();
                    let shape = shapes(d, adapters, module.names)[i].to_vec();
                    Matrix { tensor: NewTensor { name, shape, element }, weight, is_b, module, layer }
                }));
            }
        }
    }
    all.sort_by(|a, b| a.tensor.name.cmp(&b.tensor.name));
    all
}

impl Matrix {
    /// Returns its values in PEFT's order, from the tensor of the layer that `read` returns.
    fn values(
        &self,
        d: &Descriptor,
        adapters: Adapters,
        architecture: &Architecture,
        read: impl FnOnce(Param, usize) -> Result<Vec<f32>>,
    ) -> Result<Vec<f32>> {
        let Self { weight, is_b, module: Module { number, names, .. }, layer, .. } = self;
        let Some(param) = weight.adapters().map(|params| params[usize::from(*is_b)]) else { return Ok(Vec::new()) };
        let (values, width) = (read(param, *layer)?, param.shape(d).1);
        let (padded, rank) = (adapters.padded_rank(), adapters.rank);
        if !is_b {
            return Ok(values[number * padded * width..][..rank * width].to_vec());
        }
        let of_row = |row: usize| &values[row * width + number * padded..][..rank];
        let own = names.part.rows(names.param, d).flat_map(of_row).copied().collect();
        Ok(convert_b(d, architecture, names, rank, own, RotaryPairs::HalfSplit))
    }
}

/// Writes the tensors of a PEFT directory.
pub(crate) fn write_tensors(
    out: &mut impl Write,
    adapter: &AdapterFile,
    d: &Descriptor,
    architecture: &Architecture,
    dtype: DType,
) -> Result<()> {
    let adapters = d.adapters.context("internal error: no adapters; please report it")?;
    let all = matrices(d, adapters, architecture, dtype.into());
    let header: Vec<NewTensor> = all.iter().map(|matrix| matrix.tensor.clone()).collect();
    safetensors_file::write_header(out, &header)?;
    for matrix in all {
        let read = |param, layer| adapter.read(d, architecture, param, layer);
        let values = matrix.values(d, adapters, architecture, read)?;
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        out.write_all(&Element::F32.convert(bytes, dtype))?;
    }
    Ok(())
}
