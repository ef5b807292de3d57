//! Models that a user names by their path.

use crate::architecture::{self, Architecture, Instance, TensorNames};
use crate::companions;
use crate::config::{self, ModelConfig};
use crate::element::{CHUNK, Element};
use crate::hugging_face::HuggingFaceModel;
use crate::nanochat_checkpoint;
use crate::peft::{self, AdapterFile};
use anyhow::{Context, Result, bail, ensure};
use checkpoint::directory;
use checkpoint::model_file::ModelFile;
use checkpoint::resume::newest_model_file;
use checkpoint::tensors;
use engine::Engine;
use engine::ops::RotaryPairs;
use engine::tensor::{DType, Tensor};
use model::descriptor::{Experts, Overrides, Positions, RouterOverrides};
use model::{Decoder, Descriptor, Param, WeightStore};
use rng::Mt19937;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use system::progress::{self, Unit};
use tokenizer::stored::{Found, Search};
use tokenizer::{Tokenizer, hub};

/// An open model: a checkpoint's model file (`.bin` or `.safetensors`), the newest checkpoint of a run, a Hugging Face directory, or a
/// checkpoint of nanochat.
///
/// If the model has adapters, they are added to the weights that are read.
#[derive(Debug)]
pub struct ModelSource {
    kind: Kind,
    adapter: Option<Adapted>,
    /// Number of ids to which the vocabulary grows when the model is loaded.
    vocab: Option<usize>,
    /// The experts of the loaded model, if they differ from those in the files, or if the files have none.
    experts: Option<Experts>,
}

/// Adapters that have been added to the weights of a source.
#[derive(Debug)]
struct Adapted {
    file: AdapterFile,
    /// The shape of the model, with adapters.
    descriptor: Descriptor,
}

#[derive(Debug)]
enum Kind {
    LlmC(Box<ModelFile>),
    HuggingFace(Box<HuggingFaceModel>),
    Nanochat(Box<HuggingFaceModel>),
}

impl From<Kind> for ModelSource {
    fn from(kind: Kind) -> Self {
        Self { kind, adapter: None, vocab: None, experts: None }
    }
}

/// Extensions of the files beside the weights of a model.
const OTHER_FILES: [&str; 5] = ["jinja", "json", "model", "toml", "txt"];

/// Standard deviation of a router that the files do not have, as in transformers.
const ROUTER_STD: f32 = 0.02;

/// Maximum number of models that an error names.
const MAX_NAMED: usize = 5;

/// Returns whether a directory is that of a model or of a run with a checkpoint.
fn is_model(directory: &Path) -> bool {
    directory.join(config::FILE).is_file() || directory::done_steps(directory).is_ok_and(|steps| !steps.is_empty())
}

/// Returns the end of an error that names the models in a directory, if there are any.
fn models_in(directory: &Path) -> String {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut models: Vec<String> =
        entries.filter(|path| is_model(path)).map(|path| path.display().to_string()).collect();
    models.sort();
    let more = models.len().saturating_sub(MAX_NAMED);
    models.truncate(MAX_NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    if models.is_empty() { String::new() } else { format!("; pass one of those in it: {}{more}", models.join(", ")) }
}

impl ModelSource {
    /// Opens a model. Its shape and the types, shapes and places of its tensors have been checked.
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.display();
        if path.is_dir() {
            return Self::open_directory(path);
        }
        let known = name.to_string().parse::<Descriptor>().is_ok();
        ensure!(
            !known || path.exists(),
            "{name}: expected a model file (.bin) or a directory, found the name of a shape, which has no weights; pass the \
             result of `llm-rs train --model {name} --out DIR` or a Hugging Face directory"
        );
        if let Some(advice) = hub::advice(path) {
            bail!("{name}: expected a model file (.bin) or a directory, found neither; {advice}");
        }
        let has_extension = |extension: &str| path.extension().is_some_and(|found| found == extension);
        ensure!(
            !has_extension("gguf") || !path.exists(),
            "{name}: expected a model file (.bin) or a Hugging Face directory, found a GGUF file, which llm-rs only writes"
        );
        let parent = atomic_file::parent(path);
        ensure!(
            !OTHER_FILES.iter().any(|extension| has_extension(extension)) || !path.is_file() || !is_model(parent),
            "{name}: expected a model file (.bin or .safetensors) or a directory, found another file of a model; pass the directory {}",
            parent.display()
        );
        // A file of a Hugging Face directory stands for the directory.
        let is_checkpoint = path.file_name().is_some_and(|name| directory::is_checkpoint_file(&name.to_string_lossy()));
        if has_extension("safetensors") && !is_checkpoint && path.exists() && parent.join(config::FILE).exists() {
            let model = HuggingFaceModel::open(parent)?;
            ensure!(
                model.has_file(path),
                "{name}: expected a file of the model in {}, found a file that it does not use; pass the directory",
                parent.display()
            );
            return Ok(Kind::HuggingFace(Box::new(model)).into());
        }
        if has_extension("pt") && path.exists() {
            return Ok(Kind::Nanochat(Box::new(HuggingFaceModel::open_nanochat(path)?)).into());
        }
        Self::of_file(ModelFile::open(path)?)
    }

    fn open_directory(path: &Path) -> Result<Self> {
        if path.join(config::FILE).exists() {
            return Ok(Kind::HuggingFace(Box::new(HuggingFaceModel::open(path)?)).into());
        }
        if AdapterFile::is_in(path) {
            return Self::of_adapters(AdapterFile::open(path)?);
        }
        if let Some(file) = newest_model_file(path)? {
            return Self::of_file(ModelFile::open(&file)?);
        }
        match nanochat_checkpoint::newest(path) {
            Some(file) => Self::open(&file),
            None => bail!(
                "{}: expected {} (a Hugging Face directory) or a complete checkpoint (the directory of a run), found neither{}",
                path.display(),
                config::FILE,
                // The directory of a model in the cache of Hugging Face.
                if path.join("snapshots").is_dir() {
                    "; pass one of the directories in snapshots/".to_owned()
                } else {
                    models_in(path)
                }
            ),
        }
    }

    /// Wraps a model file, which may contain only the adapters of another model.
    fn of_file(file: ModelFile) -> Result<Self> {
        match file.descriptor().adapters {
            Some(_) => Self::of_adapters(AdapterFile::of_run(file)?),
            None => Ok(Kind::LlmC(Box::new(file)).into()),
        }
    }

    /// Opens the model of adapters, with them.
    fn of_adapters(file: AdapterFile) -> Result<Self> {
        file.open_base()?.with_adapters(file)
    }

    /// Adds the products of adapters to the weights.
    pub fn with_adapters(self, file: AdapterFile) -> Result<Self> {
        ensure!(
            self.adapter.is_none(),
            "{}: expected a model without adapters, found one with adapters; export it with --merge, and pass the result",
            self.path().display()
        );
        let descriptor = file.descriptor(&self)?;
        Ok(Self { adapter: Some(Adapted { file, descriptor }), ..self })
    }

    /// Returns the adapters whose products the weights contain, and the shape of the model with adapters.
    pub fn adapters(&self) -> Option<(&AdapterFile, &Descriptor)> {
        self.adapter.as_ref().map(|adapted| (&adapted.file, &adapted.descriptor))
    }

    /// Returns the path of the file or of the Hugging Face directory; with adapters that of their directory.
    pub fn path(&self) -> &Path {
        if let Some(Adapted { file, .. }) = &self.adapter {
            return file.path();
        }
        match &self.kind {
            Kind::LlmC(file) => file.path(),
            Kind::HuggingFace(model) => model.directory(),
            Kind::Nanochat(model) => model.first_file(),
        }
    }

    /// Returns the directory in which the tokenizer of the model is stored, if it has one.
    pub fn directory(&self) -> &Path {
        if let Some(Adapted { file, .. }) = self.adapter.as_ref().filter(|adapted| adapted.file.is_run()) {
            return file.path();
        }
        match &self.kind {
            Kind::LlmC(file) => atomic_file::parent(file.path()),
            Kind::HuggingFace(model) | Kind::Nanochat(model) => model.directory(),
        }
    }

    /// Returns the directory with the files of the model in Hugging Face's format besides the weights: its own, or that in which a run
    /// [keeps](companions::keep) those of the model from which it started.
    pub fn companions(&self) -> Option<PathBuf> {
        let kept = |directory: &Path| Some(directory.join(companions::DIRECTORY)).filter(|kept| kept.is_dir());
        if let Some(kept) =
            self.adapter.as_ref().filter(|adapted| adapted.file.is_run()).and_then(|it| kept(it.file.path()))
        {
            return Some(kept);
        }
        match &self.kind {
            Kind::HuggingFace(model) => Some(model.directory().to_owned()),
            Kind::LlmC(_) => kept(self.directory()),
            Kind::Nanochat(_) => None,
        }
    }

    /// Returns the directories that may contain a chat template and generation settings, the preferred one first.
    pub fn settings(&self) -> Vec<PathBuf> {
        let companions = self.companions().filter(|found| found != self.directory());
        [self.directory().to_owned()].into_iter().chain(companions).collect()
    }

    /// Returns the file of a chat template that a user has put into the directory of a run, which precedes the template of its companions.
    pub fn template_of_run(&self) -> Option<PathBuf> {
        let trains_adapters = self.adapter.as_ref().is_some_and(|adapted| adapted.file.is_run());
        let is_run = trains_adapters || matches!(self.kind, Kind::LlmC(_));
        is_run.then(|| self.directory().join(companions::TEMPLATE)).filter(|path| path.is_file())
    }

    /// Returns the chat template.
    pub fn chat_template(&self) -> Result<Option<String>> {
        for directory in self.settings() {
            let config = companions::tokenizer_config(&directory)?;
            if let Some((_, template)) = companions::chat_template(&directory, &config)? {
                return Ok(Some(template));
            }
        }
        Ok(None)
    }

    /// Returns the configuration of the Hugging Face directory, or that which a run keeps. `None` if there is none for this shape.
    pub fn config(&self) -> Result<Option<ModelConfig>> {
        if let Kind::HuggingFace(model) = &self.kind {
            return Ok(Some(model.config().clone()));
        }
        let Some(directory) = self.companions().filter(|directory| directory.join(config::FILE).is_file()) else {
            return Ok(None);
        };
        let config = ModelConfig::read(&directory)?;
        let is_same = std::ptr::eq(config.architecture, self.architecture()?)
            && architecture::same_model(&config.descriptor, &self.descriptor());
        Ok(is_same.then_some(config))
    }

    /// Returns the tokenizer `named` with `--tokenizer`, or that of the model by the order of [`Search::find`]. Returns `None` if
    /// there is none, and fails if it cannot be opened.
    pub fn tokenizer(&self, named: Option<&str>) -> Result<Option<Tokenizer>> {
        let named = named.map(Tokenizer::named).transpose().context("--tokenizer")?;
        let vocab = self.descriptor().vocab;
        let search = Search { named: named.as_ref(), model: Some(self.directory()), data: None, vocab };
        let Found { tokenizer, note, .. } = search.find()?;
        ensure!(note.is_none(), "{}; pass another one with --tokenizer", note.unwrap_or_default());
        Ok(tokenizer)
    }

    /// Returns the names of the tensors in other programs.
    pub fn architecture(&self) -> Result<&'static Architecture> {
        match &self.kind {
            Kind::LlmC(file) => Architecture::of(&file.descriptor()).with_context(|| file.path().display().to_string()),
            Kind::HuggingFace(model) | Kind::Nanochat(model) => Ok(model.config().architecture),
        }
    }

    /// Returns the shape of the model.
    pub fn descriptor(&self) -> Descriptor {
        let stored = self.stored_descriptor();
        Descriptor { vocab: self.vocab.unwrap_or(stored.vocab), experts: self.experts.or(stored.experts), ..stored }
    }

    fn stored_descriptor(&self) -> Descriptor {
        match &self.kind {
            Kind::LlmC(file) => file.descriptor(),
            Kind::HuggingFace(model) | Kind::Nanochat(model) => model.descriptor(),
        }
    }

    /// Returns the model with a vocabulary of at least `vocab` ids. [`load`](Self::load) sets each row of the embeddings and of the head
    /// that the files do not have to the mean of those that they have.
    #[must_use]
    pub fn with_vocab(self, vocab: usize) -> Self {
        let grows = vocab > self.stored_descriptor().vocab;
        Self { vocab: grows.then_some(vocab), ..self }
    }

    /// Returns the model with experts. Each starts as a copy of the MLP, and the routers are random (sparse upcycling; Komatsuzaki et al.,
    /// 2022, arXiv:2212.05055).
    pub fn with_experts(self, experts: Overrides) -> Result<Self> {
        let stored = self.stored_descriptor();
        ensure!(
            stored.experts.is_none(),
            "expected a model without experts, found one with {stored}; omit --experts and --active-experts"
        );
        Ok(Self { experts: stored.with(experts)?.experts, ..self })
    }

    /// Returns the model with other settings of its routers. Biases that the files lack start at 0.
    pub fn with_router(self, router: RouterOverrides) -> Result<Self> {
        ensure!(
            router.scores.is_none() || self.stored_descriptor().experts.is_none(),
            "--router-scores: expected a model without trained routers, found one with {}; omit this flag",
            self.stored_descriptor()
        );
        let descriptor = self.descriptor();
        let changed = descriptor.with_router(router)?;
        Ok(if changed == descriptor { self } else { Self { experts: changed.experts, ..self } })
    }

    /// Returns the number of rows of wte in llm.c's files of this model.
    pub fn padded_vocab(&self) -> usize {
        match &self.kind {
            Kind::LlmC(file) => file.padded_vocab(),
            Kind::HuggingFace(model) | Kind::Nanochat(model) => model.descriptor().padded_vocab(),
        }
    }

    /// Returns the smallest storage type that holds all parameters exactly.
    pub fn dtype(&self) -> DType {
        match &self.kind {
            Kind::LlmC(file) => file.dtype(),
            Kind::HuggingFace(model) | Kind::Nanochat(model) => model.dtype(),
        }
    }

    /// Reads a tensor, one row per output, without padding of the vocabulary, as little-endian elements of type `dtype`. NaN and
    /// infinite values are an error that names the tensor.
    pub fn read(&self, param: Param, layer: usize, dtype: DType) -> Result<Vec<u8>> {
        let adapted = self.adapter.as_ref().zip(param.adapters());
        if let Some((Adapted { file, descriptor }, [a, b])) = adapted.filter(|(it, [a, _])| a.is_in(&it.descriptor)) {
            let architecture = self.architecture()?;
            let mut weight = Element::F32.widen(&self.read_base(param, layer, 0..1, DType::F32)?);
            let [a, b] = [a, b].map(|param| file.read(descriptor, architecture, param, layer));
            peft::add_products(descriptor, param, &a?, &b?, &mut weight);
            let bytes = weight.into_iter().flat_map(f32::to_le_bytes).collect();
            return Ok(Element::F32.convert(bytes, dtype));
        }
        self.read_base(param, layer, 0..param.experts(&self.descriptor()), dtype)
    }

    /// Reads a tensor as f32, like [`read`](Self::read).
    pub fn read_floats(&self, param: Param, layer: usize) -> Result<Vec<f32>> {
        Ok(Element::F32.widen(&self.read(param, layer, DType::F32)?))
    }

    /// Reads the part of a tensor that belongs to some experts, or a whole tensor of expert 0, without adapters.
    fn read_base(&self, param: Param, layer: usize, experts: Range<usize>, dtype: DType) -> Result<Vec<u8>> {
        let stored = self.stored_descriptor();
        if param == Param::RouterBias && !stored.has(param) {
            return Ok(vec![0; param.len(&self.descriptor()) * dtype.bytes()]);
        }
        match self.experts.filter(|_| stored.experts.is_none()) {
            Some(_) if param == Param::Router => {
                let mut values = vec![0.0; param.len(&self.descriptor())];
                Mt19937::new(model::init::SEED + layer as u32).normal(&mut values, ROUTER_STD);
                let bytes = values.into_iter().flat_map(f32::to_le_bytes).collect();
                Ok(Element::F32.convert(bytes, dtype))
            }
            Some(_) => Ok(self.read_stored(param, layer, 0..1, dtype)?.repeat(experts.len())),
            None => self.read_stored(param, layer, experts, dtype),
        }
    }

    /// Reads the part of a tensor in the files that belongs to some experts.
    fn read_stored(&self, param: Param, layer: usize, experts: Range<usize>, dtype: DType) -> Result<Vec<u8>> {
        let (element, bytes) = match &self.kind {
            Kind::LlmC(file) => {
                let (element, bytes) = (Element::from(file.dtype()), file.read_experts(param, layer, experts)?);
                let checked = element.check_finite(&bytes, &tensors::name(param, layer));
                checked.with_context(|| self.path().display().to_string())?;
                (element, bytes)
            }
            Kind::HuggingFace(model) | Kind::Nanochat(model) => {
                model.read_experts(param, layer, experts).with_context(|| self.path().display().to_string())?
            }
        };
        let converted = element.convert(bytes, dtype);
        if dtype == DType::Bf16 && element != Element::Bf16 {
            // Values above the largest bf16 number become infinite.
            let checked = Element::Bf16.check_finite(&converted, &tensors::name(param, layer));
            checked.with_context(|| format!("{}: rounded to bf16; use fp32", self.path().display()))?;
        }
        Ok(converted)
    }

    /// Reads part of a tensor like [`read`](Self::read), for a program with these rotary pairs.
    pub fn read_part(
        &self,
        names: &TensorNames,
        Instance { layer, expert }: Instance,
        dtype: DType,
        pairs: RotaryPairs,
    ) -> Result<Vec<u8>> {
        let (descriptor, size) = (self.descriptor(), dtype.bytes());
        let mut bytes = if names.param.experts(&descriptor) > 1 {
            self.read_base(names.param, layer, expert..expert + 1, dtype)?
        } else {
            self.read(names.param, layer, dtype)?
        };
        let elements = names.elements(&descriptor);
        bytes.truncate(elements.end * size);
        bytes.drain(..elements.start * size);
        Ok(match descriptor.positions {
            Positions::Rotary(rotary) if names.is_rotated() && rotary.pairs != pairs => {
                let columns = if names.param.is_matrix() { descriptor.channels } else { 1 };
                convert_pairs(&bytes, columns * size, descriptor.head_size, pairs)
            }
            _ => bytes,
        })
    }

    /// Reads the parameters that this rank keeps into `model`, and into its master weights if it has them. The model must have
    /// been planned for [`descriptor`](Self::descriptor). Values are widened or rounded to nearest if the types differ. NaN and
    /// infinite values are an error that names the tensor.
    pub fn load(self, model: &Decoder, engine: &mut dyn Engine) -> Result<()> {
        if self.adapter.is_some()
            || self.vocab.is_some()
            || self.experts.is_some()
            || !model.weights_in_fp8().is_empty()
        {
            return self.load_by_tensor(model, engine);
        }
        match self.kind {
            Kind::LlmC(file) => file.load(model, engine),
            Kind::HuggingFace(source) | Kind::Nanochat(source) => {
                let read = |param, layer| source.read(param, layer);
                assert_eq!(model.descriptor, source.descriptor(), "the model was planned for another directory");
                load(read, source.bytes(), model, engine)
                    .with_context(|| format!("cannot load {}", source.directory().display()))
            }
        }
    }

    /// Loads the tensors that [`read`](Self::read) returns, and new rows of the embeddings.
    fn load_by_tensor(&self, model: &Decoder, engine: &mut dyn Engine) -> Result<()> {
        let stored = self.stored_descriptor();
        let new_rows = self.descriptor().vocab - stored.vocab;
        // The sums of weights and products have more digits than the weights.
        let dtype = if self.adapter.is_some() { DType::F32 } else { self.dtype() };
        let read = |param: Param, layer| {
            let mut bytes = self.read(param, layer, dtype)?;
            if param.has_vocab_rows() {
                add_mean_rows(&mut bytes, param.shape(&stored).1, new_rows, dtype);
            }
            Ok((Element::from(dtype), bytes))
        };
        let bytes = (model.descriptor.base().parameters() * dtype.bytes()) as u64;
        load(read, bytes, model, engine).with_context(|| format!("cannot load {}", self.path().display()))
    }
}

/// Appends rows of `columns` elements to a matrix, each the mean of its rows.
fn add_mean_rows(bytes: &mut Vec<u8>, columns: usize, rows: usize, dtype: DType) {
    let element = Element::from(dtype);
    let mut sums = vec![0.0; columns];
    let row_bytes = columns * element.bytes();
    for row in bytes.chunks(row_bytes) {
        sums.iter_mut().zip(element.widen(row)).for_each(|(sum, value)| *sum += f64::from(value));
    }
    let count = (bytes.len() / row_bytes).max(1) as f64;
    let mean: Vec<u8> = sums.iter().flat_map(|sum| ((sum / count) as f32).to_le_bytes()).collect();
    let mean = Element::F32.convert(mean, dtype);
    (0..rows).for_each(|_| bytes.extend(&mean));
}

/// Reorders the rows of each head, of `row` bytes each, to these rotary pairs from the others.
pub fn convert_pairs(rows: &[u8], row: usize, head_size: usize, pairs: RotaryPairs) -> Vec<u8> {
    let half = head_size / 2;
    let source = |i: usize| match pairs {
        RotaryPairs::Interleaved => i % 2 * half + i / 2,
        RotaryPairs::HalfSplit => i % half * 2 + i / half,
    };
    let head = |head: &[u8]| (0..head_size).flat_map(|i| head[source(i) * row..][..row].to_vec()).collect::<Vec<u8>>();
    rows.chunks(head_size * row).flat_map(head).collect()
}

/// Loads the tensors of `bytes` bytes that `read` returns.
fn load(
    read: impl Fn(Param, usize) -> Result<(Element, Vec<u8>)>,
    bytes: u64,
    model: &Decoder,
    engine: &mut dyn Engine,
) -> Result<()> {
    let stores = model.weight_stores();
    let progress = progress::start("loading tensors", Unit::Bytes, bytes);
    for (param, layer) in model.layout.file_order() {
        let held = |store| WeightStore::held(store, param, layer).map(|(range, tensor)| (store, range, tensor));
        let held: Vec<_> = stores.iter().filter_map(held).collect();
        if held.is_empty() {
            continue;
        }
        let (element, bytes) = read(param, layer)?;
        progress.add(bytes.len() as u64);
        let elements = bytes.len() / element.bytes();
        for (store, range, tensor) in held {
            // Rows that pad the vocabulary are not in the file. The arena is zero before the first write.
            let wanted = range.start.min(elements)..range.end.min(elements);
            if !wanted.is_empty() {
                let to = tensor.slice(0, wanted.len());
                let bytes = &bytes[wanted.start * element.bytes()..wanted.end * element.bytes()];
                write(store, to, element, bytes, engine)?;
            }
        }
    }
    for (param, layer) in model.weights_in_fp8() {
        let (element, bytes) = read(param, layer)?;
        progress.add(bytes.len() as u64);
        model.write_in_fp8(engine, param, layer, &element.widen(&bytes))?;
    }
    Ok(())
}

/// Writes elements to a tensor of `store`.
fn write(store: &WeightStore, to: Tensor, element: Element, bytes: &[u8], engine: &mut dyn Engine) -> Result<()> {
    if element != Element::F16 && element.dtype() == to.dtype {
        return engine.write_bytes(to, bytes);
    }
    for (i, chunk) in bytes.chunks(CHUNK * element.bytes()).enumerate() {
        let to = to.slice(i * CHUNK, chunk.len() / element.bytes());
        store.write(engine, to, &element.widen(chunk))?;
    }
    Ok(())
}
